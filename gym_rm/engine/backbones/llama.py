"""The Llama-like decoder layer: one forward for scoring, training and decoding, with the attention as a parameter.

    x += o(attention(q(norm(x)), k(norm(x)), v(norm(x)))) and then x += down(silu(gate(norm(x))) * up(norm(x)))

It runs the weights of the Hugging Face layers in fewer passes over memory than their own forward: residuals are added
by the matrix products, norms, rotary positions and activations are one operation each (with kernels on CUDA, so are the
norm of heads and their rotation), and the last layer runs only at the positions that are read. With gradients, the same
operations have backwards written by hand, so values have the same bits with and without them. The layers' own forward
is the reference: trials at load compare the two.

Shapes: x `[T, hidden]`, query `[T, H, D]`, key and value `[T, H_kv, D]`, cos and sin `[T, D]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from gym_rm.engine.backbones.attention import Attention, LayerCall
from gym_rm.engine.backbones.batch_invariance import current_context
from gym_rm.engine.backbones.invariant_products import plus_linear
from gym_rm.engine.backbones.low_precision import LowPrecisionLinear, Scaled
from gym_rm.engine.backbones.packed_weights import SMALLEST_WIDTH, can_pack, onednn_linear, packs
from gym_rm.engine.backbones.sharded import RowParallelLinear, is_hook_of_sharding, whole_weights

MODEL_TYPES = frozenset({"llama", "qwen2", "qwen3", "mistral"})
SILU = (nn.SiLU, type(ACT2FN["silu"]))
PRODUCTS = (LowPrecisionLinear, RowParallelLinear)  # linear layers with a forward of the package
LIBRARIES = ("transformers.", "torch.")  # whose modules this forward was written for
MLP_ROWS = 512  # of x at once in an MLP on a CPU, to bound memory
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

Code: TypeAlias = tuple[Callable[..., Any], ...]
Call: TypeAlias = Callable[..., Any]  # that calls a function of torch or a layer, see `BatchInvariant.caller`
Rotary: TypeAlias = tuple[Tensor, Tensor]  # cos and sin of each token's position, [T, D]


def forward_fingerprint(backbone: Any) -> Code | None:
    """Return the forward function of each module; None if `llama_forward` cannot replace that of the backbone.

    It may replace these functions only: a module that is added or replaced computes something else.
    """
    if backbone.config.model_type not in MODEL_TYPES:
        return None
    called = (backbone.embed_tokens, backbone.rotary_emb)  # these run themselves, so they may be replaced
    code: list[Callable[..., Any]] = []
    modules = [backbone]
    for module in modules:  # before every batch, so without the slow attributes of modules
        own = vars(module)
        modules.extend(each for each in own["_modules"].values() if each is not None)
        # Modules with adapters, offloading or hooks compute more than a product with their weights.
        hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
        if "_hf_hook" in own or (hooks and not all(map(is_hook_of_sharding, hooks))):
            return None
        kind: Any = type(module)
        others = _is_adapted(kind) and (module.lora_variant, module.merged, *module.lora_bias.values())
        if others and (any(others) or type(module.base_layer) is not nn.Linear):  # than what `_with_adapters` does
            return None
        forward = kind.forward
        if module not in called:
            forward = _replaced(kind, forward)
            if forward is None or "forward" in own:
                return None
        code.append(forward)
    for layer in backbone.layers:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention._modules.get(name) for name in ATTENTION_PROJECTIONS]
        projections += [mlp._modules.get(name) for name in MLP_PROJECTIONS]
        if not (all(map(_is_product, map(type, projections))) and attention.is_causal and type(mlp.act_fn) in SILU):
            return None
    return tuple(code)


@functools.cache
def _replaced(kind: type, forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the forward that `llama_forward` replaces for a class of modules; None if it cannot."""
    if issubclass(kind, PRODUCTS):
        return nn.Linear.forward
    return forward if forward.__module__.startswith(LIBRARIES) or _is_adapted(kind) else None


@functools.cache
def _is_product(kind: type) -> bool:
    return kind is nn.Linear or issubclass(kind, PRODUCTS) or _is_adapted(kind)


def _is_adapted(kind: type) -> bool:
    """Return whether modules are linear layers with adapters of peft, which need not be installed."""
    return f"{kind.__module__}.{kind.__name__}" == "peft.tuners.lora.layer.Linear"


def _adapters(module: Any) -> list[tuple[Any, ...]]:
    """Return down, up, factor and dropout of each adapter of a layer that is switched on."""
    if not _is_adapted(type(module)) or module.disable_adapters:
        return []
    of = (module.lora_A, module.lora_B, module.scaling, module.lora_dropout)
    every = [[each[name] for each in of] for name in module.active_adapters if name in module.lora_A]
    return [(down.weight, up.weight, factor, dropout) for down, up, factor, dropout in every]


def merged_weight(module: Any) -> Tensor:
    """Return the weight of a linear layer, with those of its adapters added in a copy."""
    weight: Tensor = module.weight.detach()
    for down, up, factor, _ in _adapters(module):
        weight = torch.addmm(weight, up.detach(), down.detach(), alpha=factor)
    return weight


@dataclass(frozen=True, slots=True)
class Pass:
    """What all layers of one forward share.

    Attributes:
        rotary: rotary positions of the tokens.
        attention: what the tokens attend to.
        call: calls a function of torch or a layer.
        dtype: precision of what the products read.
        kernels: whether the kernels of `engine.kernels.elementwise` run.
    """

    rotary: Rotary
    attention: Attention
    call: Call
    dtype: torch.dtype
    kernels: bool


def rotary_positions(backbone: Any, x: Tensor, position_ids: Tensor) -> Rotary:
    """Return the rotary positions of tokens at `position_ids` `[T]`, in the precision of x."""
    cos, sin = backbone.rotary_emb(x, position_ids[None])
    return cos[0], sin[0]


def llama_forward(
    backbone: Any,
    x: Tensor,
    rotary: Rotary,
    attention: Attention,
    *,
    reads: Tensor | None = None,
    checkpointing: bool = False,
    onednn: bool = False,
    kernels: bool = False,
) -> Tensor:
    """Return the backbone's last hidden states `[R, hidden]` at `reads`; x is overwritten without gradients.

    Args:
        backbone: backbone that has a `forward_fingerprint`.
        x: `[T, hidden]`, embeddings of the tokens.
        rotary: their rotary positions.
        attention: what the tokens attend to.
        reads: int64 `[R]`, indices of the tokens that are read; None for all.
        checkpointing: whether each layer keeps its input only, and runs again in the backward (arXiv 1604.06174).
        onednn: whether wide products in float32 on a CPU run in oneDNN, which is faster than torch for many rows.
        kernels: whether the kernels of `engine.kernels.elementwise` run.
    """
    context = current_context()
    if context is None:
        wide = x.dtype is torch.float32 and x.shape[1] >= SMALLEST_WIDTH and packs()
        call = _onednn_call if onednn and wide else _call
        return _forward(backbone, x, Pass(rotary, attention, call, x.dtype, kernels), reads, checkpointing)
    call = context.caller(len(x), len(x) if reads is None else len(reads))
    torch._C._pop_torch_function_stack()
    try:
        return _forward(backbone, x, Pass(rotary, attention, call, x.dtype, kernels), reads, checkpointing)
    finally:
        torch._C._push_on_torch_function_stack(context)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _onednn_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if function is linear and can_pack(args[1]) and len(args[0]):
        return onednn_linear(*args)
    if function is plus_linear and can_pack(args[2]) and len(args[0]):
        return onednn_linear(args[1], args[2], plus=args[0])
    return function(*args, **kwargs)


def _forward(backbone: Any, x: Tensor, shared: Pass, reads: Tensor | None, checkpointing: bool) -> Tensor:
    layers = backbone.layers[: backbone.config.num_hidden_layers]
    if x.device.type == "cpu" and x.dtype.itemsize < 4:  # on CUDA, this would be two more passes over memory a layer
        x = x.float()  # rounding the sum of all layers loses most
    for number, layer in enumerate(layers):
        at = reads if number == len(layers) - 1 else None
        with whole_weights(layer):
            if checkpointing:
                x = checkpoint(_layer, layer, number, x, shared, at, use_reentrant=False)
            else:
                x = _layer(layer, number, x, shared, at)
    return rms_norm(backbone.norm, x, shared.dtype)


def _layer(layer: Any, number: int, x: Tensor, shared: Pass, reads: Tensor | None) -> Tensor:
    """Return the output of one layer for all tokens, or for those at `reads`."""
    x = _add_attention(layer, number, x, shared, reads)
    if len(x) <= MLP_ROWS or x.device.type != "cpu" or torch.is_grad_enabled():
        return _add_mlp(layer, x, shared)
    for part in torch.split(x, MLP_ROWS):
        part.copy_(_add_mlp(layer, part, shared))
    return x


def _add_mlp(layer: Any, x: Tensor, shared: Pass) -> Tensor:
    mlp, call = layer.mlp, shared.call
    inputs = _input(mlp.gate_proj, rms_norm(layer.post_attention_layernorm, x, shared.dtype))
    gate, up = (_product(module, inputs, shared.dtype, call) for module in (mlp.gate_proj, mlp.up_proj))
    product = _elementwise().silu_mul(gate, up) if shared.kernels else silu_times(gate, up, call)
    return _add_product(x, product, mlp.down_proj, call)


def _add_attention(layer: Any, number: int, x: Tensor, shared: Pass, reads: Tensor | None) -> Tensor:
    module, call, rotary, kernels = layer.self_attn, shared.call, shared.rotary, shared.kernels
    normed = rms_norm(layer.input_layernorm, x, shared.dtype)
    inputs = _input(module.k_proj, normed)
    key = _rotated_heads(module, "k", _heads(module, "k", inputs, normed.dtype, call), rotary, kernels)
    value = _heads(module, "v", inputs, normed.dtype, call)
    if reads is not None:
        x, rotary = x[reads], (rotary[0][reads], rotary[1][reads])
        inputs = _input(module.q_proj, normed[reads])
    query = _rotated_heads(module, "q", _heads(module, "q", inputs, normed.dtype, call), rotary, kernels)
    del normed, inputs  # attention needs the memory
    # The sliding window is in the configuration for Mistral and in each layer for Qwen; Llama has none.
    window = getattr(module.config if module.config.model_type == "mistral" else module, "sliding_window", None)
    attended = shared.attention(LayerCall(number, module.scaling, window, reads is not None), query, key, value)
    return _add_product(x, attended.reshape(x.shape[0], -1).contiguous(), module.o_proj, call)


def _heads(module: Any, name: str, inputs: Tensor | Scaled, dtype: torch.dtype, call: Call) -> Tensor:
    """Return queries, keys or values `[T, heads, D]`."""
    states = _product(getattr(module, f"{name}_proj"), inputs, dtype, call)
    return states.view(states.shape[0], -1, module.head_dim)


def _rotated_heads(module: Any, name: str, states: Tensor, rotary: Rotary, kernels: bool) -> Tensor:
    """Return queries or keys, normed if the layer does so, and rotated."""
    norm = module._modules.get(f"{name}_norm")
    if kernels:
        rotated: Tensor = _elementwise().norm_rotate(states, norm, *rotary)
        return rotated
    return rotate(states if norm is None else rms_norm(norm, states), *rotary)


def _elementwise() -> Any:
    from gym_rm.engine.kernels import elementwise  # needs Triton

    return elementwise


def _input(module: Any, x: Tensor) -> Tensor | Scaled:
    """Return the input that several projections of x share: x itself, or its rows in 8 bits."""
    return module.quantize(x) if isinstance(module, LowPrecisionLinear) else x


def _product(module: Any, x: Tensor | Scaled, dtype: torch.dtype, call: Call) -> Tensor:
    whole = isinstance(x, Tensor)
    product: Tensor = call(linear, x, module.weight, module.bias) if whole else call(module.product, x, dtype)
    return _with_adapters(product, x, module, call)


def _with_adapters(product: Tensor, x: Any, module: Any, call: Call) -> Tensor:
    """Return the product of a layer with x and its adapters' `factor * up(down(x))` added; product is overwritten."""
    for down, up, factor, dropout in _adapters(module):
        inner = call(linear, dropout(x.to(down.dtype)), down) * factor
        same = product.dtype is up.dtype
        total = call(plus_linear, product, inner, up) if same else product + call(linear, inner, up)
        product = total.to(product.dtype)
    return product


def _add_product(x: Tensor, y: Tensor, module: Any, call: Call) -> Tensor:
    """Return `x + module(y)`; in one precision, the matrix product does the addition. x may be overwritten."""
    own = isinstance(module, PRODUCTS)
    if own or x.dtype is not y.dtype or torch.is_autocast_enabled(x.device.type):  # residuals keep their precision
        product = call(module, y) if own else _product(module, y, y.dtype, call)
        return x + product if torch.is_grad_enabled() else x.add_(product)
    x = _with_adapters(call(plus_linear, x, y, module.weight), y, module, call)
    if module.bias is None:
        return x
    return x + module.bias if torch.is_grad_enabled() else x.add_(module.bias)


def rms_norm(module: Any, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the `RMSNorm` of x with the weight of a module, in a precision; None for that of x."""
    options = (x, module.weight, module.variance_epsilon, dtype or x.dtype)
    if not torch.is_grad_enabled() or x.is_cuda:  # where its backward is one kernel
        return _normed(*options)
    normed: Tensor = RMSNorm.apply(*options)  # type: ignore[no-untyped-call]
    return normed


class RMSNorm(torch.autograd.Function):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in float32 or more (arXiv 1910.07467)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """Return the normed x; keeps x only."""
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _normed(x, weight, eps, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients of x and of the weight."""
        x, weight = ctx.saved_tensors
        precision = torch.promote_types(x.dtype, torch.float32)
        grad, values = grads[0].to(precision), x.to(precision)
        squares = torch.linalg.vector_norm(values, dim=-1, keepdim=True).square_()
        scale = torch.rsqrt(squares.div_(x.shape[-1]).add_(ctx.eps))
        normed = values * scale
        weight_grad = (grad * normed).flatten(0, -2).sum(dim=0).to(weight.dtype)
        inner = grad * weight
        along = torch.linalg.vecdot(inner, normed).unsqueeze(-1) / x.shape[-1]
        return inner.addcmul_(normed, along, value=-1).mul_(scale).to(x.dtype), weight_grad, None, None


def _normed(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    if x.dtype is not dtype:
        weight = weight.to(x.dtype)
    return torch.rms_norm(x, weight.shape, weight, eps).to(dtype)  # autocast returns float32


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return states `[T, heads, D]` rotated to their positions (arXiv 2104.09864, section 3.4.2)."""
    if not torch.is_grad_enabled():
        return _rotated(states, cos, sin, 1)
    rotated: Tensor = Rotation.apply(states, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class Rotation(torch.autograd.Function):
    """Rotary positions; the backward rotates back."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the rotated states."""
        ctx.save_for_backward(cos, sin)
        return _rotated(states, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the states."""
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1), None, None


def _rotated(states: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Rotate pairs of numbers, paired as in Hugging Face's `rotate_half`."""
    half = states.shape[-1] // 2
    first, second = states[..., :half], states[..., half:]
    s = sin[:, None, :half]
    rotated = torch.mul(states, cos[:, None], out=torch.empty_like(states))
    rotated[..., :half].addcmul_(second, s, value=-sign)
    rotated[..., half:].addcmul_(first, s, value=sign)
    return rotated


def silu_times(gate: Tensor, up: Tensor, call: Call = _call) -> Tensor:
    """Return `silu(gate) * up` (SwiGLU, arXiv 2002.05202); gate is overwritten without gradients."""
    if not torch.is_grad_enabled():
        activated: Tensor = call(silu, gate, inplace=True)
        return activated.mul_(up)
    product: Tensor = SiluTimes.apply(gate, up)  # type: ignore[no-untyped-call]
    return product


class SiluTimes(torch.autograd.Function):
    """`silu(gate) * up`; the backward computes the activation again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Return the product."""
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both."""
        gate, up = ctx.saved_tensors
        activated = silu(gate)
        return torch.ops.aten.silu_backward(grads[0] * up, gate), activated.mul_(grads[0])
