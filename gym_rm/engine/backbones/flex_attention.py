"""Attention over a token tree with `flex_attention`, for CUDA.

The mask is built on the host from blocks that are pages: it needs no `[T, T]` tensor and no synchronisation with the
device. Lengths are padded to a few sizes, to compile few kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from gym_rm.engine.backbones.devices import to_device
from gym_rm.engine.pages import Pages
from gym_rm.engine.token_tree import TokenTree

FLEX_BLOCK_SIZE = 128  # number of queries in a block of flex_attention, and positions in a page
COMPILED_ON = ("cuda",)  # devices for which flex_attention is compiled
RECOMPILE_LIMIT = 1024  # kernels of flex_attention; torch's default is 8, and then it computes whole score matrices


def attend_with_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    block_mask: BlockMask,
    scaling: float | None,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Return the attention output of the whole tree `[1, T, H, D]`, or only at `rows` `[1, Q, H, D]`, in one kernel.

    `slots` are those of the tree's pages, see `TreeAttention`.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)  # with autocast, rotary positions make them float32
    if rows is not None:
        # Pad to the full length, so that all layers use the same compiled kernel.
        everywhere = query.new_zeros(1, query.shape[1], key.shape[2], query.shape[3])
        everywhere[:, :, rows] = query
        query = everywhere
    num_queries = query.shape[2]
    query = pad(query, (0, 0, 0, block_mask.seq_lengths[0] - num_queries))
    key, value = (states.index_select(2, slots) for states in (key, value))
    attention: Any = _compiled_flex_attention() if query.device.type in COMPILED_ON else flex_attention
    output, auxiliary = attention(
        query,
        key,
        value,
        score_mod=None if softcap is None else _softcap(softcap),
        block_mask=block_mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:
        # A sink adds exp(sink) to the softmax's denominator and nothing to its numerator.
        share = torch.sigmoid(auxiliary.lse - sinks.float().view(1, -1, 1))
        output = output * share.unsqueeze(-1).to(output.dtype)
    attended: Tensor = output[:, :, :num_queries].transpose(1, 2)
    return attended if rows is None else attended[:, rows]


def padded_length(length: int) -> int:
    """Return the padded length of a tree on CUDA; there are at most 16 distinct lengths per doubling."""
    step = max(FLEX_BLOCK_SIZE, 1 << max(0, (length - 1).bit_length() - 5))
    return -(-length // step) * step


def padded_lengths(length: int, num_slots: int) -> tuple[int, int]:
    """Return the padded numbers of queries and of places in pages; the second is the first times a power of two."""
    queries = padded_length(length)
    return queries, queries << max(0, (-(-num_slots // queries) - 1).bit_length())


def block_mask_of(tree: TokenTree, pages: Pages, device: torch.device, sliding_window: int | None) -> BlockMask:
    """Return the block mask of a tree: the pages that each block of queries needs, in the order of their paths.

    A page serves the queries from its first one to the end of the subtree of its last token. No block is marked as
    full, because the kernel would visit full blocks last: the order of a query's keys, and with it the rounding of
    their sum, would then depend on the other queries of its block.
    """
    length, num_slots = padded_lengths(len(tree), pages.tokens.size)
    ends = tree.subtree_end[pages.tokens[:, -1]]
    start = np.arange(0, length, FLEX_BLOCK_SIZE)[:, None]
    needed = (pages.first < start + FLEX_BLOCK_SIZE) & (ends > start)
    position = np.zeros(length, dtype=np.int64)
    position[: len(tree)] = tree.depths
    if sliding_window is not None:
        # The smallest distance between a query of the block and the last position of the page.
        last = (pages.numbers + 1) * FLEX_BLOCK_SIZE - 1
        first_position = np.minimum.reduceat(tree.depths, start[start < len(tree)])
        needed[: len(first_position)] &= first_position[:, None] - last < sliding_window
    count = needed.sum(axis=1)
    block, page = np.nonzero(needed)
    order = np.zeros((len(start), num_slots // FLEX_BLOCK_SIZE), dtype=np.int64)
    order[block, np.arange(len(block)) - np.repeat(np.cumsum(count) - count, count)] = page

    # For each place of the pages: its token, the queries that its page serves, and its position.
    nothing = np.full(num_slots - pages.tokens.size, length)
    repeated = np.diff(pages.tokens, axis=1, prepend=-1) == 0
    tokens = np.r_[np.where(repeated, length, pages.tokens).reshape(-1), nothing]
    first, end = (np.r_[np.repeat(bounds, FLEX_BLOCK_SIZE), nothing] for bounds in (pages.first, ends))
    positions = (pages.numbers[:, None] * FLEX_BLOCK_SIZE + np.arange(FLEX_BLOCK_SIZE)).reshape(-1)
    keys = np.stack([tokens, first, end, np.r_[positions, nothing]]).astype(np.int32)
    token_of, first_of, end_of, position_of_key = to_device(keys, device)
    position_of_query = to_device(position.astype(np.int32), device)
    # As a tensor, so that layers with other windows use the same kernel.
    window = None if sliding_window is None else to_device(np.array(sliding_window, dtype=np.int32), device)

    def attends(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
        allowed: Tensor = (token_of[k] <= q) & (first_of[k] <= q) & (q < end_of[k])
        return allowed if window is None else allowed & (position_of_query[q] - position_of_key[k] < window)

    counts, orders = (to_device(array.astype(np.int32), device)[None, None] for array in (count, order))
    return BlockMask.from_kv_blocks(
        counts, orders, BLOCK_SIZE=FLEX_BLOCK_SIZE, mask_mod=attends, seq_lengths=(length, num_slots)
    )


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
def _softcap(cap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod
