"""Unpacks of vLLM's wheel what a dense model in bf16 takes: Python, and the libraries of its own kernels.

python3 take_wheel.py WHEEL FOLDER
"""

from __future__ import annotations

import sys
import zipfile

LIBRARIES = (  # by what comes before the first dot
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "_vllm_fa3_C",
    "cumem_allocator",
    "fs_io_C",
    "spinloop",
)
SUFFIXES = ("py", "json", "jinja", "txt", "typed")
LEFT_OUT = ("model_executor/layers/fused_moe/configs/", ".dist-info/RECORD")  # tables for mixtures of experts


def taken(name: str) -> bool:
    """Whether this file of the wheel is."""
    folder, _, file = name.rpartition("/")
    if not file or any(part in name for part in LEFT_OUT):
        return False
    stem, _, suffix = file.partition(".")[0], *file.rpartition(".")[1:]
    if suffix == "so":
        return stem in LIBRARIES
    return suffix in SUFFIXES or folder.partition("/")[0].endswith(".dist-info")


def main(wheel: str, folder: str) -> None:
    """Unpack, and say how much it was."""
    with zipfile.ZipFile(wheel) as file:
        entries = [entry for entry in file.infolist() if taken(entry.filename)]
        for entry in entries:
            file.extract(entry, folder)
        size = sum(entry.file_size for entry in entries)
        print(f"{len(entries)} of {len(file.infolist())} files, {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main(*sys.argv[1:])
