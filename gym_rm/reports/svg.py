"""Small charts as SVG text, for a page that needs no file beside it. Colours are classes of the page's style."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

# Of a drawing, and margins around the axes, in units of the drawing.
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 460, 56, 24, 12, 52

Ticks = Sequence[tuple[float, str]]
Point = tuple[float, float]


@dataclass(slots=True)
class Chart:
    """Axes and marks in data coordinates.

    Attributes:
        title: what the chart shows, for screen readers.
        x, y: lowest and highest values.
        x_ticks, y_ticks: positions and labels; a label of x may have several lines.
        width, height: of the drawing.
        bottom: height of the margin for the labels of the x axis.

    Example:
        >>> chart = Chart("one point", x=(0, 1), y=(0, 1))
        >>> chart.dots([(0.5, 0.5)], "model")
        >>> chart.svg().count("<circle")
        1
    """

    title: str
    x: Point
    y: Point
    x_label: str = ""
    y_label: str = ""
    x_ticks: Ticks = ()
    y_ticks: Ticks = ()
    width: int = WIDTH
    height: int = 280
    bottom: int = BOTTOM
    _marks: list[str] = field(default_factory=list)

    def line(self, points: Sequence[Point], kind: str) -> None:
        """Draw a line through points."""
        self._marks.append(f'<polyline class="line {kind}" points="{self._path(points)}"/>')

    def band(self, lower: Sequence[Point], upper: Sequence[Point], kind: str) -> None:
        """Fill the area between two lines."""
        self._marks.append(f'<polygon class="band {kind}" points="{self._path([*lower, *reversed(upper)])}"/>')

    def dots(self, points: Sequence[Point], kind: str, *, radius: float = 4) -> None:
        """Draw a dot at each point."""
        for x, y in points:
            self._marks.append(f'<circle class="dot {kind}" cx="{self._x(x)}" cy="{self._y(y)}" r="{radius:.1f}"/>')

    def bar(self, low: Point, high: Point, kind: str, *, hint: str = "") -> None:
        """Fill a rectangle between two corners; `hint` is shown under the pointer."""
        x, y, right, bottom = self._x(low[0]), self._y(high[1]), self._x(high[0]), self._y(low[1])
        size = f'width="{max(0.0, right - x):.1f}" height="{max(0.0, bottom - y):.1f}"'
        self._marks.append(f'<rect class="bar {kind}" x="{x}" y="{y}" {size}><title>{escape(hint)}</title></rect>')

    def words(self, point: Point, text: str, *, anchor: str = "middle") -> None:
        """Write a text beside a point, or around it."""
        place = f'x="{self._x(point[0])}" y="{self._y(point[1])}" dy="0.35em"'
        self._marks.append(f'<text class="mark" {place} text-anchor="{anchor}">{escape(text)}</text>')

    def svg(self) -> str:
        """Return the drawing."""
        right, bottom = self.width - RIGHT, self.height - self.bottom
        parts = [
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.title)}" '
            'xmlns="http://www.w3.org/2000/svg">'
        ]
        for value, label in self.y_ticks:
            y = self._y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end" dy="0.35em">{escape(label)}</text>')
        for value, label in self.x_ticks:
            x = self._x(value)
            parts.append(f'<line class="tick" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>')
            for row, words in enumerate(label.split("\n")):
                parts.append(f'<text x="{x}" y="{bottom + 16 + 12 * row}" text-anchor="middle">{escape(words)}</text>')
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        parts.extend(self._marks)
        middle = (LEFT + right) / 2
        parts.append(f'<text class="label" x="{middle}" y="{self.height - 6}" text-anchor="middle">')
        parts.append(f"{escape(self.x_label)}</text>")
        if self.y_label:
            place = f"rotate(-90) translate(-{(TOP + bottom) / 2:.0f} 13)"
            parts.append(f'<text class="label" transform="{place}" text-anchor="middle">{escape(self.y_label)}</text>')
        return "".join([*parts, "</svg>"])

    def _x(self, value: float) -> float:
        low, high = self.x
        return round(LEFT + (value - low) / (high - low or 1) * (self.width - LEFT - RIGHT), 1)

    def _y(self, value: float) -> float:
        (low, high), zero = self.y, self.height - self.bottom
        return round(zero - (value - low) / (high - low or 1) * (zero - TOP), 1)

    def _path(self, points: Sequence[Point]) -> str:
        return " ".join(f"{self._x(x)},{self._y(y)}" for x, y in points)


def round_values(low: float, high: float, *, most: int = 5) -> list[float]:
    """Return at most `most` + 1 round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten.

    Example:
        >>> round_values(0.31, 0.67)
        [0.4, 0.5, 0.6]
    """
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(size * power for size in (1, 2, 5, 10) if size * power * most >= span)
    return [round(step * i, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def shares(low: float = 0.0, high: float = 1.0, *, step: float = 0.25) -> list[tuple[float, str]]:
    """Return ticks from `low` to `high`, as percentages."""
    count = round((high - low) / step)
    return [(low + step * i, f"{low + step * i:.0%}") for i in range(count + 1)]
