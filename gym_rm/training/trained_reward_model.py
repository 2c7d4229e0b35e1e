"""The reward model of a training run: open it, or give a chat model a head, and run its batches with gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from gym_rm.checks import model_source
from gym_rm.config import divide_settings
from gym_rm.engine.backbones.decoder import num_positions
from gym_rm.engine.backbones.reward_model import RewardModel, make_reward_model
from gym_rm.engine.executors.model_info import max_positions
from gym_rm.engine.kinds import KINDS, Kind, ModelFacts, check_kind, detect_kind
from gym_rm.engine.kinds.readouts import ClassifierLogits, ModuleHead, TokenLogits
from gym_rm.engine.loading.checkpoint import EMBEDDED, LoadOptions, load_model, open_checkpoint
from gym_rm.engine.loading.files import refusing_malformed, require_source, tensor_files
from gym_rm.engine.loading.headed_models import outputs_of_modules
from gym_rm.engine.loading.weights import read_weights
from gym_rm.engine.text.renderer import Renderer
from gym_rm.engine.text.templates import own_template
from gym_rm.engine.text.text_options import TextOptions
from gym_rm.engine.text.tokenizers import load_tokenizer
from gym_rm.engine.token_tree import Batch
from gym_rm.errors import ConfigError
from gym_rm.training.adapters import Adaptable, with_adapters
from gym_rm.training.reward_model_settings import StartSettings


@dataclass(frozen=True)
class StartModel(Adaptable):
    """The reward model that a run starts from, on the CPU in float32.

    Attributes:
        kind: what its outputs mean.
        renderer: writes conversations as token ids.
        architectures: names in config.json by which the model is known, if transformers has no class of its name.
    """

    kind: Kind
    renderer: Renderer
    architectures: tuple[str, ...] = ()


class TrainedModel(nn.Module):
    """The module whose forward runs in training: batches in, values float32 `[R, K]` of all of them out.

    Attributes:
        has_unused: whether some parameters change no value; `choose_layout` finds out.
    """

    def __init__(self, start: StartModel) -> None:
        super().__init__()
        self.model = start.trained
        self.rewards: RewardModel = make_reward_model(start.kind.readout, start.model)
        self.decoders = self.rewards.decoders
        self.has_unused = False

    def forward(self, batches: Sequence[Batch]) -> Tensor:
        """Return the values at the positions that the batches read."""
        return torch.cat([self.rewards.values(batch) for batch in batches])

    def trial_values(self, batch: Batch) -> Tensor:
        """Return the values that `choose_layout` compares."""
        return self.rewards.trial_values(batch)


def open_model(settings: StartSettings, *, seed: int) -> StartModel:
    """Return the model that training starts from.

    Raises:
        ConfigError: the model has no head and `new_head` is false, an option is invalid, or its kind cannot be trained.
    """
    options = dict(settings.reward_model_kwargs)
    loading = {name: options.pop(name) for name in list(options) if name in LoadOptions.model_fields}
    for name in ("dtype", "device", "device_map", "quantization_config"):
        if name in loading:
            raise ConfigError(
                f"model.reward_model_kwargs.{name} is for scoring; training keeps weights in float32 on the device of "
                "accelerate. Use batch.precision and batch.fsdp."
            )
    if settings.new_head:
        model, tokenizer = _with_new_head(settings, loading, seed)
        kind, name = loading.get("kind", "auto"), str(settings.path)
    else:
        load = divide_settings({**loading, "path": settings.path, "dtype": "float32"}, LoadOptions, owner="model")[0]
        try:
            checkpoint = open_checkpoint(load)
        except ConfigError as error:
            error.add_note("To train a chat or base model, or one with another head, set model.new_head=true.")
            raise
        if checkpoint.adapter is not None:
            raise ConfigError(
                f"{checkpoint.source!r} is an adapter; merge it into its base and save the result to train it further."
            )
        model, tokenizer = load_model(checkpoint, device=torch.device("cpu")), checkpoint.tokenizer
        kind, name = checkpoint.family.kind, checkpoint.name
        options = {**checkpoint.family.options, **options}
    facts = ModelFacts(name, model.config, outputs_of_modules(model), tokenizer)
    kind = "process" if kind == "auto" and "step_token" in options else kind
    outputs = model.config.num_labels
    if kind == "auto" and outputs > 1 and "weights" not in options and not hasattr(model.config, "objective_weights"):
        model.config.objective_weights = [1 / outputs] * outputs  # saved, so that the mean is the reward in scoring
    kind = detect_kind(facts) if kind == "auto" else check_kind(kind)
    text, of_kind = divide_settings(options, TextOptions, KINDS[kind].Options, owner=f"a reward model of kind {kind!r}")
    made = KINDS[kind].of(facts, of_kind)
    if not isinstance(made.readout, ModuleHead | TokenLogits | ClassifierLogits):
        raise ConfigError(f"a reward model of kind {kind!r} cannot be trained here; expected a head with outputs.")
    renderer = Renderer(tokenizer, input_format=made.input_format, **dict(text))
    renderer.max_length = min(filter(None, (text.max_length, max_positions(model), num_positions(model))), default=None)
    peft = None if settings.lora is None else with_adapters(model, settings.lora, settings.path or EMBEDDED, seed)
    of_family = not hasattr(transformers, type(model).__name__)
    architectures = tuple(model.config.architectures or ()) if of_family else ()
    return StartModel(model, peft, tokenizer, name, made, renderer, architectures)


def output_names(start: StartModel) -> tuple[str, ...]:
    """Return the names of the outputs, by which ratings are learned; `reward` for a single one without a name."""
    label = (getattr(start.model.config, "id2label", None) or {}).get(0, "LABEL_0")
    return start.kind.component_names or ("reward" if label == "LABEL_0" else label,)


def _with_new_head(settings: StartSettings, loading: Mapping[str, Any], seed: int) -> tuple[PreTrainedModel, Any]:
    """Return a classifier with the backbone of a checkpoint and a new head, and its tokenizer.

    Source of the initialisation: Stiennon et al., Learning to summarize from human feedback (arXiv 2009.01325, B.1).
    """
    if settings.path is None:
        raise ConfigError("model.new_head needs model.path: the folder or hub id of a chat or base model.")
    source, revision = model_source("model.path", settings.path), loading.get("revision")
    names = settings.outputs if isinstance(settings.outputs, tuple) else None
    outputs = settings.outputs if isinstance(settings.outputs, int) else len(settings.outputs)
    require_source(source, revision)
    with refusing_malformed(source):
        tokenizer = loading.get("tokenizer") or source
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer)
        config = AutoConfig.from_pretrained(source, revision=revision, num_labels=outputs, return_dict=True)
        if hasattr(config, "objective_weights"):  # of the outputs of another head
            del config.objective_weights
        labels = [f"LABEL_{index}" for index in range(outputs)] if names is None else names
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: index for index, name in enumerate(labels)}
        text_config = config.get_text_config()
        if getattr(text_config, "pad_token_id", None) is None:
            pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
            text_config.pad_token_id = config.pad_token_id = pad
        files = tensor_files(source, revision)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, missing = read_weights(
                AutoModelForSequenceClassification,
                source,
                files,
                config=config,
                new_head=True,
                revision=revision,
                dtype=torch.float32,
                attn_implementation=loading.get("attn_implementation"),
            )
            head = [each for name, each in model.named_children() if name != model.base_model_prefix]
            inside = [name for name in missing if name.startswith(f"{model.base_model_prefix}.")]
            if inside:
                raise ConfigError(f"{source!r} has no weights for {inside[:5]}; only the head may be new.")
            linear = [layer for module in head for layer in module.modules() if isinstance(layer, nn.Linear)]
            with torch.no_grad():
                linear[-1].weight.normal_(0.0, 1 / math.sqrt(linear[-1].in_features + 1))
                if linear[-1].bias is not None:
                    linear[-1].bias.zero_()
    if (
        "chat_template" not in settings.reward_model_kwargs
        and own_template(tokenizer) is None
        and "score" in [name for name, _ in model.named_children()]
    ):
        raise ConfigError(
            f"the tokenizer of {source!r} has no chat template; pass model.reward_model_kwargs.chat_template with "
            "Jinja source or a file. It is saved with the reward model."
        )
    return model, tokenizer
