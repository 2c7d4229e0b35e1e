"""Elementwise operations of a Llama-like layer in one kernel each: norm and rotation of heads, and `silu(gate) * up`.

Shapes: states `[T, H, D]`, cos and sin `[T, D]`, gate and up `[T, I]`. Numbers are float32 between reading and writing.
"""
# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false, disallow-incomplete-defs=false
# mypy: disallow-untyped-calls=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gym_rm.engine.kernels import operation

TOKENS = 32  # whose share in the gradient of a norm's weight one program adds up
HEADS = 16  # most heads of a program of `norm_rotate`
BLOCK = 1024  # elements of a program of `silu_mul`


@triton.jit
def _heads(at, token, head, half, heads: tl.constexpr, size: tl.constexpr, pairs: tl.constexpr):
    """Return places and validity of one half of each head `[heads, size / 2]`."""
    column = tl.arange(0, pairs)
    valid = (head < heads)[:, None] & (column < size // 2)[None, :]
    return at + (token * heads + head[:, None].to(tl.int64)) * size + half + column[None, :], valid


@triton.jit
def _of_position(at, token, half, row, size: tl.constexpr, pairs: tl.constexpr):
    """Return one half of the numbers of a position `[1, size / 2]`."""
    column = tl.arange(0, pairs)
    return tl.load(at + token * row + half + column, mask=column < size // 2, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _scale(a, b, eps, size: tl.constexpr):
    return (1 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / size + eps))[:, None]


@triton.jit
def _norm_rotate(
    states, weight, cos, sin, output, eps, row, heads: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
    pairs: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1) * block + tl.arange(0, block)
    first, valid = _heads(states, token, head, 0, heads, size, pairs)
    a = tl.load(first, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(first + size // 2, mask=valid, other=0.0).to(tl.float32)
    if weight is not None:
        scale = _scale(a, b, eps, size)
        a *= scale * _of_position(weight, 0, 0, 0, size, pairs)
        b *= scale * _of_position(weight, 0, size // 2, 0, size, pairs)
    c, s = _of_position(cos, token, 0, row, size, pairs), _of_position(sin, token, 0, row, size, pairs)
    into, valid = _heads(output, token, head, 0, heads, size, pairs)
    tl.store(into, (a * c - b * s).to(output.dtype.element_ty), mask=valid)
    tl.store(into + size // 2, (b * c + a * s).to(output.dtype.element_ty), mask=valid)


@triton.jit
def _norm_rotate_backward(
    grad, states, weight, cos, sin, output, of_weight, eps, row, count, tokens: tl.constexpr, heads: tl.constexpr,
    size: tl.constexpr, block: tl.constexpr, pairs: tl.constexpr,
):  # fmt: skip
    start, head = tl.program_id(0) * tokens, tl.program_id(1) * block + tl.arange(0, block)
    for_first, for_second = tl.zeros([block, pairs], tl.float32), tl.zeros([block, pairs], tl.float32)
    for token in range(start, tl.minimum(start + tokens, count)):
        first, valid = _heads(grad, token, head, 0, heads, size, pairs)
        ga = tl.load(first, mask=valid, other=0.0).to(tl.float32)
        gb = tl.load(first + size // 2, mask=valid, other=0.0).to(tl.float32)
        c, s = _of_position(cos, token, 0, row, size, pairs), _of_position(sin, token, 0, row, size, pairs)
        da, db = ga * c + gb * s, gb * c - ga * s
        if weight is not None:
            first, valid = _heads(states, token, head, 0, heads, size, pairs)
            a = tl.load(first, mask=valid, other=0.0).to(tl.float32)
            b = tl.load(first + size // 2, mask=valid, other=0.0).to(tl.float32)
            scale = _scale(a, b, eps, size)
            a, b = a * scale, b * scale
            for_first += da * a
            for_second += db * b
            da *= _of_position(weight, 0, 0, 0, size, pairs)
            db *= _of_position(weight, 0, size // 2, 0, size, pairs)
            along = ((tl.sum(da * a, 1) + tl.sum(db * b, 1)) / size)[:, None]
            da, db = (da - a * along) * scale, (db - b * along) * scale
        into, valid = _heads(output, token, head, 0, heads, size, pairs)
        tl.store(into, da.to(output.dtype.element_ty), mask=valid)
        tl.store(into + size // 2, db.to(output.dtype.element_ty), mask=valid)
    if weight is not None:
        column = tl.arange(0, pairs)
        into = of_weight + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * size + column
        tl.store(into, tl.sum(for_first, 0), mask=column < size // 2)
        tl.store(into + size // 2, tl.sum(for_second, 0), mask=column < size // 2)


@triton.jit
def _silu_mul(gate, up, output, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    g = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(output + at, (g / (1 + tl.exp(-g)) * u).to(output.dtype.element_ty), mask=at < count)


@triton.jit
def _silu_mul_backward(grad, gate, up, for_gate, for_up, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    d = tl.load(grad + at, mask=at < count, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-g))
    tl.store(for_gate + at, (d * u * share * (1 + g * (1 - share))).to(for_gate.dtype.element_ty), mask=at < count)
    tl.store(for_up + at, (d * g * share).to(for_up.dtype.element_ty), mask=at < count)


@operation("norm_rotate(Tensor states, Tensor? weight, Tensor cos, Tensor sin, Tensor(a!) output, float eps)")
def _launch_norm_rotate(states, weight, cos, sin, output, eps):
    grid, sizes = _grid(states, 1)
    with torch.cuda.device_of(states):
        _norm_rotate[grid](states, weight, cos, sin, output, eps, cos.stride(0), **sizes)


@operation(
    "norm_rotate_backward(Tensor grad, Tensor states, Tensor? weight, Tensor cos, Tensor sin, Tensor(a!) output, "
    "Tensor(b!)? of_weight, float eps)"
)
def _launch_norm_rotate_backward(grad, states, weight, cos, sin, output, of_weight, eps):
    grid, sizes = _grid(states, TOKENS)
    tensors = grad, states, weight, cos, sin, output, of_weight
    with torch.cuda.device_of(states):
        _norm_rotate_backward[grid](*tensors, eps, cos.stride(0), len(states), tokens=TOKENS, **sizes)


@operation("silu_mul(Tensor gate, Tensor up, Tensor(a!) output)")
def _launch_silu_mul(gate, up, output):
    with torch.cuda.device_of(gate):
        _silu_mul[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, output, gate.numel(), block=BLOCK)


@operation("silu_mul_backward(Tensor grad, Tensor gate, Tensor up, Tensor(a!) for_gate, Tensor(b!) for_up)")
def _launch_silu_mul_backward(grad, gate, up, for_gate, for_up):
    tensors = grad, gate, up, for_gate, for_up
    with torch.cuda.device_of(gate):
        _silu_mul_backward[(triton.cdiv(gate.numel(), BLOCK),)](*tensors, gate.numel(), block=BLOCK)


def _grid(states: Tensor, tokens: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the programs for so many tokens each, and the sizes of a program."""
    count, heads, size = states.shape
    block = min(HEADS, triton.next_power_of_2(heads))
    sizes = {"heads": heads, "size": size, "block": block, "pairs": triton.next_power_of_2(size // 2)}
    return (triton.cdiv(count, tokens), triton.cdiv(heads, block)), sizes


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(states, weight, cos, sin)
        ctx.eps = eps
        output = torch.empty_like(states)
        _launch_norm_rotate(states, weight, cos, sin, output, eps)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, cos, sin = ctx.saved_tensors
        (programs, blocks), _ = _grid(states, TOKENS)
        for_states, sums = torch.empty_like(states), None
        if weight is not None:
            sums = states.new_empty(programs * blocks, states.shape[2], dtype=torch.float32)
        _launch_norm_rotate_backward(grads[0].contiguous(), states, weight, cos, sin, for_states, sums, ctx.eps)
        return for_states, None if sums is None else sums.sum(0).to(weight.dtype), None, None, None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        output = torch.empty_like(gate)
        _launch_silu_mul(gate, up, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        for_gate, for_up = torch.empty_like(gate), torch.empty_like(up)
        _launch_silu_mul_backward(grads[0].contiguous(), gate, up, for_gate, for_up)
        return for_gate, for_up


def norm_rotate(states: Tensor, norm: Any, cos: Tensor, sin: Tensor) -> Tensor:
    """Return states normed by a module, or not if it is None, and rotated; in place without gradients."""
    states, cos, sin = states.contiguous(), cos.contiguous(), sin.contiguous()
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
    if torch.is_grad_enabled():
        rotated: Tensor = _NormRotate.apply(states, weight, cos, sin, eps)
        return rotated
    _launch_norm_rotate(states, weight, cos, sin, states, eps)
    return states


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up`; in place of gate without gradients."""
    gate, up = gate.contiguous(), up.contiguous()
    if torch.is_grad_enabled():
        product: Tensor = _SiluMul.apply(gate, up)
        return product
    _launch_silu_mul(gate, up, gate)
    return gate
