"""Read the weights of a checkpoint into a model, and refuse those that do not belong together."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from gym_rm.engine.loading.files import tensor_headers
from gym_rm.errors import ConfigError

# Tensors inside a backbone that its class may leave out without changing the values: tables and masks that are
# computed, the pooler after the last hidden state, towers for other inputs than text, and layers that predict later
# tokens. Real checkpoints have them.
NOT_USED = re.compile(
    r"(^|[._])(inv_freq|(cos|sin)_cached|position_ids|token_type_ids|masked_bias|causal_mask|attn\.bias"
    r"|attention\.bias|embed_positions|position_embeddings\.weight|num_batches_tracked)$"
    r"|(^|\.)(pooler|mtp|vision|visual|audio|image|multi_modal)"
)
# Of files; smaller ones need a scale.
FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
OF_QUANTISATION = re.compile(r"scale|zero|quant|absmax|g_idx|[._]map$")


def read_weights(
    model_class: Any,
    source: str,
    files: Mapping[str, str],
    *,
    config: PreTrainedConfig,
    new_head: bool = False,
    beside: Collection[str] | None = None,
    **arguments: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """Return a model with the weights of a checkpoint, and the names of its tensors that the checkpoint lacks.

    Args:
        model_class: class with `from_pretrained`.
        source: folder or hub id.
        files: file of each tensor.
        config: configuration of the model.
        new_head: whether the head is replaced, so that its tensors may have other shapes.
        beside: first names of tensors for which the model may have no module; None for any.
        **arguments: further arguments of `from_pretrained`.

    Raises:
        ConfigError: a file is not a whole safetensors file, or a tensor has the wrong type or shape, or belongs to a
            part of the model that the configuration does not have, or to no part of it.
    """
    headers = tensor_headers(source, files, arguments.get("revision"))
    with _without_report():
        model, info = model_class.from_pretrained(
            source,
            config=config,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **arguments,
        )
    quantized = getattr(model, "hf_quantizer", None) is not None
    others = {name: dtype for name, (_, dtype) in headers.items() if dtype not in FLOATS}
    wrong = [f"{name} ({dtype})" for name, dtype in others.items() if not NOT_USED.search(name)]
    if wrong and not quantized:
        raise ConfigError(f"{source!r}: weights must be floats of 16 bits or more; got {_shown(wrong)}.")
    backbone = f"{model.base_model_prefix}."
    wrong = [
        f"{name} {tuple(got)} instead of {tuple(expected)}"
        for name, got, expected in info["mismatched_keys"]
        if name.startswith(backbone) or not new_head
    ]
    if wrong:
        raise ConfigError(f"{source!r} has tensors of the wrong shape for its configuration: {_shown(wrong)}.")
    extra = [name for name in info["unexpected_keys"] if not (quantized and OF_QUANTISATION.search(name))]
    if unused := _of_missing_parts(model, extra, beside):
        raise ConfigError(
            f"{source!r} has tensors that its configuration does not use: {_shown(unused)}; scores without them would "
            "be wrong. Correct config.json (for example num_hidden_layers), or, if the reward does not need them, save "
            "the model again with from_pretrained(...).save_pretrained(...). Those beside the backbone and the head (a "
            "second head, statistics of rewards) can be left out with ignored_tensors=[their first names]."
        )
    return model, sorted(info["missing_keys"])


def _of_missing_parts(model: PreTrainedModel, names: Iterable[str], beside: Collection[str] | None) -> list[str]:
    """Return the tensors that have no place in the model, if it has the module around them or that is not `beside`."""
    parts = {name for name, _ in (*model.named_children(), *model.base_model.named_children())}
    config = model.config.get_text_config()
    first_later = getattr(config, "num_hidden_layers", None) or 0
    later = range(first_later, first_later + int(getattr(config, "num_nextn_predict_layers", None) or 0))
    predicts_later = re.compile(rf"(^|\.)layers\.({'|'.join(map(str, later))})\." if later else r"$^")
    return [
        name
        for name in names
        if (first := name.partition(".")[0]) in parts or (beside is not None and first not in beside)
        if not NOT_USED.search(name) and not predicts_later.search(name)
    ]


@contextlib.contextmanager
def _without_report() -> Iterator[None]:
    """Hide transformers' progress bar and its report of tensors, which `read_weights` checks."""

    def without_bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = {**kwargs, "disable": True}
        return factory(*args, **kwargs) if previous is None else previous(factory, args, kwargs)

    def is_no_report(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    previous = transformers_logging.set_tqdm_hook(without_bar)
    logger.addFilter(is_no_report)
    try:
        yield
    finally:
        logger.removeFilter(is_no_report)
        transformers_logging.set_tqdm_hook(previous)


def _shown(names: Iterable[str]) -> str:
    names = sorted(names)
    return f"{names[:5]}{' and more' if len(names) > 5 else ''}"
