"""Pack vLLM's source packages for a machine that cannot download them.

    python tests/integration/vllm_pack.py --out .vllm SOURCE... --wheels FOLDER

SOURCE: unpacked source packages. FOLDER: wheels that the other machine lacks, for its Python (pip download --no-deps
--only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 ...). There, `bash
tests/integration/vllm_on_gpu.sh .vllm OUT` unpacks and runs them. Only Python, JSON and the tests of the offloading
layer travel, and what stands in for the compiled modules that vLLM's CUDA platform imports: a few megabytes a release.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import tarfile
import zipfile
from pathlib import Path

KEPT = (".py", ".json", ".yaml", ".jinja")
STAND_IN = Path(__file__).with_name("vllm_compiled_part.py")
COMPILED = ("vllm/_C_stable_libtorch.py", "vllm/vllm_flash_attn/_vllm_fa2_C.py")


def pack_source(source: Path, out: Path) -> Path:
    packed = out / f"{source.name}.tar.xz"
    with tarfile.open(packed, "w:xz", preset=3) as archive:
        paths = [p for p in sorted((source / "vllm").rglob("*")) if p.suffix in KEPT and "configs/E=" not in str(p)]
        paths += sorted((source / "tests" / "v1" / "kv_offload" / "cpu").rglob("*.py"))
        paths += [source / "tests" / "__init__.py", source / "tests" / "v1" / "__init__.py"]
        paths += [source / "tests" / "v1" / "kv_offload" / "__init__.py"]
        for path in dict.fromkeys(paths):
            if path.is_file():
                archive.add(path, str(path.relative_to(source.parent)))
        for name in COMPILED:
            archive.add(STAND_IN, f"{source.name}/{name}")
    return packed


def pack_wheels(wheels: list[Path], out: Path) -> Path:
    packed = out / "site.tar.xz"
    folder = out / "site"
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    with tarfile.open(packed, "w:xz", preset=6) as archive:
        archive.add(folder, "site")
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    return packed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--out", type=Path, default=Path(".vllm"))
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    made = [pack_source(source.resolve(), options.out) for source in options.sources]
    if options.wheels:
        made.append(pack_wheels(sorted(options.wheels.glob("*.whl")), options.out))
    for path in made:
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
