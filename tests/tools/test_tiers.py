"""Tiers, geometry, sizes and pattern: the parts of a replay that move nothing."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import bindings
from hypothesis import given
from hypothesis import strategies as st

from kvswap.replay import geometry, pattern, settings
from kvswap.replay.errors import UsageError
from kvswap.replay.tiers import Admission, Tiers
from kvswap.replay.units import format_size, parse_size, says_otherwise


class Model:
    """The rules of tiers.py in their plainest form: lists, oldest first."""

    def __init__(self, gpu_blocks: int, host_blocks: int) -> None:
        self.capacity = {"gpu": gpu_blocks, "host": host_blocks}
        self.gpu: list[int] = []
        self.host: list[int] = []

    def admit(self, blocks: list[int]) -> tuple[int, int, int]:
        blocks = blocks[: self.capacity["gpu"]]
        hits = {"gpu": 0, "host": 0}
        for block in blocks:
            tier = "gpu" if block in self.gpu else "host" if block in self.host else None
            if tier is None:
                break
            hits[tier] += 1
        computed = blocks[sum(hits.values()) :]
        held = [block for block in self.host if block in blocks]
        new = [block for block in computed if block not in self.host][: self.capacity["host"] - len(held)]
        self.gpu = self._use(self.gpu, blocks, "gpu")
        self.host = self._use(self.host, [block for block in blocks if block in held or block in new], "host")
        return hits["gpu"], hits["host"], len(computed)

    def _use(self, tier: list[int], used: list[int], name: str) -> list[int]:
        kept = [block for block in tier if block not in used] + used[::-1]
        return kept[max(0, len(kept) - self.capacity[name]) :]


def prefixes() -> st.SearchStrategy[list[int]]:
    """Requests as traces have them: a path in a tree, so that equal ids have equal ids before them."""

    def path(turns: list[int]) -> list[int]:
        node, nodes = 0, []
        for turn in turns:
            node = node * 3 + turn + 1
            nodes.append(node)
        return nodes

    return st.lists(st.integers(0, 2), max_size=6).map(path)


def anything() -> st.SearchStrategy[list[int]]:
    """Requests as no trace has them: holes, blocks that come first here and last there."""
    return st.lists(st.integers(0, 30), max_size=12, unique=True)


@given(
    requests=st.lists(prefixes() | anything(), max_size=40),
    gpu_blocks=st.integers(1, 14),
    host_blocks=st.integers(0, 24),
)
def test_hits_are_those_of_the_brute_force_model(requests: list[list[int]], gpu_blocks: int, host_blocks: int) -> None:
    tiers, model = Tiers(gpu_blocks, host_blocks), Model(gpu_blocks, host_blocks)
    gpu: dict[int, int] = {}  # what each slot holds, by the moves that admissions ask for
    host: dict[int, int] = {}
    for request, blocks in enumerate(requests):
        found = tiers.admit(np.array(blocks, np.uint64))
        assert (found.gpu_hits, found.host_hits, found.misses) == model.admit(blocks)
        follow(found, gpu, host)
        assert found.request == request
        assert -1 <= found.gpu_given_up.last_user < request
        assert found.cut == max(0, len(blocks) - gpu_blocks)
        assert sorted(gpu.values()) == sorted(model.gpu) == sorted(tiers.gpu.residents()[0].tolist())
        assert sorted(host.values()) == sorted(model.host) == sorted(tiers.host.residents()[0].tolist())


def follow(found: Admission, gpu: dict[int, int], host: dict[int, int]) -> None:
    """Do on paper what an admission asks for, and see that no step destroys what a later one needs."""
    blocks = found.hashes.tolist()
    slots = found.slots.tolist()
    assert len(set(slots)) == len(slots)
    given_up = found.gpu_given_up
    for slot, block in zip(given_up.slots.tolist(), given_up.hashes.tolist(), strict=True):
        assert gpu.pop(slot) == block
    for position, slot in zip(found.loads.tolist(), found.load_from.tolist(), strict=True):
        assert host[slot] == blocks[position]
        assert slots[position] not in gpu
        gpu[slots[position]] = blocks[position]
    for position in range(found.leading):
        assert gpu[slots[position]] == blocks[position]
    for position in range(found.leading, len(blocks)):
        assert gpu.get(slots[position], blocks[position]) == blocks[position]
        gpu[slots[position]] = blocks[position]
    given_up = found.host_given_up
    for slot, block in zip(given_up.slots.tolist(), given_up.hashes.tolist(), strict=True):
        assert slot not in found.load_from.tolist()
        assert host.pop(slot) == block
    for position, slot in zip(found.stores.tolist(), found.store_to.tolist(), strict=True):
        assert position >= found.leading
        assert slot not in host
        host[slot] = blocks[position]


def test_only_leading_blocks_are_hits() -> None:
    tiers = Tiers(8, 8)
    tiers.admit(np.array([1, 2, 3], np.uint64))
    found = tiers.admit(np.array([1, 9, 2, 3], np.uint64))
    assert (found.gpu_hits, found.host_hits, found.misses) == (1, 0, 3)


def test_the_end_of_a_prefix_goes_first() -> None:
    tiers = Tiers(4, 0)
    tiers.admit(np.array([1, 2, 3, 4], np.uint64))
    tiers.admit(np.array([9], np.uint64))
    assert [block in tiers.gpu for block in (1, 2, 3, 4, 9)] == [True, True, True, False, True]


def test_the_last_user_of_a_slot_given_up() -> None:
    tiers = Tiers(2, 4)
    tiers.admit(np.array([1], np.uint64))
    assert tiers.admit(np.array([2], np.uint64)).gpu_given_up.last_user == -1
    assert tiers.admit(np.array([3], np.uint64)).gpu_given_up.last_user == 0
    assert tiers.admit(np.array([2], np.uint64)).gpu_given_up.last_user == -1
    assert tiers.admit(np.array([4], np.uint64)).gpu_given_up.last_user == 2


@pytest.mark.parametrize(
    ("name", "block_nbytes", "groups"),
    [
        ("Llama-3.1-8B", 512 * 32 * 2 * 8 * 128 * 2, 1),
        ("llama-3.1-70b", 512 * 80 * 2 * 8 * 128 * 2, 1),
        ("llama-3.1-70b-tp1", 512 * 80 * 2 * 8 * 128 * 2, 1),
        ("llama-3.1-70b-tp4", 512 * 80 * 2 * 2 * 128 * 2, 1),
        ("llama-3.1-70b-tp8", 512 * 80 * 2 * 1 * 128 * 2, 1),
        ("DeepSeek-V3", 512 * 61 * 576 * 2, 1),
        ("qwen3-8b", 512 * 36 * 2 * 8 * 128 * 2, 1),
        ("gpt-oss-120b", 512 * 36 * 2 * 8 * 64 * 2, 2),
    ],
)
def test_models(name: str, block_nbytes: int, groups: int) -> None:
    found = geometry.named(name)
    assert found.block_nbytes == found.full_nbytes == block_nbytes
    assert len(found.groups) == groups
    assert not found.scaled
    assert "SCALED" not in found.describe()
    layers = sorted(layer for group in found.groups for layer in group.layers)
    assert layers == list(range(len(layers)))


def test_a_geometry_by_numbers() -> None:
    assert geometry.custom(32, 8, 128).groups == geometry.named("llama-3.1-8b").groups
    assert geometry.custom(61, 1, 576, kv=1).groups == geometry.named("deepseek-v3").groups


@pytest.mark.parametrize("name", geometry.names())
@pytest.mark.parametrize("nbytes", [64 << 10, 100_000, 2 << 20])
def test_scaling(name: str, nbytes: int) -> None:
    full = geometry.named(name)
    found = geometry.scale(full, nbytes)
    layers = sum(len(group.layers) for group in found.groups)
    assert nbytes <= found.block_nbytes < nbytes + 16 * layers
    assert all(group.layer_nbytes % 16 == 0 for group in found.groups)
    assert found.scaled
    assert "SCALED" in found.describe()
    assert geometry.scale(full, full.full_nbytes) == full


def test_geometries_that_make_no_sense() -> None:
    full = geometry.named("llama-3.1-8b")
    with pytest.raises(UsageError, match="no geometry is called 'gpt-2'; there are deepseek-v3"):
        geometry.named("gpt-2")
    with pytest.raises(UsageError, match=r"under 64 KiB.*--allow-tiny"):
        geometry.scale(full, 4096)
    assert geometry.scale(full, 4096, allow_tiny=True).block_nbytes == 4096
    with pytest.raises(UsageError, match="at least 1"):
        geometry.scale(full, 0, allow_tiny=True)
    with pytest.raises(UsageError, match="is more than"):
        geometry.scale(full, full.full_nbytes + 1)
    with pytest.raises(UsageError, match="--layers must be at least 1"):
        geometry.custom(0, 8, 128)
    with pytest.raises(UsageError, match="--kv"):
        geometry.custom(1, 8, 128, kv=3)


def test_default_sizes_leave_memory_free() -> None:
    gib = 1 << 30
    host = settings.Room("host", 16 * gib, 16 * gib)
    assert settings.choose_sizes(64 << 10, host, None, None) == settings.Sizes(4096, 16384)
    small = settings.Room("host", gib // 4, gib // 4)
    found = settings.choose_sizes(64 << 10, small, None, None)
    assert (found.gpu_blocks + found.host_blocks) * (64 << 10) <= gib // 8
    cuda = settings.Room("cuda", 80 * gib, 64 * gib)
    assert settings.choose_sizes(2 << 20, cuda, None, None) == settings.Sizes(2048, 8192)
    found = settings.choose_sizes(64 << 20, cuda, None, None)
    assert found.gpu_blocks * (64 << 20) <= 40 * gib
    assert found.host_blocks * (64 << 20) <= 32 * gib


def test_sizes_that_cannot_be() -> None:
    room = settings.Room("host", 1 << 30, 1 << 30)
    with pytest.raises(UsageError, match="at least one block"):
        settings.choose_sizes(65536, room, 0, None)
    with pytest.raises(UsageError, match=r"GPU tier and the host tier, .* on a host device, need 84 GiB and 1 GiB is"):
        settings.choose_sizes(1 << 30, room, 20, 64)
    gpu = settings.Room("cuda", 1 << 30, 1 << 30)
    with pytest.raises(UsageError, match=r"the GPU tier needs .* is free: fewer blocks \(--gpu-blocks\)"):
        settings.choose_sizes(65536, gpu, 1 << 20, 0)
    with pytest.raises(UsageError, match=r"the host tier needs .* is free: fewer blocks \(--host-blocks\)"):
        settings.choose_sizes(65536, gpu, 1, 1 << 20)
    assert settings.choose_sizes(65536, room, 1, 0) == settings.Sizes(1, 0)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("8g", 8 << 30),
        ("8GB", 8 * 10**9),
        ("64KiB", 65536),
        ("64Ki", 65536),
        ("64kib", 65536),
        ("64k", 65536),
        ("64kB", 64000),
        ("64KB", 64000),
        ("1.5k", 1536),
        ("1.5GiB", 3 << 29),
        ("0.1GB", 10**8),
        ("9007199254740993", 2**53 + 1),
        ("7B", 7),
    ],
)
def test_sizes_in_words(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "8 XiB", "0x10", "1,5g", "inf", "7i", "7iB", "\u0663k"])
def test_words_that_are_no_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        parse_size(text)


def test_a_small_b_is_refused_with_what_it_may_mean() -> None:
    """dd and numfmt refuse 64kb, docker reads 65,536 bytes."""
    for text in ("64kb", "64Kb"):
        with pytest.raises(UsageError, match=r"write 64KiB, which is 65,536 bytes, or 64KB, which is 64,000 bytes"):
            parse_size(text)
    with pytest.raises(UsageError, match=r"write 512, or 512B"):
        parse_size("512b")
    with pytest.raises(UsageError, match="not a whole number of bytes"):
        parse_size("1.5")


def test_powers_of_1000_are_said() -> None:
    assert says_otherwise("64KB", 64000) == "64KB is 64,000 bytes; 64KiB would be 65,536"
    assert [says_otherwise(text, parse_size(text)) for text in ("64KiB", "64k", "64Ki", "7B", "7")] == [""] * 5


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (65536, "64 KiB"), (3 << 29, "1.5 GiB"), (2 << 50, "2048 TiB")]
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def splitmix64(key: int, index: int) -> int:
    """As csrc/kernels/kernels.h writes it, in plain integers."""
    mask = 2**64 - 1
    z = (key + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@given(key=st.integers(0, 2**64 - 1), nbytes=st.integers(0, 70))
def test_pattern_bytes(key: int, nbytes: int) -> None:
    want = bytes(splitmix64(key, i // 8) >> (i % 8 * 8) & 255 for i in range(nbytes))
    assert pattern.pattern_bytes(key, nbytes).tobytes() == want


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_pattern_words_are_those_of_the_extension(key: int, index: int) -> None:
    word = bindings.pattern_word(key, index)
    assert word == splitmix64(key, index)


def test_first_wrong() -> None:
    data = pattern.pattern_bytes(7, 100)
    assert pattern.first_wrong(data, 7) == (0, None)
    data[[41, 77]] ^= 1
    assert pattern.first_wrong(data, 7) == (2, 41)


def test_no_two_keys_are_equal() -> None:
    hashes = np.arange(500, dtype=np.uint64)
    keys = [pattern.block_keys(hashes, group, 80, seed) for group in range(2) for seed in range(2)]
    assert keys[0].shape == (80, 500)
    assert len(np.unique(np.concatenate(keys))) == 4 * 80 * 500
    assert pattern.POISON_KEY not in np.concatenate(keys)
