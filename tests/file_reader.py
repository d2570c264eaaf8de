"""The store's files read in pure Python, from their description in docs/files.md: shares nothing with kvswap."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096
VERSION = 1


def _table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def layout_hash(text: bytes, block_nbytes: int) -> bytes:
    value = 0x6C62272E07BB014262B821756295C58D
    for byte in struct.pack("<QQ", VERSION, block_nbytes) + text:
        value = (value ^ byte) * (1 << 88 | 0x13B) % (1 << 128)
    return value.to_bytes(16, "little")


class Wrong(Exception):
    """The page is not what it should be."""


def check_page(page: bytes, magic: bytes) -> None:
    if len(page) != PAGE or page[:8] != magic:
        raise Wrong(f"no page of {magic.decode()}")
    version, crc = struct.unpack_from("<II", page, 8)
    if crc32c(page[:12] + bytes(4) + page[16:]) != crc:
        raise Wrong("checksum of the page")
    if version != VERSION:
        raise Wrong(f"version {version}")


@dataclass(frozen=True)
class Geometry:
    layout: str
    block_nbytes: int
    slot_nbytes: int
    segment_nbytes: int
    slots: int
    segment: int


def read_geometry(page: bytes, magic: bytes) -> Geometry:
    check_page(page, magic)
    digest, block, slot, nbytes, slots, number, length = struct.unpack_from("<16sQQQIII", page, 16)
    text = page[68 : 68 + length]
    if any(page[68 + length :]):
        raise Wrong("bytes after the layout")
    if digest != layout_hash(text, block):
        raise Wrong("hash of the layout")
    if slot != PAGE + -(-block // PAGE) * PAGE or nbytes != PAGE + slots * slot:
        raise Wrong("sizes")
    return Geometry(text.decode(), block, slot, nbytes, slots, number)


@dataclass(frozen=True)
class Header:
    digest: bytes
    sequence: int
    nbytes: int
    data_crc: int
    key: bytes
    epoch: bytes


def read_header(page: bytes) -> Header:
    check_page(page, b"KVSBLOCK")
    digest, sequence, nbytes, data_crc, length = struct.unpack_from("<16sQQIH", page, 16)
    for at, byte in enumerate(page[54:], 54):
        if byte and not 56 <= at < 56 + length and not 568 <= at < 584:
            raise Wrong(f"byte {at} of a block's header is not zero: a field that this reader does not know")
    return Header(digest, sequence, nbytes, data_crc, page[56 : 56 + length], page[568:584])


def read_epoch(folder: Path) -> bytes:
    """Of a store's directory, or of a shared one; zeros: there is no file of it."""
    path = folder / "epoch.kvs"
    if not path.exists():
        return bytes(16)
    data = path.read_bytes()
    check_page(data[:PAGE], b"KVSEPOCH")
    if len(data) != 2 * PAGE or any(data[32:PAGE]) or any(data[PAGE + 4 :]):
        raise Wrong("size of the epoch's file, or bytes that this reader does not know")
    return data[16:32]


@dataclass(frozen=True)
class Checkpoint:
    generation: int
    sequence: int
    clean: bool


def read_checkpoints(path: Path) -> list[Checkpoint]:
    """Those that are whole."""
    data, found = path.read_bytes(), []
    for at in (PAGE, 2 * PAGE):
        page = data[at : at + PAGE]
        if page[:8] == b"KVSCHECK":
            check_page(page, b"KVSCHECK")
            generation, sequence, clean = struct.unpack_from("<QQB", page, 16)
            found.append(Checkpoint(generation, sequence, bool(clean)))
    return found


@dataclass(frozen=True)
class Block:
    path: Path
    offset: int  # of its header
    header: Header
    data: bytes


def read_segment(path: Path) -> tuple[Geometry, list[Block]]:
    """Every block with a header, whether its data is right or not: compare crc32c(data) with header.data_crc."""
    data = path.read_bytes()
    geometry = read_geometry(data[:PAGE], b"KVSSEGMT")
    if path.name != f"segment-{geometry.segment:08}.kvs" or len(data) != geometry.segment_nbytes:
        raise Wrong("name or size of the segment")
    blocks = []
    for slot in range(geometry.slots):
        at = PAGE + slot * geometry.slot_nbytes
        if any(data[at : at + PAGE]):
            header = read_header(data[at : at + PAGE])
            if header.digest != layout_hash(geometry.layout.encode(), geometry.block_nbytes):
                raise Wrong("layout of the block")
            begin = at + PAGE
            blocks.append(Block(path, at, header, data[begin : begin + header.nbytes]))
    return geometry, blocks


def epoch_of(folders: list[Path]) -> bytes:
    """Of a store in several directories."""
    together = 0
    for folder in folders:
        together ^= int.from_bytes(read_epoch(folder), "little")
    return together.to_bytes(16, "little")


def read_store(folder: Path, epoch: bytes | None = None) -> dict[bytes, Block]:
    """The block of each key: the one with the highest sequence, of those of the store's epoch."""
    if epoch is None:
        epoch = read_epoch(folder.parent if folder.name.startswith("writer-") else folder)
    read_geometry((folder / "store.kvs").read_bytes()[:PAGE], b"KVSSTORE")
    found: dict[bytes, Block] = {}
    for path in sorted(folder.glob("segment-*.kvs")):
        for block in read_segment(path)[1]:
            if block.header.epoch != epoch:
                continue
            if block.header.key not in found or found[block.header.key].header.sequence < block.header.sequence:
                found[block.header.key] = block
    return found
