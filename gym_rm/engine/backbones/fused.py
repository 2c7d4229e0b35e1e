"""Fused forward of Llama-like decoders over a tree, for scoring only.

It runs the weights of the Hugging Face layers faster than their own forward: residuals are added by the matrix
products, activations are computed in place, and the last layer runs only at the positions that are read. The layers'
own forward is the reference: `choose_forward` compares the two at load. Training always uses the layers' own forward.

Shapes: x `[T, hidden]`, query `[T, H, D]`, key and value `[T, H_kv, D]`, cos and sin `[T, D]`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu
from transformers.activations import ACT2FN

from gym_rm.engine.backbones.batch_invariance import with_padding
from gym_rm.engine.backbones.low_precision import LowPrecisionLinear, Scaled
from gym_rm.engine.backbones.sharded import RowParallelLinear, is_hook_of_sharding, whole_weights
from gym_rm.engine.backbones.tree_attention import TreeAttention, attend, attend_with_flex, to_device

# Architectures whose layer is x += attention(norm(x)); x += down(silu(gate(norm(x))) * up(norm(x))).
MODEL_TYPES = frozenset({"llama", "qwen2", "qwen3", "mistral"})
SILU = (nn.SiLU, type(ACT2FN["silu"]))
LIBRARIES = ("transformers.", "torch.")  # whose modules the fused forward was written for
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


Code: TypeAlias = tuple[Callable[..., Any], ...]


def fusable_code(backbone: Any) -> Code | None:
    """Return the forward function of each module; None if `fused_forward` cannot replace that of the backbone.

    The fused forward may replace these functions only: a module that is added or replaced computes something else.
    """
    if backbone.config.model_type not in MODEL_TYPES:
        return None
    called = (backbone.embed_tokens, backbone.rotary_emb)  # the fused forward calls these, so they may be replaced
    code: list[Callable[..., Any]] = []
    for module in backbone.modules():
        # Modules with adapters, offloading or hooks compute more than a product with their weights.
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if hasattr(module, "_hf_hook") or not all(map(is_hook_of_sharding, hooks)):
            return None
        product = isinstance(module, LowPrecisionLinear | RowParallelLinear)
        forward = nn.Linear.forward if product else type(module).forward
        if module not in called and ("forward" in vars(module) or not forward.__module__.startswith(LIBRARIES)):
            return None
        code.append(forward)
    projections = (
        getattr(part, name, None)
        for layer in backbone.layers
        for part, names in ((layer.self_attn, ATTENTION_PROJECTIONS), (layer.mlp, MLP_PROJECTIONS))
        for name in names
    )
    plain = (
        type(projection) is nn.Linear or isinstance(projection, LowPrecisionLinear | RowParallelLinear)
        for projection in projections
    )
    causal = (layer.self_attn.is_causal and type(layer.mlp.act_fn) in SILU for layer in backbone.layers)
    return tuple(code) if all(plain) and all(causal) else None


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries of one layer: their rotary positions and their indices in the tree.

    Attributes:
        cos, sin: `[Q, D]`, rotary positions.
        only_reads: whether the queries are the tree's reads.
        indices: int64 `[Q]`, indices in the tree; None if the queries are all tokens of the tree.
    """

    cos: Tensor
    sin: Tensor
    only_reads: bool
    indices: Tensor | None


class Prefix(Protocol):
    """Cached keys and values of a tree, which `complete` adds to those that a layer computed."""

    def complete(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of the whole tree from those of the computed tokens."""
        ...


def fused_forward(
    backbone: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    reads: Tensor,
    tree: TreeAttention,
    prefix: Prefix | None = None,
) -> Tensor:
    """Return the backbone's last hidden states `[R, hidden]` at `reads`, without gradients.

    All indices are int64 and on the backbone's device.

    Args:
        backbone: backbone that has a `fusable_code`.
        input_ids, position_ids: `[C]`, tokens to compute: all tokens of the tree, or those in `tree.computed`.
        reads: `[R]`, indices of the tokens to compute.
        tree: attention over the tree.
        prefix: cached keys and values of the tree's other tokens.
    """
    x = backbone.embed_tokens(input_ids)
    cos, sin = (part[0] for part in backbone.rotary_emb(x, position_ids[None]))
    computed = None if tree.computed is None else to_device(with_padding(tree.computed), x.device)
    everything = Queries(cos, sin, only_reads=False, indices=computed)
    *layers, last = backbone.layers[: backbone.config.num_hidden_layers]
    for number, layer in enumerate(layers):
        with whole_weights(layer):
            inputs = _input(layer.self_attn.q_proj, _norm(layer.input_layernorm, x))
            key, value = _keys_and_values(layer.self_attn, inputs, everything, number, prefix)
            attended = _attention(layer.self_attn, inputs, key, value, everything, tree)
            x = _add_product(x, attended, layer.self_attn.o_proj)
            x = _add_mlp(x, layer)
    at_reads = Queries(cos[reads], sin[reads], only_reads=True, indices=reads if computed is None else computed[reads])
    with whole_weights(last):
        normed = _norm(last.input_layernorm, x)
        inputs = _input(last.self_attn.k_proj, normed)
        key, value = _keys_and_values(last.self_attn, inputs, everything, len(layers), prefix)
        attended = _attention(last.self_attn, _input(last.self_attn.q_proj, normed[reads]), key, value, at_reads, tree)
        x = _add_product(x[reads], attended, last.self_attn.o_proj)
        x = _add_mlp(x, last)
    return _norm(backbone.norm, x)


def _keys_and_values(
    module: Any, inputs: Tensor | Scaled, tokens: Queries, layer: int, prefix: Prefix | None
) -> tuple[Tensor, Tensor]:
    """Return keys and values `[T, H_kv, D]` of the whole tree; `inputs` are the normed hidden states of `tokens`."""
    shape, dtype = (len(tokens.cos), -1, module.head_dim), tokens.cos.dtype
    key = _project(module.k_proj, inputs, dtype).view(shape)
    value = _project(module.v_proj, inputs, dtype).view(shape)
    if hasattr(module, "k_norm"):
        key = _norm(module.k_norm, key)
    key = _rotate(key, tokens.cos, tokens.sin)
    return (key, value) if prefix is None else prefix.complete(layer, key, value)


def _attention(
    module: Any, inputs: Tensor | Scaled, key: Tensor, value: Tensor, queries: Queries, tree: TreeAttention
) -> Tensor:
    """Return the attention output `[Q, H * D]`; `inputs` are the normed hidden states of `queries`."""
    query = _project(module.q_proj, inputs, queries.cos.dtype).view(len(queries.cos), -1, module.head_dim)
    if hasattr(module, "q_norm"):
        query = _norm(module.q_norm, query)
    query = _rotate(query, queries.cos, queries.sin)
    # The sliding window is in the configuration for Mistral and in each layer for Qwen; Llama has none.
    holder = module.config if module.config.model_type == "mistral" else module
    window = getattr(holder, "sliding_window", None)
    query, key, value = (states.transpose(0, 1).unsqueeze(0) for states in (query, key, value))
    if tree.use_flex:
        output = attend_with_flex(query, key, value, tree, module.scaling, window, rows=queries.indices)
    else:
        tiling = tree.tiling(window, query.shape[2], only_reads=queries.only_reads)
        output = attend(query, key, value, tree.slots, tiling, module.scaling)
    return output.reshape(len(queries.cos), -1)


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions (arXiv 2104.09864, section 3.4.2), paired as in Hugging Face's `rotate_half`."""
    half = states.shape[-1] // 2
    first, second = states[..., :half], states[..., half:]
    c, s = cos[:, None, :half], sin[:, None, :half]
    rotated = torch.empty_like(states)
    torch.mul(first, c, out=rotated[..., :half]).addcmul_(second, s, value=-1)
    torch.mul(second, c, out=rotated[..., half:]).addcmul_(first, s)
    return rotated


def _norm(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


def _input(module: Any, x: Tensor) -> Tensor | Scaled:
    """Return the input that several projections of x share: x itself, or its rows in 8 bits."""
    return module.quantize(x) if isinstance(module, LowPrecisionLinear) else x


def _project(module: Any, x: Tensor | Scaled, dtype: torch.dtype) -> Tensor:
    return linear(x, module.weight, module.bias) if isinstance(x, Tensor) else module.product(x, dtype)


def _add_product(x: Tensor, y: Tensor, module: Any) -> Tensor:
    """Compute `x += module(y)` in place; in full precision, the matrix product does the addition."""
    if isinstance(module, LowPrecisionLinear | RowParallelLinear):
        return x.add_(module(y))
    x.addmm_(y, module.weight.t())
    return x if module.bias is None else x.add_(module.bias)


def _add_mlp(x: Tensor, layer: Any) -> Tensor:
    inputs = _input(layer.mlp.gate_proj, _norm(layer.post_attention_layernorm, x))
    inner = silu(_project(layer.mlp.gate_proj, inputs, x.dtype), inplace=True)
    inner.mul_(_project(layer.mlp.up_proj, inputs, x.dtype))
    return _add_product(x, inner, layer.mlp.down_proj)
