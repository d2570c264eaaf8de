"""The picture of docs/performance.md, from the record of copies beside a decode step. Needs matplotlib:

python3 benchmarks/picture.py benchmarks/results/h200/load.txt docs/beside.svg

A record with a section of what engines do by hand ("--method numpy") has those bars too. A bar beyond the axis is cut,
and its end shows that.
"""

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROW = re.compile(
    r"^(?P<layout>\S*) +(?P<shape>\d+ x \d+ KiB x [\d,]+|\d+ KiB x [\d,]+|256 MiB x 1) +D2H +(?P<method>one copy|\w+)"
    r" +(?P<slowdown>[\d.]+) +\S+ +\S+ +(?P<gbps>[\d.]+) ",
    re.MULTILINE,
)
HOST = {"layers": "host layer-first", "1x64k": "one layer"}  # others: block-first
BY_HAND = {
    "numpy": "as vLLM's handler",  # pointers by NumPy, one batch call
    "warp": "a warp a block",  # a grid as long as the list
}
AXIS = 10.0  # %


@dataclass(frozen=True)
class Bar:
    """One method: its name, the slow-down of the step in %, GB/s of the copies, and a colour."""

    name: str
    longer: float
    gbps: str
    colour: str

    @property
    def label(self) -> str:
        """At its end."""
        return f"{self.longer:,.1f} % at {self.gbps} GB/s"


def bars_of(record: str) -> list[Bar]:
    """A plain copy and kvswap at its default priority by the first section, then what engines do by hand."""
    found = []
    sections = record.split("\n== ")[1:]
    for section in [sections[0], *(each for each in sections[1:] if "--method numpy" in each.partition("\n")[0])]:
        for row in (match.groupdict() for match in ROW.finditer(section)):
            size = row["shape"].rpartition(" x ")[0]
            if row["method"] == "one copy":
                name, colour = "one plain copy of 256 MiB", "grey"
            elif row["method"] == "auto":
                name, colour = f"{size}, {HOST.get(row['layout'].split('-')[-1], 'host block-first')}", "tab:blue"
            elif row["method"] in BY_HAND:
                name, colour = f"{size}, {BY_HAND[row['method']]}", "tab:orange"
            else:
                continue
            if section is sections[0] or colour == "tab:orange":
                found.append(Bar(name, 100 * (float(row["slowdown"]) - 1), row["gbps"], colour))
    return found


def draw(record: Path, picture: Path) -> None:
    """By how much a step takes longer, and the copies' speed beside it."""
    text = record.read_text(encoding="utf-8")
    rows = bars_of(text)
    importlib.import_module("matplotlib").rcParams["svg.fonttype"] = "none"  # text stays text
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(8, 0.42 * len(rows) + 1.5), layout="constrained"
    )
    axes = figure.subplots()
    lengths = [min(row.longer, AXIS) for row in rows]
    bars = axes.barh([row.name for row in rows], lengths, color=[row.colour for row in rows])
    for row, bar in zip(rows, bars, strict=True):
        end, middle = bar.get_width(), bar.get_y() + bar.get_height() / 2
        inside = end > 0.55 * AXIS
        axes.annotate(
            row.label, (max(end, 0.0), middle), xytext=(-16 if inside else 4, 0), textcoords="offset points",
            ha="right" if inside else "left", va="center", color="white" if inside else "black",
        )  # fmt: skip
        if row.longer > AXIS:  # cut: two slanted lines across its end
            axes.annotate("//", (0.985 * AXIS, middle), ha="center", va="center", color="white", weight="bold")
    card = re.search(r"\(([^()]+)\), beside", text)
    title = f"Copies to the host (D2H), {card[1] if card else 'GPU'}\nblue: kvswap at its default priority"
    if any(row.colour == "tab:orange" for row in rows):
        title += "; orange: what engines do by hand"
    figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
    axes.set(xlim=(0, AXIS), xlabel="a decode step takes so much longer while the copies run, %")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
