"""LoRA adapters (peft folders), merged into their base model at load, head included."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import cached_file

from gym_rm.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter, before its base model is loaded.

    Attributes:
        source: folder or hub id of the adapter.
        base: folder or hub id of the base model.
        tokenizer: folder or hub id of the tokenizer: the adapter's, or the base's if the adapter has none.
        tensors: shapes of the adapter's tensors, by their names in the adapted model.
    """

    source: str
    base: str
    tokenizer: str
    tensors: dict[str, tuple[int, ...]]

    @property
    def num_labels(self) -> int | None:
        """Number of outputs of the adapter's head; None if it has no head."""
        heads = [shape for name, shape in self.tensors.items() if name in ("score.weight", "classifier.weight")]
        return heads[0][0] if heads else None

    def holds(self, tensor: str) -> bool:
        """Return whether the adapter contains this tensor of the model in full, not only a low-rank change."""
        return tensor in self.tensors

    def merge_into(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the base model with the adapter's changes added to its weights.

        Raises:
            ConfigError: peft is not installed.
        """
        try:
            from peft import PeftModel
        except ImportError as error:
            raise ConfigError(
                f"{self.source!r} is an adapter, which needs peft: pip install 'gym-rm[lora]'."
            ) from error
        merged: PreTrainedModel = PeftModel.from_pretrained(model, self.source).merge_and_unload()
        return merged


def find_adapter(source: str, revision: str | None, base: str | os.PathLike[str] | None) -> Adapter | None:
    """Return the adapter in a folder or hub repository; None if it does not contain one.

    Raises:
        ConfigError: the adapter has no safetensors weights, or no base model.
    """
    try:
        config = json.loads(Path(cached_file(source, CONFIG, revision=revision)).read_text())
    except OSError:
        return None
    try:
        weights = cached_file(source, WEIGHTS, revision=revision)
    except OSError as error:
        raise ConfigError(
            f"the adapter {source!r} has no {WEIGHTS}, and pickled weights are not read, because they can run code. "
            "Save the adapter again with safe_serialization=True."
        ) from error
    under = os.fspath(base) if base is not None else config.get("base_model_name_or_path")
    if not under:
        raise ConfigError(f"the adapter {source!r} does not name its base model; pass base=.")
    try:
        cached_file(source, "tokenizer_config.json", revision=revision)
        tokenizer = source
    except OSError:
        tokenizer = under
    with safe_open(weights, framework="pt") as tensors:
        names = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return Adapter(source, under, tokenizer, {_module_name(name): shape for name, shape in names.items()})


def _module_name(name: str) -> str:
    """Return the name of a tensor in the model: `score.weight` for `base_model.model.score.modules_to_save.weight`."""
    return name.removeprefix("base_model.model.").replace("modules_to_save.", "").replace("original_module.", "")
