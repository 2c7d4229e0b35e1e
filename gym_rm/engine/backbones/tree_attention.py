"""Attention over a token tree: for the Llama-like layer, and registered with transformers as `"gym_rm_tree"`.

A backbone of transformers called with `tree=TreeAttention(...)` passes it to every attention layer. Shapes follow
transformers: query `[1, H, T, D]`, key and value `[1, H_kv, T, D]`, output `[1, T, H, D]`. T may include rows of
padding after the tokens of the tree.

What a query attends to is divided by its position into parts, whole pages of its path, see `pages`. Each part has a
shape that depends on the position alone, so that the result has the same bits in every tree. A CPU runs one product for
all queries that share a part, as for the replies to one prompt (Hydragen, arXiv 2402.05099), and adds up the parts with
their shares of the softmax. On CUDA, a kernel reads the keys of each path where they are (`kernels.path_attention`), or
`flex_attention` runs with a mask whose blocks are pages, where the trial at load has not proven the kernel.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad, softmax
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from gym_rm.engine.backbones.attention import LayerCall
from gym_rm.engine.backbones.batch_invariance import current_rows, with_padding
from gym_rm.engine.backbones.devices import to_device
from gym_rm.engine.backbones.flex_attention import (
    FLEX_BLOCK_SIZE,
    PAGE_WITHOUT_GRADIENTS,
    attend_with_flex,
    block_mask_of,
)
from gym_rm.engine.backbones.node_attention import NodeAttention
from gym_rm.engine.backbones.prefix_cache import KnownPrefixes
from gym_rm.engine.pages import BLOCK, Pages, Tiles, make_pages, make_tiles
from gym_rm.engine.token_tree import IntArray, TokenTree

NAME = "gym_rm_tree"
PAGE_SIZE = 32  # positions in a page on a CPU; with larger pages, short branches copy more keys
PAGES_AT_ONCE = 32  # maximum number of pages of keys in one product of several tiles, to bound memory
SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def page_size(device: torch.device) -> int:
    """Return the number of positions in a page on this device."""
    return FLEX_BLOCK_SIZE if device.type == "cuda" else PAGE_SIZE


class UnsupportedByTree(RuntimeError):
    """The model's attention needs something that trees do not support; the model runs padded batches instead."""


@dataclass(frozen=True, slots=True)
class TileGroup:
    """N tiles of queries with equally many keys.

    Attributes:
        count: N.
        queries: int64 `[N * height * H]`, head of a query in each row of a key head; any query in rows without one.
        keys: int64 `[N * keys]`, tokens of each tile's keys; a slice if they follow each other.
        filled: int64, the rows of tiles that are kept; None if all are.
        mask: float `[1 or N, 1, height, keys]`, 0 for keys that a query attends to, -inf for others; None for all keys.
    """

    count: int
    queries: Tensor
    keys: Tensor | slice
    filled: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class KeyPart:
    """One part of the keys of all queries.

    Attributes:
        groups: the tiles of the queries that have the part.
        places: int64 `[Q * H]`, place of each head of a query in the rows of all tiles; after them for queries
            without the part. Queries after those of the tree have any place.
        lacking: whether a query lacks the part.
    """

    groups: list[TileGroup]
    places: Tensor
    lacking: bool


class TreeAttention:
    """One token tree for the attention layers; pages, tiles and masks are computed once for all layers.

    Args:
        tree: the token tree, on the host.
        device: device of the queries. CUDA uses `flex_attention`, other devices use SDPA.
        prefix: cached keys and values of the tokens that are not computed; None if all are.
        use_flex: overrides the choice by device. Outside CUDA, `flex_attention` runs uncompiled: slow, but correct.
        nodes: attention by nodes, which replaces that by pages in layers of transformers where it can; for gradients
            without `flex_attention`.
        paths: whether `PathAttention` replaces that by pages where it can.
        same_as_training: whether pages have the size for gradients also without them.

    Attributes:
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
        paths: bool = False,
        same_as_training: bool = False,
    ) -> None:
        self.tree = tree
        self.nodes = nodes
        self.prefix = prefix
        self.device = device
        self.use_flex = device.type == "cuda" if use_flex is None else use_flex
        training = same_as_training or torch.is_grad_enabled()
        flex = FLEX_BLOCK_SIZE if training else PAGE_WITHOUT_GRADIENTS
        self._page_size = flex if self.use_flex else PAGE_SIZE
        self._paths: Any = _path_attention().PathAttention(tree, device) if paths else None
        self.num_rows = current_rows().padded(len(tree))
        self.num_calls = 0
        self._parts: dict[tuple[int | None, bool, tuple[int, int, int]], list[KeyPart]] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    def __call__(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention output `[Q, H, D]` of all tokens that are computed, or of those that are read."""
        if self.prefix is not None:
            key, value = self.prefix.complete(call.layer, key, value)
        rows = self._rows(call)
        if self._paths is not None and self._paths.covers(call, query, key, value):
            attention: Tensor = self._paths(call, query, key, value, rows)
            return attention
        if self.use_flex:
            every = self.prefix is None and not call.only_reads
            at = None if every else to_device(with_padding(rows, len(query)), self.device)
            return attend_with_flex(call, query, key, value, self.slots, self.block_mask(call.window), at)
        heads, size = query.shape[1], value.shape[2]
        attended: list[Tensor] = []
        shares: list[Tensor] = []
        for part in self.parts(call, (len(query), heads, key.shape[1])):
            outputs, sums = zip(*(_attend_tiles(query, key, value, group, call) for group in part.groups), strict=True)
            if part.lacking:
                outputs = (*outputs, outputs[0].new_zeros(1, size))
                sums = (*sums, sums[0].new_full((1,), -torch.inf))
            output, total = (each[0] if len(each) == 1 else torch.cat(each) for each in (outputs, sums))
            attended.append(output.index_select(0, part.places).view(-1, heads, size))
            shares.append(total.index_select(0, part.places).view(-1, heads))
        if call.sinks is not None:
            shares.append(call.sinks.to(shares[0].dtype).expand_as(shares[0]))
        result = attended[0]
        if len(shares) > 1:
            weights = softmax(torch.stack(shares, dim=-1), dim=-1).to(result.dtype)
            result = result * weights[..., :1] if torch.is_grad_enabled() else result.mul_(weights[..., :1])
            for number, other in enumerate(attended[1:], start=1):
                result = result.addcmul_(other, weights[..., number, None])
        return result

    @functools.cached_property
    def pages(self) -> Pages:
        """Pages of the tree."""
        return make_pages(self.tree, self._page_size)

    @functools.cached_property
    def slots(self) -> Tensor:
        """Tree index of the token in each place of the pages, int64 `[P * size]`, for `flex_attention`."""
        return to_device(self.pages.tokens.reshape(-1), self.device)

    def _rows(self, call: LayerCall) -> IntArray:
        """Return the tree indices of the queries."""
        computed = np.arange(len(self.tree)) if self.prefix is None else self.prefix.computed
        return self.tree.read_indices if call.only_reads else computed

    def parts(self, call: LayerCall, shape: tuple[int, int, int]) -> list[KeyPart]:
        """Return the parts of the keys of a call's queries.

        `shape` is the number of queries, of their heads, and of the heads of keys.
        """
        window = call.window
        kind = (window, call.only_reads, shape)
        if kind in self._parts:
            return self._parts[kind]
        queries = self._rows(call)
        own, *shared = make_tiles(self.tree, self.pages, queries, window, PAGES_AT_ONCE)
        found = self._parts[kind] = []
        for tiles in filter(None, (own, *shared)):
            masks = [self._mask(each, queries, window, own=tiles is own) for each in tiles]
            found.append(self._part(tiles, len(queries), shape, masks))
        return found

    def _part(
        self, tiles: list[Tiles], num_computed: int, shape: tuple[int, int, int], masks: list[Tensor | None]
    ) -> KeyPart:
        num_queries, heads, key_heads = shape
        by_key_head = np.arange(heads).reshape(key_heads, -1).T  # query heads that share a key head are rows
        groups = []
        places = np.full(num_queries, -1)
        start = 0
        for each, mask in zip(tiles, masks, strict=True):
            rows = each.queries.reshape(-1)
            chosen = np.flatnonzero(rows >= 0)
            few = each.queries.shape[1] < self.pages.size  # most rows are empty
            places[rows[chosen]] = start + (np.arange(len(chosen)) if few else chosen)
            start += len(chosen) if few else len(rows)
            groups.append(
                TileGroup(
                    len(each.queries),
                    to_device((np.maximum(rows, 0)[:, None, None] * heads + by_key_head).reshape(-1), self.device),
                    self._index(self.pages.tokens[each.pages].reshape(-1)),
                    to_device(chosen, self.device) if few else None,
                    mask,
                )
            )
        lacking = bool((places[:num_computed] < 0).any())
        of_heads = np.arange(heads).reshape(-1, key_heads).T.reshape(-1)
        found = np.where(places[:, None] < 0, start * heads if lacking else 0, places[:, None] * heads + of_heads)
        return KeyPart(groups, to_device(found.reshape(-1), self.device), lacking)

    def _mask(self, tiles: Tiles, queries: IntArray, window: int | None, *, own: bool) -> Tensor | None:
        """Return the mask of tiles; None if every query attends to all keys."""
        size = self.pages.size
        height, count = tiles.queries.shape[1], tiles.pages.shape[1]
        first = self.pages.numbers[tiles.pages[:, 0]] * size
        keys = np.arange(count * size)
        if own:
            found = self.tree.depths[queries[tiles.queries.max(axis=1)]] % size // height * height
            rows = found[: 1 if height == size else None, None] + np.arange(height)
        else:
            stop = (self.pages.numbers[tiles.pages[:, -1]] + 1) // BLOCK * BLOCK * size + BLOCK * size
            if window is None or (stop - first <= window).all():
                return None
            rows = np.where(tiles.queries >= 0, self.tree.depths[queries[tiles.queries]] - first[:, None], 0)
        hidden = keys > rows[..., None]
        if window is not None:
            hidden |= rows[..., None] - keys >= window
        return to_device(np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None], self.device)

    def _index(self, indices: IntArray) -> Tensor | slice:
        start, stop = int(indices[0]), int(indices[0]) + len(indices)
        follow = indices[-1] == stop - 1 and (indices == np.arange(start, stop)).all()
        return slice(start, stop) if follow else to_device(indices, self.device)

    def block_mask(self, sliding_window: int | None) -> BlockMask:
        """Return the tree as a `flex_attention` block mask of queries and pages."""
        if sliding_window not in self._block_masks:
            mask = block_mask_of(self.tree, self.pages, self.device, sliding_window, self.num_rows)
            self._block_masks[sliding_window] = mask
        return self._block_masks[sliding_window]


def _path_attention() -> Any:
    from gym_rm.engine.kernels import path_attention  # needs Triton

    return path_attention


def _attend_tiles(
    query: Tensor, key: Tensor, value: Tensor, group: TileGroup, call: LayerCall
) -> tuple[Tensor, Tensor]:
    """Return the output `[rows * H, D]` of a group's kept rows, and the log of the sum of their weights `[rows * H]`.

    Args:
        query: `[T, H, D]`.
        key, value: `[T, H_kv, D]`.
        group, call: the tiles; scale, soft cap and dropout.
    """
    heads = key.shape[1]
    tiles = query.reshape(-1, query.shape[2]).index_select(0, group.queries)
    q = tiles.view(group.count, -1, heads, query.shape[2]).transpose(1, 2)
    k, v = (_at(each, group.keys).reshape(group.count, -1, *each.shape[1:]).transpose(1, 2) for each in (key, value))
    mask = None if group.mask is None else group.mask.to(query.dtype).repeat_interleave(query.shape[1] // heads, dim=2)
    plain = call.softcap is None and not call.dropout and k.shape[3] == v.shape[3] and not torch.is_grad_enabled()
    if plain:
        output, sums = torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=call.scale)
    else:
        output, sums = _eager(q, k, v, mask, call)
    output, sums = output.transpose(1, 2).reshape(-1, value.shape[2]), sums.transpose(1, 2).reshape(-1)
    if group.filled is not None:
        output, sums = (
            each.view(-1, query.shape[1], *each.shape[1:]).index_select(0, group.filled).flatten(0, 1)
            for each in (output, sums)
        )
    return output, sums


def _at(states: Tensor, index: Tensor | slice) -> Tensor:
    found = states[index] if isinstance(index, slice) else states.index_select(0, index)
    return found if found.stride(-1) == 1 else found.contiguous()  # torch's kernel takes it for granted


def _eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: LayerCall) -> tuple[Tensor, Tensor]:
    """Compute softmax attention step by step, for gradients and for options that torch's kernel does not support."""
    scores = query @ key.transpose(2, 3) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.float() if mask is None else scores.float() + mask
    weights = softmax(scores, dim=-1).to(query.dtype)
    return drop(weights, call.dropout) @ value, scores.logsumexp(dim=-1)


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
        softcap, s_aux: the soft cap and the sinks of `LayerCall`.

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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = LayerCall(0, scale, sliding_window, dropout=dropout, softcap=softcap, sinks=s_aux)
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    if tree.nodes is None or tree.use_flex or softcap is not None or s_aux is not None:
        return tree(call, q, k, v).unsqueeze(0), None
    tokens = len(tree.tree)
    output = tree.nodes(call, q[:tokens], k[:tokens], v[:tokens])
    return pad(output, (0, 0, 0, 0, 0, len(q) - tokens)).unsqueeze(0), None


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
