"""Draw the curves of the pages: docs/images/{demo,verified-runs,tool-runs,judged-runs,trained-judge}.svg, not smoothed.

python scripts/make_curve_pictures.py --demo outputs/demo   # the folder of a run of `gym-rm demo`
python scripts/make_curve_pictures.py                       # the others, from runs.json and judgements.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gym_rm.reports.runs import Run, read_run  # noqa: E402
from gym_rm.reports.svg import round_values  # noqa: E402
from scripts.drawing import MARGIN, WIDTH, line, picture, text  # noqa: E402

IMAGES, RESULTS = ROOT / "docs" / "images", ROOT / "benchmarks" / "results"
LEFT, RIGHT, TOP, TALL, GAP = 46, 58, 92, 230, 24  # of a panel: room for the labels, top and height of the axes
STYLE = """
.line { fill: none; stroke-width: 3.5; stroke-linejoin: round; stroke-linecap: round; }
.line.strong { stroke: var(--strong); } .line.second { stroke: var(--second); stroke-dasharray: 1 7; }
.line.thin { stroke: var(--third); stroke-width: 1.5; opacity: 0.75; }
.band.strong { fill: var(--strong); opacity: 0.25; } .band.second { fill: var(--second); opacity: 0.3; }
circle { stroke: var(--card); stroke-width: 1.5; }
"""
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """A line of a panel: its name, its range over the seeds, and whether its first and last values are written."""

    points: Points
    kind: str = "strong"
    label: str = ""
    band: tuple[Points, Points] | None = None
    ends: bool = True


def panels(title: str, words: str, parts: Sequence[tuple[str, str, Sequence[Curve]]]) -> str:
    """Return a picture of panels beside each other, each a heading, words below it, and curves.

    Values are shares, unless one of the panel is above 1.
    """
    width = (WIDTH - 2 * MARGIN - GAP * (len(parts) - 1)) / len(parts)
    body = []
    for number, (heading, below, curves) in enumerate(parts):
        body += panel(MARGIN + number * (width + GAP), width, heading, below, curves)
    return picture(TOP + TALL + 52, title, words, body, STYLE)


def panel(start: float, width: float, heading: str, below: str, curves: Sequence[Curve]) -> list[str]:
    """Return a heading, axes and curves, `width` units wide."""
    values = [y for curve in curves for _, y in curve.points]
    share = max(values) <= 1
    ticks = [0, 0.25, 0.5, 0.75, 1] if share else round_values(min(0, *values), max(values) * 1.08)
    low, high = (0, 1) if share else (ticks[0], max(ticks[-1], max(values)))
    steps = [x for curve in curves for x, _ in curve.points]
    left, right, bottom = start + LEFT, start + width - RIGHT, TOP + TALL

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = point
        return left + x / max(steps) * (right - left), bottom - (y - low) / (high - low) * TALL

    def path(points: Points) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, points))

    parts = [text(start, 40, heading, "title"), text(start, 66, below, "soft")]
    for tick in ticks:
        _, y = place((0, tick))
        parts.append(line(left, y, right, y, "axis" if tick == ticks[0] else "grid"))
        parts.append(text(left - 8, y + 6, f"{100 * tick:.0f}" if share else f"{tick:g}", "soft", "end"))
    for step in (0, max(steps)):
        parts.append(text(place((step, 0))[0], bottom + 24, f"{step:g}", "soft", "middle"))
    parts.append(text((left + right) / 2, bottom + 24, "step", "soft", "middle"))
    for curve in curves:
        if curve.band:
            lower, upper = curve.band
            parts.append(f'<polygon class="band {curve.kind}" points="{path([*lower, *reversed(upper)])}"/>')
    for curve in curves:
        parts.append(f'<polyline class="line {curve.kind}" points="{path(curve.points)}"/>')
        if curve.ends:
            parts += [f'<circle class="{curve.kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
                      for x, y in map(place, curve.points)]  # fmt: skip
            for end, (dx, dy) in ((0, (10, 22)), (-1, (11, 6))):
                x, y = place(curve.points[end])
                value = curve.points[end][1]
                parts.append(text(x + dx, y + dy, f"{100 * value:.0f} %" if share else f"{value:+.1f}", "bold"))
    named = [curve for curve in curves if curve.label]
    if all(curve.ends for curve in named):  # a name at the end of its curve
        for curve in named:
            x, y = place(curve.points[-1])
            parts.append(text(x, y + (32 if y < TOP + TALL / 2 else -16), curve.label, "", "end"))
        return parts
    x = right - 48 - 11 * max(len(curve.label) for curve in named)
    for number, curve in enumerate(reversed(named)):  # in the lower right corner, which rising curves leave free
        y = bottom - 18 - 26 * number
        parts.append(f'<polyline class="line {curve.kind}" points="{x:.1f},{y - 6} {x + 34:.1f},{y - 6}"/>')
        parts.append(text(x + 44, y, curve.label))
    return parts


# --- the pictures -----------------------------------------------------------------------------------------------------


def demo(run: Run) -> str:
    """Return reward and right answers of a run of the demo."""

    def points(rows: Sequence[Mapping[str, Any]], name: str) -> Points:
        return [(row["step"], row[name]) for row in rows]

    def curves(name: str) -> list[Curve]:
        training = Curve(points(run.training, name), "thin", "training", ends=False)
        return [training, Curve(points(run.held_out, name), label="held out")]

    first, last = run.held_out[0], run.held_out[-1]
    words = (
        f"On held-out prompts, over {last['step']} steps, the reward rises from {first['reward_mean']:+.1f} to "
        f"{last['reward_mean']:+.1f}, and right answers from {first['accuracy']:.0%} to {last['accuracy']:.0%}. The "
        "curves of the training prompts are beside them."
    )
    parts = [
        ("Reward", "of the reward model", curves("reward_mean")),
        ("Right answers, %", "checked without the reward model", curves("accuracy")),
    ]
    return panels("A run of the demo", words, parts)


def right(run: Mapping[str, Any]) -> Points:
    """Return the share of right answers to held-out prompts over the steps."""
    return [(int(step), value) for step, value in run["right"].items()]


def verified(values: Mapping[str, Any]) -> str:
    """Return right answers of the runs with verifiers."""
    names = {"math": ("Math-v0", "the right number"), "code": ("Code-v0", "tests that pass"),
             "mixture": ("Mixed-v0", "three components")}  # fmt: skip
    parts = [(*names[name], [Curve(right(run))]) for name, run in values["verified"].items()]
    words = "Right answers to held-out prompts rise " + "; ".join(
        f"from {curve.points[0][1]:.0%} to {curve.points[-1][1]:.0%} in {heading}" for heading, _, (curve,) in parts
    )
    return panels("Right answers with verifiers, in percent", f"{words}.", parts)


def tools(values: Mapping[str, Any]) -> str:
    """Return right answers of the runs with and without the calculator."""
    found = {name: right(run) for name, run in values["tool"].items()}
    curves = []
    for kind, label in {"strong": "with the calculator", "second": "without"}.items():
        seeds = [points for name, points in found.items() if name.startswith(label)]
        curves += [Curve(points, kind, ends=False) for points in seeds[1:]] + [Curve(seeds[0], kind, label)]
    words = "; ".join(f"{name}: from {points[0][1]:.0%} to {points[-1][1]:.0%}" for name, points in found.items())
    parts = [("Right answers to sums, %", f"held-out prompts, {len(curves)} runs", curves)]
    return panels("Right answers with and without a calculator", f"{words}.", parts)


def judged(values: Mapping[str, Any]) -> str:
    """Return right answers of the runs with a judge and with a reward model, for each estimator."""
    parts, words = [], []
    for estimator in dict.fromkeys(name.split(",")[0] for name in values["judge"]):
        curves = []
        for rewards, kind in {"judge": "strong", "reward model": "second"}.items():
            runs = [right(run) for name, run in values[rewards].items() if name.startswith(f"{estimator},")]
            curves.append(of_seeds(runs, kind, rewards))
            mean = curves[-1].points
            words.append(f"{rewards}, {estimator}: from {mean[0][1]:.1%} to {mean[-1][1]:.1%}")
        parts.append((f"{estimator}, %", f"mean and range of {len(runs)} seeds", curves))
    return panels("Right answers with a judge and with a reward model", "; ".join(words) + ".", parts)


def of_seeds(runs: Sequence[Points], kind: str = "strong", label: str = "", *, ends: bool = False) -> Curve:
    """Return the mean of several runs with their range."""
    seeds = [(column[0][0], [value for _, value in column]) for column in zip(*runs, strict=True)]
    mean, low, high = ([(step, of(each)) for step, each in seeds] for of in (statistics.mean, min, max))
    return Curve(mean, kind, label, (low, high), ends)


def trained_judge(seeds: Sequence[Mapping[str, Any]]) -> str:
    """Return what a judge learns: verdicts that can be read, that are right, and that do not change with the order."""
    names = {
        "readable": ("Readable, %", "of all verdicts"),
        "right": ("Right, %", "of all verdicts"),
        "consistent": ("Same, both orders, %", "of the pairs"),
    }
    found = {name: [[(int(step), value) for step, value in seed[name].items()] for seed in seeds] for name in names}
    parts = [(*names[name], [of_seeds(runs, ends=True)]) for name, runs in found.items()]
    words = "; ".join(
        f"{heading} {below}: from {curve.points[0][1]:.0%} to {curve.points[-1][1]:.0%}"
        for heading, below, (curve,) in parts
    )
    return panels(f"A judge that is trained, mean and range of {len(seeds)} seeds", f"{words}.", parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, metavar="FOLDER", help="draw only docs/images/demo.svg, from this run")
    args = parser.parse_args()
    if args.demo:
        pictures = {"demo": demo(read_run(args.demo))}
    else:
        values, judge = (
            json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["values"]
            for name in ("runs", "judgements")
        )
        topics = {
            "verified": ("verified-runs", verified),
            "tool": ("tool-runs", tools),
            "judge": ("judged-runs", judged),
        }
        pictures = {name: draw(values) for topic, (name, draw) in topics.items() if values.get(topic)}
        pictures["trained-judge"] = trained_judge([*judge["seeds"].values()])
    for name, drawn in pictures.items():
        (IMAGES / f"{name}.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
