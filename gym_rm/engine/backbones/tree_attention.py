"""Attention over a token tree, registered with transformers as `"gym_rm_tree"`.

A backbone called with `tree=TreeAttention(...)` passes it to every attention layer. Shapes follow transformers:
query `[1, H, T, D]`, key and value `[1, H_kv, T, D]`, output `[1, T, H, D]`.

- CPU: SDPA for one block of queries at a time, with the keys of the block's node and of its ancestors.
- CUDA: `flex_attention` with a block mask that is computed on the host from `subtree_end`. Building the mask needs no
  `[T, T]` tensor and no synchronisation with the device. Lengths are padded to a few sizes, to compile few kernels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from gym_rm.engine.token_tree import IntArray, TokenTree

NAME = "gym_rm_tree"
FLEX_BLOCK_SIZE = 128  # number of queries, and of keys, in a block of flex_attention
COMPILED_ON = ("cuda",)  # devices for which flex_attention is compiled
RECOMPILE_LIMIT = 1024  # kernels of flex_attention; torch's default is 8, and then it computes whole score matrices
MASKED_QUERIES = 512  # maximum number of queries per mask, to bound the mask's memory
MERGED_TOKENS = 64  # consecutive nodes within this many tokens share a block: a call costs more than their masked keys
SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class UnsupportedByTree(RuntimeError):
    """The model's attention needs something that trees do not support; the model runs padded batches instead."""


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Consecutive queries that attend to keys in the same ranges.

    Attributes:
        start, stop: range of the queries.
        runs: ranges of the keys and values, in order.
        mask: float `[queries, keys]`, 0 for keys that a query attends to and -inf for others; None for no mask.
        causal: whether this is plain causal attention of a range to itself.
    """

    start: int
    stop: int
    runs: tuple[tuple[int, int], ...]
    mask: torch.Tensor | None
    causal: bool


class TreeAttention:
    """One token tree for the attention layers; masks and key ranges are computed once for all layers.

    Args:
        tree: the token tree, on the host.
        device: device of the queries. CUDA uses `flex_attention`, other devices use SDPA by blocks of queries.
        computed: indices of the tokens to compute, if the keys of the other tokens are cached; None for all tokens.
        use_flex: overrides the choice by device. Outside CUDA, `flex_attention` runs uncompiled: slow, but correct.

    Attributes:
        num_calls: number of layers that called `tree_attention`; a layer that did not call it ignored the tree.
    """

    def __init__(
        self,
        tree: TokenTree,
        device: torch.device,
        *,
        computed: IntArray | None = None,
        use_flex: bool | None = None,
    ) -> None:
        self.tree = tree
        self.computed = computed
        self.device = device
        self.use_flex = device.type == "cuda" if use_flex is None else use_flex
        self.num_calls = 0
        self._blocks: dict[tuple[int | None, bool], list[QueryBlock]] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    def blocks(self, sliding_window: int | None, *, only_reads: bool = False) -> list[QueryBlock]:
        """Return blocks of the computed tokens' queries, or only of the queries at `tree.read_indices`."""
        key = (sliding_window, only_reads)
        if key not in self._blocks:
            some = self.tree.read_indices if only_reads else self.computed
            self._blocks[key] = list(self._make_blocks(sliding_window, some))
        return self._blocks[key]

    def block_mask(self, sliding_window: int | None) -> BlockMask:
        """Return the tree as a `flex_attention` block mask over the padded length."""
        if sliding_window not in self._block_masks:
            self._block_masks[sliding_window] = _block_mask(self.tree, self.device, sliding_window)
        return self._block_masks[sliding_window]

    def _make_blocks(self, window: int | None, some: IntArray | None) -> Iterator[QueryBlock]:
        """Yield blocks of the queries at the indices `some`, or of all queries if it is None."""
        tree = self.tree
        queries = np.arange(len(tree)) if some is None else some
        starts = tree.node_starts.tolist()
        stops = [*starts[1:], len(tree)]
        bounds = np.searchsorted(queries, [*starts, len(tree)]).tolist()
        groups: list[tuple[int, int, int, tuple[tuple[int, int], ...]]] = []  # of nodes that share blocks
        ancestors: list[tuple[int, int]] = []  # (start, stop) of each ancestor of the current node
        for node, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            while ancestors and tree.subtree_end[ancestors[-1][0]] <= start:
                ancestors.pop()
            first, last = bounds[node : node + 2]
            if first < last:
                if groups and queries[last - 1] - groups[-1][2] < MERGED_TOKENS:
                    groups[-1] = (groups[-1][0], last, *groups[-1][2:])
                else:
                    groups.append((first, last, start, tuple(ancestors)))
            ancestors.append((start, stop))
        for first, last, start, above in groups:
            whole = some is None and not above and (tree.parents[first + 1 : last] == np.arange(first, last - 1)).all()
            if whole and (window is None or last - first <= window):
                yield QueryBlock(first, last, ((first, last),), None, causal=True)
                continue
            for one in range(first, last, MASKED_QUERIES):
                stop = min(one + MASKED_QUERIES, last)
                yield self._block(one, stop, queries[one:stop], start, above, window)

    def _block(
        self,
        start: int,
        stop: int,
        queries: IntArray,
        node: int,
        ancestors: Sequence[tuple[int, int]],
        window: int | None,
    ) -> QueryBlock:
        """Return a block of queries, which attend to keys among the ancestors of a node and from its start on."""
        positions = self.tree.position_ids
        oldest = 0 if window is None else max(0, int(positions[queries].min()) - window + 1)
        runs: list[tuple[int, int]] = []
        for first, last in (*ancestors, (node, int(queries[-1]) + 1)):
            first = min(
                last, first + max(0, oldest - int(positions[first]))
            )  # leave out keys before the window of every query
            if runs and runs[-1][1] == first:
                runs[-1] = (runs[-1][0], last)  # one range needs no copy of the keys, so adjacent ranges are merged
            elif first < last:
                runs.append((first, last))
        keys = np.concatenate([np.arange(first, last) for first, last in runs])
        rows = queries[:, None]
        hidden = (keys > rows) | (self.tree.subtree_end[keys] <= rows)
        if window is not None:
            hidden |= positions[rows] - positions[keys] >= window
        if not hidden.any():
            return QueryBlock(start, stop, tuple(runs), None, causal=False)
        mask = to_device(np.where(hidden, np.float32(-np.inf), np.float32(0)), self.device)
        return QueryBlock(start, stop, tuple(runs), mask, causal=False)


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
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: TreeMask | torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    tree: TreeAttention | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
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
    if tree.use_flex:
        return attend_with_flex(query, key, value, tree, scaling, sliding_window, softcap=softcap, sinks=s_aux), None
    blocks = tree.blocks(sliding_window)
    return attend(query, key, value, blocks, scaling, dropout=dropout, softcap=softcap, sinks=s_aux), None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Sequence[QueryBlock],
    scaling: float | None,
    *,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output `[1, queries, H, D]`; a query never reads the keys of other sequences."""
    parts = []
    for block in blocks:
        queries = query[:, :, block.start : block.stop]
        keys, values = _gather(key, block.runs), _gather(value, block.runs)
        if softcap is None and sinks is None:
            part = torch.nn.functional.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=None if block.mask is None else block.mask.to(query.dtype),
                dropout_p=dropout,
                is_causal=block.causal,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        else:
            part = _eager(queries, keys, values, block, scaling, softcap, sinks, dropout)
        parts.append(part.transpose(1, 2))
    return torch.cat(parts, dim=1)


def attend_with_flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: TreeAttention,
    scaling: float | None,
    sliding_window: int | None,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output of the whole tree `[1, T, H, D]`, or only at `rows` `[1, Q, H, D]`, in one kernel."""
    if rows is not None:
        # Pad to the full length, so that all layers use the same compiled kernel.
        everywhere = query.new_zeros(1, query.shape[1], key.shape[2], query.shape[3])
        everywhere[:, :, rows] = query
        query = everywhere
    length = query.shape[2]
    padding = padded_length(length) - length
    if padding:
        query, key, value = (torch.nn.functional.pad(states, (0, 0, 0, padding)) for states in (query, key, value))
    attention: Any = _compiled_flex_attention() if query.device.type in COMPILED_ON else flex_attention
    output, auxiliary = attention(
        query,
        key,
        value,
        score_mod=None if softcap is None else _softcap(softcap),
        block_mask=tree.block_mask(sliding_window),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:
        # A sink adds exp(sink) to the softmax's denominator and nothing to its numerator.
        share = torch.sigmoid(auxiliary.lse - sinks.float().view(1, -1, 1))
        output = output * share.unsqueeze(-1).to(output.dtype)
    attended: torch.Tensor = output[:, :, :length].transpose(1, 2)
    return attended if rows is None else attended[:, rows]


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


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Copy an array to the device; for a GPU through pinned memory, so that the host does not wait for the copy."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def padded_length(length: int) -> int:
    """Return the padded length of a tree on CUDA; there are at most 16 distinct lengths per doubling."""
    step = max(FLEX_BLOCK_SIZE, 1 << max(0, (length - 1).bit_length() - 5))
    return -(-length // step) * step


def _gather(states: torch.Tensor, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    if len(runs) == 1:
        return states[:, :, runs[0][0] : runs[0][1]]
    return torch.cat([states[:, :, start:stop] for start, stop in runs], dim=2)


def _eager(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block: QueryBlock,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """Compute softmax attention step by step, for options that SDPA does not support."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float()
    if block.causal:
        scores = scores + torch.full(scores.shape[-2:], float("-inf"), device=scores.device).triu(1)
    elif block.mask is not None:
        scores = scores + block.mask
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.nn.functional.dropout(weights.to(query.dtype), dropout) @ value


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """Return `flex_attention` that compiles one kernel for each padded length, for any number of them."""
    compiled = torch.compile(flex_attention, dynamic=False)
    limits = {"recompile_limit": RECOMPILE_LIMIT, "accumulated_recompile_limit": RECOMPILE_LIMIT}

    def attention(*args: Any, **options: Any) -> Any:
        with torch._dynamo.config.patch(limits):
            return compiled(*args, **options)

    return attention


@functools.cache
def _softcap(cap: float) -> Callable[..., torch.Tensor]:
    def score_mod(score: torch.Tensor, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


def _block_mask(tree: TokenTree, device: torch.device, sliding_window: int | None) -> BlockMask:
    """Return the block mask of a tree: which blocks of keys each block of queries needs, and which need no mask inside.

    A block of queries needs a block of keys if the block contains a key k with `k <= last query` and
    `subtree_end[k] > first query`. A pair of blocks is full if every query attends to every key.
    """
    length = padded_length(len(tree))
    extra = np.arange(len(tree), length)
    ends = np.concatenate([tree.subtree_end, extra + 1])  # padding tokens attend only to themselves
    positions = np.concatenate([tree.position_ids, np.zeros_like(extra)])
    blocks = length // FLEX_BLOCK_SIZE
    first = np.arange(blocks) * FLEX_BLOCK_SIZE
    last = first + FLEX_BLOCK_SIZE - 1
    key_ends = ends.reshape(blocks, FLEX_BLOCK_SIZE)

    needed = (first[None, :] < first[:, None]) & (key_ends.max(axis=1)[None, :] > first[:, None])
    needed |= np.eye(blocks, dtype=bool)
    full = (last[None, :] < first[:, None]) & (key_ends.min(axis=1)[None, :] > last[:, None])
    if sliding_window is not None:
        # A block stays full only if its largest distance is within the window; other blocks are masked by token.
        by_block = positions.reshape(blocks, FLEX_BLOCK_SIZE)
        full &= by_block.max(axis=1)[:, None] - by_block.min(axis=1)[None, :] < sliding_window

    subtree_end, position = to_device(np.stack([ends, positions]).astype(np.int32), device)
    # As a tensor, so that layers with other windows use the same kernel.
    window = None if sliding_window is None else to_device(np.array(sliding_window, dtype=np.int32), device)

    def attends(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        allowed: torch.Tensor = (k <= q) & (q < subtree_end[k])
        return allowed if window is None else allowed & (position[q] - position[k] < window)

    partial_count, partial_index = _rows_of_blocks(needed & ~full)
    full_count, full_index = _rows_of_blocks(needed & full)
    partial_blocks, partial_order, full_blocks, full_order = (
        to_device(array, device)[None, None] for array in (partial_count, partial_index, full_count, full_index)
    )
    return BlockMask.from_kv_blocks(
        partial_blocks,
        partial_order,
        full_blocks,
        full_order,
        BLOCK_SIZE=FLEX_BLOCK_SIZE,
        mask_mod=attends,
        seq_lengths=(length, length),
    )


def _rows_of_blocks(wanted: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[Any, Any]:
    """Return the number of wanted blocks per row, and each row's block indices with the wanted ones first; int32."""
    index = np.argsort(~wanted, axis=1, kind="stable").astype(np.int32)
    return wanted.sum(axis=1).astype(np.int32), np.ascontiguousarray(index)
