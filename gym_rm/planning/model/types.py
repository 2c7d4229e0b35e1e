"""What the configurations of model types leave unsaid: biases, norms, and the values of settings that are missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Type:
    """What the configurations of a model type leave unsaid.

    Attributes:
        norms: vectors of the hidden width in the norms of a layer; a norm with a bias has two.
        last_norm: the same of the norm after the layers.
        qkv_bias, output_bias, mlp_bias, head_bias: whether these matrices have a bias; a name of a setting that says
            so. `head_bias` is that of the output layer over the vocabulary.
        gated: whether the MLP has a gate beside its first matrix.
        head_norms: vectors of the head width that normalise queries and keys; a name of a setting for two of them.
        wide_norms: whether queries and keys are normalised by vectors of their whole width instead.
        positions: learned vectors of positions, of this setting plus this number; None without.
        bidirectional: whether it is an encoder.
        windows: whether a `sliding_window` is used without being asked for.
        grouped: whether it has settings for key and value heads and for their width.
        experts: settings of experts that it reads; None for all.
        every: period of the layers without a window, counted from the last of each period; 0 if all have it.
        fused: parts whose matrices are one linear layer: `qkv`, `mlp` (the gate and the first matrix).
        adapters: which of a mixture's matrices `all-linear` of peft gives LoRA adapters: `experts` (and the router),
            `router`, or none of them.
        tied: whether the output layer is the embedding where the configuration does not say.
        defaults: values of settings that a configuration may leave out.
    """

    norms: int = 2
    last_norm: int = 1
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    head_bias: bool | str = False
    gated: bool = True
    head_norms: int | str = 0
    wide_norms: bool = False
    positions: int | None = None
    bidirectional: bool = False
    windows: bool = True
    grouped: bool = True
    experts: tuple[str, ...] | None = ()
    every: int = 0
    fused: tuple[str, ...] = ()
    adapters: str = "experts"
    tied: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PLAIN = (*EXPERTS, "num_experts_per_tok", "experts_per_token", "top_k_experts")
_QWEN = (*_PLAIN, "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers")
_DEEP = (*_PLAIN, "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace")
EXPERT_SETTINGS = {*_QWEN, *_DEEP, "shared_expert_intermediate_size"}


def _kv(heads: int, **others: Any) -> dict[str, Any]:
    return {"num_key_value_heads": heads, **others}


_LLAMA = Type(mlp_bias="mlp_bias", windows=False)
_MISTRAL = Type(qkv_bias=False, output_bias=False, defaults=_kv(8))
_BIASED = Type(
    norms=4, last_norm=2, qkv_bias=True, output_bias=True, mlp_bias=True, gated=False, windows=False, grouped=False
)
_ENCODER = replace(_BIASED, last_norm=0, positions=0, bidirectional=True, tied=True)
_QWEN_MOE = {"num_experts_per_tok": 8, "decoder_sparse_step": 1}
_DEEPSEEK = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
_DEEPSEEK |= {"v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
_DEEPSEEK |= {"n_shared_experts": 1, "first_k_dense_replace": 3}

TYPES: dict[str, Type] = {
    "llama": _LLAMA,
    "mistral": replace(_MISTRAL, defaults=_kv(8, sliding_window=4096)),
    "ministral": replace(_MISTRAL, defaults=_kv(8, sliding_window=4096)),
    "mixtral": replace(_MISTRAL, experts=_PLAIN, defaults=_kv(8, num_local_experts=8, num_experts_per_tok=2)),
    "qwen2": Type(qkv_bias=True, output_bias=False, windows=False, defaults=_kv(32)),
    "qwen2_moe": Type(experts=(*_QWEN, "shared_expert_intermediate_size"), qkv_bias="qkv_bias", output_bias=False,
                      adapters="", windows=False,
                      defaults=_kv(16, qkv_bias=True, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
                                   shared_expert_intermediate_size=5632)),
    "qwen3": Type(head_norms=2, windows=False, defaults=_kv(32, head_dim=128)),
    "qwen3_moe": Type(experts=_QWEN, head_norms=2, windows=False,
                      defaults=_kv(4, num_experts=128, moe_intermediate_size=768, **_QWEN_MOE)),
    "phi3": Type(qkv_bias=False, output_bias=False, fused=("qkv", "mlp")),
    "phimoe": Type(experts=_PLAIN, adapters="router", norms=4, last_norm=2, head_bias="lm_head_bias",
                   defaults=_kv(8, num_local_experts=16, num_experts_per_tok=2)),
    "gemma": Type(windows=False, tied=True, defaults=_kv(16, head_dim=256)),
    "gemma2": Type(norms=4, every=2, tied=True, defaults=_kv(4, head_dim=256, sliding_window=4096)),
    "gemma3_text": Type(norms=4, head_norms=2, every=6, tied=True,
                        defaults=_kv(4, head_dim=256, sliding_window=4096, num_attention_heads=8, vocab_size=262208)),
    "gpt_oss": Type(experts=_PLAIN, adapters="", mlp_bias=True, every=2,
                    defaults=_kv(8, head_dim=64, sliding_window=128, attention_bias=True, num_local_experts=128,
                                 num_experts_per_tok=4)),
    "deepseek_v3": Type(experts=_DEEP, windows=False, grouped=False, defaults=_DEEPSEEK),
    "glm": Type(output_bias=False, windows=False, fused=("mlp",), defaults=_kv(2, head_dim=128, attention_bias=True)),
    "glm4": Type(norms=4, output_bias=False, windows=False, fused=("mlp",),
                 defaults=_kv(2, head_dim=128, attention_bias=True)),
    "glm4_moe": Type(experts=_DEEP, output_bias=False, windows=False, head_norms="use_qk_norm",
                     defaults=_kv(8, n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1408,
                                  n_shared_experts=1, first_k_dense_replace=1)),
    "minimax_m2": Type(experts=_PLAIN, qkv_bias=False, output_bias=False, windows=False, wide_norms=True,
                       defaults=_kv(8, head_dim=128, num_local_experts=256, num_experts_per_tok=8)),
    "olmo": Type(norms=0, last_norm=0, windows=False),
    "olmo2": Type(windows=False, wide_norms=True),
    "olmo3": Type(wide_norms=True, every=4, defaults={"sliding_window": 4096}),
    "olmoe": Type(experts=_PLAIN, windows=False, wide_norms=True,
                  defaults={"num_experts": 64, "num_experts_per_tok": 8}),
    "granite": _LLAMA,
    "smollm3": replace(_LLAMA, tied=True, defaults=_kv(4)),
    "seed_oss": Type(output_bias=False, windows=False, mlp_bias="mlp_bias",
                     defaults=_kv(8, head_dim=128, attention_bias=True)),
    "gpt2": replace(_BIASED, positions=0, fused=("qkv",), tied=True),
    "gpt_neox": replace(_BIASED, fused=("qkv",), qkv_bias="attention_bias", output_bias="attention_bias",
                        defaults={"attention_bias": True}),
    "opt": replace(_BIASED, positions=2, tied=True),
    "bloom": replace(_BIASED, fused=("qkv",), tied=True),
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "xlm-roberta": _ENCODER,
    "deberta-v2": replace(_ENCODER, defaults={"type_vocab_size": 0}),
    "modernbert": Type(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias",
                       bidirectional=True, fused=("qkv", "mlp"), tied=True, grouped=False),
}  # fmt: skip
# The same layers under another name: of the text part of a model that also sees, and of copies with their own code.
TYPES |= {"qwen3_vl_text": TYPES["qwen3"], "qwen3_vl_moe_text": TYPES["qwen3_moe"], "qwen2_vl_text": TYPES["qwen2"]}
TYPES |= {"qwen2_5_vl_text": TYPES["qwen2"], "kimi_k2": TYPES["deepseek_v3"]}
"""Types whose number of parameters is exact; tests compare it with the models of transformers."""

_RECURRENT = "some of its layers keep a state instead of a KV cache"
_INDEXER = "an indexer chooses the tokens that a token attends to"
_TWO_STACKS = "it has an encoder and a decoder"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("t5", "bart", "mt5", "mbart", "pegasus", "umt5", "t5gemma"), _TWO_STACKS),
    **dict.fromkeys(("jamba", "mamba", "mamba2", "falcon_h1", "bamba", "zamba2", "nemotron_h", "minimax"), _RECURRENT),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "rwkv", "recurrent_gemma", "lfm2"), _RECURRENT),
    **dict.fromkeys(("granitemoehybrid", "kimi_linear", "olmo_hybrid"), _RECURRENT),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), _INDEXER),
    "doge": "its attention has parameters of its own",
    "xlnet": "its attention has parameters for relative positions",
    "albert": "its layers share their parameters",
    "falcon": "its layers have several forms under one name",
    "phi": "its layers have one norm for two parts",
    "cohere": "its layers have one norm for two parts",
    "cohere2": "its layers have one norm for two parts",
    "llama4": "its layers with and without experts alternate, and have a shared expert",
    "gemma3n": "it has embeddings for each layer",
    "gemma4": "its layers have different heads, and it has embeddings for each layer",
    "mimo_v2_flash": "its layers with and without a window have different heads",
    "nemotron-nas": "its layers have different sizes",
    "deci": "its layers have different sizes",
    "openelm": "its layers have different sizes",
    "minimax_m3": "its formula is not known here",
    "step3p7": "its formula is not known here",
    "kimi_k3": "its formula is not known here",
}
"""Types for which a formula of the others would be wrong, and why."""
