"""Takes the GPU code for other cards than sm_90's out of a library, in place. Its length stays; zeros take their place.

    python3 keep_sm90.py LIBRARY...

A library's section .nv_fatbin is containers, one for each object file, each with images for several architectures. A
container keeps its images for sm_90; one that has none keeps the smallest image of the library for another card,
because the loader wants one, and a card of sm_90 never takes it. Zeros are what compression makes small.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import NamedTuple

_MAGIC, _MACHINE_CODE, _ARCH = 0xBA55ED50, 2, 90
_KIND_AT, _HEADER_AT, _SIZE_AT, _ARCH_AT = 0, 4, 8, 28  # in an image's header


class Image(NamedTuple):
    """Machine code or PTX, with its header: data[at : at + size]."""

    at: int
    size: int
    kind: int
    arch: int


class Container(NamedTuple):
    """at: its header of 16 bytes or more, whose bytes 8 to 15 are the length of the images after it."""

    at: int
    end: int
    images: list[Image]


def section(data: bytes) -> tuple[int, int]:
    """Where .nv_fatbin begins and ends in an ELF file of 64 bits. SystemExit: there is none."""
    table, width, count, names = *struct.unpack_from("<Q", data, 0x28), *struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * width) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, _, at, size in headers:
        if data.startswith(b".nv_fatbin\0", strings + name):
            return at, at + size
    raise SystemExit("there is no section .nv_fatbin")


def containers(data: bytes) -> list[Container]:
    """All of the section; between two there may be padding."""
    at, end = section(data)
    found = []
    while at + 16 <= end:
        magic, header, length = struct.unpack_from("<I2xHQ", data, at)
        if magic != _MAGIC:
            at += 8
            continue
        stop = at + header + length
        found.append(Container(at, stop, _images(data, at + header, stop)))
        at = stop
    return found


def _images(data: bytes, at: int, end: int) -> list[Image]:
    found = []
    while at < end:
        (kind,) = struct.unpack_from("<H", data, at + _KIND_AT)
        (header,) = struct.unpack_from("<I", data, at + _HEADER_AT)
        (length,) = struct.unpack_from("<Q", data, at + _SIZE_AT)
        (arch,) = struct.unpack_from("<I", data, at + _ARCH_AT)
        found.append(Image(at, header + length, kind, arch))
        at += header + length
    return found


def keep(data: bytes) -> tuple[bytes, str]:
    """The library without the others, and what was done."""
    made, found = bytearray(data), containers(data)
    code = [image for each in found for image in each.images if image.kind == _MACHINE_CODE]
    stand_ins = sorted((image for image in code if image.arch != _ARCH), key=lambda image: image.size)[:1]
    kept = 0
    for each in found:
        wanted = [image for image in each.images if image.kind == _MACHINE_CODE and image.arch == _ARCH]
        if not wanted and not stand_ins:
            raise SystemExit("a container has no image for sm_90, and there is none to take its place")
        begin = at = each.images[0].at
        for image in wanted or stand_ins:
            if at + image.size > each.end:
                raise SystemExit(f"the container at {each.at:#x} has no room for an image of {image.size} bytes")
            made[at : at + image.size] = data[image.at : image.at + image.size]
            at += image.size
        made[at : each.end] = bytes(each.end - at)
        struct.pack_into("<Q", made, each.at + 8, at - begin)
        kept += at - begin
    whole = sum(image.size for each in found for image in each.images)
    return bytes(made), f"{len(found)} containers, {kept:,} of {whole:,} bytes of images kept"


if __name__ == "__main__":
    for library in map(Path, sys.argv[1:]):
        made, done = keep(library.read_bytes())
        library.write_bytes(made)
        print(f"{library.name}: {done}")
