"""LoRA adapters (peft folders) over a base: merged at load, head included."""

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
    """An adapter, before its base is loaded.

    Attributes:
        source: its folder or hub id.
        base: folder or hub id of the model under it.
        tokenizer: where the tokenizer is: beside the adapter, if it was saved there, else the base.
        tensors: names of its tensors, as transformers names the modules, and their shapes.
    """

    source: str
    base: str
    tokenizer: str
    tensors: dict[str, tuple[int, ...]]

    @property
    def num_labels(self) -> int | None:
        """Outputs of the head that the adapter holds, if it holds one."""
        heads = [shape for name, shape in self.tensors.items() if name in ("score.weight", "classifier.weight")]
        return heads[0][0] if heads else None

    def holds(self, tensor: str) -> bool:
        """Whether the adapter brings this tensor of the model itself, not a change to it."""
        return tensor in self.tensors

    def merge_into(self, model: PreTrainedModel) -> PreTrainedModel:
        """The base with the adapter's changes added to its weights.

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
    """The adapter in a folder or hub repository, or None if it is none.

    Raises:
        ConfigError: an adapter without safetensors, or without a base.
    """
    try:
        config = json.loads(Path(cached_file(source, CONFIG, revision=revision)).read_text())
    except OSError:
        return None
    try:
        weights = cached_file(source, WEIGHTS, revision=revision)
    except OSError as error:
        raise ConfigError(
            f"the adapter {source!r} holds no {WEIGHTS}, and pickled weights are not read: they can run code. Save it "
            "again with safe_serialization."
        ) from error
    under = os.fspath(base) if base is not None else config.get("base_model_name_or_path")
    if not under:
        raise ConfigError(f"the adapter {source!r} names no base model; pass base=.")
    try:
        cached_file(source, "tokenizer_config.json", revision=revision)
        tokenizer = source
    except OSError:
        tokenizer = under
    with safe_open(weights, framework="pt") as tensors:
        names = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return Adapter(source, under, tokenizer, {_module_name(name): shape for name, shape in names.items()})


def _module_name(name: str) -> str:
    """`base_model.model.score.modules_to_save.weight` is `score.weight` of the model."""
    return name.removeprefix("base_model.model.").replace("modules_to_save.", "").replace("original_module.", "")
