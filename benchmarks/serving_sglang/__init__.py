"""kvswap in SGLang: whole engines with and without it, side by side. README.md says how to run it."""
