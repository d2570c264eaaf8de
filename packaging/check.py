"""Checks built wheels and sdists before they are published.

    python packaging/check.py [--release] FILE...

Of a wheel: its files, and that its extension exports nothing foreign. --release adds what only the wheels of wheels.py
have: the manylinux tag, glibc 2.28, liburing and code for every GPU in it, nothing to debug, no RUNPATH or other path
of the machine, no test bindings. Of an sdist: that it holds the files of the git checkout it stands in, and no
others. Needs pyelftools, which auditwheel brings."""

import argparse
import io
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from kvswap_build import cuda  # noqa: E402

GLIBC = (2, 28)
SYSTEM = {"libc.so.6", "libpthread.so.0", "libdl.so.2", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
HEADERS = ("kvswap.h", "kvswap_version.h", "kvswap_capi.h")
FILES = ["kvswap/__init__.py", "kvswap/_C.pyi", "kvswap/py.typed", "kvswap/data/"]
DATA = ("alerts.yml", "grafana-dashboard.json")  # in share/kvswap/monitoring
FILES += [f"kvswap/include/{name}" for name in HEADERS]
PATHS = re.compile(rb"(?<!\w)/(?:home|root|tmp|work|build|usr/src|usr/local)/[\w./+-]+")  # where builds happen
FATBIN = b"\x50\xed\x55\xba\x01\x00"
LEFT_OUT = re.compile(r"\.gitignore|\.github/.*")  # of an sdist: what only a repository uses
ADDED = re.compile(r"PKG-INFO|setup\.cfg|kvswap\.egg-info/.*")  # to an sdist, by setuptools


def fatbin_archs(data):
    """What a fatbin holds, by its own headers: {"sm_80", "compute_80"}."""
    start = data.find(FATBIN)
    if start < 0:
        return set()
    _, _, header, nbytes = struct.unpack_from("<IHHQ", data, start)
    found, at = set(), start + header
    while at < start + header + nbytes:
        kind, _, entry, size = struct.unpack_from("<HHIQ", data, at)
        (arch,) = struct.unpack_from("<I", data, at + 28)
        found.add(f"{'sm' if kind == 2 else 'compute'}_{arch}")
        at += entry + size
    return found


def check_extension(data, release):
    """What is wrong with kvswap/_C.so, one text each."""
    elf = ELFFile(io.BytesIO(data))
    names = {section.name for section in elf.iter_sections()}
    dynamic = next(section for section in elf.iter_sections() if isinstance(section, DynamicSection))
    tags = {tag.entry.d_tag for tag in dynamic.iter_tags()}
    libraries = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    exported = {s.name for s in symbols if s["st_shndx"] != "SHN_UNDEF" and s["st_info"]["bind"] == "STB_GLOBAL"}
    if bad := {name for name in exported if name != "PyInit__C" and not name.startswith("kvs_")}:
        yield f"exports {', '.join(sorted(bad))}: only PyInit__C and the C interface (kvs_...) are wanted"
    if not release:
        return
    if bad := tags & {"DT_RPATH", "DT_RUNPATH"}:
        yield f"has {', '.join(sorted(bad))}"
    if bad := libraries - SYSTEM:
        yield f"needs {', '.join(sorted(bad))}"
    if b"built without liburing" in data:
        yield "is without liburing"
    if bad := {name for name in names if name.startswith((".debug", ".symtab"))}:
        yield f"is not stripped: {', '.join(sorted(bad))}"
    if bad := set(PATHS.findall(data)) - {b"/usr/local/cuda/"}:
        yield f"has paths in it: {b', '.join(sorted(bad)[:5]).decode()}"
    wanted = {*(f"sm_{arch}" for arch in cuda.SASS), f"compute_{cuda.SASS[0]}"}
    if (found := fatbin_archs(data)) != wanted:
        yield f"has kernels for {', '.join(sorted(found)) or 'nothing'}; wanted: {', '.join(sorted(wanted))}"
    for version in versions_of_glibc(elf):
        if version > GLIBC:
            yield f"needs glibc {'.'.join(map(str, version))}"


def versions_of_glibc(elf):
    needed = next(section for section in elf.iter_sections() if isinstance(section, GNUVerNeedSection))
    names = {version.name for _, versions in needed.iter_versions() for version in versions}
    return {tuple(map(int, name[6:].split("."))) for name in names if name.startswith("GLIBC_")}


def check_wheel(path, release):
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        for wanted in FILES:
            if not any(name.startswith(wanted) for name in names):
                yield f"lacks {wanted}"
        for wanted in DATA:
            if not any(name.endswith(f".data/data/share/kvswap/monitoring/{wanted}") for name in names):
                yield f"lacks {wanted}"
        for name in names:
            if name.endswith(".pyc") or not re.match(
                r"kvswap/|kvswap-[^/]+\.(dist-info|data/data/share/kvswap/monitoring)/", name
            ):
                yield f"has {name}"
        if b'"""Copy sizes[i] bytes' not in archive.read("kvswap/_C.pyi"):
            yield "has a stub without the docstrings of the C code"
        if sum("dist-info/licenses/" in name for name in names) < 2:
            yield "lacks a license"
        extensions = [name for name in names if name.endswith(".so")]
        if bindings := [name for name in extensions if name.startswith("kvswap/_testing.")]:
            yield "has test bindings"
            extensions.remove(bindings[0])
        if len(extensions) != 1:
            yield f"has {len(extensions)} extensions: {', '.join(extensions)}"
        for name in extensions:
            yield from check_extension(archive.read(name), release)
    if release and "-manylinux_2_28_" not in path.name:
        yield "is not tagged manylinux_2_28"


def check_sdist(path):
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=HERE.parent, capture_output=True, text=True, check=True
    )
    wanted = {name for name in listed.stdout.splitlines() if Path(HERE.parent, name).exists()}
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    if missing := {name for name in wanted - names if not LEFT_OUT.fullmatch(name)}:
        yield f"lacks {', '.join(sorted(missing))}"
    if more := {name for name in names - wanted if not ADDED.fullmatch(name)}:
        yield f"has {', '.join(sorted(more))}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--release", action="store_true")
    args = parser.parse_args()
    bad = 0
    for path in args.files:
        found = list(check_wheel(path, args.release) if path.suffix == ".whl" else check_sdist(path))
        bad += len(found)
        print(f"{path.name}: {'; '.join(found) or 'ok'}")
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
