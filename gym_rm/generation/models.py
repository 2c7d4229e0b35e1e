"""Open chat models: a causal language model with its output layer, and a tokenizer with a chat template."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gym_rm.engine.loading.device_and_dtype import resolve_device, resolve_dtype
from gym_rm.engine.loading.files import find_file, read_config, refusing_malformed, require_source, tensor_files
from gym_rm.engine.loading.lora import CONFIG as ADAPTER_CONFIG
from gym_rm.engine.loading.weights import read_weights
from gym_rm.engine.text.templates import own_template
from gym_rm.engine.text.tokenizers import load_tokenizer
from gym_rm.errors import ConfigError

# Names of classes with an output layer over the vocabulary.
WRITES_TEXT = re.compile("CausalLM|LMHead|ConditionalGeneration")


def open_chat_model(
    source: str,
    *,
    option: str,
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    revision: str | None = None,
) -> tuple[PreTrainedModel, Any]:
    """Return a chat model in evaluation mode, and its tokenizer, which pads on the left.

    Args:
        source: folder or hub id.
        option: name of the setting that contains it, for error messages.
        dtype: type of the weights; `"auto"` is the checkpoint's own on a GPU, else float32.
        device: device of the model; `"auto"` is the GPU if there is one.
        revision: commit, branch or tag of a hub repository.

    Raises:
        ConfigError: there is no such model, a file is malformed, the model has no output layer over its vocabulary or
            lacks weights, or its tokenizer has no chat template.
    """
    placed = resolve_device(device)
    require_source(source, revision, option=option)
    with refusing_malformed(source, "a chat model"):
        if find_file(source, ADAPTER_CONFIG, revision) is not None:
            raise ConfigError(f"{option}={source!r} is an adapter; merge it into its base, and pass the result.")
        architectures = read_config(source, revision).get("architectures") or ()
        if architectures and not any(map(WRITES_TEXT.search, architectures)):
            raise _without_output_layer(option, source, architectures)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, revision=revision, return_dict=True)
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise _without_output_layer(option, source, architectures or [type(config).__name__])
        capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
        model, missing = read_weights(
            AutoModelForCausalLM,
            source,
            tensor_files(source, revision),
            config=config,
            dtype=resolve_dtype(dtype, placed, config),
            device_map={"": placed},
            attn_implementation="eager" if capped else None,  # sdpa ignores the cap
            revision=revision,
        )
        if missing:
            raise _without_output_layer(option, source, architectures, missing)
        tokenizer = load_tokenizer(source, padding_side="left", revision=revision)
    if own_template(tokenizer) is None:
        raise ConfigError(f"{option}={source!r} has no chat template; use a chat model, whose tokenizer has one.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer


def _without_output_layer(option: str, source: str, architectures: Any, missing: Any = None) -> ConfigError:
    lacking = f" and has no weights for {missing[:5]}, which would be random" if missing else ""
    return ConfigError(
        f"{option}={source!r} is a {'/'.join(architectures) or 'checkpoint'}{lacking}; expected a chat model with its "
        "output layer (...ForCausalLM); a reward model goes to env.reward_model."
    )
