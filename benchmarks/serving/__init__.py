"""kvswap in a serving engine: whole vLLM engines with and without it, side by side. README.md says how to run it."""
