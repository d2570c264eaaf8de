"""An extension that uses kvswap in C. It links nothing.

pip install .                                                      where kvswap comes from an index
pip install 'setuptools>=77' && pip install --no-build-isolation .     with the kvswap that is installed
"""

from setuptools import Extension, setup

import kvswap

setup(
    name="mirror",
    version="1.0",
    ext_modules=[Extension("mirror", ["mirror.c"], include_dirs=[kvswap.get_include()])],
    install_requires=["kvswap"],
)
