"""Pictures as SVG text: one card, light and dark colours, words that can be read at 400 pixels and at 1200.

A picture in an `<img>` cannot know the page around it, so that the card has its own background. Its media queries see
the width at which it is shown.
"""

from collections.abc import Mapping
from html import escape

WIDTH, MARGIN = 800, 28  # units of a picture
# Okabe and Ito's blue and orange, darker and paler: told apart without colour, too.
STYLE = """
svg { --card: #fffefb; --edge: #d8d5cc; --ink: #1c2024; --soft: #5d646b; --grid: #e3e0d8;
  --strong: #0b5394; --second: #e8a33d; --third: #7a8087; --pale: #c3d6e8; --card-ink: #fff; }
@media (prefers-color-scheme: dark) { svg { --card: #161b22; --edge: #30363d; --ink: #e6e8ea; --soft: #a2a9b1;
  --grid: #2b3138; --strong: #58a6ff; --second: #e8a33d; --third: #8b929a; --pale: #24405e; --card-ink: #0b1117; } }
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif;
  font-size: 19px; fill: var(--ink); font-variant-numeric: tabular-nums; }
@media (min-width: 640px) { text { font-size: 15px; } }
.card { fill: var(--card); stroke: var(--edge); }
.title { font-size: 23px; font-weight: 650; }
@media (min-width: 640px) { .title { font-size: 20px; } }
.soft { fill: var(--soft); } .bold { font-weight: 650; }
.grid { stroke: var(--grid); } .axis { stroke: var(--soft); }
.strong { fill: var(--strong); } .second { fill: var(--second); } .third { fill: var(--third); }
.pale { fill: var(--pale); }
@media (prefers-reduced-motion: reduce) { * { animation: none !important; } }
"""


def picture(height: float, title: str, words: str, body: list[str], style: str = "") -> str:
    """Return a card of `WIDTH` by `height` units; `title` and `words` are for screen readers."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        'aria-labelledby="title words">',
        f'<title id="title">{escape(title)}</title><desc id="words">{escape(words)}</desc>',
        f"<style>{STYLE}{style}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="12"/>',
        *body,
        "</svg>\n",
    ])  # fmt: skip


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return words whose baseline starts (or ends, or has its middle) at a point."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str, more: str = "") -> str:
    """Return a rectangle; `more` are further attributes."""
    return f'<rect class="{kind}" x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}"{more}/>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str, more: str = "") -> str:
    """Return a straight line."""
    return f'<line class="{kind}" x1="{x1:.4g}" y1="{y1:.4g}" x2="{x2:.4g}" y2="{y2:.4g}"{more}/>'


def keyframes(name: str, total: float, states: Mapping[float, str]) -> str:
    """Return the animation `name`, of `total` seconds: styles of an element at some seconds."""
    steps = " ".join(f"{100 * second / total:.4g}% {{ {style} }}" for second, style in states.items())
    return f"@keyframes {name} {{ {steps} }}\n"
