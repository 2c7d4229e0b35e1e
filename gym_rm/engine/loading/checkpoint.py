"""Checkpoints (Hugging Face folders or hub ids): open them without reading weights, then load their weights."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from gym_rm.checks import model_source
from gym_rm.config import Config, parse_settings
from gym_rm.engine.backbones.sharded import use_local_weights
from gym_rm.engine.kinds import ModelFacts, check_kind
from gym_rm.engine.loading.device_and_dtype import resolve_device, resolve_dtype
from gym_rm.engine.loading.families import OUTPUT_LAYERS, Family, beside_backbone, choose_family
from gym_rm.engine.loading.files import (
    absolute,
    check_tokenizer,
    find_file,
    read_config,
    refuse_separate_head,
    refusing_malformed,
    require_source,
    tensor_files,
    tensor_headers,
)
from gym_rm.engine.loading.headed_models import headed_model, outputs_of_heads, require_heads
from gym_rm.engine.loading.lora import CONFIG as ADAPTER_CONFIG
from gym_rm.engine.loading.lora import WEIGHTS, Adapter, find_adapter
from gym_rm.engine.loading.revision import revision_of, revision_of_tokenizer
from gym_rm.engine.loading.sharding import Sharding, distributed_arguments
from gym_rm.engine.loading.weights import FLOATS, read_weights
from gym_rm.engine.text.tokenizers import load_tokenizer
from gym_rm.errors import ConfigError

EMBEDDED = "embedded:reward_model"
# Fields of a configuration that change what a model computes from the same weights.
COMPUTES = re.compile("rope|theta|eps|activation|act$|window|layer_types|scal|softcap|multiplier|head|position|qk")
DOES_NOT_COMPUTE = re.compile("dropout|labels?$|_id$|initializer")


def _path(value: Any) -> str | None:
    if value is None or isinstance(value, str | os.PathLike):
        return None if value is None else os.path.expanduser(value)
    raise ConfigError(f"path must be a folder or a hub id, got {type(value).__name__} {value!r:.80}.")


class LoadOptions(Config):
    """Options for loading a checkpoint. Only safetensors are read, and every weight must be present."""

    path: Annotated[str | None, pydantic.BeforeValidator(_path)] = None
    """Folder or hub id of a model or a LoRA adapter; None for the embedded reward model."""
    kind: Annotated[str, pydantic.AfterValidator(check_kind)] = "auto"
    """Kind of reward model; `"auto"` detects it from the checkpoint."""
    head: str | None = None
    """First name of the head's tensors, for a head that no known family has."""
    ignored_tensors: tuple[str, ...] = ()
    """First names of tensors beside the backbone and the head that the reward does not need. Others are an error."""
    base: Annotated[str | None, pydantic.BeforeValidator(_path)] = None
    """Base model of an adapter, instead of the one in the adapter's configuration."""
    tokenizer: Any = None
    """Tokenizer (or its folder or hub id) for a checkpoint without one; None for the checkpoint's own."""
    dtype: Any = "auto"
    """`"auto"`, `"float32"`, `"bfloat16"` or `"float16"`; `"auto"` is the checkpoint's own precision on a GPU, and
    float32 on a CPU, where bfloat16 is far slower."""
    device: Any = "auto"
    """`"auto"` (the GPU if there is one), `"cpu"`, `"cuda"` or `"cuda:1"`."""
    device_map: Any = None
    """Passed to accelerate, for a model larger than a device; `device` must then be `"auto"`."""
    attn_implementation: str | None = None
    """As in transformers. The layout `"tree"` ignores it and uses gym_rm's own attention."""
    quantization_config: Any = None
    """As in transformers."""
    revision: str | None = None
    """Commit, branch or tag of a hub repository."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checkpoint before its weights are read; `load_model` reads them.

    Attributes:
        source: folder or hub id.
        name: model name in `Scores.provenance`.
        options: the user's options.
        config: configuration of the model.
        family: how to load and read the model.
        tensors: file of each tensor, by the tensor's name.
        shapes: shapes of the tensors outside the backbone.
        tokenizer: tokenizer of the checkpoint.
        adapter: the LoRA adapter, if the checkpoint is one; otherwise None.
    """

    source: str
    name: str
    options: LoadOptions
    config: PreTrainedConfig
    family: Family
    tensors: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    tokenizer: Any
    adapter: Adapter | None = None

    def at(self, path: str | os.PathLike[str]) -> ModelFiles:
        """Return another checkpoint of this model, opened with the same options and tokenizer."""
        elsewhere = {"path": os.fspath(path), "revision": None, "base": None, "tokenizer": self.tokenizer}
        return open_checkpoint(self.options.model_copy(update=elsewhere))

    def read_revision(self, *, sampled: bool = False) -> str | None:
        """Return the commit of the checkpoint, or a digest of its files, or of `sampled` parts of its weights.

        An adapter's is followed by its base's, and both by that of a tokenizer from elsewhere.
        """
        weights, tokenizer = self.tensors.values(), self.options.tokenizer
        if self.adapter is None:
            parts = [revision_of(self.source, self.options.revision, weights, sampled=sampled)]
        else:
            parts = [
                revision_of(self.adapter.source, self.options.revision, [WEIGHTS], sampled=sampled),
                revision_of(self.adapter.base, None, weights, sampled=sampled),
            ]
        if isinstance(tokenizer, str | os.PathLike):
            parts.append(revision_of_tokenizer(os.fspath(tokenizer)))
        return "+".join(map(str, parts)) if any(parts) else None

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the loaded model."""
        return resolve_dtype(self.options.dtype, resolve_device(self.options.device), self.config)

    @property
    def stored_dtypes(self) -> Counter[torch.dtype]:
        """How many numbers the files have in each precision, without those of an adapter."""
        source, revision = (self.source, self.options.revision) if self.adapter is None else (self.adapter.base, None)
        counts = Counter[torch.dtype]()
        for shape, dtype in tensor_headers(source, self.tensors, revision).values():
            if dtype in FLOATS:
                counts[FLOATS[dtype]] += math.prod(shape)
        return counts

    @property
    def reference_dtype(self) -> torch.dtype:
        """Precision of most stored weights, or that of the loaded model if it is higher."""
        (stored, _), *_ = self.stored_dtypes.most_common(1) or [(self.dtype, 0)]
        return torch.promote_types(self.dtype, stored)

    @property
    def facts(self) -> ModelFacts:
        """Properties of the model that its kind of reward model needs."""
        heads = outputs_of_heads(self.shapes)
        if self.adapter is not None:
            heads |= outputs_of_heads(self.adapter.tensors)
        return ModelFacts(self.source, self.config, heads, self.tokenizer)


def split_options(options: Mapping[str, Any]) -> tuple[LoadOptions, dict[str, Any]]:
    """Return the options that load a checkpoint, and the others.

    Raises:
        ConfigError: an option that loads a checkpoint is invalid.
    """
    loading = {name: value for name, value in options.items() if name in LoadOptions.model_fields}
    return parse_settings(LoadOptions, loading), {name: value for name, value in options.items() if name not in loading}


def open_checkpoint(options: LoadOptions, *, option: str = "path") -> ModelFiles:
    """Open a checkpoint: read its configuration, its tokenizer and the headers of its tensors.

    Error messages name the `option` that contains it.

    Raises:
        ConfigError: the folder is missing, the checkpoint is not a reward model or has no safetensors, or the dtype or
            device is invalid.
    """
    path = EMBEDDED if options.path is None else options.path
    source, name = model_source(option, path), "embedded" if path == EMBEDDED else path
    resolve_dtype(options.dtype, resolve_device(options.device), PreTrainedConfig())
    if options.device_map is not None and options.device != "auto":
        raise ConfigError(
            f"device={options.device!r} and device_map={options.device_map!r} both say where the model goes; pass only "
            "one."
        )
    require_source(source, options.revision, option=option)
    source = absolute(source)
    with refusing_malformed(source):
        adapter = find_adapter(source, options.revision, options.base)
        if adapter is None and options.base is not None:
            raise ConfigError(f"base={options.base!r} needs an adapter; {source!r} is not an adapter.")
        opened = _open(source, name, options, adapter)
        _require_head(opened)
        return opened


def load_model(
    checkpoint: ModelFiles,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    sharding: Sharding | None = None,
    as_stored: bool = False,
) -> PreTrainedModel:
    """Return the model with its weights, in evaluation mode. They are read tensor by tensor, each to its device.

    Args:
        checkpoint: checkpoint to load.
        device, dtype: device and precision of the model; None for those in the options.
        sharding: how the ranks of torch.distributed divide the weights; None for the whole model.
        as_stored: whether an adapter stays beside its base, and `quantization_config` is not used.

    Raises:
        ConfigError: weights are missing (such as a head that was never saved) or cannot be read.
    """
    options, adapter = checkpoint.options, checkpoint.adapter
    device_map = options.device_map if device is None and sharding is None else None
    device = device or resolve_device(options.device)
    arguments: dict[str, Any] = {
        "config": checkpoint.config,
        "dtype": dtype or resolve_dtype(options.dtype, device, checkpoint.config),
        "device_map": {"": device} if device_map is None and sharding is None else device_map,
        "attn_implementation": _attention(checkpoint),
        "quantization_config": None if as_stored else options.quantization_config,
        "trust_remote_code": False,
    }
    source, revision = (checkpoint.source, options.revision) if adapter is None else (adapter.base, None)
    with refusing_malformed(checkpoint.source):
        classes = {"classifier": AutoModelForSequenceClassification, "causal": AutoModelForCausalLM}
        loader = checkpoint.family.loader
        model_class = classes.get(loader) or headed_model(checkpoint.config, checkpoint.shapes)
        arguments["beside"] = None if loader == "causal" else (*OUTPUT_LAYERS, *options.ignored_tensors)
        if sharding is not None:
            arguments |= distributed_arguments(model_class, checkpoint.config, sharding)
        model, missing = read_weights(model_class, source, checkpoint.tensors, revision=revision, **arguments)
        _require_weights(checkpoint, missing if adapter is None else [k for k in missing if k not in adapter.tensors])
        if adapter is not None:
            model = adapter.apply_to(model, merge=not as_stored)
    if sharding is not None:
        model = use_local_weights(model, model.tp_plan, gather=sharding.fsdp_size > 1)
    return model.eval()


def open_weights(checkpoint: ModelFiles, sharding: Sharding | None = None) -> Mapping[str, torch.Tensor]:
    """Return the weights of a checkpoint by name, on the CPU. A tensor is read from its file when it is used.

    Weights that differ from those in the files are made at once, in memory: an adapter's, experts that transformers
    joins (with a sharding, the rank's part of them on its device), and those of files with several precisions.

    Raises:
        ConfigError: weights are missing or cannot be read.
    """
    experts = any(".experts." in name for name in checkpoint.tensors)
    stored = [*checkpoint.stored_dtypes] if checkpoint.adapter is None else []
    dtype = stored[0] if len(stored) == 1 else checkpoint.dtype
    sharding = sharding if experts else None
    model = load_model(checkpoint, device=torch.device("cpu"), dtype=dtype, sharding=sharding)
    weights: Mapping[str, torch.Tensor] = model.state_dict()
    return weights


def require_same_model(config: PreTrainedConfig, other: PreTrainedConfig, source: str) -> None:
    """Raise ConfigError if another checkpoint's configuration computes different values from the same weights."""
    ours, theirs = (each.get_text_config().to_dict() for each in (config, other))
    computing = (name for name in {*ours, *theirs} if COMPUTES.search(name) and not DOES_NOT_COMPUTE.search(name))
    different = sorted(name for name in computing if ours.get(name) != theirs.get(name))
    if different:
        shown = "; ".join(f"{name}: {ours.get(name)!r:.80} and {theirs.get(name)!r:.80}" for name in different[:5])
        raise ConfigError(
            f"weights: the configuration of {source!r} differs from the loaded model's ({shown}); load it as a new "
            "scorer."
        )


def _open(source: str, name: str, options: LoadOptions, adapter: Adapter | None) -> ModelFiles:
    base, revision = (source, options.revision) if adapter is None else (adapter.base, None)
    if adapter is not None:
        if options.quantization_config is not None:
            raise ConfigError(
                "quantization_config cannot be used with an adapter; merge the adapter into its base and save it first."
            )
        require_source(base, option="base")
        if find_file(base, ADAPTER_CONFIG) is not None:
            raise ConfigError(
                f"the base {base!r} of the adapter {source!r} is itself an adapter; merge it into its own base and "
                "save the result first."
            )
    config = _read_model_config(base, revision)
    tensors = tensor_files(base, revision)
    if options.kind not in ("generative", "implicit"):
        refuse_separate_head(source, options.revision, tensors.values())
    if adapter is not None:
        loader: Any = "causal" if options.kind in ("generative", "implicit") else "classifier"
        family = Family("adapter", options.kind, loader)
    else:
        family = choose_family(config, tensors, source, kind=options.kind, head=options.head)
    firsts = set(family.heads) or set(beside_backbone(tensors))
    beside = {tensor: file for tensor, file in tensors.items() if tensor.partition(".")[0] in firsts}
    if options.tokenizer is not None:
        tokenizer = check_tokenizer(options.tokenizer)
    else:
        place, given = (source, {"config": config}) if adapter is None else (adapter.tokenizer, {})
        own = options.revision if place == source else None
        tokenizer = load_tokenizer(place, revision=own, **given)
    shapes = {tensor: shape for tensor, (shape, _) in tensor_headers(base, beside, revision).items()}
    if family.loader == "heads":
        require_heads(config, shapes)
    outputs = None if adapter is None else _outputs_of_classifier(adapter.tensors)
    if outputs is None and not read_config(base, revision).keys() & {"num_labels", "id2label"}:
        outputs = _outputs_of_classifier(shapes) if family.loader == "classifier" else None
    config.num_labels = outputs or config.num_labels
    return ModelFiles(source, name, options, config, family, tensors, shapes, tokenizer, adapter)


def _read_model_config(source: str, revision: str | None) -> PreTrainedConfig:
    """Return the configuration of a checkpoint; its own code never runs."""
    raw = read_config(source, revision)
    if raw.get("model_type") not in CONFIG_MAPPING and raw.get("auto_map"):
        raise ConfigError(
            f"{source!r} needs its own code (model_type {raw.get('model_type')!r} is not in transformers), which is "
            "never run; load it yourself with trust_remote_code=True if you trust it, and pass the model and its "
            "tokenizer to RewardModelScorer."
        )
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False, "return_dict": True}
    config: PreTrainedConfig = AutoConfig.from_pretrained(source, **options)
    if getattr(config, "transformers_weights", None) is not None:
        raise ConfigError(
            f"{source!r} names its weights file in config.json ({config.transformers_weights!r}); expected "
            "model.safetensors, alone or with an index. Remove transformers_weights from config.json."
        )
    return config


def _attention(checkpoint: ModelFiles) -> str | None:
    """Return the attention implementation for `from_pretrained`: one that applies the soft cap of attention logits.

    Older versions of transformers accept `"sdpa"` for every model and ignore the cap.
    """
    attention = checkpoint.options.attn_implementation
    cap = getattr(checkpoint.config.get_text_config(), "attn_logit_softcapping", None)
    if cap is not None and attention == "sdpa":
        raise ConfigError(
            f"cannot load {checkpoint.source!r} with attn_implementation='sdpa', which ignores the soft cap of its "
            f"attention (attn_logit_softcapping={cap}); pass 'eager'."
        )
    return "eager" if cap is not None and attention is None else attention


def _require_head(checkpoint: ModelFiles) -> None:
    """Raise ConfigError if a classifier has no head, because transformers would make a random one."""
    adapted = {} if checkpoint.adapter is None else checkpoint.adapter.tensors
    shapes = [*checkpoint.shapes.values(), *adapted.values()]
    outputs, found = checkpoint.config.num_labels, _outputs_of_classifier(checkpoint.shapes)
    if checkpoint.family.loader == "classifier" and not adapted and found not in (None, outputs):
        raise ConfigError(
            f"{checkpoint.source!r} has a head of {found} output(s), but config.json says {outputs} (num_labels or "
            "id2label); correct the one that is wrong."
        )
    has_head = any(len(shape) == 2 and shape[0] == outputs for shape in shapes)
    if checkpoint.family.loader == "classifier" and not has_head:
        _require_weights(checkpoint, [f"a head with {outputs} output{'s' * (outputs != 1)}"])


def _outputs_of_classifier(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    names = ("score.weight", "classifier.weight", "classifier.out_proj.weight")
    return next((shapes[name][0] for name in names if name in shapes), None)


def _require_weights(checkpoint: ModelFiles, missing: Iterable[str]) -> None:
    lacking = sorted(missing)
    if not lacking:
        return
    if checkpoint.adapter is not None:
        raise ConfigError(
            f"neither the adapter {checkpoint.adapter.source!r} nor its base {checkpoint.adapter.base!r} has weights "
            f"for {lacking}; they would be random. Train the adapter with modules_to_save=['score'] "
            "(task_type='SEQ_CLS'), or pass base= with a reward model that has a head."
        )
    raise ConfigError(
        f"{checkpoint.source!r} has no weights for {lacking[:5]}{' and more' if len(lacking) > 5 else ''}; they would "
        f"be random. Its architecture is {checkpoint.config.architectures}; the checkpoint must contain the head."
    )
