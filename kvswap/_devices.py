"""The devices of this machine. Not called `devices`: a submodule of that name would hide ``kvswap.devices()``."""

from __future__ import annotations

import glob
import os
import platform
import re
import sys
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvswap import _C

if TYPE_CHECKING:
    from kvswap.typing import CudaInfo


@dataclass(frozen=True)
class DeviceInfo:
    """Facts of one device that are known without opening it.

    name: what kvswap.Device takes. kind: "cuda" or "host". product: of the GPU, or the processor. memory: bytes of the
    GPU, or of the machine. memory_gbps: 0 on a host device, and where it is not known. sms, copy_engines: 0 on a host
    device. pci: "0000:01:00.0". link: the most that it can do. driver: the CUDA version it is for. paths: each
    by its name "on", or why not. missing: what a GPU lacks for full speed, with the cost and the cure. numa_node: of a
    GPU's link; -1: unknown, or a host device.
    """

    name: str  # what kvswap.Device takes: "cuda:0", "host:0"
    kind: str  # "cuda" or "host"
    product: str  # "NVIDIA H200"; of a host device, the processor
    memory: int  # bytes of GPU memory; of a host device, of main memory
    memory_gbps: int  # bandwidth of GPU memory by its clock, GB/s; 0 on a host device, and where it is not known
    sms: int  # streaming multiprocessors; 0 on a host device
    copy_engines: int  # 0 on a host device
    pci: str  # "0000:01:00.0"; empty on a host device
    link: str  # "32.0 GT/s PCIe x16", the most that the link can do; empty where it is not known
    driver: str  # the CUDA version that the driver is for, "13.0"; empty on a host device
    paths: dict[str, str]  # by the names of kvswap.typing.ForcedPath: "on", or why not
    missing: list[str] = field(default_factory=list)  # what it lacks for full speed, what that costs, and the cure
    numa_node: int = -1  # of a GPU's link; -1: unknown, or a host device


def devices() -> list[DeviceInfo]:
    """The devices of this machine, GPUs first and host:0 always last. Opens none, so makes no CUDA context.

    "on" for a path of a GPU means that this build has what it needs; whether the driver takes the kernels is known once
    the device is open, from ``Device.info``.
    """
    count, _ = _C._cuda_count()
    return [*(_cuda(ordinal) for ordinal in range(count)), _host()]


def _cuda(ordinal: int) -> DeviceInfo:
    info = _C._cuda_info(ordinal)
    return DeviceInfo(
        name=f"cuda:{ordinal}",
        kind="cuda",
        product=info["name"],
        memory=info["memory"],
        memory_gbps=info["memory_gbps"],
        sms=info["sms"],
        copy_engines=info["copy_engines"],
        pci=info["pci"],
        link=_link(info["pci"]),
        driver=_version(info["driver"]),
        paths=_paths(kernels=_kernel_path(info), threads="only host devices copy by threads"),
        missing=missing(info, opened=False),
        numa_node=info["numa_node"],
    )


# -- what a GPU lacks -------------------------------------------------------------------------------------------------

_WITHOUT_KERNELS = (
    "paths 'burst' and 'kernel' are off, and 'dma' and 'strided' are left: blocks below 64 KiB in separate tensors "
    "move at a fifth to a third of the speed (8 KiB on one H200: 10 to 20 GB/s instead of 51 to 55)"
)
_BUILD_KERNELS = (
    "build kvswap where the CUDA toolkit is installed, or with KVSWAP_NVCC=index, which takes nvcc from the package "
    "index; KVSWAP_CUDA=require makes a build without kernels fail"
)
_WITHOUT_BATCHES = (
    "each copy of paths 'dma' and 'strided' is one call, which takes the caller 2 to 4 us instead of 0.3 (one H200)"
)


def missing(info: CudaInfo, *, opened: bool) -> list[str]:
    """What this GPU lacks for full speed: of each thing the reason, what is left, what it costs and the cure.

    info: of the open device, or of _C._cuda_info() with opened False. What the user has disabled is not missing.
    """
    found = []
    reason = info["kernels_note"] if opened else _kernel_path(info)
    if not (info["kernels"] if opened else reason in ("on", _disabled("kernel"))):
        found.append(f"no kernels ({reason}): {_WITHOUT_KERNELS}. Cure: {_cure(info, reason)}.")
    if not info["batch"]:
        found.append(
            f"no batched copies (its driver is for CUDA {_version(info['driver'])}, they came with 12.8): "
            f"{_WITHOUT_BATCHES}. Cure: a driver of branch 570 or newer."
        )
    return found


def _cure(info: CudaInfo, reason: str) -> str:
    archs = _C._fatbin()["archs"]
    if not archs:
        return _BUILD_KERNELS
    if "NO_BINARY" in reason or reason.startswith("built for"):
        return f"build kvswap with an nvcc that compiles for sm_{info['cc_major']}{info['cc_minor']}"
    return (
        f"update the driver, which is for CUDA {_version(info['driver'])}, or build kvswap with an nvcc of CUDA "
        f"{_version(info['driver'])} or older"
    )


def say_opened(name: str, info: CudaInfo) -> None:
    """Log what the device is, and warn of what a GPU lacks. Called once for each process and device, at its opening."""
    cuda = name.startswith("cuda")
    if "logging" in sys.modules:  # do not import it here: that takes as long as all of kvswap
        import logging

        why_not = _kernel_path(info) if info["kernels"] else "they are not loaded"
        paths = _paths(kernels=why_not, threads="") if cuda else _host().paths
        driver = f", driver for CUDA {_version(info['driver'])}" if cuda else ""
        on = ", ".join(path for path, state in paths.items() if state == "on")
        folder = os.path.dirname(os.path.abspath(__file__))
        what = (_C.__version__, folder, name, info["name"], driver, on)
        logging.getLogger("kvswap").info("kvswap %s in %s opens %s: %s%s; paths %s", *what)
    found = missing(info, opened=True) if cuda else []
    if found:
        warnings.warn(f"{name} has {' It has '.join(found)}", RuntimeWarning, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """warnings.warn()'s stacklevel for the function that calls this one."""
    package = os.path.dirname(os.path.abspath(__file__)) + os.sep
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    return level


def log_build() -> None:
    """Called when an engine's module is imported: once a process, log that there is a GPU and no kernel for it.

    Looks only at files: loading the driver here would break engines that fork later.
    """
    global _build_logged
    if _build_logged or _C._fatbin()["archs"] or not (glob.glob("/dev/nvidia[0-9]*") or os.path.exists("/dev/dxg")):
        return
    _build_logged = True
    import logging  # not at the top: that takes as long as all of kvswap

    logging.getLogger("kvswap").warning(
        "this machine has a GPU, and kvswap was built without nvcc: %s. Cure: %s.", _WITHOUT_KERNELS, _BUILD_KERNELS
    )


_build_logged = False


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _host() -> DeviceInfo:
    return DeviceInfo(
        name="host:0",
        kind="host",
        product=platform.processor() or platform.machine(),
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        memory_gbps=0,
        sms=0,
        copy_engines=0,
        pci="",
        link="",
        driver="",
        paths=_paths(kernels=_disabled("kernel") or "on", threads="on"),
    )


def _paths(*, kernels: str, threads: str) -> dict[str, str]:
    """Each path: on, or why not; kernels and threads: whether there is what it may need."""

    def state(path: _C._PathFacts) -> str:
        if path["lender"]:
            return "no device lends its link: see Device.lend()"
        return kernels if path["kernels"] else threads if path["threads"] else "on"

    return {path["name"]: _disabled(path["name"]) or state(path) for path in _C._paths()}


def _disabled(path: str) -> str:
    names = os.environ.get("KVSWAP_DISABLE", "").split(",")
    return f"KVSWAP_DISABLE names '{path}'" if path in names else ""


def _kernel_path(info: CudaInfo) -> str:
    archs = _C._fatbin()["archs"]
    if not archs:
        return "built without nvcc"
    major, minor = info["cc_major"], info["cc_minor"]
    for form, built_major, built_minor in re.findall(r"(sm|compute)_(\d+)(\d)\b", archs):
        built = int(built_major), int(built_minor)
        # machine code runs on later GPUs of its generation, PTX on all later ones
        if built <= (major, minor) and (form == "compute" or built[0] == major):
            return _disabled("kernel") or "on"
    return f"built for {archs}, and this GPU is sm_{major}{minor}"


def _link(pci: str) -> str:
    folder = f"/sys/bus/pci/devices/{pci}"
    try:
        with open(f"{folder}/max_link_speed") as speed, open(f"{folder}/max_link_width") as width:
            return f"{speed.read().strip()} x{width.read().strip()}"
    except OSError:  # a virtual machine need not show it
        return ""
