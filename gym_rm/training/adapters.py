"""Low-rank adapters of a model, through peft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from gym_rm.errors import ConfigError
from gym_rm.lora_settings import LoRASettings


@dataclass(frozen=True)
class Adaptable:
    """A model that a run starts from, on the CPU.

    Attributes:
        model: the Hugging Face model; with adapters, the model inside of `peft`.
        peft: the model with its adapters, or None.
        tokenizer: its tokenizer.
        name: folder or hub id.
    """

    model: PreTrainedModel
    peft: Any
    tokenizer: Any
    name: str

    @property
    def trained(self) -> Any:
        """The model to save: with adapters, that of peft."""
        return self.model if self.peft is None else self.peft


def with_adapters(
    model: PreTrainedModel, settings: LoRASettings, name: str, seed: int, *, owner: str = "model", task: str = "SEQ_CLS"
) -> Any:
    """Return the model with new adapters; the head of a classifier is trained in full.

    Args:
        model, settings, seed: the model, and settings and seed of its adapters.
        name: its folder or hub id, written into the adapters.
        owner: group of settings that has `lora`, for messages.
        task: task of peft, such as `"CAUSAL_LM"`.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError(f"{owner}.lora needs peft: pip install 'gym-rm[lora]' ({error}).") from error
    # Only modules with weights: peft would also match "dropout" in the names of its own modules.
    heads = [
        name for name, each in model.named_children() if name != model.base_model_prefix and list(each.parameters())
    ]
    modules = settings.target_modules
    config = LoraConfig(
        task_type=task,
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=modules if isinstance(modules, str) else list(modules),
        modules_to_save=heads if task == "SEQ_CLS" else None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:  # also of modules that do not exist
            raise ConfigError(f"{owner}.lora={settings.model_dump()} does not fit {name!r}: {error}") from error
    adapted.peft_config["default"].base_model_name_or_path = name
    return adapted
