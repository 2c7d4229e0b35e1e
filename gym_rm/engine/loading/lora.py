"""LoRA adapters (peft folders), merged into their base model at load, head included."""

from __future__ import annotations

import os
from dataclasses import dataclass

from transformers import PreTrainedModel

from gym_rm.checks import model_source
from gym_rm.documents import read_mapping
from gym_rm.engine.loading.files import absolute, find_file, open_tensors
from gym_rm.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter, before its base model is loaded.

    Attributes:
        source: folder or hub id of the adapter.
        base: folder or hub id of the base model.
        tokenizer: folder or hub id of the tokenizer: the adapter's, or the base's if the adapter has none.
        tensors: shapes of the adapter's tensors, by their names in the adapted model. Those named as a tensor of the
            model are whole, not only a low-rank change.
        revision: commit, branch or tag of the adapter's hub repository, or None.
    """

    source: str
    base: str
    tokenizer: str
    tensors: dict[str, tuple[int, ...]]
    revision: str | None = None

    def apply_to(self, model: PreTrainedModel, *, merge: bool) -> PreTrainedModel:
        """Return the base model with the adapter's changes added to its weights, or with layers that have both.

        Raises:
            ConfigError: peft is not installed, or the adapter's tensors are not those that it changes in the model.
        """
        try:
            from peft import PeftModel, get_peft_model_state_dict
        except ImportError as error:
            raise ConfigError(
                f"{self.source!r} is an adapter, which needs peft: pip install 'gym-rm[lora]'."
            ) from error
        own = model.get_input_embeddings().weight
        name = next(name for name, parameter in model.named_parameters() if parameter is own)
        if (size := self.tensors.get(name, own.shape)[0]) > len(own):  # tokens were added; the adapter has all of them
            model.resize_token_embeddings(size, mean_resizing=False)
        try:
            adapted = PeftModel.from_pretrained(model, self.source, revision=self.revision)
        except (RuntimeError, IndexError) as error:
            raise ConfigError(
                f"the adapter {self.source!r} does not fit its base {self.base!r}: {str(error)!r:.300}. Pass base= "
                "with the model that it was trained on; the adapter or the base must have embeddings of all tokens."
            ) from error
        expected = {_module_name(name) for name in get_peft_model_state_dict(adapted, save_embedding_layers=False)}
        missing = sorted(expected - self.tensors.keys())
        # An adapter may also contain whole layers of the model, such as resized embeddings.
        whole = {_module_name(name) for name, _ in adapted.get_base_model().named_parameters()}
        unknown = sorted(self.tensors.keys() - expected - whole)
        if missing or unknown:
            raise ConfigError(
                f"the adapter {self.source!r} does not fit its base {self.base!r}: missing {missing[:3]}, unknown "
                f"{unknown[:3]}. Pass base= with the model that it was trained on."
            )
        applied: PreTrainedModel = adapted.merge_and_unload() if merge else adapted.get_base_model()
        return applied


def find_adapter(source: str, revision: str | None, base: str | os.PathLike[str] | None) -> Adapter | None:
    """Return the adapter in a folder or hub repository; None if it does not contain one.

    Raises:
        ConfigError: the adapter has no safetensors weights, or no base model.
    """
    file = find_file(source, CONFIG, revision)
    if file is None:
        return None
    config = read_mapping(file, "the configuration of an adapter")
    if config.get("peft_type", "LORA") != "LORA" or config.get("megatron_config") is not None:
        raise ConfigError(
            f"the adapter {source!r} must be a LoRA adapter without megatron_config; got peft_type="
            f"{config.get('peft_type')!r}. Merge it into its base model, and load the result."
        )
    weights = find_file(source, WEIGHTS, revision)
    if weights is None:
        raise ConfigError(
            f"the adapter {source!r} has no {WEIGHTS}, and pickled weights are not read, because they can run code. "
            "Save the adapter again with safe_serialization=True."
        )
    under = os.fspath(base) if base is not None else config.get("base_model_name_or_path")
    if not under or not isinstance(under, str):
        raise ConfigError(f"the adapter {source!r} does not name its base model; pass base=.")
    under = model_source("base", under)
    tokenizer = under if find_file(source, "tokenizer_config.json", revision) is None else source
    with open_tensors(weights) as tensors:
        names = tensors.keys()
        shapes = {_module_name(name): tuple(tensors.get_slice(name).get_shape()) for name in names}
    return Adapter(source, absolute(under), tokenizer, shapes, revision)


def _module_name(name: str) -> str:
    """Return the name of a tensor in the model: `score.weight` for `base_model.model.score.modules_to_save.weight`."""
    name = name.removeprefix("base_model.model.")
    for wrapper in ("modules_to_save.", "original_module.", "base_layer."):
        name = name.replace(wrapper, "")
    return name
