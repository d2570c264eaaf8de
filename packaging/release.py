"""Makes a release, up to the upload, which is printed and not run.

    python packaging/release.py --liburing liburing_2.9.orig.tar.gz [--python PYTHON ...]

In an environment with packaging/requirements.txt, on a clean checkout with the tag v<version>: checks that tag, version
and CHANGELOG agree; builds the sdist and the wheels; checks them; installs each wheel for this machine in an empty
environment and tries it there; runs some of the sdist's own tests from the sdist. --dry-run leaves out what needs a tag
and a clean checkout. --all is what comes before a tag: .ci/run first (CONTRIBUTING.md has its time), then this
without the tag; it fails where anything would keep the tagged commit from being released. Other options are those
of packaging/wheels.py."""

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))
import wheels  # noqa: E402
from kvswap_build import readme  # noqa: E402

SDIST_TESTS = tuple(
    f"tests/{name}.py"
    for name in ("core/test_swap", "project/test_structure", "project/test_readme", "files/test_files_full")
)


def step(text):
    print(f"\n== {text}", flush=True)


def run(*command, **options):
    """Shows what the program prints; its failure ends the release."""
    done = subprocess.run([str(word) for word in command], check=False, **options)
    if done.returncode:
        raise SystemExit(f"release: {shlex.join(map(str, command))} ended with status {done.returncode}")


def tool(name, *args):
    run(sys.executable, "-m", name, *args)


def git(*args):
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


CHANGES_NOTHING = re.compile(
    r"(benchmarks/results|docs|tests|monitoring|examples|\.ci|\.github)/|[A-Z_]+\.md$|CITATION\.cff$"
)


def stale_records(results=ROOT / "benchmarks/results", changed=None):
    """Records of a GPU that another code made, one text each: of a commit that this one does not come from, or since
    which more than documents and tests has changed. changed: by a commit, the files since then; None: ask git."""
    for path in sorted(Path(results).glob("h*00/*.txt")):
        with path.open(encoding="utf-8") as file:
            first = re.match(r"# kvswap ([0-9a-f]{7,40})\b", file.readline())
        if not first:
            yield f"{path.name} of {path.parent.name} names no commit"
            continue
        files = (changed or changed_since)(first[1])
        if files is None:
            yield f"{path.parent.name}/{path.name} was made by {first[1]}, which this commit does not come from"
        elif other := [name for name in files if not CHANGES_NOTHING.match(name)]:
            since = f"{len(other)} files changed since: {other[0]}, ..."
            yield f"{path.parent.name}/{path.name} was made by {first[1]}; {since}"


def changed_since(commit):
    """The files; None: this commit does not come from that one."""
    ancestor = subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, capture_output=True)
    return git("diff", "--name-only", commit, "HEAD").split() if ancestor.returncode == 0 else None


def problems(version, changelog, tags, changes, stale=()):
    """What keeps this checkout from being released, one text each."""
    yield from stale
    heading = re.search(rf"^## \[{re.escape(version)}\](.*)$", changelog, re.MULTILINE)
    if not heading:
        yield f"CHANGELOG.md has no heading [{version}]"
    elif not re.fullmatch(r" - \d{4}-\d{2}-\d{2}", heading[1]):
        yield f"CHANGELOG.md's heading of {version} has no date: ## [{version}] - YYYY-MM-DD"
    if f"v{version}" not in tags:
        yield f"this commit has no tag v{version} (its tags: {', '.join(tags) or 'none'})"
    if changes:
        yield f"the checkout is not clean:\n{changes}"
    if not readme.REPOSITORY:
        yield "REPOSITORY of kvswap_build/readme.py is empty: the package would have no URLs, and its README no links"


def version_of(pyproject):
    return re.search(r'^version = "(.+?)"', pyproject, re.MULTILINE)[1]


def build_wheels(args, sdist):
    if args.wheels:
        for wheel in args.wheels.glob("*.whl"):
            shutil.copy(wheel, args.out)
        return
    options = [f"--python={path}" for path in args.python] + [f"--arch={arch}" for arch in args.arch or ()]
    options += [f"--work={args.work}"] if args.work else []
    options += [] if args.dry_run else ["--require-all"]
    run(sys.executable, HERE / "wheels.py", sdist, "--liburing", args.liburing, "--out", args.out, *options)


def try_sdist(sdist, python, folder):
    """Unpack, install by the README's way, and run some of the tests there."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    run(python, "-m", "venv", source / ".venv")
    run(source / ".venv/bin/pip", "install", "-q", ".[test]", cwd=source, env={**os.environ, "KVSWAP_CUDA": "off"})
    run(
        source / ".venv/bin/pytest",
        "-q",
        "-n",
        "2",
        *SDIST_TESTS,
        cwd=source,
        env={**os.environ, "KVSWAP_RELEASE": "1"},
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="print what keeps this from being a release, and go on")
    parser.add_argument("--all", action="store_true", help="before a tag: run .ci/run, then all of this without a tag")
    parser.add_argument(
        "--wheels", type=Path, help="a folder of wheels that were built before, by CI say: none are built"
    )
    parser.add_argument("--liburing", type=Path, help="as wheels.py has it")
    parser.add_argument("--arch", action="append", help="as wheels.py has it")
    parser.add_argument("--python", action="append", default=[], help="as wheels.py has it")
    parser.add_argument("--work", type=Path, help="as wheels.py has it")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the files go (dist)")
    args = parser.parse_args()
    if not args.wheels and not args.liburing:
        parser.error("--liburing or --wheels is needed")
    version = version_of((ROOT / "pyproject.toml").read_text())

    step(f"kvswap {version}: tag, changelog, checkout, records")
    tags = [f"v{version}"] if args.all else git("tag", "--points-at", "HEAD").split()
    changelog, changes = (ROOT / "CHANGELOG.md").read_text(), git("status", "--porcelain")
    found = list(problems(version, changelog, tags, changes, stale_records()))
    print("\n".join(found) or "ok")
    if found and not args.dry_run:
        raise SystemExit("release: not ready; --dry-run goes on all the same")
    if args.out.exists() and any(args.out.iterdir()):
        raise SystemExit(f"release: {args.out} is not empty")
    if args.all:
        step("all checks: .ci/run")
        run(ROOT / ".ci/run", cwd=ROOT)
    os.environ.setdefault("SOURCE_DATE_EPOCH", git("log", "-1", "--format=%ct") or "315532800")

    step("sdist")
    tool("build", "--sdist", "--outdir", args.out, ROOT)
    (sdist,) = args.out.glob("kvswap-*.tar.gz")
    run(sys.executable, HERE / "check.py", sdist)

    step("wheels")
    build_wheels(args, sdist)
    built = sorted(args.out.glob("*.whl"))

    step("checks")
    run(sys.executable, HERE / "check.py", "--release", *built)
    for wheel in built:
        tool("auditwheel", "show", wheel)
    tool("twine", "check", "--strict", *built, sdist)
    run(Path(sys.executable).with_name("check-wheel-contents"), *built)
    options = ["--max-allowed-size-compressed=16M", "--ignore=mixed-file-extensions"]  # compose.yaml beside .yml
    run(Path(sys.executable).with_name("pydistcheck"), *options, *built, sdist)

    step("each wheel of this machine in an empty environment")
    interpreters = wheels.interpreters(args.python)
    for wheel in built:
        for version, interpreter in interpreters.items():
            tag = f"cp{version.replace('.', '')}"
            if f"-{tag.rstrip('t')}-{tag}-" in wheel.name and platform.machine() in wheel.name:
                print(wheel.name, flush=True)
                run(HERE / "try.sh", interpreter.path, wheel)

    step("the sdist's tests, from the sdist")
    with tempfile.TemporaryDirectory(prefix="kvswap-sdist-") as folder:
        try_sdist(sdist, sys.executable, Path(folder))

    step("to upload")
    print(shlex.join(["python", "-m", "twine", "upload", *map(str, [sdist, *built])]))


if __name__ == "__main__":
    main()
