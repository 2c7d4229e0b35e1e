"""Grade GSM8K replies and formulas with `MathScorer`: agreement with the authors' grades, and answers per second.

    python benchmarks/math_answers.py [--seconds 5]

Agreement: every reply of ../shared/data/gsm8k_graded.jsonl.gz against its `correct`, with a line for each that differs.
Throughput: plain numbers (in this process), and formulas that worker processes compare, after a warm-up. `cpu` is
answers per second of this process's CPU time, which other programs on the machine disturb less than the wall clock.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path

import results
from rich.console import Console
from rich.table import Table

from gym_rm.scorers.math.scorer import MathScorer
from gym_rm.scores import ScoringError
from gym_rm.types import Conversation, Prompt

DATA = Path(__file__).parents[2] / "shared" / "data" / "gsm8k_graded.jsonl.gz"
Rows = tuple[list[Conversation], list[Prompt]]


def rows_of(pairs: list[tuple[str, str]]) -> Rows:
    prompts = [Prompt(({"role": "user", "content": "?"},), "p", answer=answer) for answer, _ in pairs]
    return [[{"role": "assistant", "content": reply}] for _, reply in pairs], prompts


def speed(scorer: MathScorer, rows: Rows, seconds: float) -> tuple[float, float]:
    """Return answers per second of wall clock and of CPU time of this process."""
    count, began, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        try:
            scorer.score(*rows)
        except ScoringError as error:
            print(error)
        count += len(rows[0])
    return count / (time.perf_counter() - began), count / (time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    results.add_argument(parser)
    args = parser.parse_args()
    seconds = args.seconds
    scorer, console = MathScorer(num_workers=2), Console()
    with gzip.open(DATA, "rt") as file:
        data = [json.loads(line) for line in file]
    replies = [(row, each) for row in data for each in row["solutions"]]
    plain = rows_of([(row["answer"], each["text"]) for row, each in replies])
    scores = scorer.score(*plain)
    differing = [k for k, (_, each) in enumerate(replies) if scores.rewards[k] != each["correct"]]
    agreement = 1 - len(differing) / len(replies)
    results.save(args.save, {"replies": len(replies), "agreement": agreement, "different": len(differing)})
    console.print(f"agreement: {1 - len(differing) / len(replies):.4f} of {len(replies)} replies")
    for k in differing:
        row, each = replies[k]
        answer = scores.infos["extracted_answer"][k]
        console.print(
            f"  question {row['id']}, {each['model']}: {answer!r} for {row['answer']!r}, graded {each['correct']}"
        )

    table = Table("rows", "answers/s", "cpu")
    formulas = [
        (f"x^2+{n}x+\\frac{{{n}}}{{7}}", f"It is \\boxed{{\\frac{{{n}}}{{7}} + x^2 + {n} \\cdot x}}.")
        for n in range(2, 514)
    ]
    roots = [(f"\\sqrt{{{n}}}", f"The answer is $\\frac{{{n}}}{{\\sqrt{{{n}}}}}$.") for n in range(2, 514)]
    for name, rows in (("plain numbers", plain), ("polynomials", rows_of(formulas)), ("roots", rows_of(roots))):
        scorer.score(*rows)
        table.add_row(name, *[f"{each:,.0f}" for each in speed(scorer, rows, seconds)])
    console.print(table)
    scorer.close()


if __name__ == "__main__":
    main()
