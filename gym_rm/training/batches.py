"""Which comparisons a step learns from, and how they run: the order of the data, shares of ranks, micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gym_rm.engine.token_tree import Batch, IntArray, PaddedBatch, TokenSequence, padded_width, plan_padded, plan_trees
from gym_rm.training.examples import Example


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole comparisons that run in one forward and backward pass.

    Attributes:
        examples: the comparisons.
        batches: their conversations, as one tree or one padded batch, or one conversation each.
        value_index: int64 `[sum of reads]`, where the values of each read of each conversation are, in order.
    """

    examples: tuple[Example, ...]
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
        epochs: number of epochs.
        seed: seed of the order.
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


def share_of_rank(examples: Sequence[Example], rank: int, world_size: int) -> list[Example]:
    """Return the comparisons of one rank: every rank gets about the same number of tokens."""
    shares = shares_by_load([each.unique_tokens for each in examples], world_size)
    return [examples[index] for index in shares[rank]]


def shares_by_load(loads: Sequence[int], world_size: int) -> list[list[int]]:
    """Divide indices into shares of about the same load; the largest loads go first, each to the lightest share."""
    shares: list[list[int]] = [[] for _ in range(world_size)]
    totals = [0] * world_size
    for index in sorted(range(len(loads)), key=lambda index: -loads[index]):
        lightest = totals.index(min(totals))
        shares[lightest].append(index)
        totals[lightest] += loads[index]
    return [sorted(share) for share in shares]


def micro_batches(
    examples: Sequence[Example],
    *,
    tree: bool,
    max_num_batched_tokens: int,
    max_width: int | None,
    longest_shared: int | None = None,
) -> list[MicroBatch]:
    """Pack whole comparisons into trees or padded batches under a token budget; larger comparisons run alone.

    Args:
        examples: the comparisons.
        tree: whether the model takes trees.
        max_num_batched_tokens: token budget of a micro-batch, padding included.
        max_width: width that padding does not exceed.
        longest_shared: maximum length of conversations that share a batch; a comparison with a longer one runs as one
            conversation after the other. None for no limit.
    """
    size_of = _unique_tokens if tree else _padded_tokens
    limit = np.inf if longest_shared is None else longest_shared
    apart = [_one_by_one(each, tree) for each in examples if max(each.num_tokens) > limit]
    examples = [each for each in examples if max(each.num_tokens) <= limit]
    large = [each for each in examples if size_of(each) > max_num_batched_tokens]
    rest = [each for each in examples if size_of(each) <= max_num_batched_tokens]
    if tree:
        packed = _cut_into_trees(rest, max_num_batched_tokens) if rest else []
        return [*apart, *(_as_tree([each]) for each in large), *map(_as_tree, packed)]
    rest.sort(key=lambda each: max(each.num_tokens))
    groups: list[list[Example]] = []
    for each in rest:
        rows = sum(len(member.sequences) for member in groups[-1]) + len(each.sequences) if groups else 0
        if groups and rows * max(each.num_tokens) <= max_num_batched_tokens:
            groups[-1].append(each)
        else:
            groups.append([each])
    return [*apart, *(_as_padded(group, max_width) for group in (*([each] for each in large), *groups))]


def _unique_tokens(example: Example) -> int:
    return example.unique_tokens


def _padded_tokens(example: Example) -> int:
    return max(example.num_tokens) * len(example.sequences)


def _cut_into_trees(examples: Sequence[Example], budget: int) -> list[list[Example]]:
    """Return the comparisons of each tree."""
    groups = [number for number, each in enumerate(examples) for _ in each.sequences]
    sequences = [sequence for each in examples for sequence in each.sequences]
    # The budget counts unique tokens, but no single conversation may be longer than it.
    plan = plan_trees(sequences, max_num_batched_tokens=budget, groups=groups)
    members: list[list[Example]] = [[] for _ in plan.batches]
    starts = np.cumsum([0] + [len(each.sequences) for each in examples])[:-1]
    for each, batch in zip(examples, plan.batch_of[starts].tolist(), strict=True):
        members[batch].append(each)
    return members


def _as_tree(examples: Sequence[Example]) -> MicroBatch:
    sequences = [sequence for each in examples for sequence in each.sequences]
    plan = plan_trees(sequences, max_num_batched_tokens=sum(len(each.input_ids) for each in sequences))
    return MicroBatch(tuple(examples), plan.batches, plan.value_index)


def _one_by_one(example: Example, tree: bool) -> MicroBatch:
    tokens = sum(example.num_tokens)
    if tree:
        plan = plan_trees(example.sequences, max_num_batched_tokens=tokens, alone=True)
    else:
        plan = plan_padded(example.sequences, max_num_batched_tokens=tokens, alone=True, exact=True)
    return MicroBatch((example,), plan.batches, plan.value_index)


def _as_padded(examples: Sequence[Example], max_width: int | None) -> MicroBatch:
    sequences: list[TokenSequence] = [sequence for each in examples for sequence in each.sequences]
    lengths = np.array([len(each.input_ids) for each in sequences], dtype=np.int64)
    longest = int(lengths.max())
    width = longest if len(set(lengths.tolist())) == 1 else padded_width(longest, max_width)
    input_ids = np.zeros((len(sequences), width), dtype=np.int32)
    for row, each in enumerate(sequences):
        input_ids[row, : lengths[row]] = each.input_ids
    seconds = [len(each.input_ids) if each.second_segment is None else each.second_segment for each in sequences]
    reads = np.concatenate(
        [
            np.stack([np.full_like(each.read_positions, row), each.read_positions], 1)
            for row, each in enumerate(sequences)
        ]
    )
    batch = PaddedBatch(input_ids, lengths, np.array(seconds, dtype=np.int64), reads)
    return MicroBatch(tuple(examples), (batch,), np.arange(len(reads)))
