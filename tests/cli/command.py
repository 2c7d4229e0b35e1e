"""Helpers for the tests of the command: run it, read and write files, and a scorer without a model. Not a test."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner, Result

from gym_rm.cli.main import app
from gym_rm.scores import Scores, ScoringError
from gym_rm.types import Provenance

USER = {"role": "user", "content": "2 + 2?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "five"}
ROWS = [{"id": index, "prompt": "2 + 2?", "response": "x" * index} for index in range(10)]


class LengthScorer:
    """Scorer that rewards the length of the reply, has no score for "bad", and can raise an exception in one call."""

    def __init__(self, *, model="length", with_provenance=True, with_components=False, raises=None, at_call=3):
        self.calls = []
        self.provenance = Provenance("LengthScorer", model) if with_provenance else None
        self.with_components = with_components
        self.raises = raises
        self.at_call = at_call

    def score(self, conversations, prompts=None, turns="last"):
        self.calls.append(len(conversations))
        if self.raises is not None and len(self.calls) == self.at_call:
            raise self.raises
        texts = [conversation[-1]["content"] for conversation in conversations]
        rewards = np.array([len(text) / 10 for text in texts], dtype=np.float32)
        scores = Scores.from_rewards(
            rewards,
            components={"length": rewards} if self.with_components else {},
            errors=["it is bad" if text == "bad" else None for text in texts],
            provenance=self.provenance,
        )
        if turns == "all":
            replies = [[len(m["content"]) for m in c if m["role"] == "assistant"] for c in conversations]
            lengths = tuple(np.array(values, dtype=np.float32) for values in replies)
            scores = dataclasses.replace(scores, turn_rewards=lengths)
        if scores.failed_rows:
            raise ScoringError(scores)
        return scores


def runner(*command: str) -> Callable[..., Result]:
    """Return a function that runs `gym-rm COMMAND ARGUMENTS` in this process."""

    def run(*arguments: Any, code: int | tuple[int, ...] = 0, stdin: str | None = None) -> Result:
        """`code` is the expected exit code, or several."""
        result = CliRunner().invoke(app, [*command, *map(str, arguments)], input=stdin)
        assert result.exit_code in (code if isinstance(code, tuple) else (code,)), result.output
        return result

    return run


run = runner("score")


def write(path: Path, rows: list[Any]) -> Path:
    """Write a JSON Lines file; a text becomes a line without encoding."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path) -> list[Any]:
    """Return the rows of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def scores_of(path: Path) -> list[Any]:
    """Return the field `score` of every row."""
    return [row["score"] for row in read(path)]
