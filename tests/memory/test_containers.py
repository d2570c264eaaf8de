"""In containers: what control groups leave, in made-up trees and in real groups, and shared pools of processes that do
not see each other's pids."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import PATIENCE, elsewhere
from disks import cannot

import kvswap
from kvswap import _C, memory
from kvswap.memory import SharedPool
from kvswap.typing import HostMemory

pytestmark = pytest.mark.not_sanitized("control groups limit what a sanitizer needs")

MIB = 1 << 20
UNLIMITED = (1 << 64) - 1
V1_UNLIMITED = 9223372036854771712

# -- made-up trees -----------------------------------------------------------------------------------------------------


class Tree:
    """A machine's kernel files below a folder."""

    def __init__(self, root: Path, unified: bool, part: str, group: str) -> None:
        self.root, self.unified = root, unified
        self.mount = "/sys/fs/cgroup" if unified else "/sys/fs/cgroup/memory"
        self.put("/proc/meminfo", "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n")
        kind = "cgroup2 cgroup2 rw" if unified else "cgroup cgroup rw,memory"
        self.put(
            "/proc/self/mountinfo",
            f"30 23 0:28 / /sys rw - sysfs sysfs rw\n31 30 0:29 {part} {self.mount} rw - {kind}\n",
        )
        self.put("/proc/self/cgroup", f"0::{group}\n" if unified else f"9:cpu:/other\n4:memory:{group}\n0::/\n")

    def put(self, path: str, text: str) -> None:
        file = self.root / path.removeprefix("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, path: str, used: int, stat: str = "", procs: str = "", **limits: int) -> None:
        """limits: max, high (version 2); max, memsw and its usage (version 1)."""
        folder = f"{self.mount}{path}".rstrip("/")
        names = (
            {"max": "memory.max", "high": "memory.high"}
            if self.unified
            else {
                "max": "memory.limit_in_bytes",
                "memsw": "memory.memsw.limit_in_bytes",
                "memsw_used": "memory.memsw.usage_in_bytes",
            }
        )
        for name in names:
            if name in limits or name in ("max", "high"):
                unlimited = "max" if self.unified else V1_UNLIMITED
                self.put(f"{folder}/{names[name]}", f"{limits.get(name, unlimited)}\n")
        self.put(f"{folder}/memory.{'current' if self.unified else 'usage_in_bytes'}", f"{used}\n")
        self.put(f"{folder}/memory.stat", stat)
        self.put(f"{folder}/cgroup.procs", procs)

    def read(self) -> HostMemory:
        return _C._host_memory(str(self.root))

    def left(self) -> int:
        there = self.read()
        return UNLIMITED if there["group_max"] == UNLIMITED else there["group_max"] - there["group_used"]


def stat_of(unified: bool, active: int, inactive: int, dirty: int, shmem: int = 0) -> str:
    if unified:
        other = f"anon 5\nfile {active + inactive + shmem}\nshmem {shmem}\nfile_mapped 1\nfile_writeback 0\n"
        return other + f"file_dirty {dirty}\ninactive_file {inactive}\nactive_file {active}\n"
    # In version 1 the first half is of the group alone, without those below.
    own = f"cache {active + inactive + shmem}\nshmem {shmem}\ndirty 1\ninactive_file 1\nactive_file 2\n"
    return own + f"total_cache 7\ntotal_dirty {dirty}\ntotal_inactive_file {inactive}\ntotal_active_file {active}\n"


VERSIONS = pytest.mark.parametrize("unified", [True, False], ids=["v2", "v1"])


@VERSIONS
@pytest.mark.parametrize(
    ("active", "inactive", "dirty", "left"),
    [
        (0, 0, 0, 100),
        (200, 0, 0, 300),  # read twice: on the active list
        (0, 200, 0, 300),
        (120, 80, 30, 270),
        (10, 20, 50, 100),  # more dirty than listed, as counters are read one after the other: nothing is added
        (500, 500, 0, 1000),  # more than is used: never more than the limit
    ],
)
def test_what_can_be_dropped(tmp_path: Path, unified: bool, active: int, inactive: int, dirty: int, left: int) -> None:
    tree = Tree(tmp_path, unified, "/", "/box")
    tree.group("/box", 900, stat_of(unified, active, inactive, dirty, shmem=400), max=1000)
    assert tree.left() == left
    there = tree.read()
    assert there["group"].endswith(f"{tree.mount}/box") and there["available"] == 512 * MIB
    assert there["knob"] == ("memory.max" if unified else "memory.limit_in_bytes")


@VERSIONS
def test_the_smallest_of_the_ancestors(tmp_path: Path, unified: bool) -> None:
    """Each is counted with its own page cache."""
    tree = Tree(tmp_path, unified, "/", "/pods/pod/box")
    tree.group("/", 5000, max=100_000)
    tree.group("/pods", 4000, stat_of(unified, 1000, 0, 0), max=4500)  # 1500
    tree.group("/pods/pod", 1900, stat_of(unified, 100, 200, 50), max=2000)  # 350
    tree.group("/pods/pod/box", 500, stat_of(unified, 100, 100, 0), max=1000)  # 700
    assert tree.left() == 350 and tree.read()["group"].endswith("/pods/pod")
    tree.group("/pods", 4400, stat_of(unified, 0, 0, 0), max=4500)
    assert tree.left() == 100 and tree.read()["group"].endswith("/pods")
    tree.group("/pods/pod/box", 990, stat_of(unified, 0, 0, 0), max=1000)
    assert tree.left() == 10 and tree.read()["group"].endswith("/box")
    tree.group("/pods/pod/box", 1100, stat_of(unified, 0, 50, 0), max=1000)  # lowered below what is used
    assert tree.read()["group_used"] == 1050


def test_memory_high(tmp_path: Path) -> None:
    """A group above it is slowed down until it has given memory back."""
    tree = Tree(tmp_path, True, "/", "/pod/box")
    tree.group("/pod", 600, stat_of(True, 100, 0, 0), max=1000, high=800)
    tree.group("/pod/box", 100, max=1000)
    assert tree.left() == 300 and tree.read()["knob"] == "memory.high"
    tree.group("/pod/box", 100, high=390)
    assert tree.left() == 290
    tree.group("/pod", 900, high=800)
    assert tree.read()["group_used"] == 900 and tree.read()["group_max"] == 800


def test_swap_of_version_1(tmp_path: Path) -> None:
    """Memory and swap together have a limit too; with swap in use it may be the smaller one."""
    tree = Tree(tmp_path, False, "/", "/box")
    tree.group("/box", 100, stat_of(False, 20, 0, 0), max=1000, memsw=1500, memsw_used=900)
    assert tree.left() == 620 and tree.read()["knob"] == "memory.memsw.limit_in_bytes"
    tree.group("/box", 100, stat_of(False, 20, 0, 0), max=1000, memsw=2000, memsw_used=900)
    assert tree.left() == 920


@VERSIONS
def test_a_namespace_with_its_own_mount(tmp_path: Path, unified: bool) -> None:
    """What a container sees: its group is the root. Version 1 names the smallest limit above all the same."""
    tree = Tree(tmp_path, unified, "/", "/")
    above = "" if unified else "hierarchical_memory_limit 700\n"
    tree.group("/", 400, above + stat_of(unified, 100, 0, 0), max=1000)
    assert tree.left() == (700 if unified else 400)
    if not unified:
        assert tree.read()["group"] == f"above {tmp_path}{tree.mount}"


@VERSIONS
def test_a_mount_of_a_part(tmp_path: Path, unified: bool) -> None:
    """The host's namespace, with the container's part of the hierarchy mounted; the process may be below it."""
    tree = Tree(tmp_path, unified, "/docker/abc", "/docker/abc/inner")
    tree.group("/", 400, max=1000)
    tree.group("/inner", 100, max=300)
    assert tree.left() == 200
    tree = Tree(tmp_path, unified, "/docker/abc", "/docker/abc")
    assert tree.left() == 600
    tree = Tree(tmp_path, unified, "/docker/ab", "/docker/abc")  # no part of that: what is mounted is guessed at
    assert tree.left() == 600
    tree = Tree(tmp_path, unified, r"/system.slice/docker\134x2dabc", r"/system.slice/docker\x2dabc/inner")
    assert tree.left() == 200


@VERSIONS
def test_a_mount_of_an_outer_namespace(tmp_path: Path, unified: bool) -> None:
    """mountinfo gives the number of levels above the namespace's root, and not the folders' names on the way down."""
    tree = Tree(tmp_path, unified, "/../..", "/inner")
    tree.group("/", 9000, max=10_000)
    tree.group("/pods", 900, max=5000)
    tree.group("/pods/one", 900, max=1000)
    tree.group("/pods/one/inner", 800, max=2000, procs="1\n2\n")
    tree.group("/pods/two", 900, max=1500, procs="3\n")
    tree.group("/pods/two/inner", 100, max=400, procs=f"7\n{os.getpid()}\n")
    assert tree.left() == 300 and tree.read()["group"].endswith("/pods/two/inner")
    tree.group("/pods/two", 1400, max=1500)
    assert tree.left() == 100 and tree.read()["group"].endswith("/pods/two")
    tree.group("/pods/two/inner", 100, max=400, procs="7\n")  # nowhere: the groups above are what is left
    assert tree.left() == 1000 and tree.read()["group"].endswith(tree.mount)


@VERSIONS
def test_a_process_outside_its_namespace(tmp_path: Path, unified: bool) -> None:
    tree = Tree(tmp_path, unified, "/", "/../sibling")
    tree.group("/", 100, max=300)
    tree.group("/sibling", 100, max=200)  # another one of that name
    assert tree.left() == UNLIMITED
    tree = Tree(tmp_path, unified, "/..", "/../sibling")
    assert tree.left() == 100


def test_both_versions_at_once(tmp_path: Path) -> None:
    """Version 2 without the memory controller, beside version 1 with it."""
    tree = Tree(tmp_path, False, "/", "/box")
    tree.group("/box", 100, max=300)
    with (tmp_path / "proc/self/mountinfo").open("a") as file:
        file.write("41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n")
    tree.put("/sys/fs/cgroup/unified/cgroup.procs", "")
    assert tree.left() == 200


def test_a_second_mount(tmp_path: Path) -> None:
    """Another container's part, mounted first, says nothing of this process."""
    tree = Tree(tmp_path, True, "/", "/mine/box")
    mounts = (tmp_path / "proc/self/mountinfo").read_text()
    tree.put("/proc/self/mountinfo", f"29 23 0:29 /theirs /mnt/theirs rw - cgroup2 cgroup2 rw\n{mounts}")
    tree.put("/mnt/theirs/memory.max", "10\n")
    tree.put("/mnt/theirs/memory.current", "9\n")
    tree.group("/mine/box", 100, max=300)
    assert tree.left() == 200


def test_nothing_can_be_read(tmp_path: Path) -> None:
    there = _C._host_memory(str(tmp_path))
    assert there["available"] == there["total"] == there["group_max"] == UNLIMITED
    tree = Tree(tmp_path, True, "/", "/box")
    tree.put("/sys/fs/cgroup/box/memory.max", "garbage\n")
    assert tree.left() == UNLIMITED


# -- real groups -------------------------------------------------------------------------------------------------------

V1 = Path("/sys/fs/cgroup/memory")
CONTROLLERS = Path("/sys/fs/cgroup/cgroup.subtree_control")


class Group:
    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def limit(self, nbytes: int, high: bool = False) -> None:
        name = "memory.limit_in_bytes" if V1.is_dir() else "memory.high" if high else "memory.max"
        (self.path / name).write_text(str(nbytes))


@pytest.fixture
def group() -> Iterator[Group]:
    """A control group with the memory controller, and one in it; removed at the end."""
    top = V1 if V1.is_dir() else Path("/sys/fs/cgroup")
    if os.geteuid() != 0 or not os.access(top, os.W_OK):
        cannot("only root makes control groups")
    if not V1.is_dir() and "memory" not in (CONTROLLERS.read_text().split() if CONTROLLERS.exists() else ()):
        pytest.skip("the root group passes no memory controller on")
    made = Group(top / f"kvswap-test-{os.getpid()}")
    try:
        if not V1.is_dir():
            (made.path / "cgroup.subtree_control").write_text("+memory")
        Group(made.path / "inner")
        yield made
    finally:
        for path in (made.path / "inner", made.path):
            if path.is_dir():
                path.rmdir()


def run_in(group: Group, code: str, *before: str) -> str:
    """What the code prints, run in the group's inner one."""
    prelude = f"""
        import mmap, os, subprocess, sys, tempfile
        open("{group.path}/inner/cgroup.procs", "w").write(str(os.getpid()))
        from kvswap import _C
        from kvswap.memory import HostPool, SharedPool
        MIB = 1 << 20
        def left():
            there = _C._host_memory("")
            return (there["group_max"] - there["group_used"]) // MIB
        def read(file, nbytes):
            for _ in range(3):
                for at in range(0, nbytes, MIB):
                    os.pread(file.fileno(), MIB, at)
        def written(nbytes, folder="/var/tmp", sync=True):
            file = tempfile.TemporaryFile(dir=folder)
            for _ in range(nbytes // MIB):
                file.write(bytes(MIB))
            file.flush()
            if sync:
                os.fsync(file.fileno())
            return file
    """
    run = subprocess.run(
        [*before, sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code)],
        **elsewhere(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_page_cache_is_given_back(group: Group) -> None:
    group.limit(300 * MIB)
    code = """
    weights = written(200 * MIB)
    read(weights, 200 * MIB)
    HostPool(160, MIB, device="host:0", reserve=0).close()
    SharedPool(f"test-{os.getpid()}", 160, MIB, device="host:0", reserve=0).close()
    print(left() > 200)
    """
    assert run_in(group, code) == "True"


def test_files_in_shared_memory_are_not(group: Group) -> None:
    """In version 1 they count as cache; nothing can drop them."""
    group.limit(300 * MIB)
    code = """
    kept = written(200 * MIB, "/dev/shm")
    read(kept, 200 * MIB)
    try:
        HostPool(160, MIB, device="host:0", reserve=0)
    except MemoryError as error:
        print(left() < 100, "control group" in str(error))
    """
    assert run_in(group, code) == "True True"


def test_a_group_seen_from_a_namespace_of_its_own(group: Group) -> None:
    """unshare --cgroup leaves the outer mounts in place."""
    if subprocess.run(["unshare", "--cgroup", "true"], capture_output=True).returncode:
        cannot("no control group namespaces here")
    group.limit(300 * MIB)
    code = """
    code = "from kvswap import _C; there = _C._host_memory(''); print(there['group'], there['group_max'] >> 20)"
    run = subprocess.run(["unshare", "--cgroup", sys.executable, "-c", code], capture_output=True, text=True)
    print(run.stdout.strip(), run.stderr)
    """
    assert run_in(group, code) == f"{group.path} 300"


def test_memory_high_of_a_real_group(group: Group) -> None:
    if V1.is_dir():
        pytest.skip("control groups are of version 1 here, which has no memory.high")
    group.limit(300 * MIB, high=True)
    assert 200 < int(run_in(group, "print(left())")) <= 300


# -- shared pools across pid namespaces --------------------------------------------------------------------------------

SHM = Path("/dev/shm")
UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
UNSHARE += [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
OPEN = """
try:
    pool = SharedPool(name, 16, 65536, create={create}, device="host:0")
except Exception as error:
    say(type(error).__name__, error)
    os._exit(0)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def name() -> Iterator[str]:
    text = f"test-containers-{os.getpid()}"
    yield text
    for path in SHM.glob(f"kvswap.{text}*"):
        path.unlink()


@pytest.fixture
def container(name: str) -> Iterator[Start]:
    """Start code in a pid namespace of its own. It ends with its standard input."""
    if subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        cannot("no pid namespaces here: unshare needs root, or user namespaces")
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *options: str) -> subprocess.Popen[str]:
        prelude = """
            import os, signal, subprocess, sys, time
            from kvswap import memory
            from kvswap.memory import SharedPool
            name = sys.argv[1]
            def say(*words):
                print(*words, flush=True)
            def heard():
                return sys.stdin.readline().strip()
        """
        code = textwrap.dedent(prelude) + textwrap.dedent(code)
        command = [*UNSHARE, *options, sys.executable, "-c", code, name]
        started.append(
            subprocess.Popen(command, **elsewhere(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield start
    for process in started:
        process.communicate(timeout=PATIENCE)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


@pytest.mark.parametrize("create", [True, None])
def test_restarts_in_place(name: str, container: Start, create: bool | None) -> None:
    """A container that is killed and started again keeps /dev/shm, and gets another pid namespace. Its processes have
    the same pids as before."""
    code = OPEN.format(create=create) + "say('owner', pool.owner, os.getpid())\nos._exit(0)"
    others, left = [], 0  # a test beside this one that makes a segment removes what is stale
    for _ in range(5):
        others.append(container("heard()"))  # so that numbers of namespaces go on
        run = container(code)
        assert line(run) == "owner True 1"
        assert run.wait(PATIENCE) == 0
        left += (SHM / f"kvswap.{name}").exists()
    memory.clean()
    assert left and not (SHM / f"kvswap.{name}").exists()


def test_two_live_owners(name: str, container: Start) -> None:
    """Containers that share /dev/shm: the second is refused, and the first goes on."""
    hold = OPEN + "pool.layer(0)[:] = 7\nsay('up')\nheard()\nsay((pool.layer(0) == 7).all(), os.path.exists(pool.path))"
    first = container(hold.format(create=True))
    assert line(first) == "up"
    for create in (True, None, False):
        second = container(OPEN.format(create=create))
        assert "belongs to a running process of another pid namespace (number 1 there)" in line(second)
        with pytest.raises(kvswap.Error, match="running process of another pid namespace"):
            SharedPool(name, 16, 65536, create=create, device="host:0")
        assert name not in memory.clean()
    with SharedPool(f"{name}-other", 16, 65536, device="host:0"):  # creating cleans first
        tell(first)
        assert line(first) == "True True"


def test_a_living_child_in_the_namespace_of_a_dead_owner(name: str, container: Start) -> None:
    """The owner is not the first process of its namespace, which lives on with a child of the owner."""
    code = f"""
    middle = os.fork()
    if middle == 0:
        {textwrap.indent(OPEN.format(create=True), " " * 8).strip()}
        if os.fork() == 0:
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(middle, 0)
    say("dead")
    heard()
    """
    box = container(code)
    assert line(box) == "dead"
    second = container(OPEN.format(create=None) + "say(pool.owner)\nos._exit(0)")
    assert line(second) == "True"


def test_cleaning_another_containers_folder(name: str, container: Start) -> None:
    """Its /dev/shm is a mount of its own, and reached through a process that runs in it."""
    code = """
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"], check=True)
    pool = SharedPool(name + "-live", 16, 65536, device="host:0")
    if os.fork() == 0:
        dead = [SharedPool(f"{name}-{i:070}", 1, 4096, device="host:0") for i in range(100)]
        os._exit(0)
    os.wait()
    os.symlink(f"/dev/shm/kvswap.{name}-victim", f"/dev/shm/kvswap.{name}-link")
    say("up")
    heard()
    say(*sorted(os.listdir("/dev/shm")))
    """
    box = container(code, "--mount")
    assert line(box) == "up"
    inside = int(Path(f"/proc/{box.pid}/task/{box.pid}/children").read_text().split()[0])
    root = Path(f"/proc/{inside}/root/dev/shm")
    with SharedPool(f"{name}-victim", 16, 65536, device="host:0"):
        assert sorted(memory.clean(root=root)) == sorted(f"{name}-{i:070}" for i in range(100))
        assert memory.clean(root=str(root)) == [] and (SHM / f"kvswap.{name}-victim").exists()
    tell(box)
    assert line(box) == f"kvswap.{name}-link kvswap.{name}-live"


def test_folders_that_cannot_be_cleaned(name: str, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    with SharedPool(name, 4, 4096, device="host:0") as pool:
        stale = bytearray(Path(pool.path).read_bytes())
    (tmp_path / "real" / f"kvswap.{name}").write_bytes(stale)
    (tmp_path / "real" / f"kvswap.{name}").chmod(0o600)
    for folder, text in [
        ("nothing", "No such file"),
        ("link", "Symbolic links are not followed"),
        ("link/.", "Symbolic links are not followed"),
        ("file", "Not a directory"),
        ("x" * 256, "too long"),
    ]:
        with pytest.raises(ValueError, match=text):
            memory.clean(root=f"{tmp_path}/{folder}")
    with pytest.raises(ValueError, match="No such file"):
        memory.clean(root="")
    with pytest.raises(TypeError):
        memory.clean(root=3)  # type: ignore[arg-type]
    (tmp_path / "real" / "kvswap.other").symlink_to(f"kvswap.{name}")
    assert memory.clean(root=tmp_path / "real" / ".." / "real") == [name]
    assert memory.clean(root=None) is not None and (tmp_path / "real" / "kvswap.other").is_symlink()
