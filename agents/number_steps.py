"""A task for `gym-rm grpo` with a reward in each step: compare numbers step by step, then answer.

    gym-rm agent number_steps outputs/number-steps  # writes the rows, the prompts and a policy: a minute or two
    gym-rm train steps                              # trains the process reward model: about two minutes
    gym-rm grpo --config steps

The questions are the embedded ones: which of three numbers is the largest or the smallest. A reply compares two numbers
in each step ("52 is lower than 86."), and answers in the last one; steps are separated by an empty line. A comparison
is good if it is true and its numbers are in the question, also if it was said before. The answer is good if it is right
and was compared with both other numbers. A sum of such steps can be had without an answer: see docs/grpo.md.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from short_programs import imitate, question_with_reply
from three_numbers import Question, sample_question

import gym_rm
from gym_rm.data.prompts import load_prompts

TRAINING_ROWS, VALIDATION_ROWS = 16_000, 1_000
STEP = re.compile(r"(\d\d) is (lower|higher) than (\d\d)\.")
ANSWER = re.compile(r"It is (\d\d)\.")


def labels(steps: list[str], question: Question) -> list[bool]:
    """Return whether each step is good: a true comparison of numbers in the question, or the answer, if it is shown."""
    found, shown = [], set[tuple[int, int]]()
    for step in steps:
        if match := STEP.fullmatch(step):
            first, second = int(match[1]), int(match[3])
            known = {first, second} <= set(question.numbers) and first != second
            good = known and (first < second) == (match[2] == "lower")
            shown |= {(first, second), (second, first)} if good else set()
        else:
            match = ANSWER.fullmatch(step)
            others = [(question.answer, number) for number in question.numbers if number != question.answer]
            good = match is not None and int(match[1]) == question.answer and shown >= set(others)
        found.append(good)
    return found


def careless_reply(question: Question, rng: random.Random, *, slips: float, most: int) -> list[str]:
    """Return the steps of a reply: up to `most` comparisons and an answer; each step is wrong with this probability."""
    steps = []
    for _ in range(rng.randint(1, most)):
        first, second = rng.sample(question.numbers, 2)
        if rng.random() < slips / 4:
            second = rng.randint(10, 99)
        wrong = rng.random() < slips
        steps.append(f"{first} is {'lower' if (first < second) != wrong else 'higher'} than {second}.")
    wrong = rng.random() < slips
    others = [number for number in question.numbers if number != question.answer]
    return [*steps, f"It is {rng.choice(others) if wrong else question.answer}."]


def broken_step(question: Question, rng: random.Random) -> str:
    """Return a text that is no step, as a policy in training may write it."""
    first, second = rng.choices(question.numbers, k=2)
    whole = rng.choice(
        (f"{first} is lower than {second}.", f"It is {first}.", question.text, f"It is {first} {second}.")
    )
    words = whole.split()
    cut = words[: rng.randint(1, len(words))] if rng.random() < 0.5 else words[rng.randint(0, len(words) - 1) :]
    return rng.choice((" ".join(cut), " ".join(cut * 2), " ".join(rng.sample(words, len(words)))))


def step_row(rng: random.Random, *, held_out: bool) -> dict[str, object]:
    """Return a row of `gym-rm train`: a reply of any number of steps with the label of each."""
    question = sample_question(rng, held_out=held_out)
    steps = careless_reply(question, rng, slips=rng.choice((0.1, 0.4)), most=5)
    if rng.random() < 0.4:
        steps[rng.randrange(len(steps))] = broken_step(question, rng)
    steps = steps[rng.randrange(len(steps)) :] if rng.random() < 0.2 else steps
    return {"prompt": question.text, "completions": steps, "labels": labels(steps, question)}


def right(conversations: Sequence[gym_rm.Conversation], prompts: Sequence[gym_rm.Prompt]) -> list[float]:
    """Return 1 for each reply whose last step is the right answer, else 0."""
    last = [conversation[-1]["content"].split("\n\n")[-1].strip() for conversation in conversations]
    return [float(step == f"It is {prompt.answer}.") for step, prompt in zip(last, prompts, strict=True)]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    rng = random.Random(1)
    for name, size in (("train", TRAINING_ROWS), ("validation", VALIDATION_ROWS)):
        rows = [step_row(rng, held_out=name == "validation") for _ in range(size)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"prompt": each.messages[-1]["content"], "answer": each.answer} for each in load_prompts(None)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))

    rng = random.Random(2)

    def example(tokenizer: Any, step: int) -> tuple[list[int], list[int]]:
        question = sample_question(rng, held_out=False)
        said = "\n\n".join(careless_reply(question, rng, slips=0.4, most=4))
        return question_with_reply(tokenizer, question.text, said)

    imitate(folder / "policy", example)
    print(f"wrote {folder}; train the reward model with: gym-rm train steps")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
