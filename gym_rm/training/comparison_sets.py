"""The sets of a run: comparisons as token ids, divided by prompt, and what was left out."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gym_rm.data.comparisons import DroppedRow, load_comparisons
from gym_rm.data.findings import grouped, key_of, template_columns
from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.token_tree import TokenSequence
from gym_rm.errors import ConfigError, ConversationError, logger
from gym_rm.evaluation.pairs import FloatArray
from gym_rm.training.reward_model_settings import DataSettings, RewardLossSettings
from gym_rm.training.trained_reward_model import StartModel
from gym_rm.types import Comparison

HELD_OUT = "held_out"  # name of the validation set that is taken from the training files
TIES = ("rao_kupper", "plackett_luce")  # losses that learn from ties


@dataclass(frozen=True, slots=True)
class EncodedComparison:
    """One comparison of K replies as token ids.

    Attributes:
        sequences: the K conversations, and where their values are read.
        ranks: `[K]`, lower is better; empty if they are not known.
        margin: strength of the preference, NaN if it is not known.
        targets: `[K, O]` ratings by objective, NaN where one is missing.
        labels: labels of all steps of all replies, in order; NaN where one is missing.
        unique_tokens: number of tokens of its tree.
    """

    sequences: tuple[TokenSequence, ...]
    ranks: FloatArray
    margin: float
    targets: FloatArray
    labels: FloatArray
    unique_tokens: int

    @property
    def num_tokens(self) -> list[int]:
        """Number of tokens of each conversation."""
        return [len(each.input_ids) for each in self.sequences]


@dataclass(frozen=True, slots=True)
class EncodedSet:
    """The examples of one set, in the order of the comparisons.

    Attributes:
        dropped: comparisons that are not used, with the reason.
        num_cut, tokens_cut: numbers of conversations that were cut to `max_length`, and of the tokens cut from them.
    """

    name: str
    examples: tuple[EncodedComparison, ...]
    dropped: tuple[DroppedRow, ...] = ()
    num_cut: int = 0
    tokens_cut: int = 0

    def digest(self) -> str:
        """Return a digest of what is learned from: tokens, ranks, margins, ratings and labels, in their order."""
        found = hashlib.sha256()
        for each in self.examples:
            for sequence in each.sequences:
                found.update(sequence.input_ids.tobytes())
            for part in (each.ranks, np.array([each.margin]), each.targets, each.labels):
                found.update(part.tobytes())
        return found.hexdigest()[:16]


def read_sets(
    settings: DataSettings, start: StartModel, loss: RewardLossSettings, objectives: Sequence[str], *, seed: int
) -> list[EncodedSet]:
    """Return the training set, then the validation sets.

    Raises:
        ConfigError: a file cannot be read, a row is malformed, or a set has no comparison that can be used.
    """
    load = functools.partial(load_comparisons, on_error=settings.on_error, columns=settings.columns)
    training = [load(path, name="training") for path in settings.train]
    comparisons = [each for part in training for each in part.comparisons]
    dropped = [each for part in training for each in part.dropped]
    parts: dict[str, tuple[Sequence[Comparison], Sequence[DroppedRow]]] = {"training": (comparisons, dropped)}
    if settings.validation_share:
        kept, held_out = _divide(comparisons, settings.validation_share, seed)
        parts = {"training": (kept, dropped), HELD_OUT: (held_out, ())}
    for name, path in settings.validation.items():
        if name in (HELD_OUT, "training"):
            raise ConfigError(f"data.validation: the name {name!r} is taken; choose another one.")
        found = load(path, name=name)
        parts[name] = found.comparisons, found.dropped
    return [encode(name, rows, start, loss, objectives, dropped=lost) for name, (rows, lost) in parts.items()]


def warn_about_drops(sets: Sequence[EncodedSet]) -> None:
    """Log one warning for every set of which rows were dropped or cut, with the reasons and the first row of each."""
    for each in sets:
        if each.dropped:
            places = ((row.reason, row.where) for row in each.dropped)
            reasons = grouped(places, lambda reason: re.sub(r"\d+", "0", reason)[:120])
            words = [f"{found.count} because {found.text} ({found.examples[0]})" for found in reasons]
            total = len(each.dropped) + len(each.examples)
            message = "%s: %d of %d comparisons are not used: %s."
            logger.warning(message, each.name, len(each.dropped), total, "; ".join(words)[:2000])
        if each.num_cut:
            message = "%s: %d conversations were cut by %d tokens to fit max_length."
            logger.warning(message, each.name, each.num_cut, each.tokens_cut)


def _divide(comparisons: Sequence[Comparison], share: float, seed: int) -> tuple[list[Comparison], list[Comparison]]:
    """Return the comparisons to train on and those to measure on; comparisons with one prompt stay together."""
    names = [key_of(each.prompt) for each in comparisons]
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


def encode(
    name: str,
    comparisons: Sequence[Comparison],
    start: StartModel,
    loss: RewardLossSettings,
    objectives: Sequence[str],
    *,
    dropped: Sequence[DroppedRow] = (),
) -> EncodedSet:
    """Return the examples of comparisons; those that teach nothing under the loss are dropped with the reason.

    Args:
        name, comparisons: the set.
        start: the model, which knows how to write conversations and where to read.
        loss, objectives: the loss, and names of the objectives, for ratings.
        dropped: rows that were left out before.

    Raises:
        ConfigError: no example is left.
    """
    examples: list[EncodedComparison] = []
    lost: list[DroppedRow] = []
    num_cut = tokens_cut = 0
    rows = [(each, row.tools) for row in comparisons for each in row.conversations]
    rendered = iter(start.renderer.encode([each for each, _ in rows], [tools for _, tools in rows]))
    for comparison in comparisons:
        replies = [next(rendered) for _ in comparison.replies]
        try:
            if columns := template_columns(comparison):
                raise ConversationError(f"{columns[0]!r} of a row is not passed to the chat template, as in scoring")
            texts = []
            for each in replies:
                if isinstance(each, ConversationError):
                    raise each
                texts.append(each)
            sequences = tuple(
                TokenSequence(each.input_ids, start.kind.read_positions(each), each.second_segment) for each in texts
            )
            example = _example(comparison, sequences, loss, objectives)
        except ConversationError as error:
            lost.append(DroppedRow(comparison.where, str(error)))
            continue
        examples.append(example)
        num_cut += sum(each.truncated_tokens > 0 for each in texts)
        tokens_cut += sum(each.truncated_tokens for each in texts)
    if not examples:
        reasons = sorted({each.reason for each in lost})
        raise ConfigError(f"{name}: none of the {len(lost)} comparisons can be used: {'; '.join(reasons[:3])}")
    return EncodedSet(name, tuple(examples), (*dropped, *lost), num_cut, tokens_cut)


def _example(
    comparison: Comparison, sequences: tuple[TokenSequence, ...], loss: RewardLossSettings, objectives: Sequence[str]
) -> EncodedComparison:
    ranks = np.array(comparison.ranks if comparison.ranks is not None else (), dtype=np.float64)
    size = len(sequences)
    targets = np.full((size, len(objectives)), np.nan)
    for column, objective in enumerate(objectives):
        if objective in comparison.scores:
            targets[:, column] = comparison.scores[objective]
    labels = np.array([label for steps in comparison.step_labels or () for label in steps], dtype=np.float64)
    match loss.objective:
        case "preferences":
            _require_preference(ranks, comparison, loss)
        case "ratings":
            if np.isnan(targets).all():
                known = sorted(comparison.scores)
                raise ConversationError(f"no rating for any of the objectives {list(objectives)}; the row has {known}")
        case "steps":
            if comparison.step_labels is None or np.isnan(labels).all():
                raise ConversationError("no label of a step")
            for steps, sequence in zip(comparison.step_labels, sequences, strict=True):
                if len(steps) != len(sequence.read_positions):
                    raise ConversationError(
                        f"{len(steps)} labels for a reply that is read at {len(sequence.read_positions)} steps; check "
                        "step_separator"
                    )
    margin = np.nan if comparison.margin is None else comparison.margin
    total = sum(len(each.input_ids) for each in sequences)
    unique = sum(batch.num_tokens for batch in plan_trees(sequences, max_num_batched_tokens=total).batches)
    return EncodedComparison(sequences, ranks, margin, targets, labels, unique)


def _require_preference(ranks: FloatArray, comparison: Comparison, loss: RewardLossSettings) -> None:
    if len(ranks) < 2:
        raise ConversationError("no preference between two replies")
    if loss.preferences not in TIES and len(set(ranks.tolist())) == 1:
        raise ConversationError(f"a tie, from which loss.preferences={loss.preferences!r} learns nothing")
    if loss.preferences == "margin_bradley_terry" and comparison.margin is None:
        raise ConversationError(f"no margin, which loss.preferences={loss.preferences!r} needs")
