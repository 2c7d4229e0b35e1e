"""From a configuration (`config.json`) to the sizes of the model. Nothing is loaded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from gym_rm.checks import describe
from gym_rm.config import Config, Flag, NonNegativeInt, PositiveInt, parse_settings
from gym_rm.documents import read_mapping
from gym_rm.errors import ConfigError
from gym_rm.planning.model.counted_layers import counted_shape
from gym_rm.planning.model.model_types import TYPES, ModelType
from gym_rm.planning.model.shape import Layer, ModelShape

LARGEST = 10**9  # a larger size is a mistake
# Names of the same setting in the configurations of some types.
ALIASES = {
    "num_local_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "_sliding_window_pattern": "sliding_window_pattern",
}
NULL_MEANS_NONE = ("sliding_window",)  # elsewhere null is as good as missing
WRITTEN = {"architectures", "transformers_version"}  # in configurations that transformers wrote, not a person
# Settings of layers that no formula here has: experts of other kinds, latent attention, states instead of a KV cache.
OTHER_LAYERS = re.compile(
    r"expert|moe|router|(kv|q|o)_lora|latent|nextn|mtp|mamba|ssm_|d_state|d_conv|conv_L|linear_(num|conv)|recurrent"
    r"|attn_layer_period|kv_shared|block_configs|block_type|text_config"
)
WITHOUT_SIZE = {"router_aux_loss_coef", "router_jitter_noise", "output_router_logits", "norm_topk_prob"}
LAYER_TYPES = {"full_attention", "sliding_attention"}


class ConfigSizes(Config):
    """The settings of a `config.json` that decide the sizes of a model."""

    hidden_size: PositiveInt = Field(le=LARGEST)
    num_hidden_layers: PositiveInt = Field(le=10_000)
    num_attention_heads: PositiveInt = Field(le=LARGEST)
    vocab_size: PositiveInt = Field(le=LARGEST)
    intermediate_size: PositiveInt | None = Field(default=None, le=LARGEST)
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = Field(default=None, le=LARGEST)
    max_position_embeddings: PositiveInt | None = None
    tie_word_embeddings: Flag | None = None
    attention_bias: Flag = False
    mlp_bias: Flag = False
    sliding_window: NonNegativeInt | None = None
    use_sliding_window: Flag | None = None
    sliding_window_pattern: PositiveInt | None = None
    max_window_layers: NonNegativeInt = 0
    layer_types: tuple[str, ...] = ()
    num_experts: NonNegativeInt = Field(default=0, le=LARGEST)
    num_experts_per_tok: PositiveInt | None = None
    moe_intermediate_size: PositiveInt | None = Field(default=None, le=LARGEST)
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: tuple[NonNegativeInt, ...] = ()
    other_parameters: NonNegativeInt = 0
    """Parameters beside those of the text, such as of a part that sees."""


@dataclass(frozen=True, slots=True)
class _Model:
    """A configuration, with the defaults of its type, and the widths that every layer needs."""

    sizes: ConfigSizes
    kind: ModelType
    model_type: str
    name: str
    kv_heads: int
    head_dim: int

    def bias(self, setting: bool | None) -> int:
        return int(self.sizes.attention_bias if setting is None else setting)


def shape_from_config(
    config: Mapping[str, Any],
    *,
    name: str,
    num_labels: int | None = None,
    source: str = "config.json",
    by_hand: bool = False,
) -> ModelShape:
    """Return the sizes of the model that a configuration describes.

    Args:
        config: `config.json` of a model, or sizes with its names; without `model_type` they are those of a Llama.
        name: how messages call the model.
        num_labels: numbers that a reward model's head computes; None for a language model.
        source: where the configuration is from.
        by_hand: whether a person wrote it, so that an unknown setting is a mistake.

    Raises:
        ConfigError: a size is missing or impossible, or the formulas of the model's layers are not known here.
    """
    by_hand = by_hand and not WRITTEN & config.keys()
    if isinstance(named := config.get("model_type"), str) and named not in TYPES and "text_config" not in config:
        shape = counted_shape(config, name=name, num_labels=num_labels, source=source, by_hand=by_hand)
        if shape is not None:
            return shape
    kind = _model_type(config, name, by_hand=by_hand)
    model_type = config.get("model_type") or "llama"
    model = _model(config, kind, model_type, name, strict=by_hand)
    sizes = model.sizes
    layers = Counter(_layer(model, index) for index in range(sizes.num_hidden_layers))
    head_width = sizes.vocab_size if num_labels is None else num_labels
    tied = kind.tied if sizes.tie_word_embeddings is None else sizes.tie_word_embeddings
    return ModelShape(
        name=name,
        layers=tuple(layers.items()),
        hidden=sizes.hidden_size,
        vocabulary=sizes.vocab_size,
        embedding=sizes.vocab_size * sizes.hidden_size,
        head=0 if tied and num_labels is None else head_width * sizes.hidden_size,
        head_width=head_width,
        other=sizes.hidden_size + sizes.other_parameters,
        max_length=sizes.max_position_embeddings,
        source=source,
        notes=() if config.get("model_type") else ("sizes without a model_type are taken for a model like Llama",),
        model_type=model_type,
    )


def read_config(path: Path) -> dict[str, Any]:
    """Return the configuration in a model's folder, or in a file.

    Raises:
        ConfigError: there is none, or it is not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    return read_mapping(file, "the configuration of a model")


def _model_type(config: Mapping[str, Any], name: str, *, by_hand: bool) -> ModelType:
    """Return what is known of a configuration's type; sizes that a person wrote without one are those of a Llama.

    Raises:
        ConfigError: the type is not known, or the configuration has settings that the formulas of its type do not read.
    """
    model_type = config.get("model_type") or ("llama" if by_hand else None)
    kind = TYPES.get(model_type) if isinstance(model_type, str) else None
    read = WITHOUT_SIZE if kind is None else {*WITHOUT_SIZE, *kind.defaults}
    others = [f"{key}={describe(value):.40}" for key, value in config.items()
              if value and OTHER_LAYERS.search(str(key)) and ALIASES.get(key, key) not in read]  # fmt: skip
    if kind is None or others:
        which = f" with {', '.join(others)}" if others else ""
        raise ConfigError(
            f"{name}: no formula for model_type {model_type!r}{which} is known here; known are {', '.join(TYPES)}. "
            "Give the sizes of a model that comes closest, such as a mixtral for experts: config: {model_type: ..., "
            "hidden_size: ..., num_hidden_layers: ..., ...}, with other_parameters for a part that sees."
        )
    return kind


def _model(config: Mapping[str, Any], kind: ModelType, model_type: str, name: str, *, strict: bool) -> _Model:
    """Check all values, and fill in the defaults of the type; `strict` is whether other settings are a mistake."""
    given: dict[str, Any] = {}
    for key, value in config.items():
        setting = ALIASES.get(key, key)
        known = setting in ConfigSizes.model_fields or (strict and setting != "model_type")
        if known and (value is not None or setting in NULL_MEANS_NONE):
            given.setdefault(setting, value)
    try:
        sizes = parse_settings(ConfigSizes, {**kind.defaults, **given})
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    heads, hidden = sizes.num_attention_heads, sizes.hidden_size
    kv_heads = sizes.num_key_value_heads or heads
    problems = []
    if sizes.head_dim is None and hidden % heads:
        problems.append(f"hidden_size {hidden} is not divisible by {heads} attention heads; give head_dim")
    if heads % kv_heads:
        default = "" if "num_key_value_heads" in given else f" (the default of model_type {model_type!r})"
        problems.append(f"{heads} attention heads are not divisible by num_key_value_heads {kv_heads}{default}")
    if sizes.layer_types and len(sizes.layer_types) != sizes.num_hidden_layers:
        problems.append(f"layer_types has {len(sizes.layer_types)} entries for {sizes.num_hidden_layers} layers")
    if other := {*sizes.layer_types} - LAYER_TYPES:
        problems.append(f"layer_types has {', '.join(sorted(other))}; known are {', '.join(sorted(LAYER_TYPES))}")
    if sizes.intermediate_size is None and sizes.moe_intermediate_size is None:
        problems.append("intermediate_size is missing")
    if sizes.num_experts and not 1 <= (sizes.num_experts_per_tok or 0) <= sizes.num_experts:
        problems.append(f"num_experts {sizes.num_experts} needs num_experts_per_tok from 1 to it")
    if problems:
        raise ConfigError(f"{name}: {'; '.join(problems)}.")
    return _Model(sizes, kind, model_type, name, kv_heads, sizes.head_dim or hidden // heads)


def _layer(model: _Model, index: int) -> Layer:
    sizes, kind, kv_heads, head_dim = model.sizes, model.kind, model.kv_heads, model.head_dim
    hidden, heads = sizes.hidden_size, sizes.num_attention_heads
    matrices = [(hidden, heads * head_dim), (heads * head_dim, hidden), *[(hidden, kv_heads * head_dim)] * 2]
    attention = model.bias(kind.qkv_bias) * (heads + 2 * kv_heads) * head_dim + model.bias(kind.output_bias) * hidden
    attention += heads if model.model_type == "gpt_oss" else 0  # sinks
    norms = kind.norms * hidden + kind.head_norms * head_dim
    norms += (heads + kv_heads) * head_dim if kind.wide_norms else 0
    mlp, active, intermediate, experts, linear = _mlp(model, index)
    return Layer(
        attention=attention + sum(inputs * outputs for inputs, outputs in matrices),
        mlp=mlp,
        active_mlp=active,
        norms=norms,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        window=_window(model, index),
        intermediate=intermediate,
        experts=experts,
        linear=linear + sum(inputs + outputs for inputs, outputs in matrices),
    )


def _mlp(model: _Model, index: int) -> tuple[int, int, int, int, int]:
    """Return all parameters, those that a token meets, the width inside, the experts, and `linear` of a layer's MLP."""
    sizes, kind, hidden = model.sizes, model.kind, model.sizes.hidden_size
    has_bias = sizes.mlp_bias if kind.mlp_bias is None else kind.mlp_bias

    def block(width: int) -> int:
        """Return the parameters of a gate, the matrix beside it, and the one that reads their product."""
        return 3 * hidden * width + has_bias * (2 * width + hidden)

    sparse = (
        sizes.num_experts > 0 and index not in sizes.mlp_only_layers and (index + 1) % sizes.decoder_sparse_step == 0
    )
    width = (sizes.moe_intermediate_size if sparse else None) or sizes.intermediate_size
    if width is None:
        raise ConfigError(f"{model.name}: intermediate_size is missing; layers without experts need it.")
    parameters = block(width)
    if not sparse:
        return parameters, parameters, 2 * width, 0, 3 * (hidden + width)
    experts, chosen = sizes.num_experts, sizes.num_experts_per_tok or 1
    router = hidden * experts + (experts if model.model_type == "gpt_oss" else 0)
    # peft gives the gate and the first matrix of an expert one adapter of twice the rank.
    linear = experts * (3 * hidden + 5 * width) + hidden + experts
    return experts * parameters + router, chosen * parameters + router, 2 * width * chosen, experts, linear


def _window(model: _Model, index: int) -> int | None:
    """Return how many tokens a token of this layer attends to; None for all."""
    sizes, kind = model.sizes, model.kind
    layer_type = sizes.layer_types[index] if sizes.layer_types else None
    used = kind.windows if sizes.use_sliding_window is None else sizes.use_sliding_window
    if not sizes.sliding_window or not used:
        return None
    if layer_type is not None:
        return sizes.sliding_window if "sliding" in layer_type else None
    if every := sizes.sliding_window_pattern or kind.every:
        return sizes.sliding_window if (index + 1) % every else None
    return None if index < sizes.max_window_layers and model.model_type.startswith("qwen") else sizes.sliding_window
