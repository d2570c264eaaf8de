"""The table of a run's lines: medians of each way, and its ratio to SGLang's own with the interval of the pairs.

PYTHONPATH=benchmarks python3 -m serving_sglang.table serving.jsonl...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from serving.table import ROWS, Turns, figures, ratio

from serving_sglang.ways import split


def _base(way: str, ways: list[str]) -> str:
    """SGLang's own copies in the same layout, or in its default one."""
    _, layout = split(way)
    found = [each for each in ways if split(each)[0] == "sglang"]
    return next((each for each in found if split(each)[1] == layout), found[0] if found else "")


def _cell(way: str, row: dict[str, Turns]) -> str:
    if way not in row:
        return "-"
    text = f"{median(value for value, _ in row[way].values()):,.4g}"
    base = _base(way, [*row])
    found = ratio(row[way], row[base]) if base and base != way else None
    return f"{text} ({found[0]:.2f}, {found[1]:.2f}-{found[2]:.2f})" if found else text


def _truth(line: dict[str, Any]) -> str:
    record = line["record"]
    if line["phase"] == "skipped":
        return f"a page left out, {line['config']}: {record['differ']} of {record['blocks']} pages differ"
    return (
        f"truth, {line['config']}: {sum(record['differ'])} of {sum(record['blocks'])} pages differ, "
        f"{record['distinct']} distinct, {record['from_host']} tokens from the host"
    )


def wrong(lines: list[dict[str, Any]]) -> bool:
    """Whether a page came back wrong, or none did, or one that was left out went by unnoticed."""
    for line in lines:
        record = line.get("record")
        if record and line["phase"] == "truth" and (any(record["differ"]) or not all(record["from_host"][1:])):
            return True
        if record and line["phase"] == "skipped" and not record["differ"]:
            return True
    return False


def tables(lines: list[dict[str, Any]]) -> str:
    """Of all lines so far."""
    ways = list(dict.fromkeys(line["config"] for line in lines))
    rows = figures(lines).get("sglang", {})
    cells = [["", *ways]]
    cells += [[title, *(_cell(way, rows[title]) for way in ways)] for title, _, _ in ROWS if title in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    turns = max((len(row[way]) for row in rows.values() for way in row), default=0)
    text.append(f"medians of {turns} turns; in brackets the pairs' ratios to SGLang's own: median, least-largest")
    text += [_truth(line) for line in lines if line.get("phase") in ("truth", "skipped") and line.get("record")]
    return "\n".join(text)


if __name__ == "__main__":
    print(tables([json.loads(line) for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]))
