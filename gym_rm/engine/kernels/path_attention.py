"""Attention along the paths of a token tree, forward and backward.

A program has up to 64 rows: the queries of a tile times the query heads of one key head. It reads keys and values where
they are, through the table of the path. Blocks of keys start at multiples of their size from the start of the path, and
keys that a row does not attend to add exactly 0, so a row's bits depend on its path alone. The softmax is computed
online, and the backward computes its weights again (arXiv 2205.14135).

Shapes: query `[Q, H, D]`, key `[T, H_kv, D]`, value `[T, H_kv, V]`, output `[Q, H, V]`, logs of sums `[Q, H]`.
"""
# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false, disallow-incomplete-defs=false
# mypy: disallow-untyped-calls=false

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gym_rm.engine.backbones.attention import LayerCall
from gym_rm.engine.backbones.devices import to_device
from gym_rm.engine.kernels import operation
from gym_rm.engine.paths import Int32Array, paths_of
from gym_rm.engine.token_tree import IntArray, TokenTree

LARGEST = 256  # head size, for which the kernels fit into the registers and the shared memory of a multiprocessor
NO_WINDOW = 2**31 - 1  # a window that hides nothing
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(at, offset, live, size: tl.constexpr, padded: tl.constexpr):
    """Return the rows `[M, padded]` at these offsets, 0 where there is none."""
    column = tl.arange(0, padded)
    mask = live[:, None]
    if size < padded:
        mask = mask & (column < size)[None, :]
    return tl.load(at + offset[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _store(at, offset, values, live, size: tl.constexpr, padded: tl.constexpr):
    column = tl.arange(0, padded)
    mask = live[:, None]
    if size < padded:
        mask = mask & (column < size)[None, :]
    tl.store(at + offset[:, None] + column[None, :], values.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _dot(a, b, precision: tl.constexpr):
    if precision == "interpreted":  # Triton's interpreter cannot multiply bfloat16
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision=precision)


@triton.jit
def _scores(q, k, seen, scale, cap, capped: tl.constexpr, precision: tl.constexpr):
    """Return scores times log2(e), -inf for keys that a row does not see, and the slope of the soft cap."""
    s = _dot(q, tl.trans(k), precision) * scale
    slope = tl.full(s.shape, 1.0, tl.float32)
    if capped:
        x = s / cap
        near = x * (1 - x * x * (1 / 3 - x * x * (2 / 15 - x * x * (17 / 315))))  # where a difference loses digits
        t = tl.where(tl.abs(x) < 0.25, near, 1 - 2 / (tl.exp2(2 * LOG2_E * x) + 1))  # tanh(x)
        s = cap * t
        slope = 1 - t * t
    return tl.where(seen, s * LOG2_E, -float("inf")), slope


@triton.jit
def _rows(first, stop, key_head, group: tl.constexpr, m: tl.constexpr):
    """Return query, head and validity of a program's rows."""
    index = tl.arange(0, m)
    row = first + index // group
    return row.to(tl.int64), key_head * group + index % group, (row < stop) & (index < m // group * group)


@triton.jit
def _tile(tiles, positions, window, group: tl.constexpr, m: tl.constexpr, n: tl.constexpr):
    """Return the path of a program, its rows, and where the first block of their keys starts and the last key is."""
    at = tiles + 3 * tl.program_id(0)
    row, head, live = _rows(tl.load(at + 1), tl.load(at + 2), tl.program_id(1), group, m)
    position = tl.load(positions + row, mask=live, other=-1)
    last = tl.max(position, 0)
    low = tl.maximum(tl.min(tl.where(live, position, last), 0) - window + 1, 0) // n * n
    return tl.load(at), row, head, live, position, low, last


@triton.jit(do_not_specialize=["window"])
def _forward(
    q_at, k_at, v_at, o_at, log_at, sink_at, tiles, positions, paths, scale, cap, window,
    q_row, q_head, k_row, k_head, v_row, v_head, heads: tl.constexpr, group: tl.constexpr, size: tl.constexpr,
    value_size: tl.constexpr, d: tl.constexpr, e: tl.constexpr, m: tl.constexpr, n: tl.constexpr,
    capped: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    key_head = tl.program_id(1)
    path, row, head, live, position, low, last = _tile(tiles, positions, window, group, m, n)
    q = _load(q_at, row * q_row + head * q_head, live, size, d)
    top = tl.full([m], -float("inf"), tl.float32)
    total = tl.zeros([m], tl.float32)
    if sink_at is not None:
        top = tl.load(sink_at + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    output = tl.zeros([m, e], tl.float32)
    for start in range(low, last + 1, n):
        place = start + tl.arange(0, n)
        there = place <= last
        token = tl.load(paths + path + place, mask=there, other=0).to(tl.int64)
        k = _load(k_at, token * k_row + key_head * k_head, there, size, d)
        distance = position[:, None] - place[None, :]
        s, _ = _scores(q, k, (distance >= 0) & (distance < window), scale, cap, capped, precision)
        new = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(new == -float("inf"), 0.0, new)
        weights = tl.exp2(s - shift[:, None])
        old = tl.exp2(top - shift)
        v = _load(v_at, token * v_row + key_head * v_head, there, value_size, e)
        total = total * old + tl.sum(weights, 1)
        output = output * old[:, None] + _dot(weights.to(v.dtype), v, precision)
        top = new
    output = output / tl.where(total == 0, 1.0, total)[:, None]
    at = row * heads + head
    _store(o_at, at * value_size, output, live, value_size, e)
    if log_at is not None:
        tl.store(log_at + at, top + tl.log2(total), mask=live)


@triton.jit(do_not_specialize=["window"])
def _backward_queries(
    q_at, k_at, v_at, o_at, log_at, grad_at, sum_at, dq_at, tiles, positions, paths, scale, cap, window,
    q_row, q_head, k_row, k_head, v_row, v_head, heads: tl.constexpr, group: tl.constexpr, size: tl.constexpr,
    value_size: tl.constexpr, d: tl.constexpr, e: tl.constexpr, m: tl.constexpr, n: tl.constexpr,
    capped: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    key_head = tl.program_id(1)
    path, row, head, live, position, low, last = _tile(tiles, positions, window, group, m, n)
    at = row * heads + head
    q = _load(q_at, row * q_row + head * q_head, live, size, d)
    grad = _load(grad_at, at * value_size, live, value_size, e)
    log = tl.load(log_at + at, mask=live, other=0.0)
    output = _load(o_at, at * value_size, live, value_size, e)
    along = tl.sum(output.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(sum_at + at, along, mask=live)
    dq = tl.zeros([m, d], tl.float32)
    for start in range(low, last + 1, n):
        place = start + tl.arange(0, n)
        there = place <= last
        token = tl.load(paths + path + place, mask=there, other=0).to(tl.int64)
        k = _load(k_at, token * k_row + key_head * k_head, there, size, d)
        v = _load(v_at, token * v_row + key_head * v_head, there, value_size, e)
        distance = position[:, None] - place[None, :]
        s, slope = _scores(q, k, (distance >= 0) & (distance < window), scale, cap, capped, precision)
        ds = tl.exp2(s - log[:, None]) * slope
        ds *= _dot(grad, tl.trans(v), precision) - along[:, None]
        dq += _dot(ds.to(k.dtype), k, precision)
    _store(dq_at, at * size, dq * scale, live, size, d)


@triton.jit(do_not_specialize=["window"])
def _backward_keys(
    q_at, k_at, v_at, log_at, grad_at, sum_at, dk_at, dv_at, tiles, queries, positions, ends, depths, scale, cap,
    window, q_row, q_head, k_row, k_head, v_row, v_head, heads: tl.constexpr, group: tl.constexpr, size: tl.constexpr,
    value_size: tl.constexpr, d: tl.constexpr, e: tl.constexpr, m: tl.constexpr, n: tl.constexpr,
    capped: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    tile, key_head = tl.program_id(0), tl.program_id(1)
    key = tl.load(tiles + 4 * tile) + tl.arange(0, n)
    there = key < tl.load(tiles + 4 * tile + 1)
    end = tl.load(ends + key, mask=there, other=0)
    depth = tl.load(depths + key, mask=there, other=0)
    k = _load(k_at, key.to(tl.int64) * k_row + key_head * k_head, there, size, d)
    v = _load(v_at, key.to(tl.int64) * v_row + key_head * v_head, there, value_size, e)
    dk = tl.zeros([n, d], tl.float32)
    dv = tl.zeros([n, e], tl.float32)
    stop = tl.load(tiles + 4 * tile + 3)
    for first in range(tl.load(tiles + 4 * tile + 2), stop, m // group):
        row, head, live = _rows(first, stop, key_head, group, m)
        at = row * heads + head
        query = tl.load(queries + row, mask=live, other=-1)[:, None]
        distance = tl.load(positions + row, mask=live, other=0)[:, None] - depth[None, :]
        seen = (key[None, :] <= query) & (query < end[None, :]) & (distance < window)
        q = _load(q_at, row * q_row + head * q_head, live, size, d)
        grad = _load(grad_at, at * value_size, live, value_size, e)
        s, slope = _scores(q, k, seen, scale, cap, capped, precision)
        weights = tl.exp2(s - tl.load(log_at + at, mask=live, other=0.0)[:, None])
        dv += _dot(tl.trans(weights.to(grad.dtype)), grad, precision)
        ds = _dot(grad, tl.trans(v), precision) - tl.load(sum_at + at, mask=live, other=0.0)[:, None]
        ds = ds * weights * slope
        dk += _dot(tl.trans(ds.to(q.dtype)), q, precision)
    at = key.to(tl.int64) * (heads // group) + key_head
    _store(dk_at, at * size, dk * scale, there, size, d)
    _store(dv_at, at * value_size, dv, there, value_size, e)


class PathAttention:
    """Attention along the paths of one token tree; its tables are computed once for all layers.

    Args:
        tree: the token tree, on the host.
        device: device of the queries.
    """

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        self.device = device
        self.paths = paths_of(tree)
        self.path_tokens = to_device(self.paths.tokens, device)
        self._tiles: dict[tuple[int, ...], _Tiles] = {}

    @staticmethod
    def covers(call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether the kernels support a call."""
        group = query.shape[1] // key.shape[1]
        few = all(group <= _blocks(query, value, of_keys=keys)["m"] for keys in (False, True))
        small = max(query.shape[2], value.shape[2]) <= LARGEST
        known = value.dtype in (torch.float32, torch.bfloat16, torch.float16)
        return few and small and known and not call.dropout

    def __call__(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor, rows: IntArray) -> Tensor:
        """Return the attention output `[Q, H, V]`.

        Args:
            call, query, key, value: see `Attention`.
            rows: int64, increasing, tree index of each query; queries after them are padding, whose output is 0.
        """
        # With autocast, rotary positions make queries and keys float32.
        query, key, value = (_with_whole_rows(each.to(value.dtype)) for each in (query, key, value))
        height = _blocks(query, value)["m"] // (query.shape[1] // key.shape[1])
        kind = len(query), len(rows), height
        if kind not in self._tiles:
            self._tiles[kind] = _Tiles(self, rows, len(query), height)
        if torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value)):
            attended: Tensor = _Attend.apply(query, key, value, call.sinks, call, self._tiles[kind])
            return attended
        return self._tiles[kind].attend(query, key, value, call, None)


class _Tiles:
    """Tiles of the queries of some layers, on the device."""

    def __init__(self, attention: PathAttention, rows: IntArray, num_queries: int, height: int) -> None:
        self.attention, self.rows = attention, rows
        self._of_keys: tuple[Tensor, ...] | None = None
        padding = np.arange(len(rows), num_queries, height)
        padding = np.stack([np.zeros_like(padding), padding, np.minimum(padding + height, num_queries)], axis=1)
        numbers = np.full((2, num_queries), -1)
        numbers[:, : len(rows)] = rows, attention.paths.tree.depths[rows]
        self.tiles = self._on_device(np.concatenate([attention.paths.query_tiles(rows, height), padding]))
        self.queries, self.positions = self._on_device(numbers)

    def _on_device(self, numbers: IntArray | Int32Array) -> Tensor:
        return to_device(numbers.astype(np.int32), self.attention.device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: LayerCall, logs: Tensor | None) -> Tensor:
        """Return the output; write the base-2 logarithm of the sum of each query's weights into `logs`."""
        output = value.new_empty(*query.shape[:2], value.shape[2])
        tables = self.tiles, self.positions, self.attention.path_tokens
        attend(query, key, value, output, logs, call.sinks, *tables, *_numbers(call))
        return output

    def of_keys(self, width: int) -> tuple[Tensor, ...]:
        """Return tiles of so many keys, and for each token the end of its subtree and its position."""
        if self._of_keys is None:
            paths = self.attention.paths
            numbers = (paths.key_tiles(self.rows, width), paths.tree.subtree_end, paths.tree.depths)
            self._of_keys = tuple(self._on_device(each) for each in numbers)
        return self._of_keys


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: LayerCall, tiles: _Tiles
    ) -> Tensor:
        logs = query.new_empty(query.shape[:2], dtype=torch.float32)
        output = tiles.attend(query, key, value, call, logs)
        ctx.save_for_backward(query, key, value, sinks, output, logs)
        ctx.call, ctx.tiles = call, tiles
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, logs = ctx.saved_tensors
        tiles, numbers, grad = ctx.tiles, _numbers(ctx.call), grads[0].contiguous()
        sums, for_query = torch.empty_like(logs), query.new_empty(query.shape)
        states, path_tokens = (query, key, value, logs, grad), tiles.attention.path_tokens
        attend_backward_queries(*states, output, sums, for_query, tiles.tiles, tiles.positions, path_tokens, *numbers)
        for_key, for_value = (each.new_zeros(each.shape) for each in (key, value))  # of padding
        of_keys, *of_tokens = tiles.of_keys(_blocks(query, value, of_keys=True)["n"])
        tables = of_keys, tiles.queries, tiles.positions, *of_tokens
        attend_backward_keys(*states, sums, for_key, for_value, *tables, *numbers)
        for_sinks = None
        if sinks is not None:
            for_sinks = -(torch.exp2(sinks.float() * math.log2(math.e) - logs) * sums).sum(0).to(sinks.dtype)
        return for_query, for_key, for_value, for_sinks, None, None


def _numbers(call: LayerCall) -> tuple[float, float, int]:
    return call.scale, call.softcap or 0.0, NO_WINDOW if call.window is None else call.window


def _with_whole_rows(states: Tensor) -> Tensor:
    return states if states.stride(2) == 1 else states.contiguous()


def _blocks(query: Tensor, value: Tensor, *, of_keys: bool = False) -> dict[str, int]:
    """Return rows and keys of a block, and warps and stages of a program, which fit into an H100 up to `LARGEST`."""
    exact, size = value.dtype is torch.float32, max(query.shape[2], value.shape[2])
    rows, keys = (32, 16) if exact else (64, 32 if of_keys or size > 128 else 64)
    if size > 128 and (exact or of_keys):
        rows //= 2
    warps = 8 if size > 128 or (size > 64 and (exact or of_keys)) else 4
    return {"m": rows, "n": keys, "num_warps": warps, "num_stages": 1 if exact and of_keys else 2}


def _settings(
    query: Tensor, key: Tensor, value: Tensor, scale: float, cap: float, window: int, *, of_keys: bool = False
) -> dict[str, Any]:
    """Return the keywords that all kernels have."""
    strides = {
        f"{name}_{kind}": states.stride(dimension)
        for name, states in (("q", query), ("k", key), ("v", value))
        for dimension, kind in enumerate(("row", "head"))
    }
    sizes = query.shape[2], value.shape[2]
    d, e = (max(16, triton.next_power_of_2(size)) for size in sizes)
    heads, group = query.shape[1], query.shape[1] // key.shape[1]
    interpreted = triton.knobs.runtime.interpret and value.dtype is torch.bfloat16
    precision = "ieee" if value.dtype is torch.float32 else "interpreted" if interpreted else "tf32"
    return {
        "scale": scale, "cap": cap, "window": window, "capped": cap > 0, "precision": precision, "heads": heads,
        "group": group, "size": sizes[0], "value_size": sizes[1], "d": d, "e": e, **strides,
        **_blocks(query, value, of_keys=of_keys),
    }  # fmt: skip


def _launch(kernel: Any, grid: tuple[int, int], *tensors: Tensor | None, **settings: Any) -> None:
    with torch.cuda.device_of(tensors[0]):
        kernel[grid](*tensors, **settings)


_STATES = "Tensor query, Tensor key, Tensor value"
_NUMBERS = "float scale, float cap, int window"


@operation(
    f"attend({_STATES}, Tensor(a!) output, Tensor(b!)? logs, Tensor? sinks, Tensor tiles, Tensor positions, "
    f"Tensor paths, {_NUMBERS})"
)
def attend(query, key, value, output, logs, sinks, tiles, positions, paths, *numbers):
    """Write attention outputs and logarithms."""
    tensors = query, key, value, output, logs, sinks, tiles, positions, paths
    _launch(_forward, (len(tiles), key.shape[1]), *tensors, **_settings(query, key, value, *numbers))


@operation(
    f"attend_backward_queries({_STATES}, Tensor logs, Tensor grad, Tensor output, Tensor(a!) sums, "
    f"Tensor(b!) for_query, Tensor tiles, Tensor positions, Tensor paths, {_NUMBERS})"
)
def attend_backward_queries(query, key, value, logs, grad, output, sums, for_query, tiles, positions, paths, *numbers):
    """Write the gradients of queries, and how far each output goes along its own gradient."""
    tensors = query, key, value, output, logs, grad, sums, for_query, tiles, positions, paths
    _launch(_backward_queries, (len(tiles), key.shape[1]), *tensors, **_settings(query, key, value, *numbers))


@operation(
    f"attend_backward_keys({_STATES}, Tensor logs, Tensor grad, Tensor sums, Tensor(a!) for_key, Tensor(b!) for_value, "
    f"Tensor tiles, Tensor queries, Tensor positions, Tensor ends, Tensor depths, {_NUMBERS})"
)
def attend_backward_keys(
    query, key, value, logs, grad, sums, for_key, for_value, tiles, queries, positions, ends, depths, *numbers
):
    """Write the gradients of keys and values."""
    tensors = query, key, value, logs, grad, sums, for_key, for_value, tiles, queries, positions, ends, depths
    settings = _settings(query, key, value, *numbers, of_keys=True)
    _launch(_backward_keys, (len(tiles), key.shape[1]), *tensors, **settings)
