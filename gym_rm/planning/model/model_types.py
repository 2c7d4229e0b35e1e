"""What the configurations of model types leave unsaid: biases, norms, and the values of settings that are missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelType:
    """What the configurations of a model type leave unsaid.

    Attributes:
        norms: vectors of the hidden width in the norms of a layer.
        qkv_bias, output_bias, mlp_bias: whether these matrices have a bias; None if the configuration says so
            (`attention_bias`, `mlp_bias`).
        head_norms: vectors of the head width that normalise queries and keys.
        wide_norms: whether queries and keys are normalised by vectors of their whole width instead.
        windows: whether a `sliding_window` is used without being asked for.
        every: period of the layers without a window, counted from the last of each period; 0 if all have it.
        tied: whether the output layer is the embedding where the configuration does not say.
        defaults: values of settings that a configuration may leave out.
    """

    norms: int = 2
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    head_norms: int = 0
    wide_norms: bool = False
    windows: bool = True
    every: int = 0
    tied: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _kv(heads: int, **others: Any) -> dict[str, Any]:
    return {"num_key_value_heads": heads, **others}


_LLAMA = ModelType(mlp_bias=None, windows=False)
_MISTRAL = ModelType(qkv_bias=False, output_bias=False)

TYPES: dict[str, ModelType] = {
    "llama": _LLAMA,
    "mistral": replace(_MISTRAL, defaults=_kv(8, sliding_window=4096)),
    "mixtral": replace(_MISTRAL, defaults=_kv(8, num_experts=8, num_experts_per_tok=2)),
    "qwen2": ModelType(qkv_bias=True, output_bias=False, windows=False, defaults=_kv(32)),
    "qwen3": ModelType(head_norms=2, windows=False, defaults=_kv(32, head_dim=128)),
    "qwen3_moe": ModelType(head_norms=2, windows=False, defaults=_kv(
        4, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)),
    "phi3": _MISTRAL,
    "olmo2": ModelType(windows=False, wide_norms=True),
    "gemma": ModelType(windows=False, tied=True, defaults=_kv(16, head_dim=256)),
    "gemma2": ModelType(norms=4, every=2, tied=True, defaults=_kv(4, head_dim=256, sliding_window=4096)),
    "gemma3_text": ModelType(norms=4, head_norms=2, every=6, tied=True, defaults=_kv(
        4, head_dim=256, sliding_window=4096, num_attention_heads=8, vocab_size=262208)),
    "gpt_oss": ModelType(mlp_bias=True, every=2, defaults=_kv(
        8, head_dim=64, sliding_window=128, attention_bias=True, num_experts=128, num_experts_per_tok=4)),
}  # fmt: skip
"""Types that are counted without torch; tests compare them with the models of transformers, which count the others."""
