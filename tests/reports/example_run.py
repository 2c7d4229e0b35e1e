"""Helpers: small runs written by `RunWriter`, and the console text of a table. Not a test."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from gym_rm.reports.runs import RunWriter

SETTINGS = {"seed": 7, "policy": {"model": None}, "env": {"reward_model": "org/model"}}


def conversation(question: str, reply: str) -> list[dict[str, str]]:
    """One question with its reply."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]


def write_run(folder: Path) -> Path:
    """Write a run of 20 steps with measurements at steps 0, 10 and 20."""
    writer = RunWriter(folder, SETTINGS)
    for step in range(21):
        if step:
            writer.add_metrics("train", step, {"reward_mean": step / 4, "accuracy": step / 20})
        if step % 10 == 0:
            writer.add_metrics("held_out", step, {"reward_mean": step / 5, "accuracy": 0.25 + step / 40})
            for number in (0, 1, 1):
                said = conversation(f"What is 1 + {number}?", f"It is {step}.")
                writer.add_conversation(step, said, prompt_id=f"p{number}", reward=step / 5, right=step == 20)
    return folder


def write_replies(folder: Path, *replies: tuple[str, ...], question: str = "What?") -> Path:
    """Write a run in which prompt n has the reply `replies[step][n]` at each step."""
    writer = RunWriter(folder, {})
    writer.add_metrics("train", 1, {"reward_mean": 0.0})
    for step, texts in enumerate(replies):
        for number, text in enumerate(texts):
            writer.add_conversation(step, conversation(question, text), prompt_id=str(number), reward=0.0)
    return folder


def text_of(renderable: Any, width: int = 200) -> str:
    """Return the text that a console of this width prints."""
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()
