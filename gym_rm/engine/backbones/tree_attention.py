"""Attention over a token tree: for the Llama-like layer, and registered with transformers as `"gym_rm_tree"`.

A backbone of transformers called with `tree=TreeAttention(...)` passes it to every attention layer. Shapes follow
transformers: query `[1, H, T, D]`, key and value `[1, H_kv, T, D]`, output `[1, T, H, D]`. T may include rows of
padding after the tokens of the tree.

Keys and values are copied into pages of consecutive positions of one path, see `pages`. What a query attends to then
has a shape that depends on its position alone, so that its result has the same bits in every tree. A CPU runs SDPA for
the queries of one page at a time, with the pages of its path as keys, in one call for all pages with equally many. CUDA
runs `flex_attention` with a mask whose blocks are pages, see `flex_attention`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad, scaled_dot_product_attention, softmax
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from gym_rm.engine.backbones.batch_invariance import current_rows, with_padding
from gym_rm.engine.backbones.devices import to_device
from gym_rm.engine.backbones.flex_attention import FLEX_BLOCK_SIZE, attend_with_flex, block_mask_of
from gym_rm.engine.backbones.node_attention import NodeAttention
from gym_rm.engine.backbones.prefix_cache import KnownPrefixes
from gym_rm.engine.pages import make_pages, make_tiles
from gym_rm.engine.token_tree import TokenTree

NAME = "gym_rm_tree"
PAGE_SIZE = 32  # positions in a page for SDPA; with larger pages, short branches waste more queries
PAGES_AT_ONCE = 512  # maximum number of pages of keys in one call of SDPA, to bound memory
SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class UnsupportedByTree(RuntimeError):
    """The model's attention needs something that trees do not support; the model runs padded batches instead."""


@dataclass(frozen=True, slots=True)
class TileGroup:
    """N tiles of queries that attend to equally many pages of keys.

    Attributes:
        start, stop: range of the tiles among all tiles.
        pages: `[N * pages]` pages of the keys of each tile; a range of them if they follow each other.
        mask: float `[PAGE_SIZE, keys]`, the same for all tiles: 0 for keys that a query attends to, -inf for others.
    """

    start: int
    stop: int
    pages: Tensor | slice
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Tiling:
    """Queries in tiles, each in the row of its position; other rows have any query, and their results are not used.

    Attributes:
        queries: int64 `[tiles * PAGE_SIZE]`, query in each row of the tiles.
        groups: groups of the tiles.
        rows: int64 `[Q]`, row of each query; queries after those of the tree have any row.
    """

    queries: Tensor
    groups: list[TileGroup]
    rows: Tensor


class TreeAttention:
    """One token tree for the attention layers; pages, tiles and masks are computed once for all layers.

    Args:
        tree: the token tree, on the host.
        device: device of the queries. CUDA uses `flex_attention`, other devices use SDPA.
        prefix: cached keys and values of the tokens that are not computed; None if all are.
        use_flex: overrides the choice by device. Outside CUDA, `flex_attention` runs uncompiled: slow, but correct.
        nodes: attention by nodes, which replaces that by pages in layers of transformers where it can; for gradients
            without `flex_attention`.

    Attributes:
        pages: pages of the tree.
        slots: int64 `[P * size]`, tree index of the token in each place of the pages.
        num_calls: number of layers that called `tree_attention`; a layer that did not call it ignored the tree.
    """

    def __init__(
        self,
        tree: TokenTree,
        device: torch.device,
        *,
        prefix: KnownPrefixes | None = None,
        use_flex: bool | None = None,
        nodes: NodeAttention | None = None,
    ) -> None:
        self.tree = tree
        self.nodes = nodes
        self.prefix = prefix
        self.device = device
        self.use_flex = device.type == "cuda" if use_flex is None else use_flex
        self.pages = make_pages(tree, FLEX_BLOCK_SIZE if self.use_flex else PAGE_SIZE)
        self.slots = to_device(self.pages.tokens.reshape(-1), device)
        self.num_rows = current_rows().padded(len(tree))
        self.num_calls = 0
        self._tilings: dict[tuple[int | None, bool, int], Tiling] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        only_reads: bool,
    ) -> Tensor:
        """Return the attention output `[Q, H, D]`; see `llama.Attention`."""
        if self.prefix is not None:
            key, value = self.prefix.complete(layer, key, value)
        query, key, value = (states.transpose(0, 1).unsqueeze(0) for states in (query, key, value))
        return self.attend(query, key, value, scale, window, only_reads=only_reads)[0]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
        *,
        dropout: float = 0.0,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        only_reads: bool = False,
    ) -> Tensor:
        """Return the attention output `[1, Q, H, D]` of all tokens that are computed, or of those that are read."""
        if self.use_flex:
            rows = self.tree.read_indices if only_reads else None if self.prefix is None else self.prefix.computed
            at = None if rows is None else to_device(with_padding(rows, query.shape[2]), self.device)
            mask = self.block_mask(window)
            return attend_with_flex(query, key, value, self.slots, mask, scaling, softcap=softcap, sinks=sinks, rows=at)
        tiling = self.tiling(window, query.shape[2], only_reads=only_reads)
        tiles = _in_pages(query, tiling.queries)
        keys, values = (_in_pages(states, self.slots) for states in (key, value))
        parts = []
        for group in tiling.groups:
            q = tiles[group.start : group.stop].transpose(1, 2)
            k, v = (_paths(states, group.pages, len(q)).transpose(1, 2) for states in (keys, values))
            if softcap is None and sinks is None:
                part = scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=group.mask.to(query.dtype),
                    dropout_p=dropout,
                    scale=scaling,
                    enable_gqa=query.shape[1] != key.shape[1],
                )
            else:
                part = _eager(q, k, v, group.mask, scaling, softcap, sinks, dropout)
            parts.append(part.transpose(1, 2).flatten(0, 1))
        return torch.cat(parts).index_select(0, tiling.rows).unsqueeze(0)

    def tiling(self, window: int | None, num_queries: int, *, only_reads: bool = False) -> Tiling:
        """Return the tiles of the computed tokens' queries, or only of the queries at `tree.read_indices`."""
        key = (window, only_reads, num_queries)
        if key in self._tilings:
            return self._tilings[key]
        computed = np.arange(len(self.tree)) if self.prefix is None else self.prefix.computed
        queries = self.tree.read_indices if only_reads else computed
        tiles, places = make_tiles(self.tree, self.pages, queries, window, PAGES_AT_ONCE)
        rows = np.zeros(num_queries, dtype=np.int64)
        rows[: len(places)] = places
        # The mask of a tile depends on distances only, so that of fewer keys is the end of that of the most keys.
        keys = np.arange(max(tile.pages.shape[1] for tile in tiles) * PAGE_SIZE)
        in_last_page = keys[-PAGE_SIZE:, None]
        hidden = keys > in_last_page
        if window is not None:
            hidden |= in_last_page - keys >= window
        mask = to_device(np.where(hidden, np.float32(-np.inf), np.float32(0)), self.device)
        groups = []
        start = 0
        for tile in tiles:
            stop = start + len(tile.queries)
            path = tile.pages[0]
            follow = len(tile.pages) == 1 and path[-1] - path[0] == len(path) - 1
            pages = slice(path[0], path[-1] + 1) if follow else to_device(tile.pages.reshape(-1), self.device)
            groups.append(TileGroup(start, stop, pages, mask[:, -len(path) * PAGE_SIZE :]))
            start = stop
        in_tiles = np.concatenate([tile.queries.reshape(-1) for tile in tiles])
        self._tilings[key] = Tiling(to_device(in_tiles, self.device), groups, to_device(rows, self.device))
        return self._tilings[key]

    def block_mask(self, sliding_window: int | None) -> BlockMask:
        """Return the tree as a `flex_attention` block mask of queries and pages."""
        if sliding_window not in self._block_masks:
            mask = block_mask_of(self.tree, self.pages, self.device, sliding_window, self.num_rows)
            self._block_masks[sliding_window] = mask
        return self._block_masks[sliding_window]


def _in_pages(states: Tensor, indices: Tensor) -> Tensor:
    """Return the states `[1, H, T, D]` at these indices, `[pages, size, H, D]`."""
    return states[0].transpose(0, 1).index_select(0, indices).view(-1, PAGE_SIZE, *states.shape[1::2])


def _paths(states: Tensor, pages: Tensor | slice, num_tiles: int) -> Tensor:
    """Return the keys or values `[num_tiles, keys, H_kv, D]` of paths, from those of all pages `[P, size, H_kv, D]`."""
    of_paths = states[pages] if isinstance(pages, slice) else states.index_select(0, pages)
    return of_paths.reshape(num_tiles, -1, *states.shape[2:])


def _eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """Compute softmax attention step by step, for options that SDPA does not support."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float() + mask
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    else:
        weights = softmax(scores, dim=-1)
    return drop(weights.to(query.dtype), dropout) @ value


@dataclass(frozen=True, slots=True)
class TreeMask:
    """Mask that transformers passes to the layers: only the sliding window, because the tree contains the rest."""

    window: int | None


def tree_mask(*, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any) -> TreeMask:
    """Return the mask for one type of layer; transformers calls this function once per type.

    Raises:
        UnsupportedByTree: the model adds its own rule to the causal mask.
    """
    if use_vmap:
        raise UnsupportedByTree("the model changes the causal mask.")
    return TreeMask(local_size)


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: TreeMask | Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    tree: TreeAttention | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention output of one layer; transformers calls this function in every layer.

    Args:
        attention_mask: return value of `tree_mask`. Its window overrides `sliding_window`, which some layers omit.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2, arXiv 2408.00118, section 2).
        s_aux: one attention sink per head, which adds to the softmax's denominator only (gpt-oss).

    Raises:
        UnsupportedByTree: the tree is missing, or the layer needs a bias or mask that trees do not support.
    """
    if tree is None:
        raise UnsupportedByTree(f"{type(module).__name__} does not pass the tree to its attention.")
    if kwargs.get("position_bias") is not None or not getattr(module, "is_causal", True):
        raise UnsupportedByTree(f"{type(module).__name__} is not plain causal attention.")
    if isinstance(attention_mask, TreeMask):
        sliding_window = attention_mask.window
    elif attention_mask is not None:
        raise UnsupportedByTree(f"{type(module).__name__} uses its own attention mask.")
    tree.num_calls += 1
    if tree.nodes is not None and not tree.use_flex and softcap is None and s_aux is None:
        q, k, v = (states[0, :, : len(tree.tree)].transpose(0, 1) for states in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = tree.nodes(0, q, k, v, scale=scale, window=sliding_window, only_reads=False, dropout=dropout)
        return pad(output, (0, 0, 0, 0, 0, query.shape[2] - len(output))).unsqueeze(0), None
    return tree.attend(query, key, value, scaling, sliding_window, dropout=dropout, softcap=softcap, sinks=s_aux), None


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, tree_mask)


@contextlib.contextmanager
def attending_to_trees(model: PreTrainedModel) -> Iterator[None]:
    """Run the model's layers with `tree_attention`; restore their own attention on exit."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = {key: (config, config._attn_implementation) for key, config in configs.items()}
    try:
        for config, _ in before.values():
            config._attn_implementation = NAME
        yield
    finally:
        for config, implementation in before.values():
            config._attn_implementation = implementation
