"""The report of kvswap info: versions, the build, the devices, and which paths work on each or why not.

By default no device is opened, so no CUDA context is made: whether the driver takes the kernels is then not known yet.
"""

from __future__ import annotations

import os
import platform
import warnings
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from kvswap import _C, _links, _metrics_port
from kvswap._devices import DeviceInfo, devices, missing
from kvswap._links import Links
from kvswap._replicas import ReplicaPool, pools
from kvswap.commands.parser import suggestion
from kvswap.replay.units import format_size
from kvswap.share._meet import Group, Loan, groups, loans

if TYPE_CHECKING:
    from kvswap.typing import BuildInfo

SWITCHES = (
    "KVSWAP_NVTX", "KVSWAP_RACECHECK", "KVSWAP_SGLANG_COPIES", "KVSWAP_SGLANG_HOST_MEMORY",
    "KVSWAP_SGLANG_SHARE", "KVSWAP_TOP", "KVSWAP_VLLM_SIMPLE_OFFLOAD", "KVSWAP_VLLM_SWAP_BLOCKS",
)  # fmt: skip
VARIABLES = (  # the tables of docs/configuration.md
    *SWITCHES, "KVSWAP_ARCHS", "KVSWAP_CALIBRATION", "KVSWAP_CUDA", "KVSWAP_CUFILE", "KVSWAP_DEBUG", "KVSWAP_DISABLE",
    "KVSWAP_LOG", "KVSWAP_MAX_CTAS", "KVSWAP_METRICS_PORT", "KVSWAP_NVCC", "KVSWAP_PACE_GBPS", "KVSWAP_PATH",
    "KVSWAP_RESERVE", "KVSWAP_SANITIZE", "KVSWAP_SGLANG_CODEC", "KVSWAP_SGLANG_LEND", "KVSWAP_SGLANG_LENDERS",
    "KVSWAP_SGLANG_LEND_MIB", "KVSWAP_TEST_BINDINGS", "KVSWAP_URING", "KVSWAP_VERIFY_CODEC", "KVSWAP_WERROR",
)  # fmt: skip


@dataclass(frozen=True)
class Opened:
    """Facts of an opened device, or why it does not open."""

    info: dict[str, Any]
    error: str | None = None
    missing: list[str] = field(default_factory=list)  # what it lacks for full speed


@dataclass(frozen=True)
class Report:
    """Everything, for a person or a script."""

    kvswap: str
    python: str
    numpy: str
    system: str
    build: BuildInfo
    cuda_note: str  # why there are no CUDA devices; empty if there are
    devices: list[DeviceInfo]
    opened: dict[str, Opened]  # by name
    files: dict[str, str]  # of the file tier: checksum, io_uring and GPUDirect Storage, "on" (by what) or why not
    mooncake: str  # which package of Mooncake is installed, for kvswap.remote
    share: list[Group]  # of kvswap.share, on this machine
    links: Links  # of the GPUs, together
    lend: list[Loan]  # engines that lend each other their links (kvswap_lend)
    replicas: list[ReplicaPool]  # host memory of several engines (kvswap_replicas)
    environment: list[str]  # what is wrong with the variables KVSWAP_...

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        lines = [f"kvswap {self.kvswap}, Python {self.python}, NumPy {self.numpy}, {self.system}", self._build_line()]
        if self.cuda_note:
            lines.append(f"CUDA     no devices: {self.cuda_note}")
        lines += [f"files    {name} {_state(state)}" for name, state in self.files.items()]
        lines.append(f"nodes    Mooncake Store {self.mooncake}")
        lines += [f"share    {group}" for group in self.share]
        lines += [f"links    {line}" for line in self.links.lines()]
        lines += [f"lend     {loan}" for loan in self.lend]
        lines += [f"replicas {pool}" for pool in self.replicas]
        lines += [f"wrong    {text}" for text in self.environment]
        for device in self.devices:
            opened = self.opened.get(device.name)
            missing = device.missing if opened is None or opened.error is not None else opened.missing
            lines += [*_facts(device, missing), *_opened(opened)]
        if not self.opened and not self.cuda_note:
            lines.append("No device was opened; --open shows what the driver makes of the kernels.")
        return "\n".join(lines)

    def _build_line(self) -> str:
        archs = self.build.get("archs")
        return (
            f"build    kernels for {archs}"
            if archs
            else "build    no kernels for GPUs: no nvcc was found, or KVSWAP_CUDA=off"
        )


def collect(*, open_devices: bool = False) -> Report:
    """Collect the report; opens devices other than host:0 only if asked to."""
    count, note = _C._cuda_count()
    found = devices()
    opened = {device.name: open_device(device.name) for device in found} if open_devices else {}
    return Report(
        kvswap=_C.__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        build=_C._fatbin(),
        cuda_note="" if count else note or "the driver finds none",
        devices=found,
        files=_files(),
        mooncake=mooncake(),
        share=groups(),
        links=_links.links(found, _links.tuning_of(found)),
        lend=loans(),
        replicas=pools(),
        environment=wrong_variables(),
        opened=opened,
    )


def wrong_variables() -> list[str]:
    """A line for each variable that is not known or has a wrong value; of those that the core reads, the first one."""
    given = {name: value for name, value in sorted(os.environ.items()) if name.startswith("KVSWAP_") and value}
    found = [
        f"{name} is set, and kvswap has no such variable{suggestion(name, VARIABLES)}"
        for name in given
        if name not in VARIABLES
    ]
    found += [f"{name} is {given[name]!r}; it is 0 or 1" for name in SWITCHES if given.get(name, "0") not in ("0", "1")]
    file = given.get("KVSWAP_CALIBRATION")
    if file and not os.path.exists(file):
        found.append(f"KVSWAP_CALIBRATION is {file!r}; there is no such file, and built-in costs are used")
    try:
        _metrics_port.address_of(given.get(_metrics_port.VARIABLE, "1"))
    except ValueError as error:
        found.append(str(error))
    core = _C._environment()
    return [*found, core] if core else found


def _files() -> dict[str, str]:
    """Only a try shows whether the kernel allows io_uring."""
    why_not, checksum = _C._file_facts()
    return {
        "io_uring": f"{why_not}; threads do the work" if why_not else "on",
        "checksum by instruction": "the processor has none" if checksum == "table" else "on",
        "GPUDirect Storage": _gds(),
    }


def mooncake() -> str:
    """Several packages have the module `mooncake`; it is not imported."""
    names = metadata.packages_distributions().get("mooncake", [])
    found = sorted({f"{name} {metadata.version(name)}" for name in names})
    if len(found) > 1:
        return f"off: {', '.join(found)} share one import name: uninstall all but one"
    return f"on: {found[0]}" if found else "off: none of its packages is installed (docs/many-nodes.md)"


def _gds() -> str:
    usable, note = _C._file_gds(False)
    return f"on: {note}" if usable else note


def open_device(name: str) -> Opened:
    try:
        with warnings.catch_warnings():  # the report says the same
            warnings.simplefilter("ignore", RuntimeWarning)
            device = _C.Device(name)
        return Opened(dict(device.info), missing=missing(device.info, opened=True) if device.kind == "cuda" else [])
    except (_C.Error, MemoryError, ValueError) as error:  # ValueError: of what the environment says
        return Opened({}, str(error))


def _facts(device: DeviceInfo, missing: list[str]) -> list[str]:
    rate = f" at {device.memory_gbps} GB/s" if device.memory_gbps else ""
    facts = [device.product, format_size(device.memory) + rate]
    if device.kind == "cuda":
        facts += [f"{device.sms} SMs", f"{device.copy_engines} copy engines", f"PCI {device.pci}"]
        facts += [device.link] if device.link else []
        facts.append(f"driver for CUDA {device.driver}")
    lines = [f"{device.name:<8} {', '.join(facts)}"]
    lines += [f"         {_links.node_text(device.numa_node)}"] if device.kind == "cuda" else []
    lines += [f"         has {text}" for text in missing]
    return lines + [f"         path {path:<7} {_state(state)}" for path, state in device.paths.items()]


def _state(state: str) -> str:
    return state if state == "on" or state.startswith("on: ") else f"off: {state}"


def _opened(opened: Opened | None) -> list[str]:
    if opened is None:
        return []
    if opened.error is not None:
        return [f"         does not open: {opened.error}"]
    info = opened.info
    return [
        f"         opened; kernels {'loaded' if info['kernels'] else 'off'}: {info['kernels_note']}",
        f"         bursts {info['burst']}; they take {format_size(info['slots_nbytes'])} of its memory",
        f"         auto goes by figures that are {info['costs']}"
        if info["costs"].startswith("built in")
        else f"         auto goes by the figures of {info['costs']}",
    ]
