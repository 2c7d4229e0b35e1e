"""Sequences of token ids to prefix trees under a token budget: integers in, integers out.

Sorting the sequences puts every shared prefix side by side. Of each sequence only what its predecessor does
not already hold is laid down, which is the prefix tree in preorder (a node before its children). Then

    token q attends to token k   exactly when   k <= q  and  q < subtree_end[k]

is causal attention for all sequences at once. `[T]` is one entry per token of a tree, `[R]` per value read.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """What the model should see once, and where it should be read.

    Attributes:
        input_ids: int32 `[L]`, at least one token.
        reads: int64 `[K]`, increasing positions in `input_ids` at which a value is wanted.
        second_segment: position where the second text of a pair starts (encoders with token types), or None.
    """

    input_ids: NDArray[np.int32]
    reads: IntArray
    second_segment: int | None = None


@dataclass(frozen=True)
class TokenTree:
    """A forest of sequences laid out in preorder; one forward computes all of them.

    Attributes:
        input_ids: int32 `[T]`.
        position_ids: int64 `[T]`, position of the token in its own sequence.
        subtree_end: int64 `[T]`, index after the last token that continues this one.
        parents: int64 `[T]`, index of the token before this one in its sequence; -1 at the start of a sequence.
        reads: int64 `[R]`, increasing indices at which a value is wanted, each once.
    """

    input_ids: NDArray[np.int32]
    position_ids: IntArray
    subtree_end: IntArray
    parents: IntArray
    reads: IntArray

    def __len__(self) -> int:
        return len(self.input_ids)

    @functools.cached_property
    def node_starts(self) -> IntArray:
        """Indices where a node (a run of tokens without a branch) begins."""
        return np.flatnonzero(np.diff(self.subtree_end, prepend=-1))

    def path(self, index: int) -> IntArray:
        """Indices of the tokens from the start of a sequence up to and including `index`."""
        before = np.arange(index + 1)
        return before[self.subtree_end[: index + 1] > index]


@dataclass(frozen=True)
class PaddedBatch:
    """Sequences of similar length side by side, for models that cannot take a tree.

    Attributes:
        input_ids: int32 `[B, L]`, padded on the right with 0; models fill in their own padding id.
        lengths: int64 `[B]`.
        second_segments: int64 `[B]`, start of the second text, or the length where there is none.
        reads: int64 `[R, 2]`, (row, position) of every value wanted.
    """

    input_ids: NDArray[np.int32]
    lengths: IntArray
    second_segments: IntArray
    reads: IntArray


@dataclass(frozen=True)
class BatchPlan:
    """Batches that fit the budget, and where each wanted value will be found.

    Attributes:
        batches: trees or padded batches, none with more than the budget's tokens (padding included).
        value_index: int64 `[sum K]`: the values that the batches yield, stacked in order and indexed with this,
            are the reads of the first sequence, then of the second, and so on.
        unique_tokens: tokens that go through the model, padding not counted.
        padded_tokens: padding that goes through the model.
    """

    batches: tuple[TokenTree, ...] | tuple[PaddedBatch, ...]
    value_index: IntArray
    unique_tokens: int
    padded_tokens: int


def plan_trees(sequences: Sequence[TokenSequence], *, max_num_batched_tokens: int, share: bool = True) -> BatchPlan:
    """Pack sequences into as few prefix trees as the budget allows; linear in tokens after one sort.

    Args:
        sequences: M sequences.
        max_num_batched_tokens: the budget.
        share: False lays every sequence down in full, side by side: packing alone.

    Raises:
        ValueError: a sequence is empty, or alone longer than the budget.
    """
    _check_lengths(sequences, max_num_batched_tokens)
    order = _sorted_order(sequences)
    ids = [sequences[row].input_ids for row in order]
    shared = [0] * len(ids)
    if share:
        shared[1:] = [_shared_prefix(before, after) for before, after in itertools.pairwise(ids)]

    read_starts = np.cumsum([0] + [len(sequence.reads) for sequence in sequences])
    value_index = np.empty(read_starts[-1], dtype=np.int64)
    trees = []
    num_values = 0
    for start, stop in _cut(ids, shared, max_num_batched_tokens):
        builder = _TreeBuilder()
        rows = order[start:stop]
        places = [
            builder.add(sequences[row], shared[place] if place > start else 0)
            for place, row in enumerate(rows, start=start)
        ]
        flat = np.concatenate(places)
        reads, inverse = np.unique(flat, return_inverse=True)
        trees.append(builder.build(reads))
        targets = np.concatenate([np.arange(read_starts[row], read_starts[row + 1]) for row in rows])
        value_index[targets] = num_values + inverse
        num_values += len(reads)
    return BatchPlan(tuple(trees), value_index, sum(len(tree) for tree in trees), 0)


def plan_padded(sequences: Sequence[TokenSequence], *, max_num_batched_tokens: int, alone: bool = False) -> BatchPlan:
    """Pack distinct sequences, sorted by length, into rectangles of at most the budget's tokens.

    Args:
        sequences: M sequences.
        max_num_batched_tokens: the budget.
        alone: one sequence per batch, so that what the forward computes depends on nothing else in the call.

    Raises:
        ValueError: a sequence is empty, or alone longer than the budget.
    """
    _check_lengths(sequences, max_num_batched_tokens)
    distinct: dict[tuple[bytes, int | None], list[int]] = {}
    for row, sequence in enumerate(sequences):
        distinct.setdefault((sequence.input_ids.tobytes(), sequence.second_segment), []).append(row)
    groups = sorted(distinct.values(), key=lambda rows: len(sequences[rows[0]].input_ids))

    read_starts = np.cumsum([0] + [len(sequence.reads) for sequence in sequences])
    value_index = np.empty(read_starts[-1], dtype=np.int64)
    batches = []
    num_values = unique_tokens = padded_tokens = 0
    start = 0
    while start < len(groups):
        stop = start + 1
        while stop < len(groups) and not alone:
            width = len(sequences[groups[stop][0]].input_ids)
            if width * (stop + 1 - start) > max_num_batched_tokens:
                break
            stop += 1
        members = [sequences[rows[0]] for rows in groups[start:stop]]
        lengths = np.array([len(member.input_ids) for member in members], dtype=np.int64)
        input_ids = np.zeros((len(members), lengths.max()), dtype=np.int32)
        for place, member in enumerate(members):
            input_ids[place, : lengths[place]] = member.input_ids
        reads = []
        for place, rows in enumerate(groups[start:stop]):
            positions = np.unique(np.concatenate([sequences[row].reads for row in rows]))
            reads.append(np.stack([np.full_like(positions, place), positions], axis=1))
            for row in rows:
                found = np.searchsorted(positions, sequences[row].reads)
                value_index[read_starts[row] : read_starts[row + 1]] = num_values + found
            num_values += len(positions)
        seconds = [len(m.input_ids) if m.second_segment is None else m.second_segment for m in members]
        batches.append(PaddedBatch(input_ids, lengths, np.array(seconds, dtype=np.int64), np.concatenate(reads)))
        unique_tokens += int(lengths.sum())
        padded_tokens += int(input_ids.size - lengths.sum())
        start = stop
    return BatchPlan(tuple(batches), value_index, unique_tokens, padded_tokens)


def _check_lengths(sequences: Sequence[TokenSequence], budget: int) -> None:
    for row, sequence in enumerate(sequences):
        if not 0 < len(sequence.input_ids) <= budget:
            raise ValueError(
                f"sequence {row} has {len(sequence.input_ids)} tokens; expected 1 to max_num_batched_tokens={budget}."
            )


def _sorted_order(sequences: Sequence[TokenSequence]) -> list[int]:
    """Rows in lexicographic order of their ids: big-endian bytes compare as the integers do."""
    if not sequences:
        return []
    buffer = np.concatenate([sequence.input_ids for sequence in sequences]).astype(">u4").tobytes()
    stops = np.cumsum([4 * len(sequence.input_ids) for sequence in sequences]).tolist()
    keys = [buffer[start:stop] for start, stop in itertools.pairwise([0, *stops])]
    return sorted(range(len(sequences)), key=keys.__getitem__)


def _shared_prefix(before: NDArray[np.int32], after: NDArray[np.int32]) -> int:
    limit = min(len(before), len(after))
    different = before[:limit] != after[:limit]
    first = int(different.argmax())
    return first if different[first] else limit


def _cut(ids: Sequence[NDArray[np.int32]], shared: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Ranges of the sorted sequences whose trees fit the budget, cut where the least is shared."""
    cuts = []
    start = 0
    while start < len(ids):
        used = len(ids[start])
        stop = start + 1
        # A cut through a group computes its shared prefix twice: in the last quarter of the budget,
        # the boundary that shares least is taken instead of the last one that fits.
        best = stop
        while stop < len(ids) and used + len(ids[stop]) - shared[stop] <= budget:
            used += len(ids[stop]) - shared[stop]
            stop += 1
            late = stop < len(ids) and 4 * used >= 3 * budget
            if late and (best == start + 1 or shared[stop] <= shared[best]):
                best = stop
        if stop == len(ids) or best == start + 1 or shared[stop] <= shared[best]:
            best = stop
        cuts.append((start, best))
        start = best
    return cuts


class _TreeBuilder:
    """Lays sequences down in sorted order; the path to the current leaf is kept as runs of indices."""

    def __init__(self) -> None:
        self._length = 0
        self._ids: list[NDArray[np.int32]] = []
        self._pieces: list[tuple[int, int, int]] = []  # (start, depth, parent) of each piece of new tokens
        self._ends: list[tuple[int, int]] = []  # (start, subtree_end) of each finished run
        self._depths: list[int] = []  # of the current path: depth at which each run starts,
        self._starts: list[int] = []  # the index of its first token,
        self._depth = 0  # and the depth after its last token

    def add(self, sequence: TokenSequence, shared: int) -> IntArray | list[int]:
        """Append what follows the first `shared` tokens; returns the indices of the sequence's reads."""
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
        if len(sequence.reads) == 1:
            return [self._index(int(sequence.reads[0]))]
        runs = np.searchsorted(self._depths, sequence.reads, side="right") - 1
        places: IntArray = np.asarray(self._starts)[runs] + sequence.reads - np.asarray(self._depths)[runs]
        return places

    def build(self, reads: IntArray) -> TokenTree:
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
            reads=reads,
        )

    def _index(self, depth: int) -> int:
        """Index of the current path's token at this depth."""
        run = len(self._depths) - 1
        while self._depths[run] > depth:
            run -= 1
        return self._starts[run] + depth - self._depths[run]

    def _close(self, depth: int) -> None:
        """Leave every token of the current path at `depth` or below: nothing continues it any more."""
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
