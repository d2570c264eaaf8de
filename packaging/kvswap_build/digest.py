"""A digest of the C sources, stamped into the extension by a build; tests and .ci/quick compare it."""

import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "csrc" / "py" / "sources.h"
MADE = {"kvswap_version.h", "sources.h"}  # by a build


def of_sources(root=ROOT):
    """The digest of the files in csrc/ and tests/bindings/: their names and contents, in one order on every machine."""
    whole = hashlib.sha256()
    files = [*(root / "csrc").rglob("*"), *(root / "tests" / "bindings").rglob("*")]
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        if path.suffix in (".c", ".h", ".cu", ".cuh") and path.name not in MADE:
            whole.update(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\n".encode())
            whole.update(path.read_bytes())
    return whole.hexdigest()[:32]


def write_header():
    text = f'/* Made by digest.py. */\n#define KVSWAP_SOURCES "{of_sources()}"\n'
    if not HEADER.exists() or HEADER.read_text() != text:
        HEADER.write_text(text)


def stale(package, root=ROOT):
    """What the imported package has of another state than the checkout; empty: nothing. package: kvswap."""
    there = Path(package.__file__).resolve().parent
    mine = root / "kvswap"
    wrong = ["csrc/"] if package._C._sources != of_sources(root) else []
    if there != mine:
        files = {path.relative_to(mine) for path in mine.rglob("*.py")}
        files |= {path.relative_to(there) for path in there.rglob("*.py") if "include" not in path.parts}
        for name in sorted(files):
            one, other = mine / name, there / name
            if not (one.exists() and other.exists() and one.read_bytes() == other.read_bytes()):
                wrong.append(f"kvswap/{name}")
    return wrong


def message(package, wrong):
    """What to do about it, for a person."""
    there = Path(package.__file__).resolve().parent
    build = f"{sys.executable} setup.py -q build_ext --inplace"
    if there != ROOT / "kvswap":
        build = f"{sys.executable} -m pip install -e '.[test,dev]' --config-settings editable_mode=compat"
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return (
        f"kvswap in {there} is not what this checkout has: {', '.join(wrong[:3])}{more}. Rebuild it: {build} "
        "(KVSWAP_TEST_INSTALLED=1 tests what is installed)"
    )


def main():
    import kvswap

    wrong = stale(kvswap)
    if wrong:
        sys.exit(message(kvswap, wrong))


if __name__ == "__main__":
    main()
