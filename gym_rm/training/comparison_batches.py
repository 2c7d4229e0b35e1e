"""Which comparisons a step learns from, and how they run: the order of the data, shares of ranks, micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gym_rm.engine.batch_planning import plan_layout
from gym_rm.engine.token_tree import Batch, IntArray, Layout
from gym_rm.training.comparison_sets import EncodedComparison


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole comparisons (`examples`) that run in one forward and backward pass.

    Attributes:
        batches: their conversations, as one tree, padded batches of similar lengths, or one conversation each.
        value_index: int64 `[sum of reads]`, where the values of each read of each conversation are, in order.
    """

    examples: tuple[EncodedComparison, ...]
    batches: tuple[Batch, ...]
    value_index: IntArray


def steps_of(
    sizes: Sequence[int], *, batch_size: int, epochs: int, seed: int, shuffle: bool
) -> Iterator[tuple[int, IntArray]]:
    """Yield `(epoch, comparisons)` of every step, always in the same order for the same arguments.

    The step with the largest comparison runs first, so that a run that does not fit into memory stops at once. Without
    shuffling, the order of the data is kept.

    Args:
        sizes: number of tokens of each comparison.
        batch_size: comparisons in a step; the last step of an epoch may have fewer.
        epochs, seed: number of epochs, and seed of their orders.
        shuffle: whether every epoch has another order.
    """
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(len(sizes)) if shuffle else np.arange(len(sizes))
        steps = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        if epoch == 0 and shuffle:
            largest = int(np.argmax(sizes))
            first = next(index for index, step in enumerate(steps) if largest in step)
            steps.insert(0, steps.pop(first))
        for step in steps:
            yield epoch, step


def share_of_rank(examples: Sequence[EncodedComparison], rank: int, world_size: int) -> list[EncodedComparison]:
    """Return the comparisons of one rank: every rank gets about the same number of tokens.

    The largest comparisons go first, each to the lightest share.
    """
    shares: list[list[int]] = [[] for _ in range(world_size)]
    totals = [0] * world_size
    for index in sorted(range(len(examples)), key=lambda index: -examples[index].unique_tokens):
        lightest = totals.index(min(totals))
        shares[lightest].append(index)
        totals[lightest] += examples[index].unique_tokens
    return [examples[index] for index in sorted(shares[rank])]


def micro_batches(
    examples: Sequence[EncodedComparison],
    *,
    tree: bool,
    max_num_batched_tokens: int,
    max_width: int | None,
    max_batchable_length: int | None = None,
) -> list[MicroBatch]:
    """Pack whole comparisons into trees or padded batches under a token budget; larger comparisons run alone.

    Args:
        examples, tree: the comparisons, and whether the model takes trees.
        max_num_batched_tokens: token budget of a micro-batch, padding included.
        max_width: width that padding does not exceed.
        max_batchable_length: maximum length of conversations that share a batch; a comparison with a longer one runs
            as one conversation after the other. None for no limit.
    """
    limit = np.inf if max_batchable_length is None else max_batchable_length
    apart = [each for each in examples if max(each.num_tokens) > limit]
    rest = [each for each in examples if max(each.num_tokens) <= limit]
    groups = _pack(rest, tree=tree, budget=max_num_batched_tokens)
    return [
        *(_micro_batch([each], tree=tree, max_width=max_width, alone=True) for each in apart),
        *(_micro_batch(group, tree=tree, max_width=max_width) for group in groups),
    ]


def _pack(examples: Sequence[EncodedComparison], *, tree: bool, budget: int) -> list[list[EncodedComparison]]:
    """Divide comparisons into groups under the token budget; for trees, those with one prompt are neighbours."""

    def size_of(group: Sequence[EncodedComparison]) -> int:
        if tree:
            return sum(each.unique_tokens for each in group)
        return max(max(each.num_tokens) for each in group) * sum(len(each.sequences) for each in group)

    def place_of(each: EncodedComparison) -> bytes | int:
        return each.sequences[0].input_ids.tobytes() if tree else max(each.num_tokens)

    groups: list[list[EncodedComparison]] = []
    for each in sorted(examples, key=place_of):
        if groups and size_of([*groups[-1], each]) <= budget:
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def _micro_batch(
    examples: Sequence[EncodedComparison], *, tree: bool, max_width: int | None, alone: bool = False
) -> MicroBatch:
    """Return the micro-batch of comparisons; `alone` runs one conversation after the other."""
    sequences = [sequence for each in examples for sequence in each.sequences]
    # Enough for all of them, also padded.
    budget = 2 * len(sequences) * max(len(each.input_ids) for each in sequences) + 1024
    layout: Layout = "tree" if tree else "one_by_one" if alone else "padded"
    plan = plan_layout(layout, sequences, max_num_batched_tokens=budget, max_width=max_width, alone=alone)
    return MicroBatch(tuple(examples), plan.batches, plan.value_index)
