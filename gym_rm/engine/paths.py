"""The paths of a token tree, and tiles of it: what attention along paths reads. Integers only, no torch.

A chain is a run of tokens each of which follows the token before. All of its tokens have one path: the tokens before
the chain, and the chain. So a query at position p attends to the first p + 1 tokens of the path, in this order, and a
tile of queries of one chain reads each of them once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gym_rm.engine.token_tree import IntArray, TokenTree

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class Paths:
    """The C chains of a tree, and their paths.

    Attributes:
        tree: the tree.
        chains: int64 `[C]`, increasing, first token of each chain.
        offsets: int64 `[C]`, where the path of each chain starts in `tokens`.
        tokens: int32, tree indices of the paths, one path after another.
    """

    tree: TokenTree
    chains: IntArray
    offsets: IntArray
    tokens: Int32Array

    def query_tiles(self, queries: IntArray, height: int) -> Int32Array:
        """Return tiles of up to `height` of the queries, increasing tree indices; those with the most keys first.

        Returns:
            int32 `[tiles, 3]`: offset of the path, index of the first query, and index after the last query.
        """
        chain, first, stop = self._runs(queries, height)
        order = np.argsort(-self.tree.depths[queries[stop - 1]], kind="stable")
        return np.stack([self.offsets[chain], first, stop], axis=1)[order].astype(np.int32)

    def key_tiles(self, queries: IntArray, width: int) -> Int32Array:
        """Return tiles of up to `width` tokens as keys, and the queries in the subtree of the first of them.

        Returns:
            int32 `[tiles, 4]`: first key, key after the last, index of the first query, and index after the last one.
        """
        _, first, stop = self._runs(np.arange(len(self.tree)), width)
        low, high = np.searchsorted(queries, first), np.searchsorted(queries, self.tree.subtree_end[first])
        order = np.argsort(low - high, kind="stable")
        return np.stack([first, stop, low, high], axis=1)[order].astype(np.int32)

    def _runs(self, tokens: IntArray, most: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return chain, first index and index after the last of runs of up to `most` tokens of one chain."""
        chains = np.searchsorted(self.chains, tokens, side="right") - 1
        edges = np.flatnonzero(np.diff(chains, prepend=-1, append=-1))
        starts, stops = edges[:-1], edges[1:]
        counts = -(-(stops - starts) // most)
        first = np.repeat(starts, counts) + most * (
            np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        )
        return np.repeat(chains[starts], counts), first, np.minimum(first + most, np.repeat(stops, counts))


def paths_of(tree: TokenTree) -> Paths:
    """Return the paths of a tree."""
    starts = tree.parents != np.arange(-1, len(tree) - 1)
    starts[:1] = True
    chains = np.flatnonzero(starts)
    depths, stops = tree.depths[chains], np.append(chains[1:], len(tree))
    lengths = depths + stops - chains
    offsets = np.cumsum(lengths) - lengths
    tokens = np.empty(int(lengths.sum()), dtype=np.int32)
    before = offsets[np.maximum(np.cumsum(starts)[tree.parents[chains]] - 1, 0)]
    for chain, stop, depth, offset, parent in zip(
        *(each.tolist() for each in (chains, stops, depths, offsets, before)), strict=True
    ):
        tokens[offset : offset + depth] = tokens[parent : parent + depth]
        tokens[offset + depth : offset + depth + stop - chain] = np.arange(chain, stop)
    return Paths(tree, chains, offsets, tokens)
