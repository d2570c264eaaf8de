"""Stores of coded blocks: pools are coded on the way to the file and decoded on the way back, coded pools and arrays go
as they are, what does not fit or is no coded block is not stored, and no store is opened under another coding."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, Bytes, usable

import kvswap
from kvswap.codecs import Coding, Field
from kvswap.files import FileStore, Layout

PAGE, PAGES = 4096 + 80, 3
BLOCKS = 24
CODECS = ("exact", "mxfp8", "fp4")


@pytest.fixture(autouse=True)
def _kernels(session_device: kvswap.Device) -> None:
    usable(session_device, "kernel")


def coding_of(codec: str = "exact", pages: int = PAGES) -> Coding:
    return Coding(PAGE * pages, codec, page_nbytes=PAGE, fields=[Field(0, PAGE - 80, "bf16")])


def bf16(count: int, seed: int = 1) -> Bytes:
    """Blocks of normal values, a row each."""
    values = np.random.default_rng(seed).standard_normal((count, PAGE * PAGES // 2), np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def misfit(block: Bytes) -> None:
    """Give it exponents that `exact` cannot hold."""
    block[:2048] = np.random.default_rng(5).integers(0, 256, 2048, np.uint8)


class Cache:
    """Blocks on the device, layer first, and a pool of coded ones in host memory."""

    def __init__(self, device: kvswap.Device, coding: Coding) -> None:
        self.coding = coding
        self.memory = Buffer(device, PAGES * BLOCKS * PAGE, "gpu")
        self.host_memory = Buffer(device, BLOCKS * coding.coded_nbytes, "cpu")
        step = BLOCKS * PAGE
        self.pool = kvswap.Pool(device, self.memory.ptr, BLOCKS, PAGE * PAGES, rows=PAGES, pitch=step, stride=PAGE)
        self.host = kvswap.Pool(device, self.host_memory.ptr, BLOCKS, coding.coded_nbytes, coding=coding)
        self.host_memory.put(np.zeros(BLOCKS * coding.coded_nbytes, np.uint8))

    def put(self, blocks: Bytes) -> None:
        pages = blocks.reshape(BLOCKS, PAGES, PAGE).transpose(1, 0, 2)
        self.memory.put(np.ascontiguousarray(pages).reshape(-1))

    def blocks(self) -> Bytes:
        pages = self.memory.get().reshape(PAGES, BLOCKS, PAGE).transpose(1, 0, 2)
        return np.ascontiguousarray(pages).reshape(BLOCKS, -1)

    def coded(self) -> Bytes:
        return self.host_memory.get().reshape(BLOCKS, -1)


def layout_of(coding: Coding | list[Coding], **fields: Any) -> Layout:
    codings = [coding] if isinstance(coding, Coding) else coding
    return Layout(sum(one.coded_nbytes for one in codings), coding=coding, **{"model": "m", **fields})


def keys_of(ids: Any) -> list[bytes]:
    return [b"block-%d" % i for i in ids]


@pytest.fixture(params=CODECS)
def cache(request: pytest.FixtureRequest, device: kvswap.Device) -> Cache:
    return Cache(device, coding_of(request.param))


@pytest.fixture
def exact(device: kvswap.Device) -> Cache:
    return Cache(device, coding_of())


def opened(folder: Path, layout: Layout, device: kvswap.Device | None, **options: Any) -> FileStore:
    return FileStore(folder / "store", layout, capacity=8 << 20, segment_nbytes=1 << 20, device=device, **options)


@pytest.fixture
def store(exact: Cache, device: kvswap.Device, tmp_path: Path) -> Iterator[FileStore]:
    with opened(tmp_path, layout_of(exact.coding), device) as store:
        yield store


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["threads", "auto"])
def test_pools_are_coded_on_the_way(cache: Cache, device: kvswap.Device, tmp_path: Path, engine: str) -> None:
    """The file has the bytes of kvswap.codecs, and a second process of the cache finds them."""
    blocks, ids, to = bf16(BLOCKS), np.arange(20), np.arange(BLOCKS)[::-1][:20]
    cache.put(blocks)
    layout = layout_of(cache.coding)
    with opened(tmp_path, layout, device, engine=engine) as store:
        store.store(keys_of(ids), cache.pool, ids).wait(PATIENCE)
    coded, _ = cache.coding.encode(blocks[ids])
    with opened(tmp_path, layout, None, engine=engine) as store:
        found = np.zeros_like(coded)
        store.load(keys_of(ids), found, ids).wait(PATIENCE)
        np.testing.assert_array_equal(found, coded)
    wanted = bf16(BLOCKS, 2)
    cache.put(wanted)
    with opened(tmp_path, layout, device, engine=engine) as store:
        store.load(keys_of(ids), cache.pool, to).wait(PATIENCE)
    wanted[to] = cache.coding.decode(coded)[0]
    np.testing.assert_array_equal(cache.blocks(), wanted)
    if cache.coding.lossless:
        np.testing.assert_array_equal(cache.blocks()[to], blocks[ids])


def test_coded_pools_go_as_they_are(cache: Cache, device: kvswap.Device, tmp_path: Path) -> None:
    """What a coded host pool has stored, the GPU loads, and the other way round."""
    blocks, ids = bf16(BLOCKS), np.arange(BLOCKS)
    cache.put(blocks)
    kvswap.move_blocks(cache.pool, cache.host, ids, ids).wait(PATIENCE)
    coded = cache.coded().copy()
    with opened(tmp_path, layout_of(cache.coding), device) as store:
        store.store(keys_of(ids[:12]), cache.host, ids[:12]).wait(PATIENCE)
        store.store(keys_of(ids[12:]), cache.pool, ids[12:]).wait(PATIENCE)
        cache.put(bf16(BLOCKS, 3))
        store.load(keys_of(ids), cache.pool, ids).wait(PATIENCE)
        np.testing.assert_array_equal(cache.blocks(), cache.coding.decode(coded)[0])
        cache.host_memory.put(np.zeros(coded.size, np.uint8))
        store.load(keys_of(ids), cache.host, ids).wait(PATIENCE)
        np.testing.assert_array_equal(cache.coded(), coded)


def test_a_coding_a_pool(device: kvswap.Device, tmp_path: Path) -> None:
    """Keys are exact, values are not."""
    codings = [coding_of("exact", 1), coding_of("mxfp8", 1)]
    memory = [Buffer(device, BLOCKS * PAGE, "gpu") for _ in codings]
    pools: list[kvswap.Pool] = []
    for buffer in memory:
        pools.append(kvswap.Pool(device, buffer.ptr, BLOCKS, PAGE, group=pools[0] if pools else None))
    halves = [np.ascontiguousarray(bf16(BLOCKS, seed)[:, :PAGE]) for seed in (1, 2)]
    for buffer, half in zip(memory, halves, strict=True):
        buffer.put(half.reshape(-1))
    ids = np.arange(BLOCKS)
    with opened(tmp_path, layout_of(codings), device) as store:
        store.store(keys_of(ids), pools, ids).wait(PATIENCE)
        for buffer in memory:
            buffer.put(np.zeros(BLOCKS * PAGE, np.uint8))
        store.load(keys_of(ids), pools, ids).wait(PATIENCE)
        with pytest.raises(ValueError, match="blocks are in 1 pools; the layout of the store has 2 codings"):
            store.store(keys_of(ids), pools[0], ids)
    for buffer, half, coding in zip(memory, halves, codings, strict=True):
        np.testing.assert_array_equal(buffer.get().reshape(half.shape), coding.decode(coding.encode(half)[0])[0])


# -- what is not stored -----------------------------------------------------------------------------------------------


def test_a_block_that_does_not_fit(exact: Cache, store: FileStore) -> None:
    """It fails alone, is not found, and its place in staging is used again."""
    blocks, ids = bf16(BLOCKS), np.arange(BLOCKS)
    misfit(blocks[7])
    exact.put(blocks)
    for attempt in range(2):
        stored = store.store([b"%d-%d" % (attempt, i) for i in ids], exact.pool, ids)
        with pytest.raises(kvswap.Error, match="block 7 does not fit its coded size, and is not stored"):
            stored.wait(PATIENCE)
        assert stored.failed_positions.tolist() == [7]
        assert store.contains([b"%d-%d" % (attempt, i) for i in ids]) == [i != 7 for i in ids]
    exact.put(bf16(BLOCKS, 4))
    good = ids[ids != 7]
    store.load([b"1-%d" % i for i in good], exact.pool, good).wait(PATIENCE)
    np.testing.assert_array_equal(exact.blocks()[good], blocks[good])


def test_slots_that_hold_no_coded_block(exact: Cache, store: FileStore) -> None:
    """One was never written, one says that its block was not stored."""
    blocks, ids = bf16(BLOCKS), np.arange(4)
    misfit(blocks[2])
    exact.put(blocks)
    move = kvswap.move_blocks(exact.pool, exact.host, ids[1:], ids[1:])
    with pytest.raises(kvswap.Error):
        move.wait(PATIENCE)
    stored = store.store(keys_of(ids), exact.host, ids)
    with pytest.raises(kvswap.Error, match="block 0 is not stored: its bytes are not a block that is coded"):
        stored.wait(PATIENCE)
    assert stored.failed_positions.tolist() == [0, 2]
    assert "does not fit its coded size" in str(stored.reasons[2])
    assert store.contains(keys_of(ids)) == [False, True, False, True]


def test_arrays_that_hold_no_coded_block(exact: Cache, store: FileStore) -> None:
    coded, _ = exact.coding.encode(bf16(3))
    coded[1, :16] ^= 1
    stored = store.store(keys_of(range(3)), coded, range(3))
    with pytest.raises(kvswap.Error, match="not a block that is coded"):
        stored.wait(PATIENCE)
    assert store.contains(keys_of(range(3))) == [True, False, True]


# -- refused with nothing moved ---------------------------------------------------------------------------------------


def test_another_coding_of_the_same_directory(exact: Cache, store: FileStore, tmp_path: Path) -> None:
    """Also of the same size, and a raw store under it."""
    ids = np.arange(4)
    exact.put(bf16(BLOCKS))
    store.store(keys_of(ids), exact.pool, ids).wait(PATIENCE)
    store.close()
    size = exact.coding.coded_nbytes
    other = Coding(PAGE * PAGES, "exact", page_nbytes=PAGE, fields=[Field(80, PAGE - 80, "bf16")])
    assert other.coded_nbytes == size
    for layout in (Layout(size, model="m"), layout_of(other)):
        with pytest.raises(ValueError) as refused:
            opened(tmp_path, layout, None)
        there, asked = str(refused.value).split("asked for")
        assert '[[0,4096,"bf16","exact",2]]' in there
        assert ('[[80,4096,"bf16","exact",2]]' if layout.codings else '"model":"m"') in asked


def test_pools_of_another_coding(exact: Cache, store: FileStore, device: kvswap.Device, tmp_path: Path) -> None:
    ids = [0]
    coding = Coding(PAGE * PAGES, "exact", page_nbytes=PAGE, fields=[Field(80, PAGE - 80, "bf16")])
    other = Cache(device, coding)
    with pytest.raises(
        ValueError, match=r"blocks\[0\].* is coded as .*\[80,4096.*the blocks of the store as .*\[0,4096"
    ):
        store.store([b"k"], other.host, ids)
    small = kvswap.Pool(device, Buffer(device, BLOCKS * PAGE, "gpu").memory, BLOCKS, PAGE)
    with pytest.raises(ValueError, match=f"has blocks of {PAGE} bytes; the store codes blocks of {PAGE * PAGES}"):
        store.load([b"k"], small, ids)
    with (
        FileStore(tmp_path / "raw", Layout(coding.coded_nbytes), capacity=8 << 20, device=device) as raw,
        pytest.raises(ValueError, match="is coded, and the layout of the store does not say so"),
    ):
        raw.store([b"k"], other.host, ids)


def test_pools_whose_rows_hold_no_page(exact: Cache, store: FileStore, device: kvswap.Device) -> None:
    memory = Buffer(device, BLOCKS * PAGE * PAGES, "gpu").memory
    rows = kvswap.Pool(device, memory, BLOCKS, PAGE * PAGES, rows=PAGES * 2, pitch=BLOCKS * PAGE // 2, stride=PAGE // 2)
    with pytest.raises(ValueError, match="a page must lie in one row"):
        store.store([b"k"], rows, [0])


def test_parts(exact: Cache, store: FileStore) -> None:
    half = exact.coding.coded_nbytes // 2
    memory = np.zeros(2 * half, np.uint8)
    addresses = [memory.ctypes.data, memory.ctypes.data + half]
    with pytest.raises(ValueError, match="a coded block has no parts"):
        store.store([b"k"], addresses, parts=[half, half])


def test_a_layout_that_does_not_name_its_coding(exact: Cache, tmp_path: Path) -> None:
    liar = types.SimpleNamespace(block_nbytes=exact.coding.coded_nbytes, text="{}", codings=(exact.coding,))
    with pytest.raises(ValueError, match="the layout does not say how the blocks are coded"):
        opened(tmp_path, liar, None)
    liar = types.SimpleNamespace(block_nbytes=16, text=exact.coding.text, codings=(exact.coding,))
    with pytest.raises(ValueError, match=f"block_nbytes is 16; a block is coded to {exact.coding.coded_nbytes}"):
        opened(tmp_path, liar, None)
    for wrong in ((3,), [exact.coding], (exact.coding,) * 1025):
        liar = types.SimpleNamespace(block_nbytes=16, text="{}", codings=wrong)
        with pytest.raises(TypeError, match=r"layout\.codings"):
            opened(tmp_path, liar, None)


# -- layouts ----------------------------------------------------------------------------------------------------------


def test_layouts_of_coded_blocks() -> None:
    coding = coding_of()
    layout = layout_of([coding, coding_of("fp4")])
    many = layout_of([coding] * 80)  # a layer each
    assert Layout.parse(many.block_nbytes, many.text).codings == (coding,) * 80
    assert Layout.parse(layout.block_nbytes, layout.text) == layout
    assert layout.codings == (coding, coding_of("fp4"))
    assert Coding.parse(coding.text) == coding and hash(Coding.parse(coding.text)) == hash(coding)
    assert layout_of(coding) != Layout(coding.coded_nbytes, model="m")
    with pytest.raises(ValueError, match=f"block_nbytes is 16; a block is coded to {coding.coded_nbytes}"):
        Layout(16, coding=coding)
    with pytest.raises(TypeError, match=r"coding\[0\] must be a kvswap.codecs.Coding, not str"):
        Layout(16, coding=["exact"])
    for wrong in ("3", "[3]", "[[1]]", '[["a",{}]]', "[[0,{}]]", "[[2000,{}]]"):
        with pytest.raises(ValueError, match="coding must be a list of pairs"):
            Layout.parse(16, f'{{"coding":{wrong}}}')


@pytest.mark.parametrize("change", [{"codec": "zip"}, {"fields": [[0, 4096, "bf16", "exact", 9]]}, {"unit": 1 << 16}])
def test_a_coding_that_this_version_has_not(change: dict[str, Any]) -> None:
    text = json.dumps({**json.loads(coding_of().text), **change})
    with pytest.raises(ValueError, match=r"zip|cannot be read"):
        Coding.parse(text)
    with pytest.raises(ValueError, match="is not the text of a Coding"):
        Coding.parse("[]")
