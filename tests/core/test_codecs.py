"""Codecs by the CPU: against a reference in NumPy that shares no code with them, on random, hostile and real-looking
blocks; the command. The C tests (tests/c/test_codecs.c) go through every value."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, run_python
from numpy.typing import NDArray

from kvswap.cli import main
from kvswap.codecs import CODECS, KINDS, Coding, Field, Verdict, measure, reader

pytestmark = pytest.mark.host_device
HOSTILE = ("random", "every exponent", "one value apart", "subnormals", "NaN payloads", "zeros", "saturated")


def words(what: str, count: int, seed: int = 1) -> NDArray[np.uint16]:
    rng = np.random.default_rng(seed)
    random = rng.integers(0, 1 << 16, count).astype(np.uint16)
    made = {
        "random": random,
        "every exponent": (random & 0x807F) | (np.arange(count) % 256 << 7).astype(np.uint16),
        "one value apart": np.where(np.arange(count) % 331 == 7, random, 0x3F80 | random & 0x807F).astype(np.uint16),
        "subnormals": random & 0x80FF,
        "NaN payloads": np.where(np.arange(count) % 1000 == 5, 0x7F80 | random, 0x3F80 | random & 0x807F),
        "zeros": random & 0x8000,
        "saturated": np.where(np.arange(count) % 700 == 9, 0x7F7F, 0x4000 | random & 0x80FF),
        "normal": measure.to_bf16(rng.standard_normal(count)),
    }
    return made[what].astype(np.uint16)


def compare(coding: Coding, block: NDArray[np.uint16]) -> Verdict:
    """Both encoders give the same bytes, both decoders too, and coding what was decoded changes nothing."""
    coded, verdicts = coding.encode(block)
    wanted, verdict = reader.encode_block(coding, block)
    assert verdicts.tolist() == [verdict]
    assert np.array_equal(coded[0], wanted)
    back, found = coding.decode(coded)
    same, again = reader.decode_block(coding, coded[0])
    assert np.array_equal(back[0], same) and found.tolist() == [again] == [verdict]
    if verdict == Verdict.GOOD:
        assert np.array_equal(coding.encode(back)[0], coded)
    return verdict


@pytest.mark.parametrize("what", [*HOSTILE, "normal"])
@pytest.mark.parametrize("codec", CODECS)
def test_the_same_bytes_as_the_reference(codec: str, what: str) -> None:
    for kind in {"exact": ("bf16",), "mxfp8": ("bf16", "fp16"), "fp4": ("bf16", "fp16", "e4m3")}[codec]:
        for values in (1, 31, 512, 1000, 4096, 16384 + 520):
            coding = Coding(2 * values, codec, fields=[(0, 2 * values, kind)])
            verdict = compare(coding, words(what, values, seed=values))
            if codec != "exact" or what in ("normal", "subnormals", "zeros"):
                assert verdict == Verdict.GOOD


def latents(tokens: int, seed: int) -> NDArray[np.uint8]:
    """Rows of fp8_ds_mla, Gaussian: 512 values of e4m3 with a scale of fp32 for each 128, and 64 of RoPE in bf16."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((tokens, 4, 128)).astype(np.float32)
    scales = np.abs(values).max(axis=2, keepdims=True) / 448
    nearest = np.abs(np.abs(values / scales)[..., None] - reader._E4M3.astype(np.float32)).argmin(axis=-1)
    rows = np.zeros((tokens, 656), np.uint8)
    rows[:, :512] = (nearest | np.signbit(values) << 7).reshape(tokens, 512)
    rows[:, 512:528] = scales.astype(np.float32).reshape(tokens, 4).view(np.uint8)
    rows[:, 528:] = measure.to_bf16(3 * rng.standard_normal((tokens, 64))).view(np.uint8)
    return rows


def of_latents(rows: NDArray[np.uint8]) -> NDArray[np.float64]:
    codes = rows[:, :512].astype(np.int64)
    scales = np.ascontiguousarray(rows[:, 512:528]).view(np.float32).astype(np.float64)
    return np.where(codes > 127, -1, 1) * reader._E4M3[codes & 127] * np.repeat(scales, 128, axis=1)


@pytest.mark.parametrize(("rope", "ratio"), [("raw", 1.57), ("exact", 1.69), ("mxfp8", 1.84)])
def test_latents_of_e4m3_by_fp4(rope: str, ratio: float) -> None:
    """As vLLM's fp8_ds_mla keeps them: smaller by so much, within the error, the RoPE part as its field says."""
    rows = latents(64, 1)
    fields = [Field(0, 512, "e4m3"), Field(512, 16, "fp32"), Field(528, 128, "bf16", rope)]
    coding = Coding(rows.nbytes, "fp4", fields=fields, pitch=656)
    assert 1 / coding.ratio > ratio
    assert compare(coding, rows.reshape(-1)) == Verdict.GOOD  # type: ignore[arg-type]
    back = coding.decode(coding.encode(rows)[0])[0].reshape(rows.shape)
    assert np.array_equal(back[:, 512:528], rows[:, 512:528])
    assert np.array_equal(back[:, 528:], rows[:, 528:]) == (rope != "mxfp8")
    assert 0.09 < measure._rms(of_latents(back), of_latents(rows)) < 0.11


def test_e4m3_by_fp4_keeps_what_no_number_is() -> None:
    """A NaN makes its 32 values NaN, zeros keep their signs, and the largest value of a block is exact."""
    block = np.tile(np.array([0x7E, 0x80, 0x00, 0xFE], np.uint8), 24)
    block[40] = 0xFF
    coding = Coding(96, "fp4", fields=[(0, 96, "e4m3")])
    back = coding.decode(coding.encode(block)[0])[0][0]
    assert np.array_equal(back[:32], block[:32]) and np.array_equal(back[64:], block[64:])
    assert (back[32:64] & 0x7F == 0x7F).all()


@pytest.mark.parametrize("what", HOSTILE)
def test_exact_loses_no_bit_or_says_so(what: str) -> None:
    block = words(what, 8192)
    coding = Coding(block.nbytes, "exact")
    coded, verdicts = coding.encode(block)
    back, found = coding.decode(coded)
    fits = what in ("subnormals", "NaN payloads", "zeros")  # the others have values too far below the largest
    assert found[0] == verdicts[0] == (Verdict.GOOD if fits else Verdict.NOT_STORED)
    assert np.array_equal(back[0], block.view(np.uint8) if verdicts[0] == Verdict.GOOD else np.zeros(block.nbytes))


def keys_with_biases(heads: int, channels: int, larger: float, order: str, seed: int) -> NDArray[np.uint16]:
    """16 tokens of keys whose heads have each three channels, of any number, that are far larger than the others."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((16, heads, channels)).astype(np.float32)
    for head in range(heads):
        keys[:, head, rng.permutation(channels)[:3]] += larger * rng.choice((-1, 1), 3)
    return measure.to_bf16(keys if order == "tokens" else keys.transpose(1, 0, 2)).reshape(-1)


@pytest.mark.parametrize(
    ("order", "heads", "channels"),
    [("tokens", 8, 128), ("tokens", 3, 64), ("tokens", 2, 80), ("heads", 8, 128), ("heads", 16, 64), ("heads", 2, 128)],
)
def test_exact_marks_channels_that_are_far_larger(order: str, heads: int, channels: int) -> None:
    """As biases of keys make them. Most blocks fit, no bit is lost, and the reference marks the same ones."""
    found = []
    for seed in range(12):
        block = keys_with_biases(heads, channels, 200, order, seed)
        coding = Coding(block.nbytes, "exact")
        if compare(coding, block) == Verdict.GOOD:
            n, coded = block.size, coding.encode(block)[0][0]
            assert np.array_equal(coding.decode(coded[None])[0][0], block.view(np.uint8))
            found.append(int(coded[reader._marks_at(n)]))
    assert len(found) >= 11 and found.count(0) <= 2, found
    assert order == "heads" or set(found) <= {0, heads * channels // 16}, found
    plain = measure.to_bf16(np.random.default_rng(1).standard_normal(16 * heads * channels).astype(np.float32))
    assert Coding(plain.nbytes, "exact").encode(plain)[0][0][reader._marks_at(plain.size)] == 0


@pytest.mark.parametrize(("values", "heads"), [(128, 5), (96, 8), (80, 20), (192, 8), (64, 3)])
def test_rows_with_a_pitch_are_cut_where_channels_can_be_found(values: int, heads: int) -> None:
    """Keys and values of a head side by side, as vLLM has them: units have whole runs of 16 rows."""
    keys = keys_with_biases(heads, values, 150, "heads", 3).reshape(-1, values)
    block = np.repeat(keys[:, None], 2, axis=1)
    block[:, 1] = measure.to_bf16(np.random.default_rng(1).standard_normal(keys.shape).astype(np.float32))
    fields = [(0, 2 * values, "bf16"), (2 * values, 2 * values, "bf16")]
    coding = Coding(block.nbytes, "exact", fields=fields, pitch=4 * values)
    assert all(unit.rows % 16 == 0 for unit in reader.units_of(coding))
    assert compare(coding, block.reshape(-1)) == Verdict.GOOD


def test_marks_that_are_damaged() -> None:
    """Any stay inside the block, and the reference reads the same."""
    block, rng = keys_with_biases(3, 64, 200, "tokens", 1), np.random.default_rng(3)
    coding, at = Coding(block.nbytes, "exact"), reader._marks_at(block.size)
    coded, verdicts = coding.encode(block)
    assert verdicts[0] == Verdict.GOOD and coded[0, at] == 12  # rows of 192 values
    for inner in (0, 1, 2, 5, 12, 100, 255):
        coded[0, at] = inner
        coded[0, at + 1 : at + 2 + block.size // 256] = rng.integers(0, 256, 1 + block.size // 256)
        back, found = coding.decode(coded)
        assert np.array_equal(back[0], reader.decode_block(coding, coded[0])[0]) and found[0] == Verdict.GOOD


LATENT = [Field(0, 512, "e4m3"), Field(512, 16, "fp32"), Field(528, 128, "bf16")]
FIELDS = {
    "latent": (656 * 64, {"fields": LATENT, "pitch": 656, "page_nbytes": 656 * 16}),
    "latent, two codecs": (656 * 64, {"fields": [*LATENT[:2], Field(528, 128, "bf16", "mxfp8")], "pitch": 656}),
    "halves": (4 * 40960, {"fields": [Field(0, 20480, "bf16"), Field(20480, 20480, "bf16")], "page_nbytes": 40960}),
    "halves by pitch": (4 * 40960, {"pitch": 20480, "page_nbytes": 40960}),
    "token by token": (64 * 4096, {"fields": [(2048, 2048, "bf16"), (0, 2048, "bf16")], "pitch": 4096}),
    "odd gaps": (30 * 77, {"fields": [(3, 6, "bf16"), (20, 50, "bf16")], "pitch": 77}),
    "long rows": (2 * 70000, {"fields": [(4, 69000, "bf16")], "pitch": 70000}),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str) -> None:
    nbytes, options = FIELDS[name]
    coding = Coding(nbytes, "exact", **options)  # type: ignore[arg-type]
    units = reader.units_of(coding)
    assert len(units) == coding.units
    pages = coding.block_nbytes // coding.page_nbytes
    assert sum(unit.coded_nbytes for unit in units) * pages == coding.coded_nbytes
    covered = np.zeros(coding.page_nbytes, int)
    for unit in units:
        covered[reader._rows(covered, unit)] += 1  # type: ignore[arg-type]
    assert (covered == 1).all()
    for seed in range(3):
        block = words("normal", -(-nbytes // 2), seed).view(np.uint8)[:nbytes]
        compare(coding, block)  # type: ignore[arg-type]


def test_damage_is_found_or_stays_inside() -> None:
    """Both decoders agree on changed bytes, and on bytes that never were a block."""
    rng = np.random.default_rng(3)
    seen = set()
    for codec in CODECS:
        coding = Coding(6000, codec, fields=[(0, 5000, "bf16"), (5000, 1000, "raw")])
        whole = coding.encode(words("normal", 3000))[0][0]
        for _ in range(200):
            coded = whole.copy()
            where = rng.integers(0, len(coded) if rng.integers(2) else 16, 1 + rng.integers(4))
            coded[where] = rng.integers(0, 256, len(where))
            back, verdicts = coding.decode(coded)
            same, verdict = reader.decode_block(coding, coded)
            assert verdicts[0] == verdict and np.array_equal(back[0], same)
            seen.add(verdict)
    assert seen >= {Verdict.GOOD, Verdict.DAMAGED}


def test_errors_stay_within_what_the_docs_say() -> None:
    data = measure.synthetic()
    by_codec = {report.codec: report for report in measure.measure(data)}
    assert by_codec["exact"].error == {"k": 0, "v": 0} and by_codec["exact"].ratio < 0.7645
    assert max(by_codec["mxfp8"].error.values()) < 0.03 and by_codec["mxfp8"].ratio < 0.52
    assert max(by_codec["fp4"].error.values()) < 0.1 and by_codec["fp4"].ratio < 0.286


def test_arguments() -> None:
    coding = Coding(4096, "exact", page_nbytes=2048)
    assert (coding.block_nbytes, coding.page_nbytes, coding.units, coding.lossless) == (4096, 2048, 1, True)
    assert coding.ratio < 0.775 and "4096 bytes coded to 3168" in repr(coding)
    blocks = np.zeros((3, 2048), np.uint16)
    out = np.empty((3, coding.coded_nbytes), np.uint8)
    coded, _ = coding.encode(blocks, out=out)
    assert np.shares_memory(coded, out)
    half = coding.encode(words("normal", 2048), valid_nbytes=1024)[0]
    cut = words("normal", 2048).reshape(2, -1).copy()
    cut[:, 512:] = 0
    assert np.array_equal(half, coding.encode(cut)[0])
    for wrong, error in (
        (lambda: coding.encode([1, 2]), "must be a NumPy array"),  # type: ignore[arg-type]
        (lambda: coding.encode(np.zeros(100, np.uint8)), "not a whole number of 4096"),
        (lambda: coding.encode(np.zeros((2, 4096), np.uint16)[:, ::2]), "C-contiguous"),
        (lambda: coding.encode(blocks, out=out[:2]), "room for 2 blocks, not 3"),
        (lambda: Coding(4096, "zip"), "there are exact, mxfp8, fp4"),
        (lambda: Coding(4096, "exact", fields=[(0, 7, "bf16")]), r"fields\[0\] has 7 bytes"),
        (lambda: Coding(4096, "exact", fields=[(0, 8, "int8")]), "must be one of 'raw', 'bf16'"),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            wrong()
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        coding.encode(blocks, out=out)
    assert KINDS[0] == "raw"


def test_a_field_that_is_kept() -> None:
    """Whatever it holds: it fits, and comes back bit by bit. The rest is coded."""
    half = Coding(4096, "mxfp8", fields=[(0, 2048, "bf16", "raw"), (2048, 2048, "bf16")])
    kept = Coding(4096, "mxfp8", fields=[(0, 4096, "bf16", "raw")])
    assert not half.lossless and kept.lossless and kept.coded_nbytes == 4096 + 16
    blocks = np.random.default_rng(1).integers(0, 1 << 16, (5, 2048)).astype(np.uint16)
    for coding in (half, kept):
        coded, verdicts = coding.encode(blocks)
        assert not verdicts.any()
        back = coding.decode(coded)[0].view(np.uint16)
        assert np.array_equal(back[:, :1024], blocks[:, :1024])
        assert np.array_equal(back[:, 1024:], blocks[:, 1024:]) == (coding is kept)
        assert np.array_equal(coded, [reader.encode_block(coding, block)[0] for block in blocks])
        assert Coding.parse(coding.text) == coding
    assert half.text != Coding(4096, "mxfp8", fields=[(0, 2048, "raw"), (2048, 2048, "bf16")]).text
    with pytest.raises(ValueError, match="codes none of the fields"):
        Coding(4096, "mxfp8", fields=[(0, 4096, "raw")])


def test_encoding_runs_beside_python() -> None:
    """Without the GIL: many threads, each with the bytes that one alone gives."""
    run_python(
        "import numpy as np, threading\n"
        "from kvswap.codecs import Coding\n"
        "coding = Coding(1 << 16, 'mxfp8')\n"
        "blocks = np.random.default_rng(1).integers(0, 1 << 16, (8, 1 << 15)).astype(np.uint16)\n"
        "wanted, found = coding.encode(blocks)[0], [None] * 8\n"
        "def work(i): found[i] = coding.encode(blocks[i])[0][0]\n"
        "threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]\n"
        "[t.start() for t in threads], [t.join() for t in threads]\n"
        "assert np.array_equal(np.stack(found), wanted)\n"
    )


@pytest.mark.not_sanitized("compiles a program, which has sanitizers of its own or none")
@pytest.mark.slow
def test_the_cuda_code_on_the_cpu(tmp_path: Path) -> None:
    """The kernels' own text, compiled as C++, its threads in a random order: the bytes of the C code."""
    if shutil.which("c++") is None or shutil.which("cc") is None:
        pytest.skip("no C++ compiler")
    objects = []
    for source in [*sorted((ROOT / "csrc/codecs").glob("*.c")), ROOT / "csrc/status.c"]:
        objects.append(str(tmp_path / f"{source.stem}.o"))
        flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-Icsrc", "-c", str(source), "-o", objects[-1]]
        subprocess.run(["cc", *flags], cwd=ROOT, check=True)
    flags = ["-std=c++17", "-O1", "-w", "-Icsrc", "-Itests/c", "tests/c/code_cta.cc", *objects]
    subprocess.run(["c++", *flags, "-o", str(tmp_path / "cta")], cwd=ROOT, check=True)
    run = subprocess.run([str(tmp_path / "cta")], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0 and run.stdout.endswith(" passed, 0 failed\n"), run.stderr[-2000:]


# -- the command ------------------------------------------------------------------------------------------------------


def write(path: Path, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    keys, values = rng.standard_normal((2, 2, 3, 200, 64), np.float32)
    if path.suffix == ".npz":
        np.savez(path, k=measure.to_bf16(keys), v=measure.to_bf16(values))
        return path
    items = {"key.0": keys[0], "key.1": keys[1], "value.0": values[0], "value.1": values[1]}
    header, data = {"__metadata__": {"by": "a test"}}, b""
    for name, array in items.items():
        part = measure.to_bf16(array).tobytes()
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(part)]}  # type: ignore[dict-item]
        data += part
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_the_command_reads_both_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for name in ("kv.npz", "kv.safetensors"):
        assert main(["codec", str(write(tmp_path / name)), "--json", "--length", "64", "--length", "100000"]) == 0
        text = capsys.readouterr()
        assert "exact: 1.3" in text.err and "no bit is lost" in text.err
        found.append(json.loads(text.out))
    assert found[0]["codecs"] == found[1]["codecs"]
    exact, mxfp8, fp4 = found[0]["codecs"]
    assert exact["not_stored"] == 0 and list(exact["attention"]) == ["64"]
    assert 0 < mxfp8["attention"]["64"]["both"] < fp4["attention"]["64"]["both"] < 0.2
    assert [len(report["layers"]) for report in found[0]["codecs"]] == [2, 2, 2]


def test_the_command_on_synthetic_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codec", "--outliers", "4096", "--codec", "fp4", "--length", "256"]) == 0
    assert "a key channel in 32 times 4096" in capsys.readouterr().out


def test_what_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "other.npz", weights=np.zeros(3))
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 40)
    for name, says in (
        ("other.npz", "has weights; keys begin with 'k'"),
        ("bad.safetensors", "not a .safetensors file"),
        ("kv.txt", "must be an .npz or a .safetensors file"),
        ("none.npz", "No such file"),
    ):
        assert main(["codec", str(tmp_path / name)]) == 2
        assert says in capsys.readouterr().err
    assert main(["codec", str(write(tmp_path / "kv.npz")), "--block", "1000"]) == 2
    assert "has 200 tokens; a block has 1000" in capsys.readouterr().err


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: .ci/run has a step with it")
    assert main(["codec", str(write(tmp_path / "kv.npz")), "--plot", str(tmp_path / "kv.svg")]) == 0
    assert "relative error of attention" in (tmp_path / "kv.svg").read_text()
