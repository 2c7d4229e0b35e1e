"""From a configuration (`config.json`) to the sizes of the model. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gym_rm.checks import describe
from gym_rm.errors import ConfigError
from gym_rm.planning.model.settings import NAMES, NEEDED, RECURRENT, check_values
from gym_rm.planning.model.shape import Layer, ModelShape
from gym_rm.planning.model.types import EXPERT_SETTINGS, REFUSED, TYPES, Type
from gym_rm.planning.quantities import Basis


@dataclass(frozen=True, slots=True)
class _Reader:
    """A configuration with the values that its type leaves out, and the sizes that every layer needs."""

    config: Mapping[str, Any]
    kind: Type
    model_type: str
    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    def first(self, key: str) -> Any:
        return next((self.config[name] for name in NAMES[key] if self.config.get(name) is not None), None)

    def says(self, setting: bool | str) -> int:
        return int(bool(self.config.get(setting, False)) if isinstance(setting, str) else setting)

    def latent(self, key: str) -> int:
        value = self.config.get(key)
        if value is None:
            raise ConfigError(f"{self.name}: multi-head latent attention (kv_lora_rank) needs {key} too.")
        return int(value)


def shape_from_config(
    config: Mapping[str, Any],
    *,
    name: str,
    num_labels: int | None = None,
    source: str = "config.json",
    approximate: bool = False,
) -> ModelShape:
    """Return the sizes of the model that a configuration describes.

    Args:
        config: `config.json` of a model.
        name: how messages call the model.
        num_labels: numbers that a reward model's head computes; None for a language model.
        source: where the configuration is from.
        approximate: whether layers without a formula are taken for layers like those of Llama, because the parameters
            are counted elsewhere.

    Raises:
        ConfigError: a size is missing or impossible, or the model has layers without a formula.
    """
    notes: list[str] = []
    config, model_type = _text_config(config, name, notes)
    problem = REFUSED.get(model_type) or next((f"it has {key}" for key in RECURRENT if config.get(key)), None)
    kind = TYPES.get(model_type)
    basis = Basis.FORMULA if kind else Basis.ASSUMPTION
    if problem and not approximate:
        raise ConfigError(
            f"{name}: no formula for model_type {model_type!r} is known here: {problem}. Give a folder that has its "
            "weights (their headers are counted), or inline sizes of a model that comes closest: config: {...}."
        )
    if kind is None:
        kind = Type(windows=False, experts=None)
        notes.append(f"the layers of model_type {model_type!r} are taken for layers like those of Llama")
    reader = _reader(config, kind, model_type, name)
    if kind.bidirectional and num_labels is None:
        raise ConfigError(f"{name}: a model of type {model_type!r} is an encoder; it scores, and generates no text.")
    layers = _layers(reader)
    vocabulary = int(reader.first("vocabulary"))
    max_length = reader.first("max_length")
    embedding, other = _outside(reader, vocabulary, max_length)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=reader.hidden,
        vocabulary=vocabulary,
        embedding=embedding,
        head=_head(reader, vocabulary, num_labels),
        head_width=vocabulary if num_labels is None else num_labels,
        other=other,
        max_length=max_length if isinstance(max_length, int) else None,
        bidirectional=kind.bidirectional,
        source=source,
        basis=basis,
        notes=tuple(notes),
        model_type=model_type,
        stored=_stored(config),
    )


def _stored(config: Mapping[str, Any]) -> str | None:
    """Return the dtype of the weights' files."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype.removeprefix("torch.") if isinstance(dtype, str) else None


def _text_config(config: Any, name: str, notes: list[str]) -> tuple[dict[str, Any], str]:
    """Return the configuration of the language model, and its type."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"{name}: the sizes must be a mapping with the names of config.json, got {describe(config)}.")
    text = config.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise ConfigError(f"{name}: text_config must be a mapping, got {describe(text)}.")
    found = dict(config)
    if text:
        found = {**{key: config[key] for key in ("tie_word_embeddings",) if key in config}, **text}
        found.setdefault("model_type", config.get("model_type", ""))
        if config.get("vision_config"):
            notes.append("the vision part of the model is not in the sizes; it needs memory of its own")
    model_type = found.get("model_type") or ""
    if not isinstance(model_type, str):
        raise ConfigError(f"{name}: model_type must be a text such as 'llama', got {describe(model_type)}.")
    if (
        model_type not in TYPES
        and model_type not in REFUSED
        and model_type.removesuffix("_text") in {**TYPES, **REFUSED}
    ):
        model_type = model_type.removesuffix("_text")
    return found, model_type


def _reader(config: Mapping[str, Any], kind: Type, model_type: str, name: str) -> _Reader:
    """Check all values, and return them with the defaults of the type.

    Raises:
        ConfigError: values are missing or impossible. The message has all of them.
    """
    problems = check_values(config)
    filled = _with_defaults(config, kind)
    for key in NEEDED:
        if all(filled.get(each) is None for each in NAMES[key]):
            problems.append(f"{NAMES[key][0]} is missing")
    widths = (*NAMES["intermediate"], "moe_intermediate_size")
    if model_type not in ("gpt2", "bloom") and all(filled.get(each) is None for each in widths):
        problems.append("intermediate_size is missing")
    if not problems:
        hidden, heads = (next(filled[each] for each in NAMES[key] if filled.get(each)) for key in ("hidden", "heads"))
        kv_heads = (filled.get("num_key_value_heads") if kind.grouped else None) or heads
        if filled.get("head_dim") is None and hidden % heads and not filled.get("kv_lora_rank"):
            problems.append(f"hidden size {hidden} is not divisible by {heads} attention heads; give head_dim")
        if heads % kv_heads:
            default = "" if "num_key_value_heads" in config else f" (the default of model_type {model_type!r})"
            problems.append(f"{heads} attention heads are not divisible by num_key_value_heads {kv_heads}{default}")
        types = filled.get("layer_types")
        count = next(filled[each] for each in NAMES["num_layers"] if filled.get(each))
        if isinstance(types, list) and len(types) != count:
            problems.append(f"layer_types has {len(types)} entries for {count} layers")
    if problems:
        needs = ""
        if any(problem.endswith("is missing") for problem in problems):
            needs = (
                " A model needs hidden_size, num_hidden_layers, num_attention_heads, intermediate_size and vocab_size."
            )
        raise ConfigError(f"{name}: {'; '.join(problems)}.{needs}")
    head_dim = (filled.get("head_dim") if kind.grouped else None) or hidden // heads
    return _Reader(filled, kind, model_type, name, hidden, heads, kv_heads, head_dim)


def _with_defaults(config: Mapping[str, Any], kind: Type) -> dict[str, Any]:
    """Return the settings that the type reads, with its defaults for those that are missing under all their names."""
    ignored = EXPERT_SETTINGS - set(EXPERT_SETTINGS if kind.experts is None else kind.experts)
    filled = {key: value for key, value in config.items() if key not in ignored}
    for key, value in kind.defaults.items():
        others = next((names for names in NAMES.values() if key in names), (key,))
        null = key in ("sliding_window", "q_lora_rank") and key in filled  # null says that there is none
        if not null and all(filled.get(each) is None for each in others):
            filled[key] = value
    return filled


def _layers(reader: _Reader) -> tuple[tuple[Layer, int], ...]:
    """Return the layers in groups of equal ones."""
    types = reader.config.get("layer_types")
    found: dict[Layer, int] = {}
    for i in range(reader.first("num_layers")):
        layer = _layer(reader, i, types[i] if types else None)
        found[layer] = found.get(layer, 0) + 1
    return tuple(found.items())


def _layer(reader: _Reader, i: int, layer_type: str | None) -> Layer:
    kind, hidden, heads, kv_heads = reader.kind, reader.hidden, reader.heads, reader.kv_heads
    head_dim = value_dim = reader.head_dim
    cached = 2 * kv_heads * head_dim
    head_norms = 2 * reader.says(kind.head_norms) if isinstance(kind.head_norms, str) else kind.head_norms
    norms = kind.norms * hidden + head_norms * head_dim
    if rank := reader.config.get("kv_lora_rank"):  # multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1)
        rope, nope, value_dim = (reader.latent(key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        head_dim, kv_heads, cached = rope + nope, heads, rank + rope
        low = reader.config.get("q_lora_rank")
        pairs = [(hidden, heads * head_dim)] if low is None else [(hidden, low), (low, heads * head_dim)]
        pairs += [(hidden, rank + rope), (rank, heads * (nope + value_dim)), (heads * value_dim, hidden)]
        attention = sum(a * b for a, b in pairs) + rank + (low or 0)
        attention += reader.says("attention_bias") * ((low or 0) + rank + rope + hidden)
        linear = sum(a + b for a, b in pairs)
    else:
        wide = (heads + 2 * kv_heads) * head_dim
        attention = hidden * wide + reader.says(kind.qkv_bias) * wide
        attention += heads * head_dim * hidden + reader.says(kind.output_bias) * hidden
        linear = (1 if "qkv" in kind.fused else 3) * hidden + wide + heads * head_dim + hidden
        if reader.model_type == "gpt_oss":
            attention += heads  # sinks
        if kind.wide_norms:
            norms += (heads + kv_heads) * head_dim
    if reader.model_type == "modernbert" and i == 0:
        norms -= hidden
    mlp, active, intermediate, experts, mlp_linear = _mlp(reader, i)
    return Layer(
        attention=attention,
        mlp=mlp,
        active_mlp=active,
        norms=norms,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        cached=0 if kind.bidirectional else cached,
        window=_window(reader, i, layer_type),
        intermediate=intermediate,
        experts=experts,
        linear=linear + mlp_linear,
    )


def _mlp(reader: _Reader, i: int) -> tuple[int, int, int, int, int]:
    """Return all parameters, those that a token meets, the width inside, the experts, and the linear layers' width."""
    kind, hidden, config = reader.kind, reader.hidden, reader.config
    matrices = 3 if kind.gated else 2
    experts = reader.first("experts") or 0
    sparse = (
        experts > 1
        and i >= (config.get("first_k_dense_replace") or 0)
        and i not in (config.get("mlp_only_layers") or ())
        and (i + 1) % (config.get("decoder_sparse_step") or 1) == 0
    )
    dense = reader.first("intermediate")
    if dense is None and reader.model_type in ("gpt2", "bloom"):
        dense = 4 * hidden
    if dense is None and not (sparse and config.get("moe_intermediate_size")):
        raise ConfigError(f"{reader.name}: intermediate_size is missing; layers without experts need it.")
    biases = reader.says(kind.mlp_bias)
    inputs = 1 if "mlp" in kind.fused else matrices - 1  # linear layers that read the hidden state
    if not sparse:
        size = matrices * hidden * dense + biases * ((matrices - 1) * dense + hidden)
        return size, size, (matrices - 1) * dense, 0, (inputs + 1) * hidden + matrices * dense
    width = config.get("moe_intermediate_size") or dense
    chosen = reader.first("chosen")
    if chosen is None:
        raise ConfigError(f"{reader.name}: a model with {experts} experts needs num_experts_per_tok.")
    if chosen > experts:
        raise ConfigError(f"{reader.name}: num_experts_per_tok {chosen} is more than the {experts} experts.")
    expert = matrices * hidden * width + biases * ((matrices - 1) * width + hidden)
    router = hidden * experts + (experts if reader.model_type == "gpt_oss" else 0)
    shared_width = config.get("shared_expert_intermediate_size") or width * (config.get("n_shared_experts") or 0)
    shared = matrices * hidden * shared_width
    linear = (inputs + 1) * hidden + matrices * shared_width if shared_width else 0
    if kind.adapters:
        linear += hidden + experts
    if kind.adapters == "experts":  # the gate and the first matrix are one, with twice the rank
        linear += experts * (2 * (hidden + 2 * width) + width + hidden)
    if config.get("shared_expert_intermediate_size"):
        shared += hidden  # its gate
        linear += hidden + 1
    always = router + shared
    inside = (matrices - 1) * (width * chosen + shared_width)
    return experts * expert + always, chosen * expert + always, inside, experts, linear


def _window(reader: _Reader, i: int, layer_type: str | None) -> int | None:
    config, kind = reader.config, reader.kind
    if reader.model_type == "modernbert":
        local: int = config.get("local_attention") or 128
        every = config.get("global_attn_every_n_layers") or 3
        return None if (layer_type or ("full" if i % every == 0 else "local")).startswith("full") else local
    window = config.get("sliding_window")
    if not window or not config.get("use_sliding_window", kind.windows):
        return None
    if layer_type is not None:
        return int(window) if "sliding" in layer_type else None
    if every := config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or kind.every:
        return int(window) if (i + 1) % int(every) else None
    if reader.model_type in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe") and i < (config.get("max_window_layers") or 0):
        return None
    return int(window)


def _outside(reader: _Reader, vocabulary: int, max_length: int | None) -> tuple[int, int]:
    """Return the parameters of the embeddings, and of what is neither layer, embedding nor head."""
    kind, hidden, config = reader.kind, reader.hidden, reader.config
    embedding, other = vocabulary * hidden, kind.last_norm * hidden
    deberta = reader.model_type == "deberta-v2"
    if kind.positions is not None and not (deberta and config.get("position_biased_input") is False):
        if max_length is None:
            raise ConfigError(f"{reader.name}: {NAMES['max_length'][0]} is missing; the model has learned positions.")
        embedding += (max_length + kind.positions) * hidden
    if kind.bidirectional and reader.model_type != "modernbert":
        embedding += config.get("type_vocab_size", 2) * hidden
        other += 2 * hidden
    if reader.model_type == "modernbert":
        other += hidden
    if reader.model_type == "bloom":
        other += 2 * hidden
    if deberta and config.get("relative_attention"):
        buckets = config.get("position_buckets", -1)
        if buckets <= 0:
            buckets = config.get("max_relative_positions", -1)
        embedding += 2 * (buckets if buckets > 0 else max_length or 0) * hidden
        other += 2 * hidden * ("layer_norm" in str(config.get("norm_rel_ebd", "none")))
    return embedding, other


def _head(reader: _Reader, vocabulary: int, num_labels: int | None) -> int:
    """Return the parameters of the head: over the vocabulary, or a row for each label."""
    kind, hidden = reader.kind, reader.hidden
    if num_labels is None:
        bias = vocabulary * reader.says(kind.head_bias)
        return bias + (0 if reader.config.get("tie_word_embeddings", kind.tied) else vocabulary * hidden)
    head = num_labels * hidden
    if kind.bidirectional:
        head += num_labels + hidden * hidden + hidden  # a pooler, or a dense layer before the last
    return head
