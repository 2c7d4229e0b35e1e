"""Names and values of the settings of a `config.json` that decide the sizes of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gym_rm.checks import describe
from gym_rm.errors import ConfigError, nearest
from gym_rm.planning.model.types import EXPERTS

# Other names of the same setting, in the order in which they are tried.
NAMES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocabulary": ("vocab_size",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "experts": EXPERTS,
    "chosen": ("num_experts_per_tok", "experts_per_token", "top_k_experts"),
    "max_length": ("max_position_embeddings", "n_positions"),
}
NEEDED = ("hidden", "num_layers", "heads", "vocabulary")
POSITIVE = {
    *(name for key, names in NAMES.items() if key != "experts" for name in names),
    *("num_key_value_heads", "head_dim", "moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim"),
    *("v_head_dim", "decoder_sparse_step", "local_attention", "global_attn_every_n_layers", "sliding_window_pattern"),
    "_sliding_window_pattern",
}
NOT_NEGATIVE = {
    *(*NAMES["experts"], "sliding_window", "shared_expert_intermediate_size", "n_shared_experts", "max_window_layers"),
    *("first_k_dense_replace", "qk_rope_head_dim", "type_vocab_size"),
}
FLAGS = {
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias", "use_sliding_window", "use_qk_norm"),
    *("lm_head_bias", "relative_attention", "position_biased_input"),
}
OTHERS = {
    "model_type",
    "layer_types",
    "mlp_only_layers",
    "position_buckets",
    "norm_rel_ebd",
    "text_config",
}
KNOWN = POSITIVE | NOT_NEGATIVE | FLAGS | OTHERS
# Settings that change no size.
NO_SIZE = re.compile(
    r"rope|norm_eps|epsilon|_token_id|dropout|_act|activation|dtype|initializer|use_cache|softcap|query_pre|router|"
    r"auto_map|name_or_path|scal|norm_topk|topk|n_group|aux_loss|problem_type|label|pooler|pad_|pos_att_type|share_att|"
    r"max_relative_positions|pretraining_tp|vision_config|embd_pdrop|image|num_nextn"
)
# Names that people and other libraries use.
MEANT = {
    **dict.fromkeys(("num_kv_heads", "kv_heads", "n_kv_heads", "num_query_groups"), "num_key_value_heads"),
    **dict.fromkeys(("heads", "n_heads"), "num_attention_heads"),
    **dict.fromkeys(("layers", "n_layers"), "num_hidden_layers"),
    **dict.fromkeys(("hidden", "dim", "embedding_size"), "hidden_size"),
    **dict.fromkeys(("vocab", "vocabulary", "vocabulary_size", "n_vocab"), "vocab_size"),
    **dict.fromkeys(("ffn_hidden_size", "ffn_size", "mlp_size", "ffn", "intermediate"), "intermediate_size"),
    **dict.fromkeys(("head_size", "head_width", "d_head", "kv_channels"), "head_dim"),
    **dict.fromkeys(("tied", "tie_embeddings", "tied_embeddings"), "tie_word_embeddings"),
    **dict.fromkeys(("window", "sliding_window_size"), "sliding_window"),
    **dict.fromkeys(("type", "architecture"), "model_type"),
    "experts": "num_experts",
}
# Settings of layers that keep a state instead of a KV cache.
RECURRENT = ("mamba_d_state", "ssm_state_size", "linear_num_key_heads", "conv_L_cache", "attn_layer_period", "d_state")


MOST_LAYERS, LARGEST = 10_000, 10**9  # more is a mistake


def check_values(config: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with single values of a configuration."""
    problems = []
    for key, value in config.items():
        if value is None:
            continue
        integer = isinstance(value, int) and not isinstance(value, bool)
        if key in POSITIVE and not (integer and value > 0):
            problems.append(f"{key} must be an integer of at least 1, got {describe(value)}")
        elif key in NOT_NEGATIVE and not (integer and value >= 0):
            problems.append(f"{key} must be an integer of at least 0, got {describe(value)}")
        elif integer and value > (most := MOST_LAYERS if key in NAMES["num_layers"] else LARGEST) and key in KNOWN:
            problems.append(f"{key} must be at most {most:,}, got {value}")
        elif key in FLAGS and not isinstance(value, bool):
            problems.append(f"{key} must be true or false, got {describe(value)}")
        elif key in ("position_buckets", "max_relative_positions") and not integer:
            problems.append(f"{key} must be an integer, got {describe(value)}")
        elif key == "layer_types" and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            problems.append(f"{key} must be a list of texts, got {describe(value)}")
        elif key == "mlp_only_layers" and not isinstance(value, list):
            problems.append(f"{key} must be a list of layer numbers, got {describe(value)}")
    return problems


def unknown_settings(config: Mapping[Any, Any]) -> list[str]:
    """Return what is wrong with the names of settings that a person wrote. A whole `config.json` may have any name."""
    if {"architectures", "transformers_version"} & config.keys():
        return []
    problems = []
    for key in config:
        if key in KNOWN or NO_SIZE.search(str(key)):
            continue
        meant = MEANT.get(str(key))
        hint = f" Did you mean {meant!r}?" if meant else nearest(str(key), KNOWN)
        problems.append(f"unknown setting {key!r}; use the names of config.json.{hint}")
    return problems


def read_config(path: Path) -> dict[str, Any]:
    """Return the configuration in a model's folder.

    Raises:
        ConfigError: there is none, or it is not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the configuration of the model in {str(path)!r}: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(config).__name__}.")
    return config
