"""Sizes of a model, from its configuration: parameters, what a token computes, and what it leaves in the cache.

Nothing is loaded: a configuration (`config.json`) is enough. The number of parameters is exact for the types in
`TYPES`; tests compare it with the models of transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gym_rm.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of one layer.

    Attributes:
        attention: parameters of the attention's matrices and their biases.
        mlp: parameters of the MLP; of a mixture of experts, of all experts and the router.
        active_mlp: those parameters of the MLP that one token is multiplied with.
        norms: parameters of the norms.
        heads: query heads; 0 for a layer without attention over tokens.
        kv_heads: key and value heads.
        head_dim: width of a query and a key.
        value_dim: width of a value.
        cached: numbers that a token leaves in the KV cache.
        window: tokens that a token attends to at most; None for all.
        intermediate: numbers that a token has inside the MLP at a time: of the gate and of the product with it.
        experts: number of experts; 0 for a dense MLP.
    """

    attention: int
    mlp: int
    active_mlp: int
    norms: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    cached: int
    window: int | None
    intermediate: int
    experts: int = 0

    @property
    def parameters(self) -> int:
        """All parameters of the layer."""
        return self.attention + self.mlp + self.norms

    @property
    def matmul(self) -> int:
        """Parameters that one token is multiplied with."""
        return self.attention + self.active_mlp


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        name: hub id, folder, or what the user called it.
        layers: pairs of a layer and how many such layers there are.
        hidden: width of a hidden state.
        vocabulary: number of tokens.
        embedding: parameters of all embeddings.
        head: parameters of the head; the output layer of a language model counts 0 if it is tied to the embedding.
        head_width: numbers that the head computes for a token: the vocabulary, or one for each objective.
        other: parameters outside of layers, embeddings and head, such as the last norm.
        max_length: tokens of the longest text that the model was made for; None if its configuration does not say.
        bidirectional: whether every token attends to all tokens (an encoder).
        source: where the sizes are from.

    Example:
        >>> shape = shape_from_config({"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2,
        ...                            "intermediate_size": 128, "num_attention_heads": 4}, name="tiny")
        >>> shape.parameters
        210240
    """

    name: str
    layers: tuple[tuple[Layer, int], ...]
    hidden: int
    vocabulary: int
    embedding: int
    head: int
    head_width: int
    other: int
    max_length: int | None
    bidirectional: bool
    source: str

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return sum(count for _, count in self.layers)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.embedding + self.head + self.other + sum(layer.parameters * n for layer, n in self.layers)

    @property
    def active_parameters(self) -> int:
        """Parameters of the layers that one token is multiplied with."""
        return sum(layer.matmul * n for layer, n in self.layers)

    @property
    def heads(self) -> int:
        """Number of query heads that every layer's number is a multiple of."""
        return math.gcd(*(layer.heads for layer, _ in self.layers))

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads that every layer's number is a multiple of."""
        return math.gcd(*(layer.kv_heads for layer, _ in self.layers))

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer."""
        return max(layer.parameters for layer, _ in self.layers)

    @property
    def is_language_model(self) -> bool:
        """Whether the head computes one number for each token of the vocabulary."""
        return self.head_width == self.vocabulary

    def cached_numbers(self, length: int) -> int:
        """Return how many numbers a text of this length leaves in the KV cache; windows bound what a layer keeps."""
        return sum(
            layer.cached * (length if layer.window is None else min(length, layer.window)) * n
            for layer, n in self.layers
        )

    def pairs_attended(self, length: int) -> float:
        """Return the products of one query and one key times heads and layers, for a text of this length."""
        total = 0.0
        for layer, n in self.layers:
            window = length if layer.window is None else min(length, layer.window)
            if self.bidirectional:
                pairs = float(length) * window
            else:
                pairs = window * (window + 1) / 2 + (length - window) * float(window)
            total += pairs * layer.heads * (layer.head_dim + layer.value_dim) / 2 * n
        return total


# --- reading a configuration -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Type:
    """What the configurations of a model type leave unsaid.

    Attributes:
        norms: vectors of the hidden width in the norms of a layer; a norm with a bias has two.
        last_norm: the same of the norm after the layers.
        qkv_bias, output_bias, mlp_bias: whether these matrices have a bias; a name of a setting that says so.
        gated: whether the MLP has a gate beside its first matrix.
        head_norms: vectors of the head width that normalise queries and keys.
        positions: learned vectors of positions, of this setting plus this number; None without.
        bidirectional: whether it is an encoder.
        windows: whether a `sliding_window` is used without being asked for.
    """

    norms: int = 2
    last_norm: int = 1
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    gated: bool = True
    head_norms: int = 0
    positions: int | None = None
    bidirectional: bool = False
    windows: bool = True


_BIASED = Type(norms=4, last_norm=2, qkv_bias=True, output_bias=True, mlp_bias=True, gated=False)
_ENCODER = replace(_BIASED, last_norm=0, positions=0, bidirectional=True)

TYPES: dict[str, Type] = {
    "llama": Type(mlp_bias="mlp_bias", windows=False),
    "mistral": Type(qkv_bias=False, output_bias=False),
    "mixtral": Type(qkv_bias=False, output_bias=False),
    "ministral": Type(qkv_bias=False, output_bias=False),
    "qwen2": Type(qkv_bias=True, output_bias=False, windows=False),
    "qwen2_moe": Type(qkv_bias="qkv_bias", output_bias=False, windows=False),
    "qwen3": Type(head_norms=2, windows=False),
    "qwen3_moe": Type(head_norms=2, windows=False),
    "phi3": Type(qkv_bias=False, output_bias=False),
    "gemma": Type(windows=False),
    "gemma2": Type(norms=4),
    "gemma3_text": Type(norms=4, head_norms=2),
    "gpt_oss": Type(mlp_bias=True),
    "deepseek_v3": Type(windows=False),
    "glm4": Type(norms=4, windows=False),
    "olmo2": Type(windows=False),
    "granite": Type(mlp_bias="mlp_bias", windows=False),
    "gpt2": replace(_BIASED, positions=0),
    "gpt_neox": replace(_BIASED, qkv_bias="attention_bias", output_bias="attention_bias"),
    "opt": replace(_BIASED, positions=2),
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "xlm-roberta": _ENCODER,
    "deberta-v2": _ENCODER,
    "modernbert": Type(
        qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias", bidirectional=True
    ),
}
# Other names of the same setting, in the order in which they are tried.
NAMES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocabulary": ("vocab_size",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "chosen": ("num_experts_per_tok", "experts_per_token", "top_k_experts"),
    "max_length": ("max_position_embeddings", "n_positions", "model_max_length"),
}
# Settings that change what a layer is in a way that is not known here.
UNKNOWN = ("mamba_d_state", "ssm_state_size", "linear_num_key_heads", "conv_L_cache", "attn_layer_period", "d_state")


def shape_from_config(
    config: Mapping[str, Any], *, name: str, num_labels: int | None = None, source: str = "config.json"
) -> ModelShape:
    """Return the sizes of the model that a configuration describes.

    Args:
        config: `config.json` of a model.
        name: how messages call the model.
        num_labels: numbers that a reward model's head computes; None for a language model.
        source: where the configuration is from.

    Raises:
        ConfigError: a size is missing, or the model has layers of an unknown sort.
    """
    model_type = str(config.get("model_type", ""))
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**{key: config[key] for key in ("tie_word_embeddings",) if key in config}, **text}
        model_type = str(config.get("model_type", model_type))
    if unknown := [key for key in UNKNOWN if config.get(key)]:
        raise ConfigError(
            f"{name}: layers of model_type {model_type!r} ({unknown[0]}) are not attention over tokens, and no formula "
            "for them is known here; give sizes of a model that comes closest."
        )
    kind = TYPES.get(model_type) or TYPES.get(model_type.removesuffix("_text"))
    if kind is None:
        kind = Type()
        source = f"{source}; model_type {model_type!r} is unknown, taken for one like Llama"
    sizes = {key: _size(config, name, key) for key in ("hidden", "num_layers", "heads", "vocabulary")}
    hidden, vocabulary = sizes["hidden"], sizes["vocabulary"]
    layers = _layers(config, kind, name, model_type, sizes)
    max_length = next((config[key] for key in NAMES["max_length"] if isinstance(config.get(key), int)), None)
    embedding, other = _outside(config, kind, model_type, hidden, vocabulary, max_length)
    tied = config.get("tie_word_embeddings", model_type in ("gemma", "gemma2", "gemma3_text", "gpt2", "opt", "bert"))
    if num_labels is not None:
        head = num_labels * hidden
        if kind.bidirectional:
            head += num_labels
            if model_type in ("roberta", "xlm-roberta", "bert", "deberta-v2"):
                head += hidden * hidden + hidden  # a pooler, or a dense layer before the last
            elif model_type == "modernbert":
                head += hidden * hidden + hidden
    else:
        head = 0 if tied else vocabulary * hidden
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        embedding=embedding,
        head=head,
        head_width=vocabulary if num_labels is None else num_labels,
        other=other,
        max_length=max_length,
        bidirectional=kind.bidirectional,
        source=source,
    )


def _size(config: Mapping[str, Any], name: str, key: str, default: int | None = None) -> int:
    for each in NAMES[key]:
        value = config.get(each)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}: {each} must be an integer of at least 1, got {value!r}.")
        return value
    if default is None:
        raise ConfigError(
            f"{name}: the configuration has no {NAMES[key][0]}.{nearest(NAMES[key][0], map(str, config))} A model needs "
            "hidden_size, num_hidden_layers, num_attention_heads, intermediate_size and vocab_size."
        )
    return default


def _layers(
    config: Mapping[str, Any], kind: Type, name: str, model_type: str, sizes: Mapping[str, int]
) -> tuple[tuple[Layer, int], ...]:
    """Return the layers in groups of equal ones."""
    count = sizes["num_layers"]
    types = config.get("layer_types") or [None] * count
    found: dict[Layer, int] = {}
    for i in range(count):
        layer = _layer(config, kind, name, model_type, sizes, i, types[i % len(types)])
        found[layer] = found.get(layer, 0) + 1
    return tuple(found.items())


def _layer(
    config: Mapping[str, Any],
    kind: Type,
    name: str,
    model_type: str,
    sizes: Mapping[str, int],
    i: int,
    layer_type: str | None,
) -> Layer:
    hidden, heads = sizes["hidden"], sizes["heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    value_dim, cached = head_dim, 2 * kv_heads * head_dim
    norms = kind.norms * hidden + kind.head_norms * head_dim
    if rank := config.get("kv_lora_rank"):  # multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)
        rope, nope, value_dim = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
        head_dim, kv_heads, cached = rope + nope, heads, rank + rope
        low = config.get("q_lora_rank")
        queries = hidden * heads * head_dim if low is None else hidden * low + low + low * heads * head_dim
        attention = queries + hidden * (rank + rope) + rank + rank * heads * (nope + value_dim)
        attention += heads * value_dim * hidden
    else:
        wide = (heads + 2 * kv_heads) * head_dim
        attention = hidden * wide + _says(kind.qkv_bias, config) * wide
        attention += heads * head_dim * hidden + _says(kind.output_bias, config) * hidden
        if model_type == "gpt_oss":
            attention += heads  # sinks
        if model_type == "olmo2":
            norms += (heads + kv_heads) * head_dim
    if model_type == "modernbert" and i == 0:
        norms -= hidden
    mlp, active, intermediate, experts = _mlp(config, kind, name, model_type, hidden, i)
    window = _window(config, kind, model_type, i, layer_type)
    return Layer(
        attention=attention,
        mlp=mlp,
        active_mlp=active,
        norms=norms,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        cached=cached,
        window=window,
        intermediate=intermediate,
        experts=experts,
    )


def _mlp(
    config: Mapping[str, Any], kind: Type, name: str, model_type: str, hidden: int, i: int
) -> tuple[int, int, int, int]:
    """Return all parameters, those that a token meets, the width inside, and the number of experts."""
    matrices = 3 if kind.gated else 2
    dense = _size(config, name, "intermediate", 4 * hidden if "n_embd" in config or "n_inner" in config else None)
    biases = _says(kind.mlp_bias, config)
    experts = next((config[key] for key in NAMES["experts"] if config.get(key)), 0)
    sparse = (
        experts > 1
        and i >= config.get("first_k_dense_replace", 0)
        and i not in (config.get("mlp_only_layers") or ())
        and (i + 1) % (config.get("decoder_sparse_step") or 1) == 0
    )
    if not sparse:
        size = matrices * hidden * dense + biases * ((matrices - 1) * dense + hidden)
        return size, size, (matrices - 1) * dense, 0
    width = config.get("moe_intermediate_size") or dense
    chosen = _size(config, name, "chosen")
    expert = matrices * hidden * width + biases * ((matrices - 1) * width + hidden)
    router = hidden * experts + (experts if model_type == "gpt_oss" else 0)
    shared_width = config.get("shared_expert_intermediate_size") or width * (config.get("n_shared_experts") or 0)
    shared = matrices * hidden * shared_width
    if config.get("shared_expert_intermediate_size"):
        shared += hidden  # its gate
    always = router + shared
    inside = (matrices - 1) * (width * chosen + shared_width)
    return experts * expert + always, chosen * expert + always, inside, experts


def _window(config: Mapping[str, Any], kind: Type, model_type: str, i: int, layer_type: str | None) -> int | None:
    if model_type == "modernbert":
        local: int = config.get("local_attention", 128)
        every = config.get("global_attn_every_n_layers", 3)
        return None if (layer_type or ("full" if i % every == 0 else "local")).startswith("full") else local
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window", kind.windows) is False:
        return None
    if layer_type is not None:
        return int(window) if "sliding" in layer_type else None
    if model_type == "gemma2":
        return int(window) if i % 2 == 0 else None
    if pattern := config.get("sliding_window_pattern") or (6 if model_type == "gemma3_text" else None):
        return int(window) if (i + 1) % pattern else None
    if model_type in ("qwen2", "qwen3") and i < config.get("max_window_layers", 0):
        return None
    return int(window)


def _outside(
    config: Mapping[str, Any], kind: Type, model_type: str, hidden: int, vocabulary: int, max_length: int | None
) -> tuple[int, int]:
    """Return the parameters of the embeddings, and of what is neither layer, embedding nor head."""
    embedding, other = vocabulary * hidden, kind.last_norm * hidden
    if kind.positions is not None and not (model_type == "deberta-v2" and config.get("position_biased_input") is False):
        embedding += ((max_length or 0) + kind.positions) * hidden
    if kind.bidirectional and model_type != "modernbert":
        embedding += config.get("type_vocab_size", 2) * hidden
        other += 2 * hidden
    if model_type == "modernbert":
        other += hidden
    if model_type == "deberta-v2" and config.get("relative_attention"):
        buckets = config.get("position_buckets", -1)
        embedding += 2 * (buckets if buckets > 0 else config.get("max_relative_positions", 0)) * hidden
        other += 2 * hidden * ("layer_norm" in str(config.get("norm_rel_ebd", "none")))
    return embedding, other


def _says(setting: bool | str, config: Mapping[str, Any]) -> int:
    return int(bool(config.get(setting, False)) if isinstance(setting, str) else setting)


def read_config(path: Path) -> dict[str, Any]:
    """Return the configuration in a model's folder.

    Raises:
        ConfigError: there is none, or it is not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"cannot read the configuration of the model in {str(path)!r}: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(config).__name__}.")
    return config
