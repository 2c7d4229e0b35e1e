"""Log-probabilities of tokens from hidden states, without the logits of all tokens in memory at a time.

The logits of some tokens are computed, reduced to two numbers per token, and dropped; the backward computes them again
(as in Liger Kernel, arXiv 2410.10989, section 3.2, but for a gradient that is not known in the forward).

With z the logits divided by the temperature, p = softmax(z), y the target and H the entropy:

    d log p_y / dz_j = [j = y] - p_j,        dH / dz_j = -p_j (log p_j + H)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gym_rm.engine.backbones.packed_weights import onednn_is_faster, onednn_linear

LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**27}  # elements; larger tiles leave the cache of a CPU


@dataclass(frozen=True, slots=True)
class LogitOptions:
    """What stands between the outputs of the output layer and the logits of the softmax.

    Attributes:
        temperature: sampling temperature, a divisor.
        scale: factor of the outputs.
        softcap: `softcap * tanh(logits / softcap)` bounds the scaled outputs (Gemma 2); None for no bound.
    """

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    options: LogitOptions,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target and the entropy of its distribution, both `[N]` in float32.

    Products run in the type of autocast or of the weight; on a GPU they are accumulated and kept in float32, on a CPU
    low precision is widened first. Everything after them is float32 (float64 for float64 inputs).

    Args:
        hidden: last hidden states `[N, hidden]`.
        weight: weight of the output layer `[V, hidden]`; it may be the embedding table.
        bias: bias of the output layer `[V]`, or None.
        targets: token ids, int64 `[N]`.
        options: temperature, scale and soft cap.
        chunk_tokens: number of tokens whose logits are in memory at a time; None for a number that suits the device.
    """
    device = weight.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    if device == "cpu" and dtype in (torch.bfloat16, torch.float16):
        dtype = torch.float32
    chunk = chunk_tokens or max(16, LOGITS_AT_ONCE.get(device, 2**24) // len(weight))
    with torch.autocast(device, enabled=False):
        result: tuple[Tensor, Tensor] = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
            hidden.to(weight.device), weight, bias, targets.to(weight.device), options, chunk, dtype
        )
    return result


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: LogitOptions,
        chunk: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        cast = weight.to(dtype)
        log_z, picked, entropy = (torch.empty(len(hidden), dtype=wide, device=weight.device) for _ in range(3))
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part].to(dtype), cast, bias, options)
            picked[part] = logits.gather(1, targets[part, None])[:, 0]
            largest = logits.amax(dim=1, keepdim=True)
            weights = torch.exp(logits.sub_(largest))
            total = weights.sum(dim=1)
            log_total = total.log()
            log_z[part] = largest[:, 0] + log_total
            entropy[part] = log_total - torch.linalg.vecdot(weights, logits) / total
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropy)
        ctx.settings = options, chunk, dtype
        ctx.set_materialize_grads(False)
        return picked - log_z, entropy.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None and entropy_grad is None:
            return (None,) * 7
        with torch.autocast(ctx.saved_tensors[1].device.type, enabled=False):
            return _gradients(ctx, grad, entropy_grad)


def _gradients(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, targets, log_z, entropy = ctx.saved_tensors
    options, chunk, dtype = ctx.settings
    need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
    cast = weight.to(dtype)
    grad = torch.zeros_like(log_z) if grad is None else grad
    hidden_grad = torch.empty_like(hidden) if need_hidden else None
    weight_grad = torch.zeros_like(weight, dtype=log_z.dtype) if need_weight else None
    bias_grad = torch.zeros_like(bias, dtype=log_z.dtype) if need_bias else None
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        states, g = hidden[part].to(dtype), grad[part, None]
        values = _logits(states, cast, bias, options)
        slope = None
        if options.softcap is not None:  # the derivative of the soft cap, 1 - tanh^2
            slope = (values * (options.temperature / options.softcap)).square_().neg_().add_(1.0)
        values.sub_(log_z[part, None])
        if entropy_grad is None:
            values.exp_().mul_(-g)
        else:
            probabilities = values.exp()
            values.add_(entropy[part, None]).mul_(entropy_grad[part, None]).add_(g).mul_(probabilities).neg_()
        values.scatter_add_(1, targets[part, None], g)
        values.mul_(options.scale / options.temperature)
        if slope is not None:
            values.mul_(slope)
        if bias_grad is not None:
            bias_grad += values.sum(dim=0)
        values = values.to(dtype)
        if hidden_grad is not None:
            fast = onednn_is_faster(cast)
            hidden_grad[part] = onednn_linear(values, cast.T) if fast else values @ cast
        if weight_grad is not None:
            _add_product(weight_grad, values.T, states)
    return (
        hidden_grad,
        None if weight_grad is None else weight_grad.to(weight.dtype),
        None if bias_grad is None else bias_grad.to(bias.dtype),
        *(None,) * 4,
    )


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None, options: LogitOptions) -> Tensor:
    """Return the logits divided by the temperature `[C, V]`, at least in float32."""
    if weight.dtype in (torch.bfloat16, torch.float16):
        logits = torch.mm(states, weight.T, out_dtype=torch.float32)
    else:
        logits = onednn_linear(states, weight) if onednn_is_faster(weight) else states @ weight.T
    if bias is not None:
        logits.add_(bias.to(logits.dtype))
    if options.softcap is None:
        factor = options.scale / options.temperature
        return logits if factor == 1.0 else logits.mul_(factor)
    return logits.mul_(options.scale / options.softcap).tanh_().mul_(options.softcap / options.temperature)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right, out_dtype=total.dtype))
