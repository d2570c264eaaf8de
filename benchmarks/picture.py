"""The picture of docs/performance.md, from the record of copies beside a decode step. Needs matplotlib:

python3 benchmarks/picture.py benchmarks/results/h200/load.txt docs/beside.svg
"""

import importlib
import re
import sys
from pathlib import Path

ROW = re.compile(
    r"^(?P<layout>\S*) +(?P<shape>\d+ x \d+ KiB x [\d,]+|\d+ KiB x [\d,]+|256 MiB x 1) +D2H +(?P<method>one copy|auto)"
    r" +(?P<slowdown>[\d.]+) +\S+ +\S+ +(?P<gbps>[\d.]+) ",
    re.MULTILINE,
)


def draw(record: Path, picture: Path) -> None:
    """A bar a row of the record's first table: by how much a step takes longer, and the copies' speed beside it."""
    first = record.read_text(encoding="utf-8").split("\n== ")[1]
    rows = [match.groupdict() for match in ROW.finditer(first)]
    names = [
        "one plain copy of 256 MiB"
        if row["method"] == "one copy"
        else f"{row['shape'].rpartition(' x ')[0]}, "
        + {"layers": "host layer-first", "1x64k": "one layer"}.get(row["layout"].split("-")[-1], "host block-first")
        for row in rows
    ]
    importlib.import_module("matplotlib").rcParams["svg.fonttype"] = "none"  # text stays text
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(8, 0.5 * len(rows) + 1.2), layout="constrained"
    )
    axes = figure.subplots()
    longer = [100 * (float(row["slowdown"]) - 1) for row in rows]
    bars = axes.barh(names, longer, color=["grey"] + ["tab:blue"] * (len(rows) - 1))
    labels = [f"{value:.1f} % at {row['gbps']} GB/s" for value, row in zip(longer, rows, strict=True)]
    axes.bar_label(bars, labels, padding=4)
    card = re.search(r"\(([^()]+)\), beside", first)
    title = f"Copies to the host (D2H), {card[1] if card else 'GPU'}. Blue: kvswap at its default priority"
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set(xlim=(0, 5), xlabel="a decode step takes so much longer while the copies run, %")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
