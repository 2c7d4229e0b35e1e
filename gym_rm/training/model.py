"""The model of a training run: open it, give it a head or adapters, and choose how its batches run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from gym_rm.config import divide_settings
from gym_rm.engine.backbones.decoder import DecoderBackbone, num_positions
from gym_rm.engine.backbones.dynamic_rotary import dynamic_rotaries, forget_lengths
from gym_rm.engine.backbones.reward_model import RewardModel, make_reward_model
from gym_rm.engine.backbones.tree_attention import attending_to_trees
from gym_rm.engine.executors.local import max_positions
from gym_rm.engine.kinds import KINDS, Kind, ModelFacts, check_kind, detect_kind
from gym_rm.engine.kinds.readouts import ClassifierLogits, ModuleHead, TokenLogits
from gym_rm.engine.loading.checkpoint import LoadOptions, load_model, open_checkpoint
from gym_rm.engine.loading.files import refusing_malformed, require_source, tensor_files
from gym_rm.engine.loading.headed_models import outputs_of_modules
from gym_rm.engine.loading.trial import FAILURES, PLAIN, TOLERANCE, Candidate, Forward, choose_forward, trial_sequences
from gym_rm.engine.loading.weights import read_weights
from gym_rm.engine.text.options import TextOptions
from gym_rm.engine.text.renderer import Renderer
from gym_rm.engine.text.templates import own_template
from gym_rm.engine.text.tokenizers import load_tokenizer
from gym_rm.engine.token_tree import Batch, BatchPlan, plan_padded, plan_trees
from gym_rm.errors import ConfigError, logger
from gym_rm.scores import FloatArray
from gym_rm.training.settings import LoRASettings, ModelSettings

GRADIENT_TOLERANCE = 1e-4  # maximum difference of gradients in the trial, relative to the largest


@dataclass(frozen=True)
class StartModel:
    """The model that a run starts from, on the CPU in float32.

    Attributes:
        model: the Hugging Face model; with adapters, the model inside of `peft`.
        peft: the model with its adapters, or None.
        tokenizer: its tokenizer.
        kind: what its outputs mean.
        renderer: writes conversations as token ids.
        name: folder or hub id.
        initialisation: how a new head was made; empty if there is none.
        architectures: names in config.json by which the model is known, if transformers has no class of its name.
    """

    model: PreTrainedModel
    peft: Any
    tokenizer: Any
    kind: Kind
    renderer: Renderer
    name: str
    initialisation: str = ""
    architectures: tuple[str, ...] = ()

    @property
    def trained(self) -> Any:
        """The model to save: with adapters, that of peft."""
        return self.model if self.peft is None else self.peft


class Trainable(Protocol):
    """What `choose_layout` needs of a module: its decoders, and the values that layouts are compared by."""

    decoders: tuple[DecoderBackbone, ...]
    has_unused: bool

    def trial_values(self, batch: Batch) -> Tensor:
        """Return values `[R, ...]` with gradients, if enabled."""


class TrainedModel(nn.Module):
    """The module whose forward runs in training: batches in, values float32 `[R, K]` of all of them out.

    Args:
        start: the model.

    Attributes:
        has_unused: whether some parameters change no value; `choose_layout` finds out.
    """

    def __init__(self, start: StartModel) -> None:
        super().__init__()
        self.model = start.trained
        self.rewards: RewardModel = make_reward_model(start.kind.readout, start.model)
        self.decoders = self.rewards.decoders
        self.has_unused = False
        self._rotaries = dynamic_rotaries([start.model])

    def forward(self, batches: Sequence[Batch]) -> Tensor:
        """Return the values at the positions that the batches read."""
        return torch.cat([self._values(batch) for batch in batches])

    def trial_values(self, batch: Batch) -> Tensor:
        """Return the values that `choose_layout` compares."""
        return self.rewards.trial_values(batch)

    def _values(self, batch: Batch) -> Tensor:
        forget_lengths(self._rotaries)
        return self.rewards.values(batch)


def open_model(settings: ModelSettings, *, seed: int) -> StartModel:
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
    initialisation = ""
    if settings.new_head:
        model, tokenizer, initialisation = _with_new_head(settings, loading, seed)
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
        options = {**checkpoint.kind_options, **options}
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
    peft = None if settings.lora is None else with_adapters(model, settings.lora, name, seed)
    of_family = not hasattr(transformers, type(model).__name__)
    architectures = tuple(model.config.architectures or ()) if of_family else ()
    return StartModel(model, peft, tokenizer, made, renderer, name, initialisation, architectures)


def output_names(start: StartModel) -> tuple[str, ...]:
    """Return the names of the outputs, by which ratings are learned; `reward` for a single one without a name."""
    label = (getattr(start.model.config, "id2label", None) or {}).get(0, "LABEL_0")
    return start.kind.component_names or ("reward" if label == "LABEL_0" else label,)


def _with_new_head(settings: ModelSettings, loading: Mapping[str, Any], seed: int) -> tuple[PreTrainedModel, Any, str]:
    """Return a classifier with the backbone of a checkpoint and a new head, its tokenizer, and how the head was made.

    Source of the initialisation: Stiennon et al., Learning to summarize from human feedback (arXiv 2009.01325, B.1).
    """
    if settings.path is None:
        raise ConfigError("model.new_head needs model.path: the folder or hub id of a chat or base model.")
    source, revision = settings.path, loading.get("revision")
    names = settings.outputs if isinstance(settings.outputs, tuple) else None
    outputs = settings.outputs if isinstance(settings.outputs, int) else len(settings.outputs)
    require_source(source, revision)
    with refusing_malformed(source):
        tokenizer = loading.get("tokenizer") or source
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer, trust_remote_code=False)
        config = AutoConfig.from_pretrained(source, revision=revision, num_labels=outputs)
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
            std = 1 / math.sqrt(linear[-1].in_features + 1)
            with torch.no_grad():
                linear[-1].weight.normal_(0.0, std)
                if linear[-1].bias is not None:
                    linear[-1].bias.zero_()
    if (
        own_template(tokenizer) is None
        and "chat_template" not in settings.reward_model_kwargs
        and "score" in [name for name, _ in model.named_children()]
    ):
        raise ConfigError(
            f"the tokenizer of {source!r} has no chat template; pass model.reward_model_kwargs.chat_template with "
            "Jinja source or a file. It is saved with the reward model."
        )
    return model, tokenizer, f"normal with standard deviation {std:.4g} (1 / sqrt({linear[-1].in_features} + 1))"


def with_adapters(
    model: PreTrainedModel, settings: LoRASettings, name: str, seed: int, *, owner: str = "model", task: str = "SEQ_CLS"
) -> Any:
    """Return the model with new adapters; the head of a classifier is trained in full.

    Args:
        model: the model.
        settings: settings of the adapters.
        name: its folder or hub id, written into the adapters.
        seed: seed of the adapters.
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


def choose_layout(trained: Trainable, model: PreTrainedModel, *, tree: bool, fuse: bool) -> Forward:
    """Return the fastest layout whose values and gradients equal those of the plain forward, on a few short texts.

    Sets how the decoder of `trained` runs. Dropout is off meanwhile.
    """
    decoders, dtype = trained.decoders, str(model.dtype).removeprefix("torch.")
    tolerance = GRADIENT_TOLERANCE if dtype == "float32" else TOLERANCE[dtype]
    candidate = Candidate(
        name=type(model).__name__,
        config=model.config,
        dtype=dtype,
        # flex_attention has no dropout.
        can_take_trees=bool(decoders) and tree and (_no_dropout(model) or model.device.type != "cuda"),
        can_fuse=bool(decoders) and fuse and decoders[0].fuse and _no_dropout(model),
        max_width=num_positions(model),
    )

    def run(plan: BatchPlan, forward: Forward) -> FloatArray:
        for decoder in decoders:
            decoder.fuse_gradients = forward.fuse
        with torch.enable_grad():
            values = torch.cat([trained.trial_values(batch).float() for batch in plan.batches])
        return values.detach().cpu().numpy()

    def gradients(forward: Forward) -> list[Tensor]:
        sequences = trial_sequences(model.config)
        alone = forward.layout == "one_by_one"
        plan = (
            plan_trees(sequences, max_num_batched_tokens=10**6)
            if forward.layout == "tree"
            else plan_padded(sequences, max_num_batched_tokens=10**6, alone=alone, exact=alone)
        )
        for decoder in decoders:
            decoder.fuse_gradients = forward.fuse
        values = torch.cat([trained.trial_values(batch).float() for batch in plan.batches])
        values = values[torch.from_numpy(plan.value_index)]
        factors = torch.from_numpy(np.random.default_rng(0).standard_normal(tuple(values.shape)).astype(np.float32))
        parameters = [p for p in model.parameters() if p.requires_grad]
        found = torch.autograd.grad((values * factors.to(values.device)).sum(), parameters, allow_unused=True)
        if forward == PLAIN:  # the trial does not run the head
            inside = {id(parameter) for parameter in model.base_model.parameters()}
            pairs = zip(parameters, found, strict=True)
            trained.has_unused = any(gradient is None and id(parameter) in inside for parameter, gradient in pairs)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]

    with _evaluating(model):
        chosen = choose_forward(candidate, run)
        plain_gradients = gradients(PLAIN)
        options = [chosen, dataclasses.replace(chosen, fuse=False), Forward("padded", fuse=False)]
        for forward in dict.fromkeys(options):
            try:
                difference = _difference(gradients(forward), plain_gradients)
            except FAILURES as error:
                logger.info("%s cannot be trained with %s: %s", candidate.name, forward, error)
                continue
            if difference <= tolerance:
                break
            logger.warning(
                "%s: gradients with %s differ from the plain ones by %.1e, so it is not used; training is correct, but "
                "slower.",
                candidate.name,
                forward,
                difference,
            )
        else:
            forward = Forward("one_by_one", fuse=False)
    for decoder in decoders:
        decoder.fuse_gradients = forward.fuse
    return forward


def enable_checkpointing(
    model: PreTrainedModel, decoders: Sequence[DecoderBackbone], layout: Forward, *, option: str
) -> None:
    """Let the layers keep only their input, and run again in the backward (arXiv 1604.06174).

    Raises:
        ConfigError: the model does not support it; the message names the option.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if layout.layout == "tree":  # the backward runs the layers again, which then attend to trees again
        options["context_fn"] = lambda: (contextlib.nullcontext(), attending_to_trees(model.base_model))
    try:
        model.gradient_checkpointing_enable(options)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
    for decoder in decoders:
        decoder.checkpointing = True


def _difference(got: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of gradients, relative to the largest gradient."""
    scale = max(float(each.abs().max()) for each in expected)
    return max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True)) / max(scale, 1e-12)


def _no_dropout(model: PreTrainedModel) -> bool:
    return not any(getattr(part, "attention_dropout", 0.0) for part in model.modules())


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Any:
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
