"""What a compiled program relies on, a line each: the functions of the public headers, the size of each struct and the
place of each member, the value of each constant. tests/c/abi.txt is the list of the last release or of what follows it;
tests/c/test_libkvswap.py compares. After a change that docs/c.md permits: python tests/c/abi.py >tests/c/abi.txt"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CC = os.environ.get("CC") or "cc"
HEADERS = ["kvswap.h", "kvswap_codec.h", "kvswap_file.h"]  # which include all others


def surface(include: Path) -> str:
    """The text of the public headers without comments. kvswap_capi.h is for extensions of Python and not in it."""
    paths = [path for path in sorted(include.glob("kvswap*.h")) if path.stem not in ("kvswap_capi", "kvswap_version")]
    return re.sub(r"/\*.*?\*/", "", "\n".join(path.read_text() for path in paths), flags=re.DOTALL)


def functions(text: str) -> list[str]:
    return sorted(re.findall(r"^KVS_API[^;(]*?\b(kvs_\w+)\(", text, re.MULTILINE))


def members(body: str) -> list[str]:
    found = []
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        pointer = re.search(r"\(\*(\w+)\)", declaration)
        items = [pointer[1]] if pointer else [re.sub(r"\[.*", "", item).split()[-1] for item in declaration.split(",")]
        found += [item.lstrip("*") for item in items]
    return found


def structs(text: str) -> dict[str, list[str]]:
    return {name: members(body) for name, body in re.findall(r"^struct (kvs_\w+) \{(.*?)^\};", text, re.DOTALL | re.M)}


def constants(text: str) -> list[str]:
    statuses = [f"KVS_{name}" for name in re.findall(r"^ +X\((\w+), -?\d+,", text, re.MULTILINE)]
    bodies = re.findall(r"\benum (?:kvs_\w+ )?\{([^}]*)\}", text)
    return [name for body in bodies for name in re.findall(r"(?:^|,)\s*(KVS_\w+)(?=\s*[,=]|\s*$)", body)] + statuses


def lines(include: Path) -> list[str]:
    text = surface(include)
    prints = ['printf("abi %d\\n", KVSWAP_ABI_VERSION);']
    for name, fields in sorted(structs(text).items()):
        prints.append(f'printf("struct {name} %zu\\n", sizeof(struct {name}));')
        prints += [f'printf("  {name}.{field} %zu\\n", offsetof(struct {name}, {field}));' for field in fields]
    prints += [f'printf("constant {name} %lld\\n", (long long){name});' for name in constants(text)]
    includes = "".join(f"#include <{name}>\n" for name in ["stddef.h", "stdio.h", *HEADERS])
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "abi.c"), Path(folder, "abi")
        source.write_text(includes + "int main(void) {\n" + "\n".join(prints) + "\nreturn 0;\n}\n")
        subprocess.run([*CC.split(), "-std=c11", f"-I{include}", str(source), "-o", str(program)], check=True)
        run = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    return [*run.stdout.splitlines(), *(f"function {name}" for name in functions(text))]


if __name__ == "__main__":
    print("\n".join(lines(ROOT / "csrc")))
