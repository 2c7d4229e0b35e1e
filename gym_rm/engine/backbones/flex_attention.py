"""Attention over a token tree with `flex_attention`, for CUDA.

The mask is built on the host from blocks that are pages: it needs no `[T, T]` tensor and no synchronisation with the
device. Queries and keys lie in buffers whose lengths are powers of two, because torch compiles a kernel for each pair
of lengths: one for each doubling of the tokens, for all windows. The kernel reads no block beyond those of the mask, so
a longer buffer takes memory but hardly time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from gym_rm.engine.backbones.attention import LayerCall
from gym_rm.engine.backbones.devices import to_device
from gym_rm.engine.pages import Pages
from gym_rm.engine.token_tree import TokenTree

FLEX_BLOCK_SIZE = 128  # number of queries in a block of flex_attention, and positions in a page
PAGE_WITHOUT_GRADIENTS = 64  # the same without gradients, for which torch's backward has no smaller blocks
COMPILED_ON = ("cuda",)  # devices for which flex_attention is compiled
RECOMPILE_LIMIT = 1024  # kernels of flex_attention; torch's default is 8, and then it computes whole score matrices
SHORTEST = 512  # length of the shortest buffer of queries
NO_WINDOW = 2**31 - 1  # a window that hides nothing
# Blocks of the forward in float32. Those of torch need more registers than a thread has at head sizes of 64, 80 and
# 256, and more shared memory than an H100 has at 192; these fit from 64 to 256, also on GPUs with 99 KB.
FLOAT32_BLOCKS = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 16, "fwd_num_warps": 4, "fwd_num_stages": 3}
SMALL_BLOCKS = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 2}


def attend_with_flex(
    call: LayerCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    block_mask: BlockMask,
    rows: Tensor | None = None,
) -> Tensor:
    """Return the attention output of the whole tree `[T, H, D]`, or only at `rows` `[Q, H, D]`, in one kernel.

    `slots` are those of the tree's pages, see `TreeAttention`.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)  # with autocast, rotary positions make them float32
    length, num_slots = block_mask.seq_lengths
    compiled = query.device.type in COMPILED_ON
    attention: Any = _compiled_flex_attention() if compiled else flex_attention
    # Uncompiled, the rest of the buffers is multiplied by zeros.
    zeros = torch.is_grad_enabled() or not compiled
    queries = _buffer(query, length, zeros)
    at = slice(len(query)) if rows is None else rows
    queries[at] = query
    keys, values = (_in_slots(states, slots, num_slots, zeros) for states in (key, value))
    small = SMALL_BLOCKS if block_mask.BLOCK_SIZE[0] < FLEX_BLOCK_SIZE else None
    output = attention(
        *(states.transpose(0, 1).unsqueeze(0) for states in (queries, keys, values)),
        score_mod=None if call.softcap is None else _softcap(call.softcap),
        block_mask=block_mask,
        scale=call.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=FLOAT32_BLOCKS if query.is_cuda and query.dtype is torch.float32 else small,
        return_aux=None if call.sinks is None else AuxRequest(lse=True),
    )
    if call.sinks is not None:
        # A sink adds exp(sink) to the softmax's denominator and nothing to its numerator.
        output, auxiliary = output
        share = torch.sigmoid(auxiliary.lse - call.sinks.float().view(1, -1, 1))
        output = output * share.unsqueeze(-1).to(output.dtype)
    attended: Tensor = output[0].transpose(0, 1)[at]
    return attended


def _in_slots(states: Tensor, slots: Tensor, size: int, zeros: bool) -> Tensor:
    """Return the states `[T, H, D]` of the tokens in slots, in a buffer `[size, H, D]` whose rest may be anything."""
    buffer = _buffer(states, size, zeros)
    if torch.is_grad_enabled():
        buffer[: len(slots)] = states.index_select(0, slots)
    else:
        torch.index_select(states, 0, slots, out=buffer[: len(slots)])
    return buffer


def _buffer(states: Tensor, size: int, zeros: bool) -> Tensor:
    """Return a buffer `[size, H, D]` for states `[T, H, D]`, of zeros or of anything."""
    return (states.new_zeros if zeros else states.new_empty)(size, *states.shape[1:])


def buffer_lengths(length: int, num_slots: int) -> tuple[int, int]:
    """Return the lengths of the buffers for the queries of a tree and for the slots of its pages: n and 2n."""
    queries = 1 << (max(SHORTEST, length, -(-num_slots // 2)) - 1).bit_length()
    return queries, 2 * queries


def block_mask_of(
    tree: TokenTree, pages: Pages, device: torch.device, sliding_window: int | None, num_rows: int
) -> BlockMask:
    """Return the block mask of a tree with padding up to `num_rows`.

    It has the pages that each block of queries needs, in the order of their paths.

    A page serves the queries from its first one to the end of the subtree of its last token. No block is marked as
    full, because the kernel would visit full blocks last: the order of a query's keys, and with it the rounding of
    their sum, would then depend on the other queries of its block.
    """
    length, num_slots = buffer_lengths(num_rows, pages.tokens.size)
    ends = tree.subtree_end[pages.tokens[:, -1]]
    start = np.arange(0, length, pages.size)[:, None]
    needed = (pages.first < start + pages.size) & (ends > start)
    if sliding_window is not None:
        # The smallest distance between a query of the block and the last position of the page.
        last = (pages.numbers + 1) * pages.size - 1
        first_position = np.minimum.reduceat(tree.depths, start[start < len(tree)])
        needed[: len(first_position)] &= first_position[:, None] - last < sliding_window
    count = needed.sum(axis=1, dtype=np.int32)
    block, page = np.nonzero(needed)
    order = np.zeros((len(start), num_slots // pages.size), dtype=np.int32)
    order[block, np.arange(len(block)) - np.repeat(np.cumsum(count) - count, count)] = page

    # For each slot: the queries that attend to it, from its token or the first of its page to the end of the page's
    # subtree, and its position. A slot without a token, or with one that an earlier slot has, serves none.
    repeated = np.diff(pages.tokens, axis=1, prepend=-1) == 0
    firsts = np.where(repeated, length, np.maximum(pages.tokens, pages.first[:, None]))
    positions = pages.numbers[:, None] * pages.size + np.arange(pages.size)
    of_slots = np.full((3, num_slots), length, dtype=np.int32)
    of_slots[:, : firsts.size] = [each.reshape(-1) for each in (firsts, np.repeat(ends, pages.size), positions)]
    first_of, end_of, position_of_key = to_device(of_slots, device)
    position = np.zeros(length, dtype=np.int32)
    position[: len(tree)] = tree.depths
    position_of_query = to_device(position, device)
    # A tensor, so that layers with other windows, and with none, use the same kernel.
    window = to_device(np.array(NO_WINDOW if sliding_window is None else sliding_window, dtype=np.int32), device)

    def attends(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
        near = position_of_query[q] - position_of_key[k] < window
        seen: Tensor = (first_of[k] <= q) & (q < end_of[k]) & near
        return seen

    counts, orders = (to_device(array, device)[None, None] for array in (count, order))
    return BlockMask.from_kv_blocks(
        counts,
        orders,
        BLOCK_SIZE=pages.size,
        mask_mod=attends,
        seq_lengths=(length, num_slots),
        compute_q_blocks=torch.is_grad_enabled(),  # for the backward
    )


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """Return `flex_attention` that compiles one kernel for each length of the buffers, for any number of them."""
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
