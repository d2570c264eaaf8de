"""The settings of a replay, and the defaults that depend on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvswap import _C
from kvswap.codecs import CODECS, Coding
from kvswap.codecs._coding import PATHS

from .errors import UsageError
from .geometry import Geometry, Group, scale
from .units import format_size

if TYPE_CHECKING:
    from kvswap.typing import Path

_DEFAULT_BLOCK_NBYTES = {"cuda": 2 << 20, "host": 64 << 10}
_DEFAULT_GPU_BLOCKS = {"cuda": 2048, "host": 4096}
_HOST_BLOCKS_PER_GPU_BLOCK = 4
_LEAST_CODED = 1024
_LARGEST_SHARE = 0.5  # of what is free, by default


@dataclass(frozen=True)
class Sizes:
    """Tier sizes in blocks."""

    gpu_blocks: int
    host_blocks: int
    file_blocks: int = 0


@dataclass(frozen=True)
class Settings:
    """How a trace is replayed."""

    geometry: Geometry
    sizes: Sizes
    in_flight: int = 8
    seconds: float | None = None  # no request is admitted after so long
    seed: int = 0
    path: Path = "auto"
    wait_limit: float = 60.0  # of every single wait
    file_tier: str | None = None  # folder of the file tier, which has sizes.file_blocks
    codec: str | None = None  # of the host tier's blocks, and of the file tier's

    def __post_init__(self) -> None:
        if self.in_flight < 1:
            raise UsageError(f"--in-flight must be at least 1, not {self.in_flight}")
        if self.seconds is not None and not self.seconds > 0:
            raise UsageError(f"--seconds must be more than 0, not {self.seconds:g}")
        if (self.file_tier is not None) != (self.sizes.file_blocks > 0):
            raise UsageError("--file-tier DIR and --file-blocks N go together")
        if self.file_tier is not None and self.sizes.host_blocks == 0:
            raise UsageError("the file tier takes what leaves the host tier: there is none (--host-blocks 0)")
        if self.codec is not None:
            self._check_codec()

    def _check_codec(self) -> None:
        check_codec(str(self.codec))
        if self.sizes.host_blocks == 0:
            raise UsageError("--codec is of the host tier: there is none (--host-blocks 0)")
        least = min(group.layer_nbytes for group in self.geometry.groups)
        if least < _LEAST_CODED:
            raise UsageError(
                f"--codec needs {_LEAST_CODED} bytes a block in each layer, and there are {least}: larger blocks "
                "(--bytes-per-block)"
            )
        if self.path not in PATHS:
            raise UsageError(f"--path {self.path} moves bytes as they are: --codec needs one of {', '.join(PATHS)}")

    @property
    def lossless(self) -> bool:
        return self.codec is not None and coding_of(self.geometry.groups[0], self.codec).lossless


def check_codec(name: str) -> None:
    if name not in CODECS:
        raise UsageError(f"--codec {name}: there are {', '.join(CODECS)}")


def coding_of(group: Group, codec: str) -> Coding:
    """Of a layer's part of a block, which is bf16."""
    return Coding(group.layer_nbytes, codec)


def host_nbytes(geometry: Geometry, codec: str | None) -> int:
    """Of a block in the host tier."""
    if codec is None:
        return geometry.block_nbytes
    return sum(len(group.layers) * coding_of(group, codec).coded_nbytes for group in geometry.groups)


@dataclass(frozen=True)
class Room:
    """Memory that the tiers may fill. On a host device both tiers share the host's."""

    kind: str
    device_nbytes: int
    host_nbytes: int


def choose_geometry(full: Geometry, kind: str, block_nbytes: int | None, *, allow_tiny: bool = False) -> Geometry:
    """Scale the geometry as asked, or to what suits the device: 2 MiB a block on a GPU, 64 KiB on a host device."""
    if block_nbytes is not None:
        return scale(full, block_nbytes, allow_tiny=allow_tiny)
    return scale(full, min(full.full_nbytes, _DEFAULT_BLOCK_NBYTES[kind]), allow_tiny=True)


def choose_sizes(block_nbytes: int, room: Room, gpu_blocks: int | None, host_blocks: int | None) -> Sizes:
    """Tier sizes as asked, or defaults that leave half of the memory free. Refuses what cannot fit."""
    shared = room.kind == "host"
    if gpu_blocks is None:
        parts = 1 + _HOST_BLOCKS_PER_GPU_BLOCK if shared else 1
        fit = int(room.device_nbytes * _LARGEST_SHARE) // parts // block_nbytes
        gpu_blocks = max(1, min(_DEFAULT_GPU_BLOCKS[room.kind], fit))
    if gpu_blocks < 1:
        raise UsageError(f"the GPU tier must hold at least one block, not {gpu_blocks}: --gpu-blocks 1 or more")
    if host_blocks is None:
        fit = int(room.host_nbytes * _LARGEST_SHARE) // block_nbytes - (gpu_blocks if shared else 0)
        host_blocks = max(0, min(_HOST_BLOCKS_PER_GPU_BLOCK * gpu_blocks, fit))
    if host_blocks < 0:
        raise UsageError(f"the host tier cannot hold {host_blocks} blocks")
    if shared:
        both = "GPU tier and the host tier, which are both in host memory on a host device,"
        _refuse_too_large(both, "need", ("gpu", "host"), (gpu_blocks + host_blocks) * block_nbytes, room.host_nbytes)
    else:
        _refuse_too_large("GPU tier", "needs", ("gpu",), gpu_blocks * block_nbytes, room.device_nbytes)
        _refuse_too_large("host tier", "needs", ("host",), host_blocks * block_nbytes, room.host_nbytes)
    return Sizes(gpu_blocks, host_blocks)


def _refuse_too_large(what: str, need: str, tiers: Sequence[str], nbytes: int, available: int) -> None:
    if nbytes > available:
        options = ", ".join(f"--{tier}-blocks" for tier in tiers)
        raise UsageError(
            f"the {what} {need} {format_size(nbytes)} and {format_size(available)} is free: fewer blocks ({options}) "
            "or smaller ones (--bytes-per-block) need less"
        )


def room(device: _C.Device) -> Room:
    """What the tiers may fill on this device."""
    host = available_host_memory()
    return Room("host", host, host) if device.kind == "host" else Room("cuda", int(device.info["memory"]), host)


def available_host_memory() -> int:
    """Bytes that programs can still allocate: what the kernel estimates, and what the control groups leave."""
    there = _C._host_memory("")
    return min(there["available"], max(0, there["group_max"] - there["group_used"]))
