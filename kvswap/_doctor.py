"""What kvswap doctor finds: whether kvswap would work on this machine, and what would make it slow or fail.

Each check looks at one thing and reports findings. It writes nothing, and opens no device unless it is asked to. Checks
run beside each other, and one that does not end in time (a driver that hangs) is a finding itself.

kvswap.info has the facts; here they are judged. CURES and FATAL name every finding that is not "ok".
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import platform
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

from kvswap import _C, info
from kvswap._devices import DeviceInfo, devices
from kvswap._doctor_config import Configuration
from kvswap._engines import ENGINES, Engine
from kvswap._replicas import held_nbytes
from kvswap._top_socket import folder_path
from kvswap.replay.units import format_size
from kvswap.share._meet import Group, Loan, Stray, groups, loans, strays

State = Literal["ok", "warning", "error"]
LIMIT = 8.0  # seconds for all checks; the command itself takes less than one more

_LITTLE = 1 << 30  # bytes: of memory, and of /dev/shm: a container has 64 MiB if nothing is said
_REPLICAS = re.compile(r"(?:replicas|replica(\d+))-(.*)")  # groups of kvswap_replicas with kvswap_lend, by rank
_UNKNOWN = (1 << 64) - 1
_MBIND = {"x86_64": 237, "aarch64": 235}  # the number of the system call

# By the kind of a finding. "{cure}": what the facts themselves say.
CURES = {
    "no-gpu": "{cure}",
    "no-kernels": "{cure}",
    "no-batches": "{cure}",
    "no-io-uring": "build kvswap where liburing-dev is installed; a kernel that refuses it: sysctl "
    "kernel.io_uring_disabled=0, and in a container a seccomp profile that permits io_uring_setup",
    "memlock": "ulimit -l unlimited, docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity of a systemd unit",
    "shm-small": "docker run --shm-size, or mount -o remount,size= /dev/shm",
    "memory-little": "end what uses the memory, or raise the limit: docker run --memory, resources.limits.memory",
    "numa-away": "let the engine run beside its GPU: numactl --cpunodebind={node} --membind={node}, or docker run "
    "--cpuset-cpus and --cpuset-mems",
    "mbind-refused": "docker run --cap-add SYS_NICE",
    "not-calibrated": "kvswap calibrate --device {device}, once, while nothing else uses the GPU",
    "calibration-wrong": "kvswap calibrate --device {device} writes it anew",
    "variable": "unset it, or correct it: docs/configuration.md lists them",
    "engine-release": "a release that kvswap is tested with; with others, look for kvswap's warnings in its log",
    "plugin-missing": "install kvswap into this environment with pip; a folder in PYTHONPATH has no plugin hooks",
    "plugin-filtered": "add kvswap to {variable}, or unset it",
    "manager-packages": "pip install 'kvswap[manager]' for kvswap manager; the ops need neither",
    "mooncake-several": "uninstall all but one of them",
    "key-ignored": "remove the key, or correct it: the engine's page of the documentation lists them",
    "directory-full": "a smaller capacity, or free space on that file system",
    "lend-apart": "{cure}",
    "lend-alone": "start another engine on this machine with the same name: kvswap_lend or kvswap_replicas in "
    "vLLM, KVSWAP_SGLANG_LEND in SGLang; or leave it out",
    "lend-none": "look for kvswap.share in the engines' logs: lines with 'no link is lent', 'is not offered' and "
    "'takes no part' say why. An engine begins to lend only while it is idle, and an engine that sleeps lends nothing",
    "lend-one-gpu": "leave out kvswap_lend; or run this command with the CUDA_VISIBLE_DEVICES of all engines together",
    "no-peers": "nvidia-smi topo -p2p r shows which GPUs reach each other; in a virtual machine, or where an IOMMU is "
    "on, the host must permit it",
    "slow": "run kvswap info beside it, to see what hangs: dmesg names a driver that does not answer",
}
FATAL = {
    "driver-refused": "{cure}",
    "device-refused": "{cure}",
    "variable-refused": "correct the variable: no device opens with it",
    "memory-short": "a smaller cpu_bytes_to_use, or a higher limit: docker run --memory, resources.limits.memory",
    "configuration": "correct the file: the engine would not start with it",
    "directory": "name a directory that this user can write to",
}


@dataclass(frozen=True)
class Finding:
    """kind: a key of CURES or FATAL; empty: all is well."""

    check: str
    state: State
    text: str
    kind: str = ""
    cure: str = ""


@dataclass(frozen=True)
class Asked:
    """configuration: of an engine. gpu: whether GPUs are opened. root: put before paths of the system, for tests."""

    configuration: Configuration | None = None
    gpu: bool = False
    root: str = ""


@dataclass(frozen=True)
class Report:
    """Everything, for a person or a script. status: the exit status."""

    findings: list[Finding]

    @property
    def status(self) -> int:
        return max(({"ok": 0, "warning": 1, "error": 2}[each.state] for each in self.findings), default=0)

    def to_dict(self) -> dict[str, Any]:
        return {"status": self.status, "findings": [asdict(each) for each in self.findings]}

    def to_lines(self) -> Iterator[str]:
        for each in self.findings:
            yield f"{each.state:<8} {each.check:<11} {each.text}"
            if each.cure:
                yield f"{'':<8} {'cure':<11} {each.cure}"
        count = {state: sum(each.state == state for each in self.findings) for state in ("error", "warning")}
        found = [f"{n} {state}{'s' * (n > 1)}" for state, n in count.items() if n]
        yield f"kvswap {_C.__version__}: {', '.join(found) or 'nothing to mend'}"


_Findings = Iterator[Finding]


def _ok(text: str) -> Finding:
    return Finding("", "ok", text)


def _bad(kind: str, text: str, **values: str) -> Finding:
    cure = (CURES.get(kind) or FATAL[kind]).format(**values)
    return Finding("", "error" if kind in FATAL else "warning", text, kind, cure)


# -- checks -----------------------------------------------------------------------------------------------------------


def _driver(asked: Asked) -> _Findings:
    found = [device for device in devices() if device.kind == "cuda"]
    if not found:
        note = _C._cuda_count()[1] or "the driver finds none: nvidia-smi, and CUDA_VISIBLE_DEVICES, say why"
        text, _, cure = note.rpartition(": ")
        there = glob.glob(f"{asked.root}/dev/nvidia[0-9]*") or os.path.exists(f"{asked.root}/dev/dxg")
        kind = "driver-refused" if there else "no-gpu"
        yield _bad(kind, f"no GPU, only host devices: {text or note}", cure=cure)
    for device in found:
        yield _ok(f"{device.name}: {device.product}, {format_size(device.memory)}, driver for CUDA {device.driver}")


def _lacks(device: DeviceInfo | None, missing: list[str], name: str) -> _Findings:
    for text in missing:
        what, _, cure = text.rstrip(".").partition(". Cure: ")
        yield _bad("no-kernels" if what.startswith("no kernels") else "no-batches", f"{name}: {what}", cure=cure)
    if device is not None and not missing:
        yield _ok(f"{name}: kernels and batched copies")


def _kernels(asked: Asked) -> _Findings:
    archs = _C._fatbin()["archs"]
    found = [device for device in devices() if device.kind == "cuda"]
    if not found:
        yield _ok(f"built for {archs}" if archs else "this build has none for GPUs, and there is no GPU")
    for device in found:
        if asked.gpu:
            opened = info.open_device(device.name)
            if opened.error is not None:
                yield _bad("device-refused", f"{device.name} does not open", cure=opened.error)
                continue
            yield from _lacks(device, opened.missing, device.name)
        else:
            yield from _lacks(device, device.missing, device.name)


def _io_uring(asked: Asked) -> _Findings:
    why_not, _ = _C._file_facts()
    yield _bad("no-io-uring", f"{why_not}: threads read and write files") if why_not else _ok("on")


def _memlock(asked: Asked) -> _Findings:
    """GPU drivers do not count what they pin; RDMA does."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        yield _ok("no limit")
    elif info.mooncake().startswith("on"):
        yield _bad("memlock", f"{format_size(limit)}: Mooncake's RDMA cannot register more")
    else:
        yield _ok(f"{format_size(limit)}; GPU drivers do not count what they pin")


def _shm(asked: Asked) -> _Findings:
    needed = max(_LITTLE, _needed(asked))
    try:
        there = os.statvfs(f"{asked.root}/dev/shm")
    except OSError as error:
        yield _bad("shm-small", f"/dev/shm: {error.strerror}: shared pools and shared host memory fail")
        return
    nbytes, free = there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize
    text = f"/dev/shm has {format_size(nbytes)}, {format_size(free)} free"
    if free < needed:
        yield _bad("shm-small", f"{text}; shared host memory needs {format_size(needed)}")
    else:
        yield _ok(text)


def _memory(asked: Asked) -> _Findings:
    found = _C._host_memory(asked.root)
    limit = "" if found["group_max"] == _UNKNOWN else f", limit {format_size(found['group_max'])} by {found['group']}"
    text = f"{format_size(found['available'])} of {format_size(found['total'])} can be allocated{limit}"
    needed = _needed(asked)
    if found["available"] < needed:
        yield _bad("memory-short", f"{text}; cpu_bytes_to_use needs {format_size(needed)} more")
    elif found["available"] < _LITTLE:
        yield _bad("memory-little", text)
    else:
        yield _ok(text)


def _numbers(text: str) -> set[int]:
    """Of "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _needed(asked: Asked) -> int:
    """Bytes of host memory that an engine with the configuration still takes."""
    given = asked.configuration
    if given is None:
        return 0
    held = held_nbytes(given.replicas, asked.root) if given.replicas else 0
    return max(0, given.host_nbytes - held)


def _allowed_nodes(root: str) -> set[int]:
    status = _read(f"{root}/proc/self/status")
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return _numbers(lines.get("Mems_allowed_list", ""))


def _mbind_error() -> int:
    """The errno of an mbind() of no bytes, which does nothing; 0: it is permitted, or not known."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.syscall(number, None, 0, 0, None, 0, 0) < 0 else 0


def _numa(asked: Asked) -> _Findings:
    nodes = sorted(glob.glob(f"{asked.root}/sys/devices/system/node/node[0-9]*"))
    allowed, cpus = _allowed_nodes(asked.root), os.sched_getaffinity(0)
    refused = _mbind_error()
    if refused == errno.EPERM and len(nodes) > 1:
        yield _bad("mbind-refused", "memory cannot be placed on a GPU's node: mbind is not permitted")
    away = False
    for device in devices():
        node = _read(f"{asked.root}/sys/bus/pci/devices/{device.pci.lower()}/numa_node").strip() if device.pci else ""
        if not node or int(node) < 0:
            continue
        beside = _numbers(_read(f"{asked.root}/sys/devices/system/node/node{node}/cpulist"))
        what = [text for text, held in (("memory", int(node) in allowed or not allowed), ("processors", cpus & beside))
                if not held]  # fmt: skip
        if what:
            away = True
            yield _bad("numa-away", f"{device.name} is on node {node}, whose {' and '.join(what)} this process may "
                       "not use: copies cross the sockets", node=node)  # fmt: skip
    if not away:
        yield _ok(f"{max(1, len(nodes))} node{'s' * (len(nodes) > 1)}")


def _lend(asked: Asked) -> _Findings:
    """Engines that lend each other their links, and those that would."""
    wanted = asked.configuration.lend if asked.configuration and not asked.configuration.replicas else ""
    here, apart = loans(asked.root), strays(asked.root)
    gpus = sum(device.kind == "cuda" for device in devices())
    if wanted and gpus == 1:
        yield _bad("lend-one-gpu", "kvswap_lend: this command sees one GPU, and a link is lent by another one")
    if here or (asked.configuration and asked.configuration.lend):
        yield from _peers(gpus)
    for group in groups(asked.root):
        if of_replicas := _REPLICAS.fullmatch(group.name):
            rank, name = of_replicas.groups()
            yield _lend_of_replicas(f"{name}, rank {rank}" if rank else name, group)
    for name in sorted({one.name for one in here} | {one.name for one in apart} | {wanted} - {""}):
        yield from _lend_of(name, name == wanted, [one for one in here if one.name == name],
                            [one for one in apart if one.name == name])  # fmt: skip


def _lend_of(name: str, wanted: bool, here: list[Loan], apart: list[Stray]) -> _Findings:
    folders = {one.folder: one.uid for one in apart}
    own = first = str(folder_path())
    if apart and not (here or wanted):
        first = next(iter(folders))
        del folders[first]
    for folder, uid in folders.items():
        count = sum(one.folder == folder for one in apart)
        text = f"{name}: {count} processes with sockets in {folder} do not find those with sockets in {first}"
        yield _bad("lend-apart", text, cure=_cure_apart(folder == own, uid))
    if apart and not folders:
        yield _ok(f"{name}: {len(apart)} processes with sockets in {apart[0].folder}, where this command cannot look")
    without = sum(not one.lenders for one in here)
    if here and len({one.engine for one in here}) == 1:
        yield _bad("lend-alone", f"{name}: one engine is here, and no other that lends it a link")
    elif without:
        yield _bad("lend-none", f"{name}: to {without} of {len(here)} processes no other lends its link")
    elif here:
        yield _ok(f"{name}: {len(here)} processes, each with others that lend it their link")
    elif wanted and not apart:
        yield _ok(f"{name}: no engine is here yet")


def _lend_of_replicas(name: str, group: Group) -> Finding:
    count = len(group.ranks)
    if count == 1:
        return _bad("lend-alone", f"{name}: one replica is here, and no other that lends it a link")
    if group.links < count * (count - 1) // 2:
        return _bad("lend-none", f"{name}: of {count} replicas not each lends its link to all others")
    return _ok(f"{name}: {count} replicas, each lends its link to all others")


def _cure_apart(same_name: bool, uid: int) -> str:
    if uid != os.geteuid():
        return f"run all engines as one user: the folder is that of user {uid}, and this is user {os.geteuid()}"
    if same_name:
        return "containers need a common folder of sockets, and one pid namespace: mount the folder into all of them"
    return "start all engines, and this command, with the same XDG_RUNTIME_DIR"


def _peers(gpus: int) -> _Findings:
    pairs = [(a, b) for a in range(gpus) for b in range(a)]
    apart = [f"cuda:{b} and cuda:{a}" for a, b in pairs if not _C._cuda_can_reach(a, b)]
    if apart:
        some = ", ".join(apart[:4]) + ", ..." * (len(apart) > 4)
        yield _bad("no-peers", f"no link is lent between {some}: they do not reach each other's memory")
    elif pairs:
        yield _ok(f"all {gpus} GPUs reach each other's memory")


def _calibration(asked: Asked) -> _Findings:
    found = [device for device in devices() if device.kind == "cuda"]
    if not found:
        yield _ok("no GPU to calibrate")
    for ordinal, device in enumerate(found):
        facts = _C._cuda_info(ordinal)
        try:
            path = _C._costs_path(_C._costs_what(facts["name"], facts["driver"]))
            _C._costs_read(path)
        except IndexError:
            yield _bad("not-calibrated", f"{device.name} has none: paths are chosen by an H200's costs",
                       device=device.name)  # fmt: skip
        except ValueError as error:
            yield _bad("calibration-wrong", f"{device.name}: {error}: built-in costs are used", device=device.name)
        else:
            yield _ok(f"{device.name}: {path}")


def _environment(asked: Asked) -> _Findings:
    refused = _C._environment()
    wrong = [text for text in info.wrong_variables() if text != refused]
    if refused:
        yield _bad("variable-refused", refused)
    yield from (_bad("variable", text) for text in wrong)
    if not wrong and not refused:
        names = sorted(name for name in os.environ if name in info.VARIABLES)
        yield _ok(f"{', '.join(names)} set" if names else "no KVSWAP_... variable is set")


def _has_plugin(engine: Engine) -> bool:
    assert engine.plugin is not None
    return any(point.name == "kvswap" for point in metadata.entry_points(group=engine.plugin[0]))


def _hook(engine: Engine) -> str:
    """What of kvswap the engine would use, as far as the environment says it."""
    on = [name for name in info.SWITCHES if f"_{engine.module.upper()}_" in name and os.environ.get(name) == "1"]
    by = f"{engine.ours}, by its configuration" if engine.plugin else engine.ours
    return ", and ".join([by, *(f"its own copies replaced ({name})" for name in on)])


def _engine(engine: Engine, release: str) -> _Findings:
    yield _ok(f"{engine.name} {release}: {_hook(engine)}")
    if not engine.takes(release):
        yield _bad("engine-release", f"{engine.name} {release}: kvswap is tested with {engine.releases}")
    if engine.plugin is not None and not _has_plugin(engine):
        yield _bad("plugin-missing", f"{engine.name} does not find kvswap's plugin ({engine.plugin[0]})")
    if engine.plugin is not None and not engine.loads_plugin():
        names, variable = os.environ[engine.plugin[1]], engine.plugin[1]
        yield _bad("plugin-filtered", f"{variable} is {names!r}: {engine.name} does not load kvswap's plugin",
                   variable=variable)  # fmt: skip
    if engine.name == "FastDeploy" and (lacking := [name for name in ("zmq", "msgspec") if not _is_there(name)]):
        yield _bad("manager-packages", f"the cache transfer manager needs {' and '.join(lacking)}")


def _is_there(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def _engines(asked: Asked) -> _Findings:
    found = [(engine, release) for engine in ENGINES if (release := engine.installed())]
    if not found:
        yield _ok(f"none is installed here, of {', '.join(engine.name for engine in ENGINES)}")
    for engine, release in found:
        yield from _engine(engine, release)
    mooncake = info.mooncake()
    if "share one import name" in mooncake:
        yield _bad("mooncake-several", mooncake.removeprefix("off: ").partition(": uninstall")[0])
    elif mooncake.startswith("on"):
        yield _ok(f"Mooncake Store: {mooncake.removeprefix('on: ')}")


def _configuration(asked: Asked) -> _Findings:
    given = asked.configuration
    if given is None:
        return
    if given.wrong:
        yield _bad("configuration", f"for {given.engine.name}: {given.wrong}")
    yield from (_bad("key-ignored", text) for text in given.ignored)
    for place, nbytes in given.stores:
        yield from _directory(place, nbytes)
    if not given.wrong and not given.ignored:
        yield _ok(f"for {given.engine.name}: all keys are known, all values allowed")


def _directory(place: str, nbytes: int) -> _Findings:
    """The folder that is there already; the engine makes those below it."""
    there = place
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        yield _bad("directory", f"{place}: {there} is not a directory that this user can write to")
        return
    of_disk = os.statvfs(there)
    free = of_disk.f_bavail * of_disk.f_frsize
    if _nbytes_in(place) + free < nbytes:
        yield _bad("directory-full", f"{place}: a capacity of {format_size(nbytes)}, and {format_size(free)} are free")


def _nbytes_in(place: str) -> int:
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            with contextlib.suppress(OSError):  # it has just been removed
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


CHECKS: tuple[tuple[str, Callable[[Asked], _Findings]], ...] = (
    ("driver", _driver),
    ("kernels", _kernels),
    ("calibration", _calibration),
    ("lend", _lend),
    ("io_uring", _io_uring),
    ("memlock", _memlock),
    ("shm", _shm),
    ("memory", _memory),
    ("numa", _numa),
    ("environment", _environment),
    ("engines", _engines),
    ("config", _configuration),
)


class _Running(threading.Thread):
    """A check. Its findings can be read while it hangs."""

    def __init__(self, name: str, check: Callable[[Asked], _Findings], asked: Asked) -> None:
        super().__init__(name=f"kvswap-doctor-{name}", daemon=True)
        self.check, self._look, self._asked = name, check, asked
        self.findings: list[Finding] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            for each in self._look(self._asked):
                self.findings.append(each)
        except Exception as error:
            self.error = error


def examine(asked: Asked, limit: float = LIMIT) -> Report:
    """Run the checks, `limit` seconds at most. A check that raises is a defect, and raises here."""
    end = time.monotonic() + limit
    running = [_Running(name, check, asked) for name, check in CHECKS]
    for each in running:
        each.start()
    found: list[Finding] = []
    for each in running:
        each.join(max(0.0, end - time.monotonic()))
        if each.error is not None:
            raise each.error
        findings = list(each.findings)
        if each.is_alive():
            findings.append(_bad("slow", f"no answer after {limit:g} s"))
        found += [Finding(each.check, one.state, one.text, one.kind, one.cure) for one in findings]
    return Report(found)
