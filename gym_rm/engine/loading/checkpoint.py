"""A Hugging Face folder or hub id: what it holds, found out without its weights; and then its weights."""

from __future__ import annotations

import importlib.resources
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pydantic
import torch
from safetensors import safe_open
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file

from gym_rm.config import Config, Flag
from gym_rm.engine.kinds.kind import ModelFacts
from gym_rm.engine.loading.families import Family, beside_backbone, choose_family, recognise
from gym_rm.engine.loading.headed_models import headed_model, outputs_of_heads
from gym_rm.engine.loading.lora import Adapter, find_adapter
from gym_rm.engine.text.templates import own_template
from gym_rm.errors import ConfigError, nearest

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def _path(value: Any) -> str | None:
    if value is None or isinstance(value, str | os.PathLike):
        return None if value is None else os.fspath(value)
    raise ConfigError(f"path must be a folder or a hub id, got {type(value).__name__} {value!r:.80}.")


class LoadOptions(Config):
    """Which checkpoint, and how it is loaded: safetensors only, every weight present."""

    path: Annotated[str | None, pydantic.BeforeValidator(_path)] = None
    """None for the embedded reward model, a folder, or a hub id; also of a LoRA adapter."""
    kind: str = "auto"
    """Which kind of reward model it is; `"auto"` detects it from what the checkpoint holds."""
    head: str | None = None
    """First name of the tensors of a head that no known family has."""
    base: Annotated[str | None, pydantic.BeforeValidator(_path)] = None
    """Of an adapter, instead of the base that it names."""
    dtype: Any = "auto"
    """`"auto"`, `"float32"`, `"bfloat16"`, `"float16"`; auto is the checkpoint's own precision on a GPU and float32 on
    a CPU, where bfloat16 is far slower."""
    device: Any = "auto"
    """`"auto"` (the GPU if there is one), `"cpu"`, `"cuda"`, `"cuda:1"`."""
    device_map: Any = None
    """Passed to accelerate, for a model larger than a device; `device` is then ignored."""
    attn_implementation: str | None = None
    """As in transformers. With the token tree, attention is gym_rm's own and this serves the other layouts."""
    quantization_config: Any = None
    """As in transformers."""
    revision: str | None = None
    """Commit, branch or tag of a hub repository."""
    trust_remote_code: Flag = False
    """Run Python from the checkpoint, for families that cannot be loaded otherwise."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is known about a checkpoint before any weight is read; `load_model` reads the weights.

    Attributes:
        source: folder or hub id.
        name: what `Scores.provenance` calls it.
        options: how it is loaded.
        config: its configuration.
        family: how it is loaded and read.
        tensors: names of its tensors, and the files that hold them.
        shapes: of the tensors beside the backbone.
        tokenizer: the tokenizer that was saved beside it.
        adapter: the LoRA adapter that it is, or None.
        remote_class: name in `auto_map` of the class that the checkpoint's own code defines, or None.
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
    remote_class: str | None = None

    def at(self, path: str | os.PathLike[str]) -> Checkpoint:
        """Another checkpoint of the same kind, loaded with the same options."""
        elsewhere = {"path": os.fspath(path), "revision": None, "base": None}
        return open_checkpoint(self.options.model_copy(update=elsewhere))

    @property
    def facts(self) -> ModelFacts:
        """What kinds of reward model ask."""
        heads = outputs_of_heads(self.shapes)
        if self.adapter is not None:
            heads |= outputs_of_heads(self.adapter.tensors)
        return ModelFacts(self.source, self.config, heads, self.tokenizer)

    @property
    def kind_options(self) -> dict[str, Any]:
        """Options that the family sets: of its kind, and its template where the tokenizer has none."""
        options = {name: value for name, value in self.family.options.items() if name != "chat_template"}
        if self.family.suffix or "chat_template" in self.family.options:
            own = own_template(self.tokenizer)
            template = own or self.family.options.get("chat_template")
            if template is not None and (own is None or self.family.suffix):
                options["chat_template"] = template + self.family.suffix
        return options


def embedded(name: str) -> str:
    """Folder of a model that ships with the package."""
    return str(importlib.resources.files("gym_rm") / "assets" / name)


def open_checkpoint(options: LoadOptions) -> Checkpoint:
    """Find out what a checkpoint is, from its configuration, tokenizer and the headers of its tensors.

    Raises:
        ConfigError: no such folder, not a reward model, weights in another format, unknown dtype or device.
    """
    source = embedded("reward_model") if options.path is None else options.path
    name = "embedded" if options.path is None else options.path
    hub_id = source.count("/") == 1 and not source.startswith((".", "/", "~"))
    if not Path(source).exists() and not hub_id:
        raise ConfigError(f"{source!r} does not exist and is not a hub id (owner/name) either.")
    resolve_dtype(options.dtype, resolve_device(options.device), PreTrainedConfig())
    try:
        adapter = find_adapter(source, options.revision, options.base)
        if adapter is None and options.base is not None:
            raise ConfigError(f"base={options.base!r} came with {source!r}, which is not an adapter.")
        found = _open(source, name, options) if adapter is None else _open_adapter(adapter, name, options)
        _require_head(found)
        return found
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot load {source!r} as a reward model: {error}") from error


def load_model(checkpoint: Checkpoint, *, device: torch.device | None = None) -> PreTrainedModel:
    """The model with its weights, in evaluation mode, on its device.

    Args:
        checkpoint: what to load.
        device: instead of the options' own.

    Raises:
        ConfigError: weights are missing (a head that was never saved), or cannot be read.
    """
    options = checkpoint.options
    device = device or resolve_device(options.device)
    arguments: dict[str, Any] = {
        "config": checkpoint.config,
        "dtype": resolve_dtype(options.dtype, device, checkpoint.config),
        "use_safetensors": True,
        "output_loading_info": True,
        "device_map": options.device_map,
        "attn_implementation": options.attn_implementation,
        "quantization_config": options.quantization_config,
    }
    try:
        if checkpoint.adapter is not None:
            model, info = _model_class(checkpoint).from_pretrained(checkpoint.adapter.base, **arguments)
            _require_weights(checkpoint, [k for k in info["missing_keys"] if not checkpoint.adapter.holds(k)])
            model = checkpoint.adapter.merge_into(model)
        else:
            if checkpoint.remote_class is not None:
                arguments["trust_remote_code"] = True
            model_class = _model_class(checkpoint)
            model, info = model_class.from_pretrained(checkpoint.source, revision=options.revision, **arguments)
            _require_weights(checkpoint, info["missing_keys"])
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if isinstance(error, ConfigError | torch.OutOfMemoryError):
            raise
        raise ConfigError(f"cannot load {checkpoint.source!r} as a reward model: {error}") from error
    quantized = options.quantization_config is not None or getattr(model, "quantization_method", None) is not None
    if options.device_map is None and not quantized:
        model = model.to(device)
    loaded: PreTrainedModel = model.eval()
    return loaded


def _open(source: str, name: str, options: LoadOptions) -> Checkpoint:
    raw, _ = PreTrainedConfig.get_config_dict(source, revision=options.revision)
    known = recognise(PreTrainedConfig(architectures=raw.get("architectures")), (), source)
    if known is not None and known.loader == "remote" and not options.trust_remote_code:
        raise ConfigError(
            f"{source!r} ({known.name}) needs code of its own to run: {known.needs}. If you trust the checkpoint's "
            "Python, pass trust_remote_code=True."
        )
    # What transformers has itself never needs the checkpoint's code, trusted or not.
    remote = options.trust_remote_code and raw.get("model_type") not in CONFIG_MAPPING
    config = AutoConfig.from_pretrained(source, revision=options.revision, trust_remote_code=remote)
    tensors = tensor_files(source, options.revision)
    if remote and options.head is not None:
        kind = "decoder" if options.kind == "auto" else options.kind
        family = Family("own code", kind, "remote", options={"head": options.head})
    else:
        family = choose_family(config, tensors, source, kind=options.kind, head=options.head)
    firsts = set(family.heads) or set(beside_backbone(tensors))
    beside = {tensor: file for tensor, file in tensors.items() if tensor.partition(".")[0] in firsts}
    classifier = "AutoModelForSequenceClassification"
    return Checkpoint(
        source,
        name,
        options,
        config,
        family,
        tensors,
        tensor_shapes(source, beside, options.revision),
        AutoTokenizer.from_pretrained(
            source, config=config, revision=options.revision, trust_remote_code=options.trust_remote_code
        ),
        remote_class=(classifier if classifier in raw.get("auto_map", {}) else "AutoModel") if remote else None,
    )


def _open_adapter(adapter: Adapter, name: str, options: LoadOptions) -> Checkpoint:
    if options.quantization_config is not None:
        raise ConfigError("an adapter is merged into its base, which must not be quantised; merge and save it first.")
    config = AutoConfig.from_pretrained(adapter.base)
    if adapter.num_labels is not None:
        config.num_labels = adapter.num_labels
    tensors = tensor_files(adapter.base)
    beside = {tensor: file for tensor, file in tensors.items() if tensor.partition(".")[0] in beside_backbone(tensors)}
    loader: Any = "causal" if options.kind in ("generative", "implicit") else "classifier"
    return Checkpoint(
        adapter.source,
        name,
        options,
        config,
        Family("adapter", options.kind, loader),
        tensors,
        tensor_shapes(adapter.base, beside),
        AutoTokenizer.from_pretrained(adapter.tokenizer),
        adapter,
    )


def _model_class(checkpoint: Checkpoint) -> Any:
    family = checkpoint.family
    match family.loader:
        case "classifier":
            return AutoModelForSequenceClassification
        case "causal":
            return AutoModelForCausalLM
        case "heads":
            return headed_model(
                checkpoint.config, checkpoint.shapes, backbone=family.backbone, activation=family.activation
            )
        case "remote":
            return AutoModelForSequenceClassification if checkpoint.remote_class != "AutoModel" else AutoModel


def _require_head(checkpoint: Checkpoint) -> None:
    """Raise `ConfigError` for a classifier without a head of its own: transformers would make a random one."""
    adapted = {} if checkpoint.adapter is None else checkpoint.adapter.tensors
    shapes = [*checkpoint.shapes.values(), *adapted.values()]
    outputs = checkpoint.config.num_labels
    if checkpoint.family.loader == "classifier" and not any(
        len(shape) == 2 and shape[0] == outputs for shape in shapes
    ):
        _require_weights(checkpoint, [f"a head of {outputs} output{'s' * (outputs != 1)}"])


def _require_weights(checkpoint: Checkpoint, missing: Iterable[str]) -> None:
    lacking = sorted(missing)
    if not lacking:
        return
    if checkpoint.adapter is not None:
        raise ConfigError(
            f"neither the adapter {checkpoint.adapter.source!r} nor its base {checkpoint.adapter.base!r} has weights "
            f"for {lacking}: they would be random. Train the adapter with modules_to_save=['score'] "
            "(task_type='SEQ_CLS'), or pass base= a reward model that has its head."
        )
    raise ConfigError(
        f"{checkpoint.source!r} has no weights for {lacking[:5]}{' and more' if len(lacking) > 5 else ''}: they would "
        f"be random. Its architecture is {checkpoint.config.architectures}; a reward model must hold its head."
    )


def tensor_files(source: str, revision: str | None = None) -> dict[str, str]:
    """Which file of a checkpoint holds which tensor.

    Raises:
        ConfigError: there are no safetensors; other formats run code when they are read.
    """
    try:
        whole = cached_file(source, "model.safetensors", revision=revision)
        with safe_open(whole, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), "model.safetensors")
    except OSError:
        pass
    try:
        index = json.loads(Path(cached_file(source, "model.safetensors.index.json", revision=revision)).read_text())
    except OSError as error:
        raise ConfigError(
            f"{source!r} holds no safetensors weights, and pickled weights are not read: they can run code. Convert "
            "them once with from_pretrained(...).save_pretrained(...), or pass the revision that holds a converted "
            "copy (on the hub often a pull request: revision='refs/pr/1')."
        ) from error
    return dict(index["weight_map"])


def tensor_shapes(source: str, files: Mapping[str, str], revision: str | None = None) -> dict[str, tuple[int, ...]]:
    """Shapes of some tensors, read from the headers of their files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(set(files.values())):
        with safe_open(cached_file(source, file, revision=revision), framework="pt") as tensors:
            for tensor in (t for t, f in files.items() if f == file):
                shapes[tensor] = tuple(tensors.get_slice(tensor).get_shape())
    return shapes


def resolve_device(device: str | torch.device) -> torch.device:
    """A device by name; `"auto"` is the GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N'; got {device!r}.") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r} was asked for, but torch sees no GPU; pass device='cpu' or 'auto'.")
    return resolved


def resolve_dtype(dtype: str | torch.dtype, device: torch.device, config: PreTrainedConfig) -> torch.dtype:
    """A precision by name; `"auto"` is the checkpoint's own on a GPU and float32 elsewhere."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        own = getattr(config, "dtype", None) or torch.float32
        return own if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        hint = nearest(str(dtype), DTYPES)
        raise ConfigError(f"dtype must be 'auto' or one of {sorted(DTYPES)}; got {dtype!r}.{hint}")
    return DTYPES[dtype]
