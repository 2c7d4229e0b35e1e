"""Charts of an evaluation: margins, calibration and best-of-n."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gym_rm.evaluation.best_of_n import BestOfN
from gym_rm.evaluation.pairs import CalibrationBins
from gym_rm.reports.svg import Chart, round_values, shares

MARGIN_BARS = 40


def margin_chart(margins: NDArray[np.float64]) -> str:
    """Return a histogram of margins; the outermost bars hold what is beyond the 1st and 99th percentile."""
    low, high = np.quantile(margins, (0.01, 0.99))
    bound = max(abs(float(low)), abs(float(high))) or 1.0
    counts, edges = np.histogram(np.clip(margins, -bound, bound), bins=MARGIN_BARS, range=(-bound, bound))
    top = int(counts.max())
    chart = Chart(
        "Histogram of the margins of all pairs",
        x=(-bound, bound),
        y=(0, top * 1.05),
        x_label="margin: reward of the better reply minus that of the other",
        y_label="pairs",
        x_ticks=[(value, f"{value:+g}" if value else "0") for value in round_values(-bound, bound)],
        y_ticks=[(value, f"{value:,g}") for value in round_values(0, top) if value == int(value)],
    )
    for count, left, right in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        kind = "bad" if right <= 1e-9 * bound else "good"
        chart.bar((left, 0), (right, count), kind, hint=f"{count} pairs from {left:+.3g} to {right:+.3g}")
    chart.line([(0, 0), (0, top * 1.05)], "rule")
    return chart.svg()


def calibration_chart(calibration: Sequence[CalibrationBins]) -> str:
    """Return stated against observed probabilities, for one model or two; large dots have many pairs."""
    low = min([0.5, *(math.floor(each.observed.min() * 4) / 4 for each in calibration if each.observed.size)])
    chart = Chart(
        "Share of right choices by stated probability",
        x=(0.5, 1.0),
        y=(low, 1.0),
        x_label="stated: sigmoid of the size of the margin",
        y_label="observed: share that is right",
        x_ticks=shares(0.5, 1.0, step=0.1),
        y_ticks=shares(low, 1.0),
    )
    chart.line([(0.5, 0.5), (1.0, 1.0)], "rule")
    for bins, kind in zip(calibration, ("model", "against"), strict=False):
        points = list(zip(bins.stated.tolist(), bins.observed.tolist(), strict=True))
        chart.line(points, kind)
        for point, count in zip(points, bins.num_pairs.tolist(), strict=True):
            chart.dots([point], kind, radius=2.5 + 7 * math.sqrt(count / max(1, bins.num_pairs.sum())))
    return chart.svg()


def best_of_n_chart(curves: Sequence[BestOfN]) -> str:
    """Return the grade of the pick over n with its interval, between the oracle and a random reply."""
    first = curves[0]
    positions = [math.log(n) for n in first.ns]
    grades = [end for curve in curves for each in curve.picked for end in (each.low, each.high)]
    grades += [value for curve in curves for value in (*curve.oracle, curve.random)]
    lowest, highest = min(grades), max(grades)
    span = (highest - lowest) or 1.0
    low, high = lowest - 0.08 * span, highest + 0.08 * span
    share = lowest >= 0 and highest <= 1
    chart = Chart(
        f"Best-of-n by {first.gold}",
        x=(-0.04, positions[-1] + 0.04),
        y=(low, high),
        x_label="n, and the upper bound of the divergence from the policy in nats",
        y_label=first.gold,
        x_ticks=[(at, f"{n}\n≤ {kl:.2f}") for at, n, kl in zip(positions, first.ns, first.kl, strict=True)],
        y_ticks=[(at, f"{100 * at:g}%" if share else f"{at:g}") for at in round_values(low, high)],
        height=310,
    )
    chart.line(list(zip(positions, first.oracle, strict=True)), "oracle")
    chart.line([(positions[0], first.random), (positions[-1], first.random)], "random")
    for curve, kind in zip(curves, ("model", "against"), strict=False):
        lower, middle, upper = (
            list(zip(positions, (getattr(each, end) for each in curve.picked), strict=True))
            for end in ("low", "value", "high")
        )
        chart.band(lower, upper, kind)
        chart.line(middle, kind)
        chart.dots(middle, kind)
    return chart.svg()
