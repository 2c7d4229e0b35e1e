"""The sets of a run: read comparisons, divide them by prompt, encode them, and say what was left out."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np

from gym_rm.data.comparisons import ComparisonSet, DroppedRow, load_comparisons
from gym_rm.errors import ConfigError, logger
from gym_rm.training.encoded_comparisons import EncodedSet, encode
from gym_rm.training.objectives import Objective
from gym_rm.training.reward_model_settings import DataSettings
from gym_rm.training.trained_reward_model import StartModel
from gym_rm.types import Comparison

HELD_OUT = "held_out"  # name of the validation set that is taken from the training files


def read_sets(settings: DataSettings, start: StartModel, objective: Objective, *, seed: int) -> list[EncodedSet]:
    """Return the training set, then the validation sets.

    Raises:
        ConfigError: a file cannot be read, a row is malformed, or a set has no comparison that can be used.
    """
    training = [_read(path, "training", settings) for path in settings.train]
    comparisons = [each for part in training for each in part.comparisons]
    dropped = [each for part in training for each in part.dropped]
    parts: list[tuple[str, Sequence[Comparison]]] = [("training", comparisons)]
    lost = {"training": dropped}
    if settings.validation_share:
        kept, held_out = _divide(comparisons, settings.validation_share, seed)
        parts = [("training", kept), (HELD_OUT, held_out)]
    for name, path in settings.validation.items():
        if name in (HELD_OUT, "training"):
            raise ConfigError(f"data.validation: the name {name!r} is taken; choose another one.")
        found = _read(path, name, settings)
        parts.append((name, found.comparisons))
        lost[name] = list(found.dropped)
    sets = []
    for name, rows in parts:
        encoded = encode(
            name,
            rows,
            renderer=start.renderer,
            kind=start.kind,
            loss=objective.settings,
            objectives=objective.objectives,
        )
        sets.append(
            EncodedSet(
                name,
                encoded.examples,
                (*lost.get(name, ()), *encoded.dropped),
                encoded.num_cut,
                encoded.tokens_cut,
            )
        )
    return sets


def warn_about_drops(sets: Sequence[EncodedSet]) -> None:
    """Log one warning for every set of which rows were dropped or cut, with the reasons and the first row of each."""
    for each in sets:
        reasons: dict[str, list[DroppedRow]] = {}
        for row in each.dropped:
            reasons.setdefault(_kind_of(row.reason), []).append(row)
        if reasons:
            words = [
                f"{len(rows)} because {rows[0].reason} ({rows[0].where})"
                for rows in sorted(reasons.values(), key=len, reverse=True)
            ]
            total = len(each.dropped) + len(each.examples)
            message = "%s: %d of %d comparisons are not used: %s."
            logger.warning(message, each.name, len(each.dropped), total, "; ".join(words)[:1000])
        if each.num_cut:
            message = "%s: %d conversations were cut by %d tokens to fit max_length."
            logger.warning(message, each.name, each.num_cut, each.tokens_cut)


def _kind_of(reason: str) -> str:
    """Return a reason without its numbers, so that reasons that differ only in numbers are counted together."""
    return re.sub(r"\d+", "0", reason)[:120]


def _read(path: str, name: str, settings: DataSettings) -> ComparisonSet:
    return load_comparisons(path, name=name, on_error=settings.on_error)


def _divide(comparisons: Sequence[Comparison], share: float, seed: int) -> tuple[list[Comparison], list[Comparison]]:
    """Return the comparisons to train on and those to measure on; comparisons with one prompt stay together."""
    names = [json.dumps(each.prompt, sort_keys=True, default=str) for each in comparisons]
    distinct = list(dict.fromkeys(names))
    count = round(share * len(distinct))
    if not 0 < count < len(distinct):
        raise ConfigError(
            f"data.validation_share={share} of {len(distinct)} prompts is {count} prompts; both parts need one or more."
        )
    chosen = np.random.default_rng([seed, 1]).permutation(len(distinct))[:count]
    held_out = {distinct[index] for index in chosen.tolist()}
    return (
        [each for each, name in zip(comparisons, names, strict=True) if name not in held_out],
        [each for each, name in zip(comparisons, names, strict=True) if name in held_out],
    )
