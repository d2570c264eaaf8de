"""Draws the pictures of the concepts: python docs/pictures/draw.py writes them beside this file.

Text stays text, lines are few, and the ground is white, so that a picture reads the same in light and dark pages.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

INK, FAINT, LINE = "#1c2733", "#5b6875", "#8794a1"
BLUE, GREEN, AMBER, RED, GREY = "#cfe3f7", "#d3ecd5", "#fbe6bf", "#f6c9c5", "#eceff2"


class Picture:
    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts: list[str] = []
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="14" role="img">\n'
            f"<title>{escape(title)}</title>\n"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>\n'
        )

    def box(self, x: float, y: float, w: float, h: float, text: str = "", fill: str = GREY, size: int = 14) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4" fill="{fill}" stroke="{LINE}"/>'
        )
        lines = text.split("\n") if text else []
        for i, line in enumerate(lines):
            self.text(x + w / 2, y + h / 2 + 5 + (i - (len(lines) - 1) / 2) * 17, line, "middle", size=size)

    def text(self, x: float, y: float, text: str, anchor: str = "start", fill: str = INK, size: int = 14,
             bold: bool = False) -> None:  # fmt: skip
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" font-size="{size}"{weight}>'
            f"{escape(text)}</text>"
        )

    def arrow(self, *points: tuple[float, float], dashed: bool = False, both: bool = False) -> None:
        path = " ".join(f"{'M' if i == 0 else 'L'}{x:g} {y:g}" for i, (x, y) in enumerate(points))
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        start = ' marker-start="url(#tip)"' if both else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="1.4"{dash}{start} marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        head = self.head.replace('orient="auto"', 'orient="auto-start-reverse"')
        return head + "\n".join(self.parts) + "\n</svg>\n"


def tiers() -> Picture:
    """Narrow, since the README shows it on telephones."""
    p = Picture(540, 250, "An engine, kvswap, and the three tiers between which it moves blocks")
    p.box(
        16,
        14,
        508,
        54,
        "an engine decides which blocks move:\nvLLM, SGLang, LMCache, TensorRT-LLM, FastDeploy, your own",
        size=16,
    )
    p.text(270, 96, "block ids  ↓    kvswap    ↑  which arrived, which are lost", "middle", size=16)
    for x, name, what, fill in (
        (16, "GPU memory", "a model's cache", BLUE), (203, "host memory", "pinned pools", GREEN),
        (390, "files, nodes", "for longer", AMBER),
    ):  # fmt: skip
        p.box(x, 116, 134, 116, f"{name}\n\n{what}", fill, 16)
    for x, there, back in ((152, "offload", "onboard"), (339, "store", "load")):
        p.text(x + 25, 152, there, "middle", size=13)
        p.arrow((x, 160), (x + 49, 160))
        p.arrow((x + 49, 192), (x, 192))
        p.text(x + 25, 210, back, "middle", size=13)
    return p


def blocks() -> Picture:
    p = Picture(760, 324, "Blocks, layers, pools and slots")
    p.text(30, 32, "GPU: a cache, layer-first", bold=True)
    p.text(30, 52, "each row is a tensor: all blocks of one layer", fill=FAINT)
    for layer in range(4):
        p.text(30, 90 + layer * 34, f"layer {layer}")
        for block in range(8):
            chosen = {3: BLUE, 5: AMBER}.get(block, "#ffffff")
            p.box(92 + block * 40, 70 + layer * 34, 38, 30, "", chosen)
    for block in range(8):
        p.text(111 + block * 40, 220, str(block), "middle", FAINT, 12)
    p.text(260, 240, "id of a block", "middle", FAINT, 12)
    p.text(480, 32, "host: a pool, block-first", bold=True)
    p.text(480, 52, "each slot holds all layers of a block", fill=FAINT)
    for slot in range(4):
        fill = {1: BLUE, 2: AMBER}.get(slot, "#ffffff")
        p.text(490, 92 + slot * 40, f"slot {slot}")
        for layer in range(4):
            p.box(548 + layer * 46, 70 + slot * 40, 45, 34, f"layer {layer}", fill, 11)
    p.arrow((420, 138), (482, 138))
    p.text(451, 128, "offload", "middle", size=12)
    p.arrow((482, 170), (420, 170))
    p.text(451, 188, "onboard", "middle", size=12)
    p.text(30, 268, "block: the keys and values of a fixed number of tokens; the unit that is moved.", fill=FAINT,
           size=13)  # fmt: skip
    p.text(30, 288, "layer: a block has a part in each layer's tensor. slab: one allocation that holds several layers.",
           fill=FAINT, size=13)  # fmt: skip
    p.text(30, 308, "pool: blocks of one size in known memory. slot: the place of a block in a pool.", fill=FAINT,
           size=13)  # fmt: skip
    return p


def transfer() -> Picture:
    p = Picture(760, 300, "The life of a transfer")
    p.text(30, 30, "in the call", bold=True)
    steps = ["check", "plan", "choose", "order", "issue"]
    words = ["ids, sizes,\noverlaps", "runs,\nrows", "lane,\npath", "event\nwaits", "copies,\nkernels"]
    for i, (step, word) in enumerate(zip(steps, words, strict=True)):
        p.box(30 + i * 100, 44, 84, 34, step, BLUE if i < 3 else GREEN)
        for j, line in enumerate(word.split("\n")):
            p.text(72 + i * 100, 96 + j * 15, line, "middle", FAINT, 12)
        if i:
            p.arrow((16 + i * 100, 61), (28 + i * 100, 61))
    p.text(30, 142, "an error here is raised: nothing has moved", fill=FAINT, size=12)
    p.text(345, 142, "from here on the call raises nothing", fill=FAINT, size=12)
    p.box(580, 44, 150, 34, "Transfer", "#ffffff")
    p.arrow((516, 61), (578, 61))
    p.text(655, 96, "the call returns: all", "middle", FAINT, 12)
    p.text(655, 111, "is queued on the device", "middle", FAINT, 12)
    p.text(30, 182, "on the device", bold=True)
    p.box(30, 200, 190, 60, "running\nbeside the model", GREY)
    p.arrow((224, 214), (330, 206))
    p.arrow((224, 230), (330, 230))
    p.arrow((224, 246), (330, 254))
    p.box(334, 192, 100, 24, "done", GREEN)
    p.box(334, 220, 100, 24, "failed", RED)
    p.box(334, 248, 100, 24, "cancelled", AMBER)
    p.text(448, 209, "every block arrived", size=13)
    p.text(448, 237, "failed_positions lists the lost ones", size=13)
    p.text(448, 265, "stopped before it was issued (files)", size=13)
    p.text(30, 290, "It ends in exactly one state. wait(timeout) returns, or raises its error; done() never blocks.",
           fill=FAINT, size=12)  # fmt: skip
    return p


def order() -> Picture:
    p = Picture(760, 320, "Order between the model's stream and two lanes")
    rows = [("model's stream", 60), ("lane of stores (D2H)", 150), ("lane of loads (H2D)", 240)]
    for name, y in rows:
        p.text(20, y + 24, name, size=13)
        p.parts.append(f'<path d="M170 {y + 20} L745 {y + 20}" stroke="{LINE}" stroke-dasharray="2 4"/>')
    p.box(180, 60, 110, 40, "kernels 1", BLUE)
    p.box(300, 60, 290, 40, "kernels 2", BLUE)
    p.box(625, 60, 110, 40, "kernels 3", BLUE)
    p.box(310, 150, 120, 40, "store a", GREEN)
    p.box(440, 150, 110, 40, "store b", GREEN)
    p.box(452, 240, 130, 40, "load c", AMBER)
    p.arrow((290, 100), (312, 148))
    p.text(172, 128, "compute stream", size=12)
    p.arrow((424, 190), (458, 238))
    p.text(308, 222, "pool: reads a's slot", size=12)
    p.arrow((576, 238), (634, 102))
    p.text(600, 222, "make_wait", size=12)
    p.text(170, 30, "time →", fill=FAINT, size=12)
    p.text(20, 306, "An arrow is a wait on the device. Stores and loads run side by side, and beside the model.",
           fill=FAINT, size=12)  # fmt: skip
    return p


def failure() -> Picture:
    p = Picture(760, 300, "A lost block travels, until it is written again")
    titles = ["1: an offload", "2: reads these slots", "3: writes them whole", "4: reads them again"]
    outcome = ["block 5 was refused", "fails for that block only", "the loss is cleared", "done"]
    for i, (title, end) in enumerate(zip(titles, outcome, strict=True)):
        x = 24 + i * 182
        p.text(x, 34, title, bold=True, size=13)
        for j, block in enumerate((3, 5, 8)):
            lost = block == 5 and i < 2
            p.box(x, 56 + j * 62, 64, 40, f"block {block}", "#ffffff", 12)
            p.box(x + 98, 56 + j * 62, 62, 40, "lost" if lost else "right", RED if lost else GREEN, 12)
            p.arrow((x + 66, 76 + j * 62), (x + 96, 76 + j * 62), dashed=lost)
        p.text(x, 254, end, size=13)
        p.text(x, 272, f"failed_positions: {[1] if i < 2 else []}", fill=FAINT, size=12)
    return p


PICTURES = {"tiers": tiers, "blocks": blocks, "transfer": transfer, "order": order, "failure": failure}


def main() -> None:
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent
    for name, picture in PICTURES.items():
        (folder / f"{name}.svg").write_text(picture().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
