"""An extension that uses kvswap in C. It links nothing. With the kvswap that is installed:
pip install 'setuptools>=77' && pip install --no-build-isolation .
"""

from setuptools import Extension, setup

import kvswap

setup(
    name="mirror",
    version="1.0",
    ext_modules=[Extension("mirror", ["mirror.c"], include_dirs=[kvswap.get_include()])],
    install_requires=["kvswap"],
)
