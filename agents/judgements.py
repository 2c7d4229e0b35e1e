"""A task for `gym-rm grpo`: a judge learns which of two replies is better, from preferences alone.

    gym-rm agent judgements outputs/judgements  # writes pairs, questions about them, and a judge; about a minute
    gym-rm grpo --config judge

The questions are those of the embedded task, with two replies of different quality. The judge to train is the embedded
one after it has read the verdicts of a careless judge, who does not look at the replies: it names the first one in two
of three verdicts, and writes one in four so that nobody can read it. `gym-rm data judgements` makes a question about
each pair in both orders, so the place is worth nothing. The scores in a verdict are free: only the preference is paid.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from short_programs import imitate
from three_numbers import GRADES, sample_question

from gym_rm.data.comparisons import load_comparisons
from gym_rm.scorers.judge.training_rows import judgement_rows

STYLE, JUDGE = "genrm", "embedded:judge"
PAIRS, HELD_OUT_PAIRS = 1024, 128
FIRST, BROKEN = 0.67, 0.25
STEPS, BATCH_SIZE, LEARNING_RATE = 60, 32, 1e-3


def pair(rng: random.Random, *, held_out: bool) -> dict[str, str]:
    """Return a question with two replies of different grades, the better one as `chosen`."""
    question = sample_question(rng, held_out=held_out)
    while True:
        better, worse = sorted(rng.sample(range(len(GRADES)), 2))
        replies = [GRADES[grade](question, rng) for grade in (better, worse)]
        if replies[1].strip():  # rows with an empty reply are left out
            return {"prompt": question.text, "chosen": replies[0], "rejected": replies[1]}


def careless_verdict(rng: random.Random) -> str:
    """Return the verdict of a judge who has not read the replies, which is often broken."""
    low, high = sorted(rng.sample(range(1, 6), 2))
    first = rng.random() < FIRST
    scores = (high, low) if first else (low, high)
    ranking = rng.randint(1, 3) if first else rng.randint(4, 6)
    verdict = json.dumps({"score_1": scores[0], "score_2": scores[1], "ranking": ranking})
    return broken(verdict, rng) if rng.random() < BROKEN else verdict


def broken(verdict: str, rng: random.Random) -> str:
    """Return a verdict that cannot be read."""
    changes = (verdict[:-1], verdict.replace('"score_2"', '"score_1"'), verdict[1:], verdict.replace(": ", " ", 1))
    return rng.choice(changes)


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    rng = random.Random(1)
    for name, count in (("pairs", PAIRS), ("held_out_pairs", HELD_OUT_PAIRS)):
        write(folder / f"{name}.jsonl", (pair(rng, held_out=name != "pairs") for _ in range(count)))
        questions = judgement_rows(load_comparisons(folder / f"{name}.jsonl"), style=STYLE)
        write(folder / f"{name.replace('pairs', 'questions')}.jsonl", questions)
    asked = [json.loads(line)["messages"] for line in (folder / "questions.jsonl").read_text().splitlines()]

    def example(tokenizer: Any, step: int) -> tuple[list[int], list[int]]:
        question = tokenizer.apply_chat_template(rng.choice(asked), add_generation_prompt=True, return_dict=False)
        verdict = tokenizer(careless_verdict(rng))["input_ids"] + [tokenizer.eos_token_id]
        return question + verdict, [-100] * len(question) + verdict

    imitate(folder / "judge", example, start=JUDGE, steps=STEPS, batch_size=BATCH_SIZE, learning_rate=LEARNING_RATE)
    print(f"wrote {folder}; train with: gym-rm grpo --config judge")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
