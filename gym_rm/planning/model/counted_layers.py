"""Sizes of a model whose type has no formula here: counted in the model of transformers, on the meta device."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gym_rm.errors import ConfigError, nearest
from gym_rm.planning.model.shape import Layer, ModelShape

if TYPE_CHECKING:
    from torch import nn

KEYS = ("k_proj", "key_proj", "k_lin", "key", "wk")
VALUES = ("v_proj", "value_proj", "v_lin", "value", "wv")
ALL_IN_ONE = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv", "in_proj", "attn_qkv")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts", "top_k")
# Modules that are no attention, MLP or norm: states instead of a KV cache, convolutions, attention of other kinds.
OTHER_MODULES = re.compile(
    r"Conv[12]d|Mamba|Delta|Recurrent|RgLru|Linear_?Attention|Lightning|Rwkv|Indexer|Compress|LSTM|Retention|Latent|AltUp"
)


def counted_shape(
    config: Mapping[str, Any], *, name: str, num_labels: int | None, source: str, by_hand: bool
) -> ModelShape | None:
    """Return the sizes of a model that transformers has and whose layers are attention with an MLP or experts.

    Returns None where torch or transformers is missing, or transformers does not have the type.

    Raises:
        ConfigError: a setting is wrong, or a layer is of another kind; the message says which.
    """
    try:
        import torch
        import transformers
    except ImportError:
        return None
    model_type, given = config["model_type"], {key: value for key, value in config.items() if key != "model_type"}
    try:
        known = transformers.AutoConfig.for_model(model_type)
    except ValueError:
        return None
    if by_hand and (wrong := [key for key in given if not hasattr(known, key)]):
        raise ConfigError(f"{name}: {wrong[0]}: unknown setting of {model_type}.{nearest(wrong[0], dir(known))}")
    try:
        settings = transformers.AutoConfig.for_model(model_type, **given)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(settings)
    except Exception as error:  # the code of each type raises its own
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{name}: transformers makes no {model_type} of these sizes: {reason:.200}") from error
    return _shape(model, settings, name=name, num_labels=num_labels, source=source)


def _shape(model: nn.Module, config: Any, *, name: str, num_labels: int | None, source: str) -> ModelShape:
    from torch import nn

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = max(lists, key=_parameters, default=None)
    if blocks is None or len(blocks) != getattr(config, "num_hidden_layers", None):
        raise ConfigError(f"{name}: the layers of {type(model).__name__} are not one list of attention and MLP.")
    hidden, inside = config.hidden_size, {id(parameter) for parameter in blocks.parameters()}
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    embedded = {id(each): each.numel() for module in tables for each in module.parameters() if id(each) not in inside}
    output: Any = model.get_output_embeddings()  # type: ignore[operator]
    head = sum(each.numel() for each in output.parameters() if id(each) not in embedded)
    layers = Counter(_layer(block, config, index, name) for index, block in enumerate(blocks))
    embedding = sum(embedded.values())
    return ModelShape(
        name=name,
        layers=tuple(layers.items()),
        hidden=hidden,
        vocabulary=config.vocab_size,
        embedding=embedding,
        head=head if num_labels is None else num_labels * hidden,
        head_width=config.vocab_size if num_labels is None else num_labels,
        other=_parameters(model) - _parameters(blocks) - embedding - head,
        max_length=getattr(config, "max_position_embeddings", None),
        source=source,
        notes=(f"counted in {type(model).__name__} of transformers; activations are those of layers like Llama's",),
        model_type=config.model_type,
    )


def _layer(block: nn.Module, config: Any, index: int, name: str) -> Layer:
    """Return the sizes of one layer.

    Raises:
        ConfigError: it is not one attention over keys and values with an MLP or experts.
    """

    def refused(why: str) -> ConfigError:
        return ConfigError(f"{name}: layer {index} of {config.model_type} is of a kind without a formula: {why}.")

    if others := [type(each).__name__ for each in block.modules() if OTHER_MODULES.search(type(each).__name__)]:
        raise refused(others[0])
    found = [child for child in block.children() if re.search("attention|attn", type(child).__name__, re.IGNORECASE)]
    kinds = getattr(config, "layer_types", None) or []
    if len(found) != 1 or (kinds and kinds[index] not in ("full_attention", "sliding_attention")):
        raise refused(f"{len(found)} attentions" if len(found) != 1 else kinds[index])
    attention = found[0]
    matrices = dict(_matrices(attention))
    inner = next((child for child in attention.modules() if getattr(child, "head_dim", None)), config)
    head_dim = getattr(inner, "head_dim", None) or config.hidden_size // config.num_attention_heads
    last = [inputs for inputs, outputs in matrices.values() if outputs == config.hidden_size]
    heads = last[-1] // head_dim if last else 0
    keys, values = (next((matrices[each][1] for each in names if each in matrices), None) for names in (KEYS, VALUES))
    if keys is None and (joined := [matrices[each][1] for each in ALL_IN_ONE if each in matrices]):
        keys = values = (joined[0] - heads * head_dim) // 2
    if not keys or keys != values or keys % head_dim or not heads or heads % (keys // head_dim):
        raise refused(f"{type(attention).__name__} does not keep keys and values of whole heads")
    norms = sum(_parameters(each) for each in block.modules() if "norm" in type(each).__name__.lower())
    in_norms = sum(_parameters(each) for each in attention.modules() if "norm" in type(each).__name__.lower())
    attended = _parameters(attention) - in_norms
    mlp = _parameters(block) - attended - norms
    experts, of_experts, width = _experts(block, config.hidden_size)
    chosen = next((value for each in CHOSEN if (value := getattr(config, each, None))), None) if experts else 0
    if chosen is None:
        raise refused("experts without a number that a token meets")
    outside = Counter(sizes for _, sizes in _matrices(block)) - Counter(sizes for _, sizes in _matrices(attention))
    dense = max((inputs for inputs, outputs in outside if outputs == config.hidden_size), default=0)
    if not (mlp and (dense or width)):
        raise refused("no MLP")
    window = getattr(config, "sliding_window", None) if kinds else getattr(attention, "sliding_window", None)
    return Layer(
        attention=attended,
        mlp=mlp,
        active_mlp=mlp - of_experts + of_experts * chosen // max(experts, 1),
        norms=norms,
        heads=heads,
        kv_heads=keys // head_dim,
        head_dim=head_dim,
        window=window if not kinds or kinds[index] == "sliding_attention" else None,
        intermediate=2 * (dense + chosen * width),
        experts=experts,
        linear=sum(sum(sizes) for _, sizes in _matrices(block)) + experts * 3 * (config.hidden_size + 2 * width),
    )


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _matrices(module: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the names of the linear layers, without those of experts, with their inputs and outputs."""
    for path, each in module.named_modules():
        weight = getattr(each, "weight", None)
        if weight is not None and weight.ndim == 2 and not re.search(r"experts?\.\d", path):
            inputs, outputs = weight.shape if type(each).__name__ == "Conv1D" else reversed(weight.shape)
            yield path.rpartition(".")[2], (inputs, outputs)


def _experts(block: nn.Module, hidden: int) -> tuple[int, int, int]:
    """Return the number of experts, the parameters of all, and the width inside of one; zeros without any."""
    from torch import nn

    for path, module in block.named_modules():
        own = [*module.parameters(recurse=False)]
        if stacks := [each for each in own if each.ndim == 3]:
            count = stacks[0].shape[0]
            widths = [size for each in stacks for size in each.shape[1:] if size != hidden]
            return count, sum(each.numel() for each in own if each.shape[0] == count), min(widths, default=hidden)
        if isinstance(module, nn.ModuleList) and path.endswith("experts") and len(module):
            width = max((min(sizes) for _, sizes in _matrices(module[0])), default=hidden)
            return len(module), _parameters(module), width
    return 0, 0, 0
