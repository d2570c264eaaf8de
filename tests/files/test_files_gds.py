"""GPUDirect Storage in the file tier: a libcufile that tests make (fake_cufile.c) on a host device, which claims and
fails what it is told to; and with --device cuda:0 the machine's own, in its compatibility mode if it has no other."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import ctypes
import gc
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import file_reader
import numpy as np
import pytest
import test_files_device as plain
import test_files_starve as starve
from conftest import PATIENCE, ROOT, Buffer, bindings, random_bytes, run_python, seam, until
from test_files_device import BLOCKS, Rig, keys_of
from test_transfer_manager import FP4, HALF
from test_transfer_manager import Rig as ManagerRig

import kvswap
from kvswap import _C, info, metrics, testing
from kvswap.files import FileStore, Layout
from kvswap.trtllm import Block

CC = os.environ.get("CC") or "cc"
RETURN, ERRNO, FLIP = 1, 2, 3  # fake_kind
ALLOW_COMPAT = 1 << 1


class Fake:
    """The fake's variables as attributes."""

    def __init__(self, path: Path) -> None:
        object.__setattr__(self, "library", ctypes.CDLL(str(path)))
        self.library.fake_reset()

    def __getattr__(self, name: str) -> int:
        kind = ctypes.c_long if name == "value" else ctypes.c_int
        return kind.in_dll(self.library, f"fake_{name}").value

    def __setattr__(self, name: str, value: int) -> None:
        kind = ctypes.c_long if name == "value" else ctypes.c_int
        kind.in_dll(self.library, f"fake_{name}").value = value

    def nbytes(self, write: bool) -> int:
        return (ctypes.c_long * 2).in_dll(self.library, "fake_nbytes")[write]

    def claim_real(self) -> None:
        """The driver is there, and may not fall back: each file that it takes goes directly."""
        self.major, self.flags = 2, 0

    def go_wrong(self, kind: int, value: int, write: bool, nth: int = 1, every: int = 0) -> None:
        """From now on, counted anew."""
        calls = (ctypes.c_long * 2).in_dll(self.library, "fake_calls")
        calls[0] = calls[1] = 0
        self.value, self.write, self.nth, self.every, self.kind = value, int(write), nth, every, kind


@pytest.fixture(scope="session")
def fake_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(CC) is None:
        pytest.skip(f"no C compiler ({CC})")
    path = tmp_path_factory.mktemp("cufile") / "libfake.so"
    source = ROOT / "tests" / "stand_ins" / "fake_cufile.c"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([CC, *flags, str(source), "-o", str(path)], check=True)
    return path


@pytest.fixture
def fake(fake_path: Path, device_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """What was opened and registered in a test has been given back at its end."""
    if not device_name.startswith("host:"):
        pytest.skip("the machine's own libcufile is tested here, which is opened once a process")
    assert bindings.file_gds_close()
    fake = Fake(fake_path)
    monkeypatch.setenv("KVSWAP_CUFILE", str(fake_path))
    yield fake
    assert bindings.file_gds_close()
    assert (fake.handles, fake.buffers, fake.complaints, fake.opens) == (0, 0, 0, fake.closes)


@pytest.fixture
def host() -> Iterator[kvswap.Device]:
    """The fake needs plain memory, whatever device the tests run on."""
    device = kvswap.Device("host:0")
    yield device
    bindings.set_fault(device, "call", "none")
    bindings.set_fault(device, "copy", "none")
    device.synchronize(PATIENCE)


# Whether a transfer is direct is told, and changes nothing else: one test tries both.
@pytest.fixture(params=["real", "libcufile"])
def rig(request: pytest.FixtureRequest, device_name: str, tmp_path: Path) -> Iterator[Rig]:
    if request.param == "libcufile":
        device = request.getfixturevalue("cuda")
        there, why = _C._file_gds(True)
        if not there:
            pytest.skip(why)
        rig = Rig(device, tmp_path, gds="compat")
        why = rig.store.info["gds_note"]
        if why.startswith(("libcufile does not take files of this file system", "there is no /proc/modules")):
            rig.store.close()
            pytest.skip(f"{why} (--basetemp names a folder elsewhere)")
        assert rig.store.info["gds"] in ("on", "compat"), why
    else:
        fake = request.getfixturevalue("fake")
        if request.param == "real":
            fake.claim_real()
        rig = Rig(request.getfixturevalue("host"), tmp_path, gds="auto" if request.param == "real" else "compat")
        assert rig.store.info["gds"] == ("on" if request.param == "real" else "compat"), rig.store.info["gds_note"]
    yield rig
    rig.store.close()


# What a store promises does not depend on how blocks travel: these tests know of no difference.
test_there_and_back = plain.test_there_and_back
test_what_the_device_stored_the_host_reads = plain.test_what_the_device_stored_the_host_reads
test_it_starts_after_what_it_is_given = plain.test_it_starts_after_the_compute_stream_and_what_it_is_given
test_another_transfer_need_not_wait_for_that = plain.test_another_transfer_need_not_wait_for_that
test_a_copy_that_is_refused_is_a_failed_block = plain.test_a_copy_that_is_refused_is_a_failed_block
test_a_damaged_block_does_not_reach_the_device = plain.test_a_damaged_block_does_not_reach_the_device
test_the_store_keeps_its_pools = plain.test_the_store_keeps_its_pools
test_a_cancelled_transfer_that_nobody_holds = plain.test_a_cancelled_transfer_that_nobody_holds


@pytest.mark.parametrize("rig", ["real", "compat", "libcufile"], indirect=True)
def test_all_bytes_of_blocks_went_by_it(rig: Rig) -> None:
    rig.store.store(keys_of(range(9)), rig.pools, range(9)).wait(PATIENCE)
    rig.store.load(keys_of(range(9)), rig.pools, range(20, 29)).wait(PATIENCE)
    stats, slot = rig.store.stats(), rig.store.info["slot_nbytes"]
    assert (stats["gds_written_nbytes"], stats["gds_read_nbytes"], stats["gds_by_host"]) == (9 * slot, 9 * slot, 0)
    for rows in rig.model:
        rows[20:29] = rows[:9]
    rig.check()


def test_others_read_what_it_stored_and_it_reads_what_others_stored(rig: Rig) -> None:
    ids = list(range(8))
    rig.store.store(keys_of(ids), rig.pools, ids).wait(PATIENCE)
    rig.store.close()
    found = file_reader.read_store(rig.folder)
    for i in ids:
        block = found[b"block-%d" % i]
        assert block.data == b"".join(rows[i].tobytes() for rows in rig.model)
        assert file_reader.crc32c(block.data) == block.header.data_crc
    for engine in ("threads", "auto"):
        rig.store = rig.open(gds="off", engine=engine)
        assert (rig.store.info["gds"], rig.store.info["gds_note"]) == ("off", "not asked for")
        rig.store.load(keys_of(ids), rig.pools, [i + 10 for i in ids]).wait(PATIENCE)
        rig.store.store([b"other-%d" % i for i in ids], rig.pools, ids).wait(PATIENCE)
        assert rig.store.stats()["gds_read_nbytes"] == 0
        rig.store.close()
    rig.store = rig.open()
    rig.store.load([b"other-%d" % i for i in ids], rig.pools, [i + 20 for i in ids]).wait(PATIENCE)
    for rows in rig.model:
        rows[10:18] = rows[20:28] = rows[:8]
    rig.check()


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("where", ["magic", "key", "checksum", "first byte", "last byte"])
def test_what_was_changed_on_disk_never_reaches_a_pool(rig: Rig, where: str) -> None:
    rig.store.store(keys_of([1, 2]), rig.pools, [1, 2]).wait(PATIENCE)
    rig.store.close()
    block = file_reader.read_store(rig.folder)[b"block-2"]
    rig.store = rig.open()
    offsets = {"magic": 0, "key": 58, "checksum": 49, "first byte": 4096, "last byte": 4096 + rig.nbytes - 1}
    flip(block.path, block.offset + offsets[where])
    load = rig.store.load(keys_of([1, 2]), rig.pools, [11, 12])
    with pytest.raises(kvswap.Error, match="block 1 is damaged on disk"):
        load.wait(PATIENCE)
    for rows in rig.model:
        rows[11] = rows[1]
    rig.check()
    assert rig.store.stats()["damaged"] == 1


@pytest.mark.parametrize(("call", "durability"), [("read", "flush"), ("write", "flush"), ("write", "fsync")])
@pytest.mark.parametrize(("action", "code"), [("short", 0), ("interrupt", 0), ("delay", 0), ("fail", 5)])
def test_faults_of_files(rig: Rig, durability: str, call: str, action: str, code: int) -> None:
    """Those that testing.file_fault() makes happen here too."""
    rig.store.close()
    rig.store = rig.open(durability=durability)
    ids = list(range(12))
    with testing.file_fault(rig.store, call, action, nth=2, every=3, code=code, delay=0.002):
        transfers = [rig.store.store(keys_of(ids), rig.pools, ids)]
        for kind in ("store", "load"):
            try:
                transfers[-1].wait(PATIENCE)
            except kvswap.Error as error:
                assert action == "fail", error
            if kind == "store":
                transfers.append(rig.store.load(keys_of(ids), rig.pools, [i + 20 for i in ids]))
    lost = {int(i) for transfer in transfers for i in transfer.failed_positions}
    assert bool(lost) == (action == "fail")
    after = [buffer.get().reshape(rows.shape) for buffer, rows in zip(rig.buffers, rig.model, strict=True)]
    for i in set(ids) - lost:
        assert all((rows[i + 20] == model[i]).all() for rows, model in zip(after, rig.model, strict=True)), i
    again = rig.store.store(keys_of(ids), rig.pools, ids)
    again.wait(PATIENCE)
    rig.store.load(keys_of(ids), rig.pools, [i + 20 for i in ids]).wait(PATIENCE)
    for rows in rig.model:
        rows[20:32] = rows[:12]
    rig.check()


def test_replacing_evicting_and_deleting(rig: Rig) -> None:
    """Hundreds of stores and loads at once on twelve slots of disk and four of staging."""
    rig.store.close()
    shutil.rmtree(rig.folder)
    rig.store = rig.open(capacity=12 * 32768, segment_nbytes=4 * 32768, staging_nbytes=1)
    rng = np.random.default_rng(5)
    transfers = []
    for step in range(60):
        ids = rng.permutation(20)[:5]
        transfers.append(rig.store.store(keys_of(ids), rig.pools, ids))
        some = rng.permutation(20)[:5]
        transfers.append(rig.store.load(keys_of(some), rig.pools, some + 20))
        if step % 7 == 0:
            transfers.append(rig.store.delete(keys_of(some[:2])))
    plain.check_churn(rig, transfers)
    stats = rig.store.stats()
    assert stats["loaded"] > 0 and stats["evicted"] > 0 and stats["damaged"] == stats["failed"] == 0


def test_a_device_that_refuses_the_checksum(rig: Rig) -> None:
    rig.store.store(keys_of(range(4)), rig.pools, range(4)).wait(PATIENCE)
    for call, ids in ((rig.store.load, [10, 11, 12, 13]), (rig.store.store, [0, 1, 2, 3])):
        with testing.fault(rig.device, "call", "fail", operation="launch", nth=1, every=1, code=1):
            transfer = call(keys_of(range(4)), rig.pools, ids)
            with pytest.raises(kvswap.DeviceError, match="failed") as told:
                transfer.wait(PATIENCE)
        assert told.value.code == 1
        assert transfer.failed_positions.tolist() == [0, 1, 2, 3]
    rig.check()
    rig.store.load(keys_of(range(4)), rig.pools, range(10, 14)).wait(PATIENCE)
    for rows in rig.model:
        rows[10:14] = rows[:4]
    rig.check()


@pytest.mark.parametrize("nbytes", [1, 15, 16, 4095, 4096, 4097, 21717, 8 * 4096, 9 * 4096 + 5, 300 * 4096 + 77])
def test_the_checksum_of_a_kernel(device: kvswap.Device, nbytes: int) -> None:
    """One word beside the memory is another allocation: a kernel that reads beyond is seen by tools that look."""
    data, word = Buffer(device, nbytes), Buffer(device, 4)
    stream = kvswap.Stream(device)
    for seed in (1, 2):
        data.randomise(seed)
        word.put(np.zeros(4, np.uint8))
        seam(device, "launch_crc", data.ptr, nbytes, word.ptr, stream.handle)
        stream.synchronize(PATIENCE)
        assert word.get().view("<u4")[0] == file_reader.crc32c(random_bytes(seed, nbytes).tobytes())


def test_the_structs_are_those_of_its_header() -> None:
    """Where the toolkit or NVIDIA's packages have it: CPATH, or beside the packages of this Python."""
    folders = [f"-I{path}" for site in sys.path for path in Path(site).glob("nvidia/*/include")]
    check = [*shlex.split(CC), "-std=c11", "-D_GNU_SOURCE", "-fsyntax-only", "-I", "csrc", *folders]
    there = subprocess.run([*check, "-include", "cufile.h", "-xc", "/dev/null"], capture_output=True, check=False)
    if there.returncode:
        pytest.skip("no cufile.h here")
    subprocess.run([*check, "tests/c/cufile_check.c"], cwd=ROOT, check=True)


# -- what libcufile says and does -------------------------------------------------------------------------------------


def open_rig(host: kvswap.Device, folder: Path, gds: str = "auto", **options: Any) -> Rig:
    folder.mkdir(exist_ok=True)
    return Rig(host, folder, gds=gds, **options)


def check_round_trip(rig: Rig, mode: str) -> None:
    """Blocks come back whatever was decided."""
    assert rig.store.info["gds"] == mode, rig.store.info["gds_note"]
    rig.store.store(keys_of(range(6)), rig.pools, range(6)).wait(PATIENCE)
    rig.store.load(keys_of(range(6)), rig.pools, range(10, 16)).wait(PATIENCE)
    for rows in rig.model:
        rows[10:16] = rows[:6]
    rig.check()
    rig.store.close()


def file_system_of(folder: Path) -> int:
    return int(
        subprocess.run(["stat", "-f", "-c", "%t", folder], capture_output=True, check=True, text=True).stdout, 16
    )


def test_auto_takes_what_is_real(fake: Fake, host: kvswap.Device, tmp_path: Path) -> None:
    fake.claim_real()
    rig = open_rig(host, tmp_path)
    assert rig.store.info["gds_note"] == "nvidia-fs 2.7"
    check_round_trip(rig, "on")
    assert fake.nbytes(True) > 0 and fake.opens == 1


@pytest.mark.parametrize("bits", [0, -1])
def test_auto_asks_whether_the_file_system_is_served(
    fake: Fake, host: kvswap.Device, tmp_path: Path, bits: int
) -> None:
    fake.claim_real()
    fake.flags, fake.file_systems = ALLOW_COMPAT, bits
    rig = open_rig(host, tmp_path)
    served = bits != 0 and file_system_of(tmp_path) in (0xEF53, 0x58465342, 0x6969)
    if not served:
        assert "serve" in rig.store.info["gds_note"]
    check_round_trip(rig, "on" if served else "off")


def test_auto_leaves_the_compatibility_mode_alone(fake: Fake, host: kvswap.Device, tmp_path: Path) -> None:
    rig = open_rig(host, tmp_path)
    assert "only its compatibility mode" in rig.store.info["gds_note"]
    check_round_trip(rig, "off")
    assert fake.nbytes(True) == fake.nbytes(False) == 0


def test_compat_is_taken_when_asked_for(fake: Fake, host: kvswap.Device, tmp_path: Path) -> None:
    rig = open_rig(host, tmp_path, "compat")
    assert "only its compatibility mode" in rig.store.info["gds_note"]
    check_round_trip(rig, "compat")
    assert fake.nbytes(True) > 0


def test_compat_without_o_direct(fake: Fake, host: kvswap.Device, tmp_path: Path) -> None:
    check_round_trip(open_rig(host, tmp_path / "a", "compat", buffered=True), "compat")
    fake.claim_real()
    rig = open_rig(host, tmp_path / "b", "auto", buffered=True)
    assert rig.store.info["gds_note"] == "the files are not open with O_DIRECT"
    check_round_trip(rig, "off")


def test_off_opens_nothing(fake: Fake, host: kvswap.Device, tmp_path: Path) -> None:
    fake.claim_real()
    check_round_trip(open_rig(host, tmp_path, "off"), "off")
    with FileStore(tmp_path / "host", Layout(4096), capacity=1 << 20) as store:
        assert (store.info["gds"], store.info["gds_note"]) == ("off", "the store has no device")
    assert fake.opens == 0


REFUSALS = [
    ({"open_code": 5001}, "libcufile does not open its driver: libcufile's error 5001: nvidia-fs is not loaded"),
    ({"properties_code": 5002}, "the driver does not tell its properties: libcufile's error 5002"),
    ({"register_code": 5008}, "libcufile does not take files of this file system: libcufile's error 5008"),
]


@pytest.mark.parametrize(("codes", "note"), REFUSALS, ids=[str(next(iter(codes))) for codes, _ in REFUSALS])
def test_what_is_refused_at_open_goes_through_host_memory(
    fake: Fake, host: kvswap.Device, tmp_path: Path, codes: dict[str, int], note: str
) -> None:
    fake.claim_real()
    for name, code in codes.items():
        setattr(fake, name, code)
    rig = open_rig(host, tmp_path)
    assert note in rig.store.info["gds_note"]
    check_round_trip(rig, "off")


def test_staging_that_cannot_be_registered(fake: Fake, host: kvswap.Device, tmp_path: Path) -> None:
    """libcufile then has buffers of its own."""
    fake.claim_real()
    fake.buffer_code = 5036
    rig = open_rig(host, tmp_path)
    assert rig.store.info["gds_note"].endswith("; staging could not be registered")
    check_round_trip(rig, "on")


@pytest.mark.parametrize(
    ("kind", "value", "note"),
    [
        (RETURN, 100, "read 100 bytes"),
        (RETURN, -5030, "error 5030"),
        (ERRNO, 5, "read 0 bytes"),
        (FLIP, 70, "reads other bytes"),
    ],
)
def test_a_library_that_does_not_read_right_is_not_used(
    fake: Fake, host: kvswap.Device, tmp_path: Path, kind: int, value: int, note: str
) -> None:
    fake.claim_real()
    fake.go_wrong(kind, value, write=False)
    rig = open_rig(host, tmp_path)
    assert note in rig.store.info["gds_note"]
    check_round_trip(rig, "off")


def test_a_library_without_a_function(fake_path: Path, host: kvswap.Device, tmp_path: Path, fake: Fake) -> None:
    empty = tmp_path / "libempty.so"
    (tmp_path / "empty.c").write_text("int nothing(void) { return 0; }\n")
    subprocess.run([CC, "-shared", "-fPIC", str(tmp_path / "empty.c"), "-o", str(empty)], check=True)
    for path, note in ((empty, "libcufile has no cuFileDriverOpen"), (tmp_path / "none.so", "KVSWAP_CUFILE: ")):
        os.environ["KVSWAP_CUFILE"] = str(path)
        rig = open_rig(host, tmp_path / path.stem)
        assert note in rig.store.info["gds_note"]
        check_round_trip(rig, "off")


@pytest.mark.parametrize("most", [4096, 12288, 5000, 20000])
def test_short_reads_and_writes(fake: Fake, host: kvswap.Device, tmp_path: Path, most: int) -> None:
    fake.claim_real()
    rig = open_rig(host, tmp_path)
    fake.most = most if rig.store.info["direct"] is False or most % 4096 == 0 else most // 512 * 512
    check_round_trip(rig, "on")


WRONG = [
    (RETURN, -5014, "libcufile's error 5014"),
    (ERRNO, 28, r"No space left on device \(errno 28\)"),
    (ERRNO, 5, r"Input/output error \(errno 5\)"),
    (RETURN, -70000, r"Input/output error \(errno 5\)"),
    (RETURN, 1 << 40, r"errno 75\)"),
    (RETURN, 0, r"shorter than it should be|errno 5\)"),
    (RETURN, 7, r"shorter than it should be|errno 5\)"),
]


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize(("kind", "value", "message"), WRONG)
def test_every_result_is_looked_at(
    fake: Fake, host: kvswap.Device, tmp_path: Path, write: bool, kind: int, value: int, message: str
) -> None:
    fake.claim_real()
    rig = open_rig(host, tmp_path)
    rig.store.store(keys_of(range(4)), rig.pools, range(4)).wait(PATIENCE)
    fake.go_wrong(kind, value, write, nth=2)
    call = rig.store.store if write else rig.store.load
    transfer = call(keys_of(range(4)), rig.pools, range(4) if write else range(10, 14))
    with pytest.raises(kvswap.Error, match=message):
        transfer.wait(PATIENCE)
    fake.kind = 0
    failed = [int(i) for i in transfer.failed_positions]
    assert len(failed) == 1 and sorted(transfer.reasons) == failed
    for rows in rig.model:
        for i in set(range(4)) - set(failed):
            rows[10 + i] = rows[i] if not write else rows[10 + i]
    after = [buffer.get().reshape(rows.shape) for buffer, rows in zip(rig.buffers, rig.model, strict=True)]
    good = [i for i in range(BLOCKS) if i - 10 not in failed]
    for rows, model in zip(after, rig.model, strict=True):
        np.testing.assert_array_equal(rows[good], model[good])
    rig.store.store(keys_of(failed), rig.pools, failed).wait(PATIENCE)
    rig.store.load(keys_of(range(4)), rig.pools, range(20, 24)).wait(PATIENCE)
    after = [buffer.get().reshape(rows.shape) for buffer, rows in zip(rig.buffers, rig.model, strict=True)]
    for rows, model in zip(after, rig.model, strict=True):
        np.testing.assert_array_equal(rows[20:24], model[:4])
    rig.store.close()


@pytest.mark.parametrize("code", [5008, 5020, 5027, 5034])
def test_a_request_that_is_not_taken_goes_by_host_memory(
    fake: Fake, host: kvswap.Device, tmp_path: Path, code: int
) -> None:
    fake.claim_real()
    rig = open_rig(host, tmp_path)
    fake.go_wrong(RETURN, -code, write=True, nth=1, every=2)
    rig.store.store(keys_of(range(6)), rig.pools, range(6)).wait(PATIENCE)
    assert rig.store.stats()["gds_by_host"] == 3
    fake.go_wrong(RETURN, -code, write=False, nth=1, every=2)
    rig.store.load(keys_of(range(6)), rig.pools, range(10, 16)).wait(PATIENCE)
    stats = rig.store.stats()
    assert (stats["gds_by_host"], stats["gds_read_nbytes"]) == (6, 3 * rig.store.info["slot_nbytes"])
    for rows in rig.model:
        rows[10:16] = rows[:6]
    rig.check()
    rig.store.close()


def test_closing_gives_the_devices_memory_back(fake: Fake, host: kvswap.Device, tmp_path: Path) -> None:
    def allocated() -> int:
        rows = [row for row in metrics.snapshot()["devices"] if row["device"] == host.name]
        return sum(row["allocated_bytes"] + row["allocated_host_bytes"] for row in rows)

    fake.claim_real()
    rig = open_rig(host, tmp_path)
    rig.store.close()
    gc.collect()  # memory of earlier tests, which would go in the middle
    host.synchronize(PATIENCE)
    before = allocated()
    rig.store = rig.open()
    fake.go_wrong(RETURN, -5020, write=True, nth=1, every=2)  # these go through host memory
    rig.store.store(keys_of(range(6)), rig.pools, range(6)).wait(PATIENCE)
    assert rig.store.stats()["gds_by_host"] == 3 and allocated() > before
    rig.store.close()
    until(lambda: allocated() <= before, "the store's memory is given back")


def test_segments_that_are_not_taken_go_by_host_memory(fake: Fake, host: kvswap.Device, tmp_path: Path) -> None:
    fake.claim_real()
    fake.refuse_from = 3  # after the trial and the first segment
    rig = open_rig(host, tmp_path, segment_nbytes=4 * 32768)
    rig.store.store(keys_of(range(20)), rig.pools, range(20)).wait(PATIENCE)
    rig.store.load(keys_of(range(20)), rig.pools, range(20, 40)).wait(PATIENCE)
    stats = rig.store.stats()
    assert stats["segments"] > 2
    assert 0 < stats["gds_read_nbytes"] < 20 * rig.store.info["slot_nbytes"]
    assert (
        stats["gds_by_host"] * rig.store.info["slot_nbytes"] + stats["gds_read_nbytes"] + stats["gds_written_nbytes"]
        == 40 * rig.store.info["slot_nbytes"]
    )
    for rows in rig.model:
        rows[20:] = rows[:20]
    rig.check()
    rig.store.close()


@pytest.mark.parametrize("at", [0, 57, 4096, 4096 + 21716])
def test_bytes_that_arrive_wrong_are_not_served(fake: Fake, host: kvswap.Device, tmp_path: Path, at: int) -> None:
    """Right on disk, wrong in staging: what is compared is what was delivered."""
    fake.claim_real()
    rig = open_rig(host, tmp_path)
    rig.store.store(keys_of([1, 2]), rig.pools, [1, 2]).wait(PATIENCE)
    fake.go_wrong(FLIP, at, write=False, nth=1, every=1)
    load = rig.store.load(keys_of([1, 2]), rig.pools, [11, 12])
    with pytest.raises(kvswap.Error, match="damaged on disk"):
        load.wait(PATIENCE)
    assert load.failed_positions.tolist() == [0, 1]
    rig.check()
    rig.store.close()


def test_a_reader_beside_the_writer(fake: Fake, host: kvswap.Device, tmp_path: Path) -> None:
    fake.claim_real()
    rig = open_rig(host, tmp_path)
    rig.store.store(keys_of(range(5)), rig.pools, range(5)).wait(PATIENCE)
    with rig.open(readonly=True, capacity=None) as reader:
        assert reader.info["gds"] == "on", reader.info["gds_note"]
        rig.store.store(keys_of(range(5, 9)), rig.pools, range(5, 9)).wait(PATIENCE)
        reader.refresh()
        reader.load(keys_of(range(9)), rig.pools, range(20, 29)).wait(PATIENCE)
        assert reader.stats()["gds_read_nbytes"] == 9 * reader.info["slot_nbytes"]
        assert fake.opens == 1  # for both
    for rows in rig.model:
        rows[20:29] = rows[:9]
    rig.check()
    rig.store.close()


def test_a_reader_of_a_damaged_block(fake: Fake, host: kvswap.Device, tmp_path: Path) -> None:
    """However often a reader looks again, since a writer may be at it: always by libcufile, and it ends."""
    fake.claim_real()
    rig = open_rig(host, tmp_path)
    rig.store.store(keys_of(range(3)), rig.pools, range(3)).wait(PATIENCE)
    rig.store.close()
    block = file_reader.read_store(rig.folder)[b"block-1"]
    rig.store = rig.open()
    with rig.open(readonly=True, capacity=None) as reader:
        flip(block.path, block.offset + 5000)
        load = reader.load(keys_of(range(3)), rig.pools, range(10, 13))
        with pytest.raises(kvswap.Error, match="block 1 is damaged on disk"):
            load.wait(PATIENCE)
        slot = reader.info["slot_nbytes"]
        assert reader.stats()["gds_read_nbytes"] >= 3 * slot and reader.stats()["gds_by_host"] == 0
    for rows in rig.model:
        rows[[10, 12]] = rows[[0, 2]]
    rig.check()
    rig.store.close()


def test_a_reader_of_segments_that_come_and_go(fake: Fake, host: kvswap.Device, tmp_path: Path) -> None:
    fake.claim_real()
    segment = 4096 + 4 * 28672
    rig = open_rig(host, tmp_path, capacity=4 * segment, segment_nbytes=segment)
    rig.store.store(keys_of(range(16)), rig.pools, range(16)).wait(PATIENCE)
    with rig.open(readonly=True, capacity=None) as reader:
        reader.load(keys_of(range(16)), rig.pools, range(20, 36)).wait(PATIENCE)
        for rows in rig.model:
            rows[20:36] = rows[:16]
        for step in range(3):  # with a smaller budget the oldest segments go, with a larger one new ones come
            rig.store.close()
            rig.store = rig.open(capacity=segment)
            rig.store.close()
            rig.store = rig.open()
            new = [b"new-%d-%d" % (step, i) for i in range(12)]
            rig.store.store(new, rig.pools, range(step, step + 12)).wait(PATIENCE)
            reader.refresh()
            reader.load(new, rig.pools, range(20, 32)).wait(PATIENCE)
            for rows in rig.model:
                rows[20:32] = rows[step : step + 12]
            rig.check()
    rig.store.close()


@pytest.mark.parametrize("durability", ["none", "fsync"])
def test_a_block_counts_as_stored_when_the_disk_says_so(rig: Rig, durability: str) -> None:
    """libcufile's writes carry no such flag: the file is synchronised after them."""
    rig.store.close()
    rig.store = rig.open(durability=durability)
    rig.store.store(keys_of([0]), rig.pools, [0]).wait(PATIENCE)  # with a segment, whose making synchronises too
    with testing.file_fault(rig.store, "sync", "fail", every=1, code=5):
        transfer = rig.store.store(keys_of(range(1, 4)), rig.pools, range(1, 4))
        if durability == "fsync":
            with pytest.raises(kvswap.Error, match=r"Input/output error \(errno 5\)"):
                transfer.wait(PATIENCE)
        else:
            transfer.wait(PATIENCE)
    assert transfer.failed_positions.size == (3 if durability == "fsync" else 0)
    assert rig.store.contains(keys_of(range(1, 4))) == [durability == "none"] * 3


def test_a_deterministic_device(fake: Fake, tmp_path: Path) -> None:
    fake.claim_real()
    rig = open_rig(testing.deterministic_device(11), tmp_path)
    check_round_trip(rig, "on")


def test_at_exit_the_driver_is_closed(fake: Fake, fake_path: Path, tmp_path: Path) -> None:
    """With a store that is never closed, and transfers without a wait."""
    done = run_python(
        f"""
        import ctypes
        import kvswap
        from kvswap.files import FileStore, Layout
        fake = ctypes.CDLL({str(fake_path)!r})
        fake.fake_reset()
        ctypes.c_int.in_dll(fake, "fake_major").value = 2
        ctypes.c_int.in_dll(fake, "fake_flags").value = 0
        device = kvswap.Device("host:0")
        memory = device.alloc(64 * 8192)
        pool = kvswap.Pool(device, memory, 64, 8192)
        store = FileStore({str(tmp_path / "s")!r}, Layout(8192), capacity=8 << 20, device=device)
        assert store.info["gds"] == "on", store.info
        store.store([b"%d" % i for i in range(64)], pool, range(64))
        """,
        KVSWAP_CUFILE=str(fake_path),
        FAKE_CUFILE_REPORT=str(tmp_path / "report"),
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report").read_text() == "0 0 0"
    with FileStore(tmp_path / "s", Layout(8192), readonly=True) as store:
        assert store.stats()["found"] == 64


def test_a_child_that_is_forked_while_the_library_opens(fake_path: Path, device_name: str, tmp_path: Path) -> None:
    """It waits neither at its end nor in a store of its own for a thread that it does not have."""
    if not device_name.startswith("host:"):
        pytest.skip("the machine's own libcufile is tested here, which is opened once a process")
    done = run_python(
        f"""
        import ctypes, os, signal, threading
        import kvswap
        from kvswap import _C, _testing
        from kvswap.files import FileStore, Layout
        fake = ctypes.CDLL({str(fake_path)!r})
        fake.fake_reset()
        opening, waits = (ctypes.c_int.in_dll(fake, f"fake_{{name}}") for name in ("opening", "open_waits"))
        waits.value = 1
        def open_one():
            folder = {str(tmp_path / "parent")!r}
            FileStore(folder, Layout(8192), capacity=8 << 20, device="host:0", gds="compat").close()
        thread = threading.Thread(target=open_one)
        thread.start()
        while not opening.value:
            pass
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            waits.value = 0
            _testing.file_gds_close()
            _C._shutdown(1.0)
            os._exit(0)
        opening.value = waits.value = 0
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """,
        KVSWAP_CUFILE=str(fake_path),
    )
    assert done.returncode == 0, done.stderr


# -- who else uses it -------------------------------------------------------------------------------------------------


def manager_rig(host: kvswap.Device, **options: Any) -> ManagerRig:
    return ManagerRig(host, HALF, FP4, file_options={"capacity": 4 << 20, "staging_nbytes": 1 << 16, **options})


@pytest.mark.parametrize("real", [True, False])
def test_the_transfer_managers_mode(fake: Fake, host: kvswap.Device, tmp_path: Path, real: bool) -> None:
    if real:
        fake.claim_real()
    rig = manager_rig(host, **({} if real else {"gds": "compat"}))
    folder = str(tmp_path / "kv")
    rig.manager.offload([3, 7], [1000, 2], 0, "gds", folder).wait(PATIENCE)
    written = fake.nbytes(True)
    assert written > 0
    rig.manager.onboard([2, 1000], [0, 9], 0, "gds", folder).wait(PATIENCE)
    rig.copied(Block(7), Block(0))
    rig.copied(Block(3), Block(9))
    rig.check()
    # the same directory by the other mode, there and back
    rig.manager.offload([4], [5], 0, "posix", folder)
    rig.manager.onboard([1000], [8], 0, "posix", folder).wait(PATIENCE)
    rig.copied(Block(3), Block(8))
    assert fake.nbytes(True) == written
    rig.manager.onboard([5], [6], 0, "gds", folder).wait(PATIENCE)
    rig.copied(Block(4), Block(6))
    rig.check()
    rig.manager.close(PATIENCE)


def test_the_transfer_managers_mode_where_it_is_not_real(fake: Fake, host: kvswap.Device, tmp_path: Path) -> None:
    rig = manager_rig(host)
    with pytest.raises(kvswap.Error, match="mode 'gds' cannot be used: nvidia-fs is not loaded"):
        rig.manager.offload([3], [1], 0, "gds", str(tmp_path / "kv"))
    rig.manager.offload([3], [1], 0, "posix", str(tmp_path / "kv")).wait(PATIENCE)
    rig.check()
    rig.manager.close(PATIENCE)


def test_info_says_so_in_one_line(fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def line() -> str:
        lines = [line for line in info.collect().to_text().splitlines() if "GPUDirect Storage" in line]
        assert len(lines) == 1
        return lines[0]

    assert "GPUDirect Storage on:" in line() and "KVSWAP_CUFILE" in line()
    monkeypatch.setenv("KVSWAP_CUFILE", str(tmp_path / "none.so"))
    assert "GPUDirect Storage off: KVSWAP_CUFILE" in line()
    assert fake.opens == 0  # it only looks


@pytest.mark.parametrize("what", ["store", "replace", "delete"])
def test_stores_and_deletes_beside_loads_that_never_pause(
    fake: Fake, host: kvswap.Device, tmp_path: Path, what: str
) -> None:
    """libcufile's threads have a queue of their own."""
    fake.claim_real()
    rig = starve.PoolRig(host, tmp_path, gds="auto")
    assert rig.store.info["gds"] == "on"
    rig.put(b"old").wait(PATIENCE)
    with rig.slow():
        loads = rig.loads(250)
        transfer = starve.write_of(rig, what)
        assert rig.ended_before(transfer, loads) <= 80
    rig.store.close()
