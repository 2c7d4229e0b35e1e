"""Draw docs/images/comparison.svg from benchmarks/results/scoring.json: times of other methods over that of gym-rm.

    python scripts/make_comparison_picture.py                # the largest model that was measured
    python scripts/make_comparison_picture.py --size 25M

Bars are linear from 0. `padded` is sorted by length; padded batches in the order of arrival are only in the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.drawing import MARGIN, WIDTH, line, picture, rect, text  # noqa: E402

RESULT, PICTURE = ROOT / "benchmarks" / "results" / "scoring.json", ROOT / "docs" / "images" / "comparison.svg"
HEADINGS = {  # of the methods, in the order of the columns
    "padded, sorted": ("padded", "transformers"),
    "TRL": ("TRL", "GRPOTrainer"),
    "sentence-transformers": ("sentence-", "transformers"),
}
NAMES, VALUE, TOP, PITCH, BAR = 198, 62, 146, 40, 22  # room for workloads and values; top, pitch and height of bars
ALIKE = 0.05  # times that differ by less from that of gym-rm have neither colour
STYLE = ".one { stroke: var(--ink); stroke-width: 1.5; }"


def draw(result: Mapping[str, Any], size: str) -> str:
    """Return the picture of the workloads of one model."""
    workloads = result["values"][size]
    methods = [name for name in HEADINGS if any(name in found["times"] for found in workloads.values())]
    width = (WIDTH - 2 * MARGIN - NAMES) / len(methods)
    most = max(found["times"].get(name, 1.0) for found in workloads.values() for name in methods)
    unit = (width - VALUE) / max(1.0, most)
    bottom = TOP + PITCH * len(workloads)
    hardware, told = result["hardware"], []
    where = f"{hardware['CPU'].replace('(R)', '')}, {hardware['threads']} threads"
    body = [
        text(MARGIN, 42, "Time to score the same conversations, gym-rm = 1", "title"),
        text(MARGIN, 68, f"reward model with {size} weights; {where}", "soft"),
    ]
    for column, name in enumerate(methods):
        left = MARGIN + NAMES + column * width
        body += [text(left, TOP - 42 + 20 * row, words, "bold" if row == 0 else "soft")
                 for row, words in enumerate(HEADINGS[name])]  # fmt: skip
        for row, (workload, found) in enumerate(workloads.items()):
            y = TOP + PITCH * row
            if column == 0:
                body.append(text(MARGIN, y + 17, workload))
            if (value := found["times"].get(name)) is None:
                continue
            kind = "third" if abs(value - 1) < ALIKE else "second" if value > 1 else "strong"
            body.append(rect(left, y, value * unit, BAR, kind))
            body.append(text(left + max(value, 1) * unit + 7, y + 17, f"{value:.1f}×", "bold"))
            told.append(f"{' '.join(HEADINGS[name])}, {workload}: {value:.2f}")
        body.append(line(left + unit, TOP - 10, left + unit, bottom - PITCH + BAR + 10, "one"))
    body += legend(bottom + 26)
    return picture(bottom + 46, "Times of other methods over that of gym-rm", "; ".join(told) + ".", body, STYLE)


def legend(y: float) -> list[str]:
    """Return what the colours and the line mean."""
    parts, x = [line(MARGIN + 1, y - 18, MARGIN + 1, y + 4, "one"), text(MARGIN + 12, y, "gym-rm", "soft")], 150.0
    for kind, words in (
        ("second", "slower"),
        ("third", f"within {ALIKE:.0%}".replace("%", " %")),
        ("strong", "faster"),
    ):
        parts += [rect(x, y - 15, 22, 18, kind), text(x + 30, y, words, "soft")]
        x += 60 + 11 * len(words)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--size", help="model of the result; default: the last")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    args = parser.parse_args()
    result = json.loads(args.result.read_text(encoding="utf-8"))
    size = args.size or [name for name, value in result["values"].items() if isinstance(value, dict)][-1]
    args.picture.write_text(draw(result, size), encoding="utf-8")


if __name__ == "__main__":
    main()
