"""An extension that uses kvswap in C: `pip install --no-build-isolation .`, with kvswap installed. It links nothing."""

from setuptools import Extension, setup

import kvswap

setup(
    name="mirror",
    version="1.0",
    ext_modules=[Extension("mirror", ["mirror.c"], include_dirs=[kvswap.get_include()])],
    install_requires=["kvswap"],
)
