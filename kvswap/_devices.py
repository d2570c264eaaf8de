"""The devices of this machine. Not called `devices`: a submodule of that name would hide ``kvswap.devices()``."""

import os
import platform
import re
from dataclasses import dataclass
from typing import Any

from kvswap import _C


@dataclass(frozen=True)
class DeviceInfo:
    """Facts of one device that are known without opening it.

    name: what kvswap.Device takes. kind: "cuda" or "host". product: of the GPU, or the processor. memory: bytes of the
    GPU, or of the machine. sms, copy_engines: 0 on a host device. pci: "0000:01:00.0". link: the most that it can do.
    driver: the CUDA version it is for. paths: "dma", "strided", "burst", "kernel" and "direct", each "on", or
    why not.
    """

    name: str  # what kvswap.Device takes: "cuda:0", "host:0"
    kind: str  # "cuda" or "host"
    product: str  # "NVIDIA H200"; of a host device, the processor
    memory: int  # bytes of GPU memory; of a host device, of main memory
    sms: int  # streaming multiprocessors; 0 on a host device
    copy_engines: int  # 0 on a host device
    pci: str  # "0000:01:00.0"; empty on a host device
    link: str  # "32.0 GT/s PCIe x16", the most that the link can do; empty where it is not known
    driver: str  # the CUDA version that the driver is for, "13.0"; empty on a host device
    paths: dict[str, str]  # "dma", "strided", "burst", "kernel", "direct"


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
        sms=info["sms"],
        copy_engines=info["copy_engines"],
        pci=info["pci"],
        link=_link(info["pci"]),
        driver=f"{info['driver'] // 1000}.{info['driver'] % 1000 // 10}",
        paths={
            "dma": "on",
            "strided": _disabled("strided") or "on",
            "burst": _disabled("burst") or _kernel_path(info),
            "kernel": _kernel_path(info),
            "direct": "only host devices copy by threads",
        },
    )


def _host() -> DeviceInfo:
    return DeviceInfo(
        name="host:0",
        kind="host",
        product=platform.processor() or platform.machine(),
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        sms=0,
        copy_engines=0,
        pci="",
        link="",
        driver="",
        paths={
            "dma": "on",
            "strided": _disabled("strided") or "on",
            "burst": _disabled("burst") or _disabled("kernel") or "on",
            "kernel": _disabled("kernel") or "on",
            "direct": "on",
        },
    )


def _disabled(path: str) -> str:
    names = os.environ.get("KVSWAP_DISABLE", "").split(",")
    return "KVSWAP_DISABLE names it" if path in names else ""


def _kernel_path(info: dict[str, Any]) -> str:
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
