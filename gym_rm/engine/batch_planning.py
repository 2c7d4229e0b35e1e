"""Plan sequences of token ids into trees or padded batches under a token budget. Integers only, no torch.

Sorting the sequences puts equal prefixes next to each other. Each sequence adds only the tokens that it does not share
with the sequence before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gym_rm.engine.text.rendered import common_prefix
from gym_rm.engine.token_tree import BatchPlan, IntArray, Layout, PaddedBatch, TokenSequence, TokenTree

WIDTH_STEP = 32  # widths of padded batches are multiples of this, so that few widths are left


def plan_trees(
    sequences: Sequence[TokenSequence],
    *,
    max_num_batched_tokens: int,
    groups: Sequence[int] | None = None,
    alone: bool = False,
) -> BatchPlan:
    """Pack sequences into prefix trees under a token budget, in linear time after one sort.

    Args:
        sequences: M sequences.
        max_num_batched_tokens: token budget of each tree.
        groups: `[M]`, group of each sequence, such as a preference pair or a GRPO group. The sequences of a group go
            into one tree, unless the group alone exceeds the budget. None for no groups.
        alone: put every sequence into a tree of its own.

    Raises:
        ValueError: a sequence is empty or longer than the budget, or `groups` does not have length M.
    """
    _check_lengths(sequences, max_num_batched_tokens)
    ids = [sequence.input_ids for sequence in sequences]
    order = _sorted_order(sequences)
    shared = _shared_with_previous(ids, order)
    first_of_unit = [True] * len(order)
    if groups is not None:
        order, shared, first_of_unit = _keep_groups_whole(ids, order, groups, max_num_batched_tokens)

    read_starts = np.cumsum([0] + [len(sequence.read_positions) for sequence in sequences])
    value_index = np.empty(read_starts[-1], dtype=np.int64)
    batch_of = np.empty(len(sequences), dtype=np.int64)
    trees: list[TokenTree] = []
    num_values = 0
    lengths = [len(ids[row]) for row in order]
    every = [(k, k + 1) for k in range(len(order))]
    for start, stop in every if alone else _cut(lengths, shared, first_of_unit, max_num_batched_tokens):
        builder = _TreeBuilder()
        rows = order[start:stop]
        found = [builder.add(sequences[row], shared[k] if k > start else 0) for k, row in enumerate(rows, start=start)]
        read_indices, inverse = np.unique(np.concatenate(found), return_inverse=True)
        targets = np.concatenate([np.arange(read_starts[row], read_starts[row + 1]) for row in rows])
        value_index[targets] = num_values + inverse
        batch_of[rows] = len(trees)
        trees.append(builder.build(read_indices))
        num_values += len(read_indices)
    return BatchPlan(tuple(trees), value_index, batch_of)


def plan_layout(
    layout: Layout,
    sequences: Sequence[TokenSequence],
    *,
    max_num_batched_tokens: int,
    max_width: int | None = None,
    alone: bool = False,
) -> BatchPlan:
    """Pack sequences into batches of a layout; see `plan_trees` and `plan_padded`."""
    if layout == "tree":
        return plan_trees(sequences, max_num_batched_tokens=max_num_batched_tokens, alone=alone)
    exact = layout == "one_by_one"
    return plan_padded(
        sequences,
        max_num_batched_tokens=max_num_batched_tokens,
        max_width=max_width,
        alone=alone or exact,
        exact=exact,
    )


def padded_width(length: int, limit: int | None) -> int:
    """Return the width of padded batches for sequences of this length.

    It is larger than the length, so that all rows of a batch have padding: models compute rows without a mask in
    another way. Only at the limit of the model's positions it is the length, and such sequences have no padding.
    """
    width = (length // WIDTH_STEP + 1) * WIDTH_STEP
    return width if limit is None or width <= limit else max(length, limit)


def plan_padded(
    sequences: Sequence[TokenSequence],
    *,
    max_num_batched_tokens: int,
    max_width: int | None = None,
    alone: bool = False,
    exact: bool = False,
) -> BatchPlan:
    """Pack sequences into padded batches under a token budget; a sequence's width depends only on its length.

    Args:
        sequences: M sequences.
        max_num_batched_tokens: token budget of each batch, padding included; one sequence may exceed it by its padding.
        max_width: width that padding does not exceed, such as the number of positions of the model.
        alone: put every sequence into a batch of its own.
        exact: pad nothing; sequences of different lengths do not share a batch.

    Raises:
        ValueError: a sequence is empty or longer than the budget.
    """
    _check_lengths(sequences, max_num_batched_tokens)

    def width_of(row: int) -> tuple[int, bool]:
        length = len(sequences[row].input_ids)
        width = length if exact else padded_width(length, max_width)
        return width, length == width

    order = sorted(range(len(sequences)), key=width_of)
    read_starts = np.cumsum([0] + [len(sequence.read_positions) for sequence in sequences])
    value_index = np.empty(read_starts[-1], dtype=np.int64)
    batch_of = np.empty(len(sequences), dtype=np.int64)
    batches: list[PaddedBatch] = []
    num_values = 0
    for (width, _), of_width in itertools.groupby(order, key=width_of):
        same = list(of_width)
        most = 1 if alone else max(1, max_num_batched_tokens // width)
        for rows in (same[start : start + most] for start in range(0, len(same), most)):
            members = [sequences[row] for row in rows]
            lengths = np.array([len(member.input_ids) for member in members], dtype=np.int64)
            input_ids = np.zeros((len(members), width), dtype=np.int32)
            reads = []
            for k, (row, member) in enumerate(zip(rows, members, strict=True)):
                input_ids[k, : lengths[k]] = member.input_ids
                positions = member.read_positions
                reads.append(np.stack([np.full_like(positions, k), positions], axis=1))
                value_index[read_starts[row] : read_starts[row + 1]] = num_values + np.arange(len(positions))
                num_values += len(positions)
            batch_of[rows] = len(batches)
            seconds = [len(m.input_ids) if m.second_segment is None else m.second_segment for m in members]
            batches.append(PaddedBatch(input_ids, lengths, np.array(seconds, dtype=np.int64), np.concatenate(reads)))
    return BatchPlan(tuple(batches), value_index, batch_of)


def _check_lengths(sequences: Sequence[TokenSequence], budget: int) -> None:
    for row, sequence in enumerate(sequences):
        if not 0 < len(sequence.input_ids) <= budget:
            raise ValueError(
                f"sequence {row} has {len(sequence.input_ids)} tokens; expected 1 to max_num_batched_tokens={budget}."
            )


def _sorted_order(sequences: Sequence[TokenSequence]) -> list[int]:
    """Return the rows in lexicographic order of their ids; big-endian bytes compare like the integers."""
    if not sequences:
        return []
    buffer = np.concatenate([sequence.input_ids for sequence in sequences]).astype(">u4").tobytes()
    stops = np.cumsum([4 * len(sequence.input_ids) for sequence in sequences]).tolist()
    keys = [buffer[start:stop] for start, stop in itertools.pairwise([0, *stops])]
    return sorted(range(len(sequences)), key=keys.__getitem__)


def _shared_with_previous(ids: Sequence[NDArray[np.int32]], order: Sequence[int]) -> list[int]:
    """Return, for each row in this order, the length of the prefix that it shares with the row before it."""
    pairs = itertools.pairwise(ids[row] for row in order)
    return [0, *(common_prefix(before, after) for before, after in pairs)] if order else []


def _keep_groups_whole(
    ids: Sequence[NDArray[np.int32]], order: Sequence[int], groups: Sequence[int], budget: int
) -> tuple[list[int], list[int], list[bool]]:
    """Order the rows so that those of a group follow each other, and mark the rows before which trees may be cut.

    Returns:
        The order, the shared prefix lengths in this order, and whether a row is the first of its group; if a group is
        larger than the budget, every row of it.
    """
    if len(groups) != len(ids):
        raise ValueError(f"groups must have one entry for each of the {len(ids)} sequences, got {len(groups)}.")
    by_group: dict[int, list[int]] = {}
    for row in order:
        by_group.setdefault(groups[row], []).append(row)
    order = [row for rows in by_group.values() for row in rows]
    shared = _shared_with_previous(ids, order)
    first_of_unit: list[bool] = []
    for rows in by_group.values():
        start = len(first_of_unit)
        tokens = sum(len(ids[row]) for row in rows) - sum(shared[start + 1 : start + len(rows)])
        first_of_unit += [k == 0 or tokens > budget for k in range(len(rows))]
    return order, shared, first_of_unit


def _cut(
    lengths: Sequence[int], shared: Sequence[int], first_of_unit: Sequence[bool], budget: int
) -> list[tuple[int, int]]:
    """Return ranges of the ordered sequences whose trees fit the budget, cut between units where they share least.

    Sequence k adds `lengths[k] - shared[k]` tokens to a tree that contains the sequence before it.
    """
    bounds = [k for k, first in enumerate(first_of_unit) if first] + [len(lengths)]
    new = np.cumsum([0, *(length - common for length, common in zip(lengths, shared, strict=True))]).tolist()
    cuts = []
    unit = 0
    while unit < len(bounds) - 1:
        start = bounds[unit]

        def used(stop_unit: int, start: int = start) -> int:
            return int(new[bounds[stop_unit]] - new[start] + shared[start])

        stop = unit + 1
        # A cut between siblings computes their shared prefix twice. So in the last quarter of the budget, take the
        # boundary with the shortest shared prefix, not the last boundary that fits.
        best = stop
        while stop < len(bounds) - 1 and used(stop + 1) <= budget:
            stop += 1
            late = stop < len(bounds) - 1 and 4 * used(stop) >= 3 * budget
            if late and (best == unit + 1 or shared[bounds[stop]] <= shared[bounds[best]]):
                best = stop
        if stop == len(bounds) - 1 or best == unit + 1 or shared[bounds[stop]] <= shared[bounds[best]]:
            best = stop
        cuts.append((start, bounds[best]))
        unit = best
    return cuts


class _TreeBuilder:
    """Builds a tree by adding sequences in sorted order; the current sequence is stored as runs of indices."""

    def __init__(self) -> None:
        self._length = 0
        self._ids: list[NDArray[np.int32]] = []
        self._pieces: list[tuple[int, int, int]] = []  # start, depth and parent of each run of new tokens
        self._ends: list[tuple[int, int]] = []  # start and subtree_end of each finished run
        self._depths: list[int] = []  # current sequence: depth of the first token of each run
        self._starts: list[int] = []  # current sequence: index of the first token of each run
        self._depth = 0  # current sequence: number of tokens that later sequences can still continue

    def add(self, sequence: TokenSequence, shared: int) -> IntArray | list[int]:
        """Append the tokens after the first `shared` ones; return the indices where the sequence is read."""
        if self._depth > shared:
            self._close(shared)
        length = len(sequence.input_ids)
        if length > shared:
            self._pieces.append((self._length, shared, self._index(shared - 1) if shared else -1))
            self._ids.append(sequence.input_ids[shared:])
            self._depths.append(shared)
            self._starts.append(self._length)
            self._depth = length
            self._length += length - shared
        if len(sequence.read_positions) == 1:
            return [self._index(int(sequence.read_positions[0]))]
        runs = np.searchsorted(self._depths, sequence.read_positions, side="right") - 1
        found: IntArray = np.asarray(self._starts)[runs] + sequence.read_positions - np.asarray(self._depths)[runs]
        return found

    def build(self, read_indices: IntArray) -> TokenTree:
        self._close(0)
        starts, depths, first_parents = np.array(self._pieces, dtype=np.int64).T
        sizes = np.diff(starts, append=self._length)
        indices = np.arange(self._length)
        parents = indices - 1
        parents[starts] = first_parents
        run_starts, run_ends = np.array(sorted(self._ends), dtype=np.int64).T
        return TokenTree(
            input_ids=np.concatenate(self._ids),
            position_ids=indices - np.repeat(starts - depths, sizes),
            subtree_end=np.repeat(run_ends, np.diff(run_starts, append=self._length)),
            parents=parents,
            read_indices=read_indices,
        )

    def _index(self, depth: int) -> int:
        """Return the index of the current sequence's token at this depth."""
        run = len(self._depths) - 1
        while self._depths[run] > depth:
            run -= 1
        return self._starts[run] + depth - self._depths[run]

    def _close(self, depth: int) -> None:
        """Set the end of the current sequence's tokens from `depth` on; later sequences do not continue them."""
        while self._depths and self._depth > depth:
            first, start = self._depths[-1], self._starts[-1]
            if first >= depth:
                self._ends.append((start, self._length))
                self._depths.pop()
                self._starts.pop()
                self._depth = first
            else:
                self._ends.append((start + depth - first, self._length))
                self._depth = depth
