"""A task for `gym-rm grpo` on `Code-v0`: one-line Python functions, whose tests run in the sandbox.

    gym-rm agent short_programs outputs/short-programs  # writes the prompts and a policy; about a minute
    gym-rm grpo --config code

The user asks for a function of a list of numbers. The policy is the embedded one, after it has read functions of a
careless programmer, who knows Python but seldom reads the question: about one in four is right. GRPO then learns from
the tests which function is meant.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from gym_rm.policy.trained_policy import open_policy

QUESTIONS = {
    "max(x)": ("Which is the largest number?", "What is the highest score?", "What is the best price?"),
    "min(x)": ("Which is the smallest number?", "What is the lowest score?", "Which is the lowest of the numbers?"),
    "x[0]": ("Which number was asked the quickest?", "What is the number that stands on top?"),
    "x[-1]": ("Which number is at the end?", "What is the number that stands at the end?"),
    "sum(x)": ("What is the score of all numbers?", "What is the price of all?"),
    "len(x)": ("How many numbers are there?", "How many points are in the answer?"),
}
OPENINGS = ("", "Hello! ", "Hi! ", "Good morning! ", "Quick question: ", "Say, ", "Please tell me: ")
MISTAKES = ("max(x", "min x", "x[0", "sum(x))", "y[0]", "max(y)", "x[99]", "x")
RIGHT, BROKEN = 0.25, 0.25
STEPS, BATCH_SIZE, LEARNING_RATE = 300, 32, 2e-3
ROWS_TOGETHER = 4


def program(body: str) -> str:
    return f"def f(x): return {body}"


def questions() -> list[tuple[str, str]]:
    """Return each question with the body of the right function."""
    return [(opening + text, body) for body, texts in QUESTIONS.items() for text in texts for opening in OPENINGS]


def careless(body: str, rng: random.Random) -> str:
    """Return the function of a careless programmer who should have written `body`."""
    luck = rng.random()
    if luck < RIGHT:
        return program(body)
    return program(rng.choice(MISTAKES) if luck < RIGHT + BROKEN else rng.choice(list(QUESTIONS)))


def tests(body: str, rng: random.Random) -> str:
    """Return tests whose lists tell the functions apart."""
    lists = [rng.sample(range(10, 100), size) for size in (3, 4, 5, 6)]
    asserts = [f"    assert candidate({x}) == {eval(body, {'x': x})}" for x in lists]
    return "\n".join(["def check(candidate):", *asserts])


def write_prompts(path: Path, rng: random.Random) -> None:
    rows = [{"prompt": text, "entry_point": "f", "test": tests(body, rng)} for text, body in questions()]
    rng.shuffle(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def imitate(
    folder: Path,
    example: Callable[[Any, int], tuple[list[int], list[int]]],
    *,
    steps: int = STEPS,
    batch_size: int = BATCH_SIZE,
    learning_rate: float = LEARNING_RATE,
    template: str | None = None,
    start: str | None = None,
) -> None:
    """Train a policy on examples, and save it.

    Args:
        folder: where it is saved.
        example: `example(tokenizer, step)` returns the tokens of a dialogue and its labels, -100 where none is learned.
        steps, batch_size, learning_rate: number of steps, their size, and the first learning rate.
        template: chat template of the policy; None for its own.
        start: the policy before; None for the embedded one.
    """
    policy = open_policy(start)
    model, tokenizer = policy.model, policy.tokenizer
    tokenizer.chat_template = template or tokenizer.chat_template
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for step in range(steps):
        rows = sorted((example(tokenizer, step) for _ in range(batch_size)), key=lambda row: len(row[0]))
        learned, loss = sum(label >= 0 for _, row_labels in rows for label in row_labels), 0.0
        for first in range(0, batch_size, ROWS_TOGETHER):  # of similar lengths, so that few tokens are padding
            part = rows[first : first + ROWS_TOGETHER]
            tokens = pad_sequence([torch.tensor(row_tokens) for row_tokens, _ in part], batch_first=True)
            labels = pad_sequence([torch.tensor(labels) for _, labels in part], batch_first=True, padding_value=-100)
            part_loss = model(input_ids=tokens, labels=labels, num_items_in_batch=learned).loss
            part_loss.backward()
            loss += part_loss.item()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}/{steps}: loss {loss:.3f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def question_with_reply(tokenizer: Any, text: str, said: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a question and a reply, and the labels: those of the reply."""
    messages = [{"role": "user", "content": text}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    reply = tokenizer(said)["input_ids"] + [tokenizer.eos_token_id]
    return asked + reply, [-100] * len(asked) + reply


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    write_prompts(folder / "prompts.jsonl", random.Random(1))
    rng = random.Random(2)
    asked = questions()

    def example(tokenizer: Any, step: int) -> tuple[list[int], list[int]]:
        text, body = rng.choice(asked)
        return question_with_reply(tokenizer, text, careless(body, rng))

    imitate(folder / "policy", example)
    print(f"wrote {folder}; train with: gym-rm grpo --config code")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
