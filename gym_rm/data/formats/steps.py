"""Rows with one reply and a label for each of its steps.

The steps are joined by an empty line, where process reward models split a reply (their option `step_separator`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.data.formats.fields import answered, number, parse_reply, required_prompt, rest, source_of
from gym_rm.data.rows import show
from gym_rm.errors import ConfigError
from gym_rm.types import Comparison

STEP_SEPARATOR = "\n\n"


def read_steps(row: Mapping[str, Any], where: str) -> Comparison:
    """Read a row with `prompt`, `completions` (the steps of one reply) and `labels` (whether each step is good)."""
    field, prompt = required_prompt(row, where, "prompt")
    steps, labels = row["completions"], row["labels"]
    are_lists = all(isinstance(each, Sequence) and not isinstance(each, str) for each in (steps, labels))
    if not are_lists or len(labels) != len(steps):
        raise ConfigError(
            f"{where}: 'labels' must be a list with one label for each step of 'completions', got {show(labels)} for "
            f"{show(steps)}."
        )
    for index, step in enumerate(steps):
        if not isinstance(step, str) or not step.strip() or STEP_SEPARATOR in step.strip():
            raise ConfigError(
                f"{where}: step {index + 1} of {len(steps)} must be a text without an empty line, got {show(step)}."
            )
    if not steps:
        raise ConfigError(f"{where}: the reply has no steps; expected at least one.")
    good = tuple(_label(label, where, f"labels[{index}]") for index, label in enumerate(labels))
    reply = parse_reply(STEP_SEPARATOR.join(step.strip() for step in steps), where, "completions")
    prompt, replies, reference = answered(prompt, (reply,), ("completions",), where, field)
    metadata = {**rest(row, field, "completions", "labels"), **reference}
    return Comparison(prompt, replies, None, None, {}, (good,), source_of(metadata), where, metadata)


def _label(value: Any, where: str, name: str) -> float:
    if value is None:
        return math.nan
    label = float(value) if isinstance(value, bool) else number(value, where, name)
    if not 0 <= label <= 1:
        raise ConfigError(f"{where}: {name!r} must be 1 for a good step and 0 for a bad one, got {show(value)}.")
    return label
