"""kvswap doctor: each finding is provoked, most of them in a process of its own, by the machine that it finds: a driver
that the tests make (fake_cuda.c), system calls that a filter refuses, packages that are a folder of metadata."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import run_python
from hypothesis import given
from hypothesis import strategies as st

from kvswap import _doctor, _doctor_config, _options, cli
from kvswap._engines import ENGINES, VLLM

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

CC = (os.environ.get("CC") or "cc").split()

SCRIPT = """
    import ctypes, json, os, platform, resource, struct, sys

    asked = json.loads(os.environ.pop("ASKED"))
    sys.path[:0] = asked["packages"]
    if asked["memlock"]:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (asked["memlock"], asked["memlock"]))
    for name in asked["without"]:
        sys.modules[name] = None

    def refuse(number):  # EPERM, as a container's filter has it
        steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
        code = b"".join(struct.pack("HBBI", *step) for step in steps)
        kept = ctypes.create_string_buffer(code)
        program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(kept))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
            raise OSError(ctypes.get_errno(), "no filter of system calls")

    if asked["refused"]:
        refuse(asked["refused"][platform.machine() == "aarch64"])

    from kvswap import _doctor, _doctor_config, metrics
    given = _doctor_config.read(asked["config"]) if asked["config"] else None
    report = _doctor.examine(_doctor.Asked(given, asked["gpu"], asked["root"]), limit=60)
    devices = [row["device"] for row in metrics.snapshot()["devices"]]
    print(json.dumps({**report.to_dict(), "devices": devices}))
"""


class Machine:
    """What a finding needs, in a folder."""

    def __init__(self, folder: Path, driver: Path) -> None:
        self.folder, self._driver = folder, driver
        self.environment = {"CUDA_VISIBLE_DEVICES": ""}
        self.asked: dict[str, Any] = {"packages": [str(folder / "packages")], "memlock": 0, "without": []}
        self.asked |= {"refused": None, "config": None, "gpu": False, "root": ""}

    def gpu(self, *, opened: bool = False, **environment: str) -> Machine:
        self.environment |= {"LD_LIBRARY_PATH": str(self._driver), **environment}
        self.asked["gpu"] = opened
        return self

    def env(self, **environment: str) -> Machine:
        self.environment |= environment
        return self

    def package(self, name: str, release: str, module: str = "", *, plugin: str = "") -> Machine:
        there = self.folder / "packages" / f"{name.replace('-', '_')}-{release}.dist-info"
        there.mkdir(parents=True)
        (there / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
        (there / "top_level.txt").write_text(f"{module or name}\n")
        if plugin:
            (there / "entry_points.txt").write_text(f"[{plugin}]\nkvswap = kvswap.vllm:register\n")
        return self

    def file(self, name: str, text: str = "") -> Machine:
        """Below the root of the system that is looked at."""
        self.asked["root"] = str(self.folder / "root")
        path = self.folder / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return self

    def config(self, given: Any) -> Machine:
        path = self.folder / "config.json"
        path.write_text(given if isinstance(given, str) else json.dumps(given))
        self.asked["config"] = str(path)
        return self

    def ask(self, **more: Any) -> Machine:
        self.asked |= more
        return self

    def examine(self) -> dict[str, Any]:
        done = run_python(SCRIPT, ASKED=json.dumps(self.asked), **self.environment)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture
def machine(tmp_path: Path, fake_driver: Path) -> Machine:
    return Machine(tmp_path, fake_driver)


def vllm(**extra: Any) -> dict[str, Any]:
    named = {"kv_connector": "KVSwapConnector", "kv_connector_module_path": "kvswap.vllm"}
    return {**named, "kv_connector_extra_config": extra}


def tier(directory: str, capacity: Any = "1GiB", **more: Any) -> dict[str, Any]:
    entry = {"type": "FileTier", "module_path": "kvswap.vllm", "directory": directory, "capacity": capacity, **more}
    return vllm(secondary_tiers=[entry])


def away(machine: Machine) -> Machine:
    node = "sys/devices/system/node/node1/cpulist"
    return (
        machine.gpu()
        .file("sys/bus/pci/devices/0000:01:00.0/numa_node", "1\n")
        .file(node, "4096-4097,5000\n")
        .file("proc/self/status", "Name:\tpython\nMems_allowed_list:\t0\n")
    )


def two_nodes(machine: Machine) -> Machine:
    return machine.file("sys/devices/system/node/node0/cpulist", "0").file("sys/devices/system/node/node1/cpulist", "1")


def little(machine: Machine) -> Machine:
    return machine.file("proc/meminfo", "MemTotal: 8388608 kB\nMemFree: 524288 kB\nMemAvailable: 524288 kB\n")


def lending(machine: Machine, *there: tuple[str, str, int], gpus: bool = False) -> Machine:
    """The kernel lists sockets of engines that lend: of each the folder, the engine's digit, how many lend to it."""
    own, lines = f"/tmp/kvswap-{os.geteuid()}", ["Num RefCount Protocol Flags Type St Inode Path"]
    for i, (folder, engine, lenders) in enumerate(there):
        path = f"{folder or own}/lend-kv-{engine * 8}{i:08x}.0.sock"
        for flags in ["00010000", *["00000000"] * lenders]:
            lines.append(f"0000000000000000: 00000002 00000000 {flags} 0005 01 {i + 1} {path}")
        machine.file(path[1:]) if not folder else None
    machine.file("proc/net/unix", "\n".join(lines) + "\n").env(XDG_RUNTIME_DIR="")
    return machine.gpu() if gpus else machine


HUGE = 1 << 60
# By the kind of the finding: what provokes it, and what its line says.
PROVOKED: dict[str, tuple[Callable[[Machine], Machine], str]] = {
    "no-gpu": (lambda machine: machine.file("dev/null"), "no GPU, only host devices"),
    "driver-refused": (lambda machine: machine.file("dev/nvidia0"), "no GPU, only host devices"),
    "no-kernels": (lambda machine: machine.gpu(opened=True, FAKE_CUDA_LOAD="222"), "cuda:1: no kernels"),
    "no-batches": (lambda machine: machine.gpu(FAKE_CUDA_VERSION="12020"), "for CUDA 12.2, they came with 12.8"),
    "device-refused": (lambda machine: machine.gpu(opened=True, FAKE_CUDA_STREAMS="0"), "cuda:0 does not open"),
    "not-calibrated": (lambda machine: machine.gpu(), "cuda:0 has none"),
    "calibration-wrong": (
        lambda machine: machine.gpu(KVSWAP_CALIBRATION=machine.file("costs", "nonsense").asked["root"] + "/costs"),
        "built-in costs are used",
    ),
    "no-io-uring": (lambda machine: machine.ask(refused=(425, 425)), "Operation not permitted"),
    "mbind-refused": (lambda machine: two_nodes(machine).ask(refused=(237, 235)), "mbind is not permitted"),
    "numa-away": (away, "cuda:0 is on node 1, whose memory and processors this process may not use"),
    "memlock": (
        lambda machine: machine.package("mooncake-transfer-engine", "0.3.13", "mooncake").ask(memlock=65536),
        "64 KiB: Mooncake's RDMA cannot register more",
    ),
    "shm-small": (lambda machine: machine.file("dev/null"), "/dev/shm: No such file"),
    "memory-short": (
        lambda machine: machine.config(vllm(cpu_bytes_to_use=HUGE)),
        "cpu_bytes_to_use needs 1048576 TiB more",
    ),
    "memory-little": (little, "512 MiB of 8 GiB can be allocated"),
    "lend-alone": (lambda machine: lending(machine, ("", "a", 0), ("", "a", 0)), "kv: one engine is here"),
    "lend-none": (
        lambda machine: lending(machine, ("", "a", 1), ("", "b", 0)),
        "kv: to 1 of 2 processes no other lends its link",
    ),
    "lend-apart": (
        lambda machine: lending(machine, ("", "a", 0), (f"/run/user/7/kvswap-{os.geteuid()}", "b", 0)),
        f"kv: 1 processes with sockets in /run/user/7/kvswap-{os.geteuid()} do not find those with sockets in /tmp",
    ),
    "lend-one-gpu": (
        lambda machine: machine.gpu(FAKE_CUDA_GPUS="1").config(vllm(kvswap_lend=True)),
        "kvswap_lend: this command sees one GPU",
    ),
    "no-peers": (
        lambda machine: lending(machine.gpu(FAKE_CUDA_PEERS="0"), ("", "a", 1), ("", "b", 1)),
        "no link is lent between cuda:0 and cuda:1",
    ),
    "variable": (lambda machine: machine.env(KVSWAP_TOPP="1"), "did you mean KVSWAP_TOP?"),
    "variable-refused": (lambda machine: machine.env(KVSWAP_PATH="dmaa"), "KVSWAP_PATH is 'dmaa'"),
    "engine-release": (lambda machine: machine.package("vllm", "0.27.1"), "vLLM 0.27.1: kvswap is tested with 0.26"),
    "plugin-missing": (  # the first package of a name counts
        lambda machine: machine.package("vllm", "0.33.0").package("kvswap", "0.0"),
        "vLLM does not find kvswap's plugin",
    ),
    "plugin-filtered": (
        lambda machine: machine.package("vllm", "0.33.0").env(VLLM_PLUGINS="lora,other"),
        "VLLM_PLUGINS is 'lora,other'",
    ),
    "manager-packages": (
        lambda machine: machine.package("fastdeploy-gpu", "2.3.0").ask(without=["zmq"]),
        "the cache transfer manager needs zmq",
    ),
    "mooncake-several": (
        lambda machine: machine.package("mooncake-a", "1", "mooncake").package("mooncake-b", "2", "mooncake"),
        "mooncake-a 1, mooncake-b 2 share one import name",
    ),
    "configuration": (lambda machine: machine.config(vllm(kvswap_path="dmaa")), '"kvswap_path" of kv_connector_extra'),
    "key-ignored": (
        lambda machine: machine.config(tier(str(machine.folder), colour="red")),
        "kvswap does not know colour",
    ),
    "directory": (
        lambda machine: machine.file("a-file").config(tier(machine.asked["root"] + "/a-file/kv")),
        "is not a directory that this user can write to",
    ),
    "directory-full": (
        lambda machine: machine.config(tier(str(machine.folder), "7000PiB")),
        "a capacity of 7168000 TiB",
    ),
}


def test_every_finding_is_provoked() -> None:
    assert {*PROVOKED, "slow"} == {*_doctor.CURES, *_doctor.FATAL}
    assert not set(_doctor.CURES) & set(_doctor.FATAL)


@pytest.mark.parametrize("kind", PROVOKED)
def test_provoked(kind: str, machine: Machine) -> None:
    provoke, text = PROVOKED[kind]
    report = provoke(machine).examine()
    found = [each for each in report["findings"] if each["kind"] == kind]
    assert any(text in each["text"] for each in found), report
    fatal = kind in _doctor.FATAL
    assert all(each["state"] == ("error" if fatal else "warning") and each["cure"] for each in found)
    assert report["status"] == max({"warning": 1, "error": 2}.get(each["state"], 0) for each in report["findings"])
    assert report["status"] >= 1 + fatal


def test_what_is_as_it_should_be(machine: Machine) -> None:
    """With engines that are known, and a configuration whose keys are."""
    place = machine.folder / "kv"
    given = {
        "module_path": "kvswap.sglang", "class_name": "FileStorage", "interface_v1": 1, "backend_name": "kvswap",
        "directory": str(place), "capacity": "64MiB",
    }  # fmt: skip
    machine.package("vllm", "0.33.0").package("kvswap", "9", plugin="vllm.general_plugins").config(given)
    report = machine.env(KVSWAP_VLLM_SWAP_BLOCKS="1").examine()
    texts = {each["text"]: each["state"] for each in report["findings"]}
    assert texts["vLLM 0.33.0: kvswap.vllm, by its configuration, and its own copies replaced "
                 "(KVSWAP_VLLM_SWAP_BLOCKS)"] == "ok"  # fmt: skip
    assert texts["for SGLang: all keys are known, all values allowed"] == "ok"
    assert not {"engines", "config"} & {each["check"] for each in report["findings"] if each["state"] != "ok"}
    assert not place.exists()


@pytest.fixture
def of_lending(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[_doctor.Finding]]:
    """What the check finds in this process, where there is no GPU."""
    monkeypatch.setattr(_doctor, "devices", list)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")

    def find() -> list[_doctor.Finding]:
        given = machine.asked["config"] and _doctor_config.read(machine.asked["config"])
        return list(_doctor._lend(_doctor.Asked(given, root=machine.asked["root"])))

    return find


def test_engines_that_lend_to_each_other(machine: Machine) -> None:
    lending(machine, ("", "a", 1), ("", "b", 1), gpus=True).config(vllm(kvswap_lend="other"))
    found = [each for each in machine.examine()["findings"] if each["check"] == "lend"]
    assert [each["text"] for each in found] == [
        "all 2 GPUs reach each other's memory",
        "kv: 2 processes, each with others that lend it their link",
        "other: no engine is here yet",
    ]
    assert all(each["state"] == "ok" for each in found)


@pytest.mark.parametrize(
    ("folder", "cure"),
    [
        (
            f"/tmp/kvswap-{os.geteuid() + 1}",
            f"run all engines as one user: the folder is that of user {os.geteuid() + 1}",
        ),
        (f"/tmp/kvswap-{os.geteuid()}", "containers need a common folder of sockets"),
        (f"/run/kvswap-{os.geteuid()}", "start all engines, and this command, with the same XDG_RUNTIME_DIR"),
    ],
)
def test_why_engines_do_not_meet(machine: Machine, of_lending: Any, folder: str, cure: str) -> None:
    """Those of another user, of another container (its socket is not in the folder that is seen here), and of a shell
    without the variable."""
    lending(machine, (folder, "a", 0))
    (alone,) = of_lending()
    assert alone.state == "ok" and "where this command cannot look" in alone.text
    machine.config(vllm(kvswap_lend="kv"))
    (found,) = of_lending()
    assert found.kind == "lend-apart" and found.cure.startswith(cure)


@pytest.mark.parametrize(
    ("group", "ranks", "links", "kind", "text"),
    [
        ("replicas-kv", 1, 0, "lend-alone", "kv: one replica is here"),
        ("replicas-kv", 3, 2, "lend-none", "kv: of 3 replicas not each lends its link to all others"),
        ("replicas-kv", 3, 3, "", "kv: 3 replicas, each lends its link to all others"),
        ("replica1-kv", 3, 2, "lend-none", "kv, rank 1: of 3 replicas not each lends its link to all others"),
    ],
)
def test_replicas_that_lend(
    machine: Machine, of_lending: Any, group: str, ranks: int, links: int, kind: str, text: str
) -> None:
    own = f"/tmp/kvswap-{os.geteuid()}"
    paths = [f"{own}/share-{group}.{rank}.sock" for rank in range(ranks)]
    for path in paths:
        machine.file(path[1:])
    rows = [("00010000", path) for path in paths] + [("00000000", paths[0])] * links
    lines = [f"0: 00000002 00000000 {flags} 0005 01 {i} {path}" for i, (flags, path) in enumerate(rows)]
    machine.file("proc/net/unix", "\n".join(["Num", *lines]) + "\n")
    (found,) = of_lending()
    assert found.kind == kind and text in found.text


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (vllm(kvswap_lend=True, kvswap_overlap=True), "kvswap_lend: the layers of a lent load come in any order"),
        (vllm(kvswap_replicas="kv", kvswap_share=True), "kvswap_replicas: kvswap_share is for the ranks of one engine"),
        (vllm(kvswap_replicas="kv", kvswap_lend=True, kvswap_path="dma"), "kvswap_lend: kvswap_path does not apply"),
        (vllm(kvswap_codec="exact", secondary_tiers=[{"type": "x"}]), "kvswap_codec: the secondary tier x"),
        ({**vllm(kvswap_share=True), "kv_connector": "OffloadingConnector"}, "kvswap_share: it needs"),
        ({**vllm(kvswap_codec="exact"), "kv_connector": "OffloadingConnector"}, "kvswap_codec needs"),
    ],
)
def test_keys_that_do_not_go_together(tmp_path: Path, given: Any, why: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(given))
    assert _doctor_config.read(str(file)).wrong.startswith(why)


def test_a_pool_of_replicas_is_needed_once(machine: Machine) -> None:
    """With the first engine running, the second one takes no more memory."""
    available = "MemTotal: 16777216 kB\nMemFree: 2097152 kB\nMemAvailable: 2097152 kB\n"
    machine.file("proc/meminfo", available)
    place = machine.folder / "root" / "dev" / "shm"
    place.mkdir(parents=True)
    machine.config(vllm(cpu_bytes_to_use=(2 << 30) + (64 << 20), kvswap_replicas="kv"))
    asked = _doctor.Asked(_doctor_config.read(machine.asked["config"]), root=machine.asked["root"])
    assert [each.kind for each in _doctor._memory(asked)] == ["memory-short"]
    (place / f"kvswap.replicas-{os.geteuid()}-kv").write_bytes(b"x" * (80 << 20))
    assert [each.kind for each in _doctor._memory(asked)] == [""]


def test_it_opens_devices_only_if_asked(machine: Machine) -> None:
    assert machine.gpu().examine()["devices"] == []
    assert machine.gpu(opened=True).examine()["devices"] == ["cuda:0", "cuda:1"]


def test_it_writes_nothing(tmp_path: Path) -> None:
    script = """
        import os, sys
        sys.dont_write_bytecode = True
        written, WRITES = [], os.O_WRONLY | os.O_RDWR | os.O_CREAT

        def hook(event, args):
            if event == "open" and args[0] != os.devnull and (args[2] or 0) & WRITES:
                written.append(args[0])
            if event in ("os.mkdir", "os.rename", "os.remove", "os.truncate", "tempfile.mkdtemp", "tempfile.mkstemp"):
                written.append((event, args))

        sys.addaudithook(hook)
        from kvswap import cli
        cli.main(["doctor"])
        assert not written, written
    """
    places = {name: str(tmp_path) for name in ("HOME", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME")}
    done = run_python(script, **places)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []  # nor the C code


# -- in this process --------------------------------------------------------------------------------------------------


def test_a_check_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()

    def hangs(asked: _doctor.Asked) -> Iterator[_doctor.Finding]:
        yield _doctor.Finding("", "ok", "first")
        end.wait(60)

    monkeypatch.setattr(_doctor, "CHECKS", (("driver", hangs), ("memlock", _doctor._memlock)))
    report = _doctor.examine(_doctor.Asked(), limit=0.2)
    end.set()
    assert [each.text for each in report.findings][:2] == ["first", "no answer after 0.2 s"]
    assert report.findings[1].kind == "slow" and report.findings[2].check == "memlock"
    assert report.status == 1


def test_a_check_that_raises_is_a_defect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def raises(asked: _doctor.Asked) -> Iterator[_doctor.Finding]:
        raise KeyError("wrong")
        yield

    monkeypatch.setattr(_doctor, "CHECKS", (("driver", raises),))
    assert cli.main(["doctor"]) == 70
    assert "KeyError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kinds", "status", "last"),
    [([], 0, "nothing to mend"), (["variable"], 1, "1 warning"), (["variable", "directory"], 2, "1 error, 1 warning")],
)
def test_status(
    kinds: list[str], status: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(asked: _doctor.Asked) -> Iterator[_doctor.Finding]:
        yield _doctor._ok("well")
        yield from (_doctor._bad(kind, f"of {kind}") for kind in kinds)

    monkeypatch.setattr(_doctor, "CHECKS", (("driver", check),))
    assert cli.main(["doctor", "--json"]) == status
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["command"], found["status"]) == ("doctor", status)
    assert [each["kind"] for each in found["findings"]] == ["", *kinds]
    lines = err.splitlines()
    assert lines[0] == "ok       driver      well" and lines[-1].endswith(last)
    assert sum(line.split()[0] == "cure" for line in lines) == len(kinds)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is not JSON"),
        ("[]", "is not an object of JSON"),
        ('{"kv_connecter": 1}', "is none of these: vLLM's --kv-transfer-config"),
        (" " * (_doctor_config.MOST_NBYTES + 1), "has more than 1 MiB"),
        (None, "No such file"),
    ],
)
def test_files_that_are_no_configuration(
    text: str | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)
    assert cli.main(["doctor", "--config", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and complaint in err and err.count("\n") == 1


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NAMES = ("secondary_tiers", "cpu_bytes_to_use", "kvswap_path", "directory", "capacity", "master", "type", "class_name")
OBJECTS = st.dictionaries(st.sampled_from(NAMES), ANY | st.sampled_from(("FileTier", "FileStorage", "/tmp", "1GiB")))
GIVEN = st.one_of(
    st.fixed_dictionaries({"kv_connector": ANY, "kv_connector_extra_config": ANY | OBJECTS}),
    OBJECTS.map(lambda given: {**given, "module_path": "kvswap.sglang"}),
    st.fixed_dictionaries({"module_path": st.just("kvswap.lmcache"), "adapter_params": ANY | OBJECTS}),
)


@given(GIVEN)
def test_any_configuration_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, given: Any) -> None:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(given))
    found = _doctor_config.read(str(path))
    assert found.wrong or found.host_nbytes >= 0


# -- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "known"),
    [
        *[("0.26.0", True), ("0.30.0rc1", True), ("0.33.2+cu128", True)],
        *[("0.25.9", False), ("0.27.0", False), ("0.29.3", False), ("0.34.0", False), ("1.0", False)],
    ],
)
def test_releases_of_vllm(release: str, known: bool) -> None:
    assert VLLM.takes(release) is known


def test_an_engine_that_is_missing_is_one_sentence() -> None:
    for engine, name in ((ENGINES[0], "KVSwapConnector"), (ENGINES[1], "FileStorage")):
        done = run_python(f"import sys; sys.modules['{engine.module}'] = None\nfrom {engine.ours} import {name}")
        last = done.stderr.splitlines()[-1]
        assert last == f"ImportError: {engine.ours} requires {engine.name} {engine.releases}; none is installed here"
        assert "During handling" not in done.stderr


def test_another_missing_module_is_not_the_engines() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), VLLM.needed():
        import no_such_module  # noqa: F401


def test_tables_of_options_have_no_key_twice() -> None:
    for table in (_options.FILE_TIER, _options.REMOTE_TIER, _options.FILE_STORAGE, _options.REMOTE_STORAGE):
        names = [option.name for option in table]
        assert len(names) == len(set(names))
