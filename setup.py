"""Builds kvswap._C and, where there is an nvcc, the kernels that it embeds: packaging/kvswap_build/extension.py lists
the environment variables. What is not code stands in pyproject.toml.
"""

import re
import sys
from pathlib import Path

import setuptools
from setuptools import find_packages, setup

sys.path.insert(0, str(Path(__file__).resolve().parent / "packaging"))  # a build front end need not have it there
from kvswap_build import digest, extension, readme, version

release = re.search(r'^version = "(.+?)"', Path("pyproject.toml").read_text(), re.MULTILINE)[1]
license_field = "license_expression" if int(setuptools.__version__.split(".")[0]) >= 77 else "license"

version.write_header()
digest.write_header()
setup(
    **{license_field: "Apache-2.0"},
    license_files=["LICENSE", "packaging/licenses/*.txt"],
    long_description=readme.index_readme("README.md", release),
    long_description_content_type="text/markdown",
    project_urls=readme.urls(release),
    packages=[*find_packages(include=["kvswap", "kvswap.*"]), "kvswap.include"],
    package_dir={"kvswap.include": "csrc"},
    package_data={
        "kvswap": ["_C.pyi", "py.typed", "data/*.jsonl*"],
        "kvswap.include": ["kvswap*.h"],
    },
    data_files=[("share/kvswap/monitoring", ["monitoring/alerts.yml", "monitoring/grafana-dashboard.json"])],
    include_package_data=False,
    ext_modules=extension.extensions(),
    cmdclass={"build_ext": extension.Build},
    setup_requires=extension.requirements(),
)
