"""Tables of a run's lines: medians of each configuration, and its ratio to another's with the interval of the pairs.

PYTHONPATH=benchmarks python3 -m serving.table serving.jsonl...
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from serving.configurations import NAMES, REPEATED, has_neighbour, lossy, takes

Turns = dict[tuple[int, int], tuple[float, float]]  # of each turn of a run: its figure, and the processor's probe
LIKE = 1.15  # two turns are a pair if their probes differ by less: else the processor was faster for one of them
Value = Callable[[dict[str, Any]], "float | None"]
# Compared to vLLM's own of its kind, or to kvswap without a neighbour; the others to native.
BASE = {"simple-kvswap": "simple"} | dict.fromkeys(("kvswap-lend", "kvswap-replicas", "kvswap-replicas-lend"), "kvswap")


def _middle(key: str) -> Value:
    return lambda record: median(record[key]) if record.get(key) else None


def _itl(key: str) -> Value:
    return lambda record: record.get("itl_ms", {}).get(key)


def _of(direction: str, value: Callable[[dict[str, Any]], float | None]) -> Value:
    return lambda record: value(record[direction]) if record.get(direction) else None


def _submission(direction: str) -> Value:
    return _of(direction, lambda made: median(made["submit_ms"]) if made["submit_ms"] else None)


def _speed(direction: str) -> Value:
    return _of(direction, lambda made: made.get("GBps"))


def _each_ms(direction: str) -> Value:
    return _of(direction, lambda made: 1e3 * made["device_s"] / made["jobs"] if made.get("device_s") else None)


def _run(direction: str) -> Value:
    return _of(direction, lambda made: made.get("host_blocks_a_run"))


def _took(direction: str) -> Value:
    return _of(direction, lambda made: median(made["took_ms"]) if made.get("took_ms") else None)


def _by_neighbour(record: dict[str, Any]) -> float | None:
    load = record.get("load", {}).get("bytes")
    return record["by_neighbour"][0] / load if load and "by_neighbour" in record else None


def _thread(direction: str) -> Value:
    return _of(direction, lambda made: median(made["thread_ms"]) if made.get("thread_ms") else None)


def _hit(key: str, cached: str) -> Value:
    def value(record: dict[str, Any]) -> float | None:
        found = [took for took, had in zip(record[key], record[cached], strict=True) if had]
        return median(found) if found else None

    return value


SPREAD = (
    "TTFT computed, ms", "TTFT, the host has it, ms", "burst, tokens/s", "ITL decoding alone, median, ms",
    "ITL beside loads, mean, ms",
)  # fmt: skip
MANY = 4096
MEMORY = f"host memory for {MANY:,} blocks, GiB"

ROWS: list[tuple[str, str, Value]] = [
    ("TTFT computed, ms", "store", _middle("ttft_ms")),
    ("TTFT, the GPU has it (floor), ms", "hits", _hit("floor_ms", "floor_cached")),
    ("TTFT, the host has it, ms", "hits", _hit("ttft_ms", "cached")),
    ("burst, tokens/s", "burst", lambda record: record["tokens_per_s"]),
    ("ITL decoding alone, median, ms", "alone", _itl("p50")),
    ("ITL decoding alone, mean, ms", "alone", _itl("mean")),
    ("ITL decoding alone, p99, ms", "alone", _itl("p99")),
    ("ITL beside loads, mean, ms", "loads", _itl("mean")),
    ("ITL beside loads, p99, ms", "loads", _itl("p99")),
    ("TTFT of what is loaded meanwhile, ms", "loads", _middle("stream_ttft_ms")),
    ("requests loaded meanwhile, 1/s", "loads", lambda record: record["streamed"] / record["seconds"]),
    ("ITL beside stores, mean, ms", "stores", _itl("mean")),
    ("ITL beside stores, p99, ms", "stores", _itl("p99")),
    ("requests stored meanwhile, 1/s", "stores", lambda record: record["streamed"] / record["seconds"]),
    ("host blocks in a run, of loads", "hits", _run("load")),
    ("host blocks in a run, beside stores", "stores", _run("store")),
    ("submission of a load, ms", "hits", _submission("load")),
    ("submission of a store, ms", "store", _submission("store")),
    ("submission of a load by the connector's thread, ms", "hits", _thread("load")),
    ("submission of a store by the connector's thread, ms", "store", _thread("store")),
    ("loads on the device, GB/s", "hits", _speed("load")),
    ("a load on the device, ms", "hits", _each_ms("load")),
    ("a load until vLLM saw that it had ended, ms", "hits", _took("load")),
    ("of what is loaded, by the neighbour's link", "hits", _by_neighbour),
    ("TTFT, the neighbour's prompt, ms", "foreign", _hit("ttft_ms", "cached")),
    ("a load of the neighbour's prompt on the device, ms", "foreign", _each_ms("load")),
    ("stores on the device, GB/s", "store", _speed("store")),
    ("connector, a step with nothing to move, us", "idle", _middle("connector_us")),
]


def figures(lines: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, Turns]]]:
    """By regime, row and configuration."""
    made: dict[str, dict[str, dict[str, Turns]]] = {}
    for line in lines:
        about = line.get("about", {})
        if about.get("host_blocks") and "host_gib" in about:  # serving_sglang's have no GiB
            figure = about["host_gib"] * MANY / about["host_blocks"]
            made.setdefault(line["regime"], {}).setdefault(MEMORY, {}).setdefault(line["config"], {})
            made[line["regime"]][MEMORY][line["config"]][line.get("run", 0), 0] = figure, 1.0
        record = line.get("record")
        if not record or (record.get("short") and line["phase"] != "hits"):  # there, of each prompt
            continue
        for title, phase, value in ROWS:
            if line["phase"] == phase and (figure := value(record)) is not None:
                rows = made.setdefault(line["regime"], {}).setdefault(title, {})
                turn = line.get("run", 0), line["repeat"]
                rows.setdefault(line["config"], {})[turn] = figure, line.get("probe_ms", 1.0)
    return made


def ratio(ours: Turns, theirs: Turns) -> tuple[float, float, float, int] | None:
    """The median, least and largest of the pairs' ratios, and how many pairs there are; None: none."""
    found = []
    for turn in ours.keys() & theirs.keys():
        (figure, probe), (base, other) = ours[turn], theirs[turn]
        if base and max(probe, other) < LIKE * min(probe, other):
            found.append(figure / base)
    return (median(found), min(found), max(found), len(found)) if found else None


def _number(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 1e4 else f"{figure:,.4g}"


def _cell(config: str, row: dict[str, Turns]) -> str:
    if config not in row:
        return "-"
    figure = median(value for value, _ in row[config].values())
    text = _number(figure)
    base = BASE.get(config, "native")
    if base == config or base not in row or config == "none":
        return text
    found = ratio(row[config], row[base])
    if found is None:
        return text
    middle, least, most, _ = found
    return f"{text} ({middle:.2f})" if least == most else f"{text} ({middle:.2f}, {least:.2f}-{most:.2f})"


def _order(config: str) -> tuple[int, str]:
    return [*NAMES].index(config.partition(":")[0]), config


def _spreads(rows: dict[str, dict[str, Turns]]) -> list[str]:
    """The least and the largest of the turns, of the rows that are quoted most."""
    made = []
    for title in SPREAD:
        found = {config: [value for value, _ in turns.values()] for config, turns in rows.get(title, {}).items()}
        each = [f"{config} {_number(min(of))}-{_number(max(of))}" for config, of in found.items() if len(of) > 1]
        made += [f"turns, {title}: {'; '.join(each)}"] if each else []
    return made


def _beside_none(rows: dict[str, dict[str, Turns]]) -> list[str]:
    """What decoding costs more where there is offloading."""
    made = []
    for title in ("ITL decoding alone, mean, ms", "ITL beside stores, mean, ms"):
        row = rows.get(title, {})
        for config in sorted(row, key=_order):
            found = ratio(row[config], row["none"]) if "none" in row and config != "none" else None
            if found:
                middle, least, most, pairs = found
                what = f"{title[:-10]}, {config}: {middle:.2f} ({least:.2f}-{most:.2f})"
                made.append(f"{what} times no offloading's; pairs: {pairs}")
    return made


def _late(lines: list[dict[str, Any]], name: str) -> list[str]:
    """Configurations whose stores took longer than the load gave them."""
    made = []
    for line in lines:
        record = line.get("record") or {}
        if line["regime"] != name or line.get("phase") != "stores":
            continue
        begun, planned = record.get("streamed", 0), record.get("planned", 0)
        if begun < 0.9 * planned:
            made.append(
                f"stores, {line['config']}, turn {line['repeat']}: {begun} of {planned} were begun, as the blocks of "
                "the others were still being stored"
            )
    return made


def _counted(
    lines: list[dict[str, Any]], name: str, of: Callable[[dict[str, Any]], dict[str, int]]
) -> dict[str, Counter[str]]:
    """Sums over a regime's records, by configuration; those that have any."""
    made: dict[str, Counter[str]] = {}
    for line in lines:
        if line["regime"] == name and (counts := of(line)):
            made.setdefault(line["config"], Counter()).update(counts)
    return made


def _own_steps(lines: list[dict[str, Any]], name: str) -> list[str]:
    """Under kvswap_overlap: what the steps of the loads waited for."""
    made = _counted(lines, name, lambda line: (line.get("record") or {}).get("own_steps", {}))
    return [
        f"{config}: loads in their request's step: {of['layers']} waited for layer by layer, {of['whole']} as a whole"
        for config, of in made.items()
    ]


def _ahead(lines: list[dict[str, Any]], name: str) -> list[str]:
    """Under kvswap_overlap: loads that were reported ahead, and still ran when the step that waits for them began."""

    def by_phase(line: dict[str, Any]) -> dict[str, int]:
        count = (line.get("record") or {}).get("ahead")
        return {line["phase"]: count} if count else {}

    return [
        f"{config}: loads reported ahead that a step waited for: {of['burst']} of bursts, {of['loads']} beside decoding"
        for config, of in _counted(lines, name, by_phase).items()
    ]


def faults(lines: list[dict[str, Any]], name: str) -> list[str]:
    """What a regime was to measure and did not, and what went wrong: without a line here, the figures are what they
    say they are."""
    made = []
    of = [line for line in lines if line["regime"] == name]
    for line in of:
        what = f"{line.get('config')}, {line.get('phase', 'engine')}"
        record = line.get("record") or {}
        where = f"{what}, turn {line['repeat']}" if line.get("phase") in REPEATED else what
        made += [f"FAILED: {where}: {line[key]}" for key in ("error", "failed") if key in line]
        made += [f"NOT MEASURED: {where}: {reason}" for reason in record.get("short", ())]
        if line.get("phase") == "truth" and any(record.get("differ", ())):
            made.append(f"WRONG BYTES: {where}: {sum(record['differ'])} blocks differ")
        if line.get("phase") == "foreign" and record.get("differ"):
            made.append(f"WRONG BYTES: {where}: {record['differ']} blocks differ")
        if line.get("phase") == "skipped" and record.get("differ") == 0:
            made.append(f"NOT MEASURED: {where}: a copy that was left out did not show, so that truth proves nothing")
    for asked in (line for line in of if "asked" in line):
        run = [line for line in of if line["run"] == asked["run"] and "record" in line]
        there = {(line["config"], line["phase"]) for line in run}
        for config in asked["configs"]:
            missing = [phase for phase in asked["asked"] if takes(config, phase) and (config, phase) not in there]
            if missing:
                made.append(f"NOT MEASURED: {config}: {', '.join(missing)}: not run, see the log, or give it more time")
    return made


def _size(about: dict[str, Any]) -> str:
    return f" of {about['host_gib']:g} GiB" if "host_gib" in about else f" for {about['host_blocks']} blocks"


def _starts(lines: list[dict[str, Any]], name: str) -> list[str]:
    made = []
    for line in lines:
        if line["regime"] == name and line.get("about", {}).get("register_s"):
            about = line["about"]
            made.append(
                f"start, {line['config']}: {about['start_s']} s, of it {sum(about['register_s']):.1f} s until the host "
                f"memory{_size(about)} was there and pinned"
            )
    return made


def _profiles(lines: list[dict[str, Any]], name: str) -> list[str]:
    """Where a TTFT goes: medians of a few prompts, one after the other, with all calls timed."""
    made = []
    for line in lines:
        if line["regime"] != name or line.get("phase") != "profile" or not line.get("record"):
            continue
        hits = [each for each in line["record"]["hit"] if "loading_ms" in each]
        if hits:
            ttft, before, loading, device, after = (
                f"{median(each[key] for each in hits):.1f}"
                for key in ("ttft_ms", "to_submission_ms", "loading_ms", "device_ms", "to_token_ms")
            )
            parts = (
                f"a TTFT of {line['config']}, {ttft} ms: {before} to the submission of its load, {loading} until that",
                f"was seen to have ended ({device} on the device), {after} until its token;",
                f"{median(each['ttft_ms'] for each in line['record']['floor']):.1f} where the GPU has it",
            )
            made.append(" ".join(parts))
    return made


def _speeds(lines: list[dict[str, Any]], name: str) -> list[str]:
    probes = [line["probe_ms"] for line in lines if line["regime"] == name and "probe_ms" in line]
    if not probes:
        return []
    slow = max(probes) / min(probes)
    return [f"the processor was up to {slow:.2f} times slower; turns that differ by {LIKE - 1:.0%} or more are no pair"]


def _truth(lines: list[dict[str, Any]], name: str) -> list[str]:
    made = []
    for line in lines:
        record = line.get("record")
        if line["regime"] != name or not record or line.get("phase") not in ("truth", "skipped"):
            continue
        if line["phase"] == "truth":
            blocks, differ = sum(record["blocks"]), sum(record["differ"])
            text = f"truth, {line['config']}: {differ} of {blocks} blocks differ, {record['distinct']} distinct"
            if lossy(line["config"]):
                text += f"; two loads are compared, {record['changed']} blocks differ from those computed"
            made.append(text)
        else:
            made.append(f"a copy left out, {line['config']}: {record['differ']} of {record['blocks']} blocks differ")
    return made


def _neighbours(lines: list[dict[str, Any]], name: str) -> list[str]:
    """What came over a neighbour's link, and what a neighbour had stored."""
    bytes_of: dict[str, list[int]] = {}
    foreign: dict[str, list[int]] = {}
    for line in lines:
        record = line.get("record") or {}
        if line["regime"] == name and "by_neighbour" in record:
            found = bytes_of.setdefault(line["config"], [0, 0])
            bytes_of[line["config"]] = [a + b for a, b in zip(found, record["by_neighbour"], strict=True)]
        if line["regime"] == name and line.get("phase") == "foreign" and record:
            before = foreign.setdefault(line["config"], [0, 0])
            foreign[line["config"]] = [before[0] + record["differ"], before[1] + record["blocks"]]
    made = [
        f"links, {config}: {got / 1e9:.3f} GB came over the neighbour's, which counted {given / 1e9:.3f}"
        for config, (got, given) in bytes_of.items()
    ]
    made += [f"the neighbour's prompts, {config}: {bad} of {of} blocks differ" for config, (bad, of) in foreign.items()]
    return made


def tables(lines: list[dict[str, Any]]) -> str:
    """One a regime."""
    parts = []
    made = figures(lines)
    for name in dict.fromkeys(line["regime"] for line in lines):
        rows = made.get(name, {})
        configs = sorted({config for row in rows.values() for config in row}, key=_order)
        cells = [["", *configs]]
        for title in (*(title for title, _, _ in ROWS), MEMORY):
            if title in rows:
                cells.append([title, *(_cell(config, rows[title]) for config in configs)])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        text = [name, *faults(lines, name)]
        text += ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        pairs = max((len(row[config]) for row in rows.values() for config in row), default=0)
        text.append(f"medians of {pairs} turns; in brackets the pairs' ratios to vLLM's own: median, least-largest")
        text += ["of configurations with a neighbour: to kvswap's"] if any(map(has_neighbour, configs)) else []
        text += _speeds(lines, name)
        text += [
            *_spreads(rows),
            *_own_steps(lines, name),
            *_ahead(lines, name),
            *_beside_none(rows),
            *_late(lines, name),
            *_starts(lines, name),
            *_profiles(lines, name),
        ]
        text += [*_neighbours(lines, name), *_truth(lines, name)]
        parts.append("\n".join(text))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(tables([json.loads(line) for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]))
