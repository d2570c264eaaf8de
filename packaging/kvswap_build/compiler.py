"""Says what is missing to compile kvswap, before setuptools fails with pages of output, and compiles on all
processors."""

import itertools
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROGRAMS = {
    "the C library's headers": "#include <stdlib.h>\nint probe(void) { return abs(1); }\n",
    "Python's headers": "#define PY_SSIZE_T_CLEAN\n#include <Python.h>\nint probe(void) { return PY_MAJOR_VERSION; }\n",
}
MOST_AT_ONCE = 16  # a compiler takes some 100 MB
PYTHON = sysconfig.get_python_version()
CURES = {
    "a C compiler": "apt-get install gcc libc6-dev, dnf install gcc, or apk add gcc musl-dev",
    "the C library's headers": "apt-get install libc6-dev, dnf install glibc-devel, or apk add musl-dev",
    "Python's headers": f"apt-get install python{PYTHON}-dev (python3-dev), dnf install python3-devel, or a Python "
    "of uv, pyenv or conda, which has them",
}


def compiles(compiler, source):
    """What the compiler says of this source, empty if it compiles it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "probe.c")
        path.write_text(source)
        includes = {sysconfig.get_path(name) for name in ("include", "platinclude")}
        command = [*compiler, *(f"-I{include}" for include in sorted(includes)), "-c", str(path)]
        done = subprocess.run(
            [*command, "-o", str(path.with_suffix(".o"))], capture_output=True, text=True, check=False
        )
        return "" if done.returncode == 0 else done.stderr.strip() or f"{compiler[0]} ended with {done.returncode}"


def what_is_missing(compiler):
    """(what, why), or None. `compiler` is a command as a list: "ccache gcc" has two words."""
    absent = [word for word in compiler[:1] if shutil.which(word) is None]
    if absent:
        return "a C compiler", f"there is no program {absent[0]!r}"
    for what, source in PROGRAMS.items():
        why = compiles(compiler, source)
        if why:
            return what, why
    return None


def require(command):
    """SystemExit with one paragraph where kvswap cannot be compiled. `command`: CC, or a list as setuptools has it."""
    missing = what_is_missing(shlex.split(command) if isinstance(command, str) else list(command))
    if missing is None:
        return
    what, why = missing
    raise SystemExit(
        f"kvswap: cannot be built from source without {what}: {CURES[what]}; CC names another compiler. "
        f"A wheel needs none of this.\n{why}"
    )


def compile_in_parallel(compiler):
    """Let this compiler of setuptools take several sources at once; by itself it takes one after the other."""
    one_call, jobs = compiler.compile, min(MOST_AT_ONCE, len(os.sched_getaffinity(0)))

    def compile_all(sources, **options):
        for path in compiler.object_filenames(sources, output_dir=options.get("output_dir")):
            Path(path).parent.mkdir(parents=True, exist_ok=True)  # not by several threads at once
        with ThreadPoolExecutor(jobs) as pool:
            return [*itertools.chain(*pool.map(lambda source: one_call([source], **options), sources))]

    compiler.compile = compile_all
