"""The forward of Llama-like decoders over a tree, written for scoring.

Hugging Face's layers are made to be read and trained. For scoring, the same weights run here with residuals added by
the matrix products themselves, activations in place, and the last layer only where a value is read. The layers'
own forward stays the reference: `choose_layout` compares the two at load, and training never comes here.

Shapes: x `[T, hidden]`, query `[T, H, D]`, key and value `[T, H_kv, D]`, cos and sin `[T, D]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from gym_rm.attention import TreeAttention, attend, attend_with_flex
from gym_rm.models.low_precision import LowPrecisionLinear, Scaled

# Architectures whose layer is x += attention(norm(x)); x += down(silu(gate(norm(x))) * up(norm(x))).
MODEL_TYPES = frozenset({"llama", "qwen2", "qwen3", "mistral"})
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def can_fuse(backbone: Any) -> bool:
    """Whether `fused_forward` may stand in for this backbone's forward, by its architecture and its modules."""
    config = backbone.config
    if config.model_type not in MODEL_TYPES or config.hidden_act != "silu":
        return False
    projections = [
        getattr(part, name, None)
        for layer in backbone.layers
        for part, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj")), (layer.mlp, MLP_PROJECTIONS))
        for name in names
    ]
    # Quantised, adapted, offloaded or watched modules compute more than their weights say.
    return all(type(projection) is nn.Linear for projection in projections) and not any(
        hasattr(module, "_hf_hook") or module._forward_hooks or module._forward_pre_hooks
        for module in backbone.modules()
    )


def fused_forward(backbone: Any, input_ids: Tensor, position_ids: Tensor, reads: Tensor, tree: TreeAttention) -> Tensor:
    """The backbone's last hidden states `[R, hidden]` at `reads`, without gradients.

    `input_ids` and `position_ids` are int64 `[T]`, `reads` int64 `[R]`, all on the backbone's device.
    """
    x = backbone.embed_tokens(input_ids)
    cos, sin = (part[0] for part in backbone.rotary_emb(x, position_ids[None]))
    *layers, last = backbone.layers
    for layer in layers:
        normed = _norm(layer.input_layernorm, x)
        attended = _attention(layer.self_attn, normed, normed, cos, sin, cos, sin, tree, None)
        x = _add_product(x, attended, layer.self_attn.o_proj)
        x = _add_mlp(x, layer)
    normed = _norm(last.input_layernorm, x)
    attended = _attention(last.self_attn, normed[reads], normed, cos[reads], sin[reads], cos, sin, tree, reads)
    x = _add_product(x[reads], attended, last.self_attn.o_proj)
    return _norm(backbone.norm, _add_mlp(x, last))


def _attention(
    module: Any,
    queried: Tensor,
    x: Tensor,
    query_cos: Tensor,
    query_sin: Tensor,
    cos: Tensor,
    sin: Tensor,
    tree: TreeAttention,
    reads: Tensor | None,
) -> Tensor:
    """Attention output `[queries, H * D]` of the rows `queried` over all of `x`; `reads` names them if not all."""
    size = module.head_dim
    inputs = _input(module.k_proj, x)
    queries = inputs if queried is x else _input(module.q_proj, queried)
    query = _project(module.q_proj, queries, x.dtype).view(len(queried), -1, size)
    key = _project(module.k_proj, inputs, x.dtype).view(len(x), -1, size)
    value = _project(module.v_proj, inputs, x.dtype).view(len(x), -1, size)
    if hasattr(module, "q_norm"):
        query, key = _norm(module.q_norm, query), _norm(module.k_norm, key)
    query, key = _rotate(query, query_cos, query_sin), _rotate(key, cos, sin)
    # Mistral's layers slide by the configuration, Qwen's each by their own kind, Llama's never.
    slides = module.config if module.config.model_type == "mistral" else module
    window = getattr(slides, "sliding_window", None)
    query, key, value = (states.transpose(0, 1).unsqueeze(0) for states in (query, key, value))
    if tree.use_flex:
        output = attend_with_flex(query, key, value, tree, module.scaling, window, reads=reads)
    else:
        output = attend(query, key, value, tree.blocks(window, only_reads=reads is not None), module.scaling)
    return output.reshape(len(queried), -1)


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864, section 3.4.2), the halves paired as in Hugging Face's `rotate_half`."""
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
    """What the projections that read x share: x itself, or its rows in 8 bits."""
    return module.quantize(x) if isinstance(module, LowPrecisionLinear) else x


def _project(module: Any, x: Any, dtype: torch.dtype) -> Tensor:
    return module.product(x, dtype) if isinstance(module, LowPrecisionLinear) else linear(x, module.weight, module.bias)


def _add_product(x: Tensor, y: Tensor, module: Any) -> Tensor:
    """`x += module(y)`, added inside the matrix product where that has full precision."""
    if isinstance(module, LowPrecisionLinear):
        return x.add_(module(y))
    x.addmm_(y, module.weight.t())
    return x if module.bias is None else x.add_(module.bias)


def _add_mlp(x: Tensor, layer: Any) -> Tensor:
    inputs = _input(layer.mlp.gate_proj, _norm(layer.post_attention_layernorm, x))
    inner = silu(_project(layer.mlp.gate_proj, inputs, x.dtype), inplace=True)
    inner.mul_(_project(layer.mlp.up_proj, inputs, x.dtype))
    return _add_product(x, inner, layer.mlp.down_proj)
