"""A drawing in inches from its top left corner: boxes, lines and labels, which are written to a file at the end."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

INK, FAINT, PALE = "#22282e", "#6b747c", "#dfe3e6"
SMALLEST = 8.0  # points of text
LINE = 0.155  # inches from one line of text of this size to the next

Side = Literal["left", "center", "right"]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle; `hatch` as in matplotlib."""

    x: float
    y: float
    width: float
    height: float
    color: str
    edge: str = "none"
    hatch: str = ""
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Stroke:
    """A line from one point to another."""

    x: float
    y: float
    to_x: float
    to_y: float
    color: str = FAINT
    thickness: float = 0.8


@dataclass(frozen=True, slots=True)
class Label:
    """A line of text whose middle is at height `y`."""

    x: float
    y: float
    text: str
    size: float = SMALLEST
    color: str = INK
    bold: bool = False
    side: Side = "left"
    plate: bool = False

    @property
    def extent(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom."""
        wide, half = width_of(self.text, self.size, self.bold), self.size / 72 / 2
        left = self.x - {"left": 0.0, "center": wide / 2, "right": wide}[self.side]
        return left, self.y - half, left + wide, self.y + half


@dataclass(slots=True)
class Drawing:
    """What is drawn, in its order.

    Attributes:
        width, height: in inches; the height grows with what is drawn.
        boxes, strokes, labels: lie over each other in this order.
    """

    width: float
    height: float = 0.0
    boxes: list[Box] = field(default_factory=list)
    strokes: list[Stroke] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the drawing to a file in the format of its suffix."""
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle

        # Text stays text in an SVG, and equal plans give equal files.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gym_rm", "hatch.linewidth": 0.6}):
            figure = Figure(figsize=(self.width, self.height), dpi=130)
            axes = figure.add_axes((0, 0, 1, 1))
            axes.set_axis_off()
            axes.set_xlim(0, self.width)
            axes.set_ylim(self.height, 0)
            for box in self.boxes:
                axes.add_patch(
                    Rectangle(
                        (box.x, box.y),
                        box.width,
                        box.height,
                        facecolor=box.color,
                        edgecolor=box.edge,
                        linewidth=0.8,
                        linestyle="--" if box.dashed else "-",
                        hatch=box.hatch or None,
                    )
                )
            for line in self.strokes:
                ends = (line.x, line.to_x), (line.y, line.to_y)
                axes.plot(*ends, color=line.color, linewidth=line.thickness)
            for label in self.labels:
                plate = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none"}
                axes.text(
                    label.x,
                    label.y,
                    label.text.replace("$", r"\$"),
                    size=label.size,
                    color=label.color,
                    weight="bold" if label.bold else "normal",
                    ha=label.side,
                    va="center_baseline",
                    bbox=plate if label.plate else None,
                )
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def width_of(text: str, size: float = SMALLEST, bold: bool = False) -> float:
    """Return the width of a line of text in inches."""
    return sum(_advance(character, bold) for character in text) * size / 72


@functools.lru_cache(maxsize=4096)
def _advance(character: str, bold: bool) -> float:
    """Return the width of a character between two others, as a share of the size of the text."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(weight="bold" if bold else "normal", size=100)
    wide, narrow = (
        text_to_path.get_text_width_height_descent(each, font, False)[0] for each in (f"n{character}n", "nn")
    )
    return float(wide - narrow) / 100


def shorten(text: str, room: float, size: float = SMALLEST, bold: bool = False) -> str:
    """Return the text, cut at its end with an ellipsis if it is wider than `room`."""
    if width_of(text, size, bold) <= room:
        return text
    left = room - width_of("…", size, bold)
    kept = 0
    while kept < len(text) and (left := left - width_of(text[kept], size, bold)) >= 0:
        kept += 1
    return f"{text[:kept]}…"


def spread(wanted: list[float], widths: list[float], low: float, high: float, gap: float = 0.12) -> list[float] | None:
    """Return left ends of labels near their wanted middles, none over another; None if there is no room."""
    if sum(widths) + gap * (len(widths) - 1) > high - low:
        return None
    places, end = [], low
    for middle, wide in zip(wanted, widths, strict=True):
        places.append(max(middle - wide / 2, end))
        end = places[-1] + wide + gap
    limit = high
    for i in range(len(places) - 1, -1, -1):
        places[i] = min(places[i], limit - widths[i])
        limit = places[i] - gap
    return places
