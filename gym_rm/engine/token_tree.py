"""Plan sequences of token ids into prefix trees or padded batches under a token budget. Integers only, no torch.

Sorting the sequences puts equal prefixes next to each other. Each sequence adds only the tokens that it does not share
with the sequence before it. The result is the prefix tree in preorder (a node before its children). Then

    token q attends to token k   exactly when   k <= q  and  q < subtree_end[k]

is causal attention for all sequences at once. Shapes: `[T]` has one entry per token of a tree, `[R]` one per value.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gym_rm.engine.text.rendered import common_prefix

IntArray = NDArray[np.int64]

Layout: TypeAlias = Literal["tree", "padded", "one_by_one"]
"""Layout of the batches of a model."""

WIDTH_STEP = 32  # widths of padded batches are multiples of this, so that few widths are left


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Token ids of one sequence, and the positions where values are read.

    Attributes:
        input_ids: int32 `[L]`, at least one token.
        read_positions: int64 `[K]`, increasing positions in `input_ids` at which a value is read.
        second_segment: position where the second text of a pair starts (encoders with token types), or None.
    """

    input_ids: NDArray[np.int32]
    read_positions: IntArray
    second_segment: int | None = None


@dataclass(frozen=True)
class TokenTree:
    """Prefix trees of several sequences in preorder; one forward computes all of them.

    Attributes:
        input_ids: int32 `[T]`.
        position_ids: int64 `[T]`, position of each token in its own sequence.
        subtree_end: int64 `[T]`, index after the last descendant of each token.
        parents: int64 `[T]`, index of the previous token of the same sequence; -1 at the start of a sequence.
        read_indices: int64 `[R]`, increasing indices at which values are read, without duplicates.
    """

    input_ids: NDArray[np.int32]
    position_ids: IntArray
    subtree_end: IntArray
    parents: IntArray
    read_indices: IntArray

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_reads(self) -> int:
        """Number of values read, R."""
        return len(self.read_indices)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return len(self)

    @functools.cached_property
    def depths(self) -> IntArray:
        """Number of tokens before each token on its path: its position, also if `position_ids` has other numbers."""
        ended = np.cumsum(np.bincount(self.subtree_end, minlength=len(self) + 1))[:-1]
        depths: IntArray = np.arange(len(self)) - ended
        return depths

    def ancestors(self, index: int) -> IntArray:
        """Return the indices of the tokens from the start of a sequence up to and including `index`."""
        before = np.arange(index + 1)
        return before[self.subtree_end[: index + 1] > index]

    def check(self) -> None:
        """Assert that the arrays are one tree in preorder: for tests, and for whoever makes trees in another way."""
        indices = np.arange(len(self))
        assert self.input_ids.dtype == np.int32
        for array in (self.position_ids, self.subtree_end, self.parents, self.read_indices):
            assert array.dtype == np.int64
        assert len(self.input_ids) == len(self.position_ids) == len(self.subtree_end) == len(self.parents)
        assert (self.parents < indices).all(), "a token stands before the one that it follows"
        starts, children = indices[self.parents < 0], indices[self.parents >= 0]
        parents = self.parents[children]
        assert (self.depths[starts] == 0).all(), "a start is inside another sequence"
        assert (self.depths[children] == self.depths[parents] + 1).all(), "subtrees and parents differ"
        assert (self.subtree_end[children] <= self.subtree_end[parents]).all(), "a subtree ends after its parent's"
        assert ((self.subtree_end > indices) & (self.subtree_end <= len(self))).all()
        assert (np.diff(self.read_indices) > 0).all(), "the reads do not increase"
        assert np.isin(self.read_indices, indices).all(), "a read is outside the tree"


@dataclass(frozen=True)
class PaddedBatch:
    """Sequences of similar length as the rows of one array, for models that do not support trees.

    Attributes:
        input_ids: int32 `[B, L]`, padded on the right with 0; models fill in their own padding id.
        lengths: int64 `[B]`.
        second_segments: int64 `[B]`, start of the second text; equal to the length if there is none.
        read_positions: int64 `[R, 2]`, (row, position) of every value that is read.
    """

    input_ids: NDArray[np.int32]
    lengths: IntArray
    second_segments: IntArray
    read_positions: IntArray

    @property
    def num_reads(self) -> int:
        """Number of values read, R."""
        return len(self.read_positions)

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return int(self.lengths.sum())


Batch: TypeAlias = TokenTree | PaddedBatch


@dataclass(frozen=True)
class BatchPlan:
    """Batches within the token budget, and where to find the values of each sequence.

    Attributes:
        batches: trees or padded batches, each with at most the budget's tokens (padding included).
        value_index: int64 `[sum K]`, index into the stacked values of all batches; first the reads of the first
            sequence, then those of the second, and so on.
        batch_of: int64 `[M]`, index of each sequence's batch.
    """

    batches: tuple[Batch, ...]
    value_index: IntArray
    batch_of: IntArray

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute, without padding."""
        return sum(batch.num_tokens for batch in self.batches)

    def check(self, sequences: Sequence[TokenSequence], max_num_batched_tokens: int) -> None:
        """Assert that batches keep to the budget, and that each value is read after the tokens of its sequence."""
        assert self.batch_of.shape == (len(sequences),)
        paths: list[tuple[int, NDArray[np.int32]]] = []  # batch and tokens of each value
        for number, batch in enumerate(self.batches):
            if isinstance(batch, TokenTree):
                batch.check()
                assert 0 < len(batch) <= max_num_batched_tokens
                paths += [(number, batch.input_ids[batch.ancestors(read)]) for read in batch.read_indices.tolist()]
            else:
                assert batch.input_ids.size <= max_num_batched_tokens or len(batch.lengths) == 1
                assert (batch.read_positions[:, 1] < batch.lengths[batch.read_positions[:, 0]]).all()
                paths += [(number, batch.input_ids[row, : at + 1]) for row, at in batch.read_positions.tolist()]
        found = (paths[index] for index in self.value_index.tolist())
        for batch_of, sequence in zip(self.batch_of.tolist(), sequences, strict=True):
            for read in sequence.read_positions.tolist():
                number, tokens = next(found)
                assert number == batch_of, "a value is in another batch than its sequence"
                assert np.array_equal(tokens, sequence.input_ids[: read + 1]), "a value is read after other tokens"
        assert next(found, None) is None, "there are more values than reads"


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
