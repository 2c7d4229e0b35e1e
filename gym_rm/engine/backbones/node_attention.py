"""Attention over a token tree for training on a CPU: one call of SDPA per node or small subtree, with its path's keys.

Pages (see `tree_attention`) give scores the same bits in every batch, at the price of copies. Training needs no equal
bits, so here the keys of a node are slices, and their gradients are added up without scattering.

A node is a run of tokens without a branching point. The tokens of a node, and those of a subtree, follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gym_rm.engine.backbones.attention import LayerCall
from gym_rm.engine.token_tree import IntArray, TokenTree

SMALL = 96  # tokens of a subtree that runs in one call: its masked products cost less than calls for its nodes


@dataclass(frozen=True, slots=True)
class PartQueries:
    """Queries of one part of the tree, and what they attend to.

    Attributes:
        count: number of queries; they follow those of the part before.
        path: the parts from the root to this one.
        mask: float32 `[count, keys]`, 0 for keys that a query attends to and -inf for others; None if the queries are
            all tokens of a root, so that attention is causal.
    """

    count: int
    path: tuple[int, ...]
    mask: Tensor | None


class NodeAttention:
    """One token tree for the attention of a training step; masks are computed once for all layers."""

    def __init__(self, tree: TokenTree) -> None:
        self.tree = tree
        starts = self._starts = part_starts(tree)
        self.sizes: list[int] = np.diff(starts, append=len(tree)).tolist()
        self._paths: list[tuple[int, ...]] = []
        for part, parent in enumerate(tree.parents[starts].tolist()):
            above = self._paths[np.searchsorted(starts, parent, side="right") - 1] if parent >= 0 else ()
            self._paths.append((*above, part))
        self._queries: dict[tuple[int | None, bool], list[PartQueries]] = {}

    def __call__(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention output `[Q, H, D]`; see `Attention`. Soft caps and sinks are not supported."""
        assert call.softcap is None
        assert call.sinks is None
        kind = call.window, call.only_reads
        if kind not in self._queries:
            self._queries[kind] = self._make_queries(*kind)
        queries = self._queries[kind]
        keys, values = (torch.split(states.transpose(0, 1), self.sizes, dim=1) for states in (key, value))
        tiles = torch.split(query.transpose(0, 1), [part.count for part in queries], dim=1)
        outputs = []
        for part, tile in zip(queries, tiles, strict=True):
            if not part.count:
                continue
            k, v = (
                states[part.path[0]] if len(part.path) == 1 else torch.cat([states[n] for n in part.path], dim=1)
                for states in (keys, values)
            )
            attended = scaled_dot_product_attention(
                tile.unsqueeze(0),
                k.unsqueeze(0),
                v.unsqueeze(0),
                attn_mask=None if part.mask is None else part.mask.to(tile.dtype),
                dropout_p=call.dropout,
                is_causal=part.mask is None,
                scale=call.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            outputs.append(attended[0].transpose(0, 1))
        return torch.cat(outputs)

    def _make_queries(self, window: int | None, only_reads: bool) -> list[PartQueries]:
        queries = []
        depths, ends, reads = self.tree.depths, self.tree.subtree_end, self.tree.read_indices
        for start, size, path in zip(self._starts.tolist(), self.sizes, self._paths, strict=True):
            rows = np.arange(start, start + size)
            branches = (ends[rows] != ends[start]).any()
            if only_reads:
                rows = reads[np.searchsorted(reads, start) : np.searchsorted(reads, start + size)]
            mask = None
            if only_reads or branches or len(path) > 1 or (window is not None and len(rows) > window):
                keys: IntArray = np.concatenate([np.arange(self.sizes[n]) + self._starts[n] for n in path])
                hidden = (keys > rows[:, None]) | (ends[keys] <= rows[:, None])
                if window is not None:
                    hidden |= depths[rows][:, None] - depths[keys] >= window
                mask = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0)))
            queries.append(PartQueries(len(rows), path, mask))
        return queries


def part_starts(tree: TokenTree) -> IntArray:
    """Return where the parts of a tree start: subtrees of at most `SMALL` tokens, and the nodes above them."""
    nodes = np.flatnonzero(np.diff(tree.subtree_end, prepend=-1))
    small = tree.subtree_end[nodes] - nodes <= SMALL
    parents = tree.parents[nodes]
    inside = np.zeros(len(nodes), dtype=np.bool_)  # of a small subtree, below its first node
    inside[parents >= 0] = small[np.searchsorted(nodes, parents[parents >= 0], side="right") - 1]
    return nodes[~(small & inside)]
