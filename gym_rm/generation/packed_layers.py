"""The layers of `llama_forward` with weights in oneDNN's format, for decoding in float32 on a CPU.

A step reads all weights for few rows, so the caches are cold after each product and an operation costs the same however
small: products of one input are one, heads are normed and rotated together, and the activation is part of a product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gym_rm.engine.backbones.attention import Attention, LayerCall
from gym_rm.engine.backbones.llama import PRODUCTS, Rotary, merged_weight, rms_norm, rotate
from gym_rm.engine.backbones.packed_weights import MOST_BYTES, can_pack, packs


def can_pack_layers(model: Any) -> bool:
    """Return whether `PackedLayers` can run a model that has a `forward_fingerprint`."""
    products = [each for each in model.modules() if isinstance(each, (nn.Linear, *PRODUCTS))]
    plain = all(type(each) is nn.Linear and can_pack(each.weight) for each in products)
    return packs() and plain and 4 * sum(each.weight.numel() for each in products) <= MOST_BYTES


class PackedLayers:
    """Packed copies of the weights of a causal language model that has a `forward_fingerprint`."""

    def __init__(self, model: Any) -> None:
        self._backbone, self._head, self._weights = model.model, _packed(model.get_output_embeddings()), []
        for layer in self._backbone.layers[: self._backbone.config.num_hidden_layers]:
            own, mlp = layer.self_attn, layer.mlp
            others = (own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
            self._weights.append((_packed(own.q_proj, own.k_proj, own.v_proj), *map(_packed, others)))

    def logits(self, x: Tensor, rotary: Rotary, attention: Attention, reads: Tensor | None = None) -> Tensor:
        """Return the logits `[R, V]` at `reads`, without gradients; see `llama_forward`."""
        product: Any = torch.ops.mkldnn._linear_pointwise
        for number, (qkv, output, gate, up, down) in enumerate(self._weights):
            layer = self._backbone.layers[number]
            own, only_reads = layer.self_attn, reads is not None and number == len(self._weights) - 1
            kv_heads = len(own.k_proj.weight) // own.head_dim
            states = product(rms_norm(layer.input_layernorm, x), *qkv, "none", [], "").view(len(x), -1, own.head_dim)
            value, states = states[:, -kv_heads:], states[:, :-kv_heads]
            if (norm := own._modules.get("q_norm")) is not None:
                states = torch.rms_norm(states, norm.weight.shape, None, norm.variance_epsilon)
                states[:, :-kv_heads].mul_(norm.weight)
                states[:, -kv_heads:].mul_(own.k_norm.weight)
            states = rotate(states, *rotary)
            query, key = states[:, :-kv_heads], states[:, -kv_heads:]
            if only_reads:
                query, x = query[reads], x[reads]
            window = getattr(own.config if own.config.model_type == "mistral" else own, "sliding_window", None)
            attended = attention(LayerCall(number, own.scaling, window, only_reads), query, key, value)
            x = product.binary(attended.reshape(len(x), -1).contiguous(), x, *output, "add")
            inputs = rms_norm(layer.post_attention_layernorm, x)
            inputs = product.binary(inputs, product(inputs, *gate, "swish", [], ""), *up, "mul")
            x = product.binary(inputs, x, *down, "add")
        logits: Tensor = product(rms_norm(self._backbone.norm, x), *self._head, "none", [], "")
        return logits


def _packed(*layers: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias of the product with all layers; adapters are merged into a copy."""
    weight, biases = torch.cat([merged_weight(layer) for layer in layers]), [layer.bias for layer in layers]
    return torch.ops.mkldnn._reorder_linear_weight(weight), None if biases[0] is None else torch.cat(tuple(biases))
