"""Batches of token ids: prefix trees and padded batches, and the plan that holds them. Integers only, no torch.

A tree has the sequences' tokens in preorder (a node before its children), and what they share once. Then

    token q attends to token k   exactly when   k <= q  and  q < subtree_end[k]

is causal attention for all sequences at once. Shapes: `[T]` has one entry per token of a tree, `[R]` one per value.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

Layout: TypeAlias = Literal["tree", "padded", "one_by_one"]
"""Layout of the batches of a model."""


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
