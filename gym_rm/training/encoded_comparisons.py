"""Comparisons as token ids, with the positions where values are read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gym_rm.data.comparisons import DroppedRow
from gym_rm.engine.kinds import Kind
from gym_rm.engine.text.rendered import Rendered
from gym_rm.engine.text.renderer import Renderer
from gym_rm.engine.token_tree import TokenSequence, plan_trees
from gym_rm.errors import ConfigError, ConversationError
from gym_rm.evaluation.pairs import FloatArray
from gym_rm.training.reward_model_settings import RewardLossSettings
from gym_rm.types import Comparison

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
    """The examples of one set.

    Attributes:
        name: name of the set.
        examples: the examples, in the order of the comparisons.
        dropped: comparisons that are not used, with the reason.
        num_cut: number of conversations that were cut to `max_length`.
        tokens_cut: number of tokens that were cut.
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


def encode(
    name: str,
    comparisons: Sequence[Comparison],
    *,
    renderer: Renderer,
    kind: Kind,
    loss: RewardLossSettings,
    objectives: Sequence[str],
) -> EncodedSet:
    """Return the examples of comparisons; those that teach nothing under the loss are dropped with the reason.

    Args:
        name: name of the set.
        comparisons: the comparisons.
        renderer: writes conversations as token ids.
        kind: the kind of reward model, which knows where to read.
        loss: the loss, with its objective.
        objectives: names of the objectives, for ratings.

    Raises:
        ConfigError: no example is left.
    """
    examples: list[EncodedComparison] = []
    dropped: list[DroppedRow] = []
    num_cut = tokens_cut = 0
    rendered = iter(renderer.encode([each for row in comparisons for each in row.conversations]))
    for comparison in comparisons:
        replies = [next(rendered) for _ in comparison.replies]
        try:
            texts = [_require(each) for each in replies]
            sequences = tuple(
                TokenSequence(each.input_ids, kind.read_positions(each), each.second_segment) for each in texts
            )
            example = _example(comparison, sequences, loss, objectives)
        except ConversationError as error:
            dropped.append(DroppedRow(comparison.where, str(error)))
            continue
        examples.append(example)
        num_cut += sum(each.truncated_tokens > 0 for each in texts)
        tokens_cut += sum(each.truncated_tokens for each in texts)
    if not examples:
        reasons = sorted({each.reason for each in dropped})
        raise ConfigError(f"{name}: none of the {len(dropped)} comparisons can be used: {'; '.join(reasons[:3])}")
    return EncodedSet(name, tuple(examples), tuple(dropped), num_cut, tokens_cut)


def _require(rendered: Rendered | ConversationError) -> Rendered:
    if isinstance(rendered, ConversationError):
        raise rendered
    return rendered


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
