"""A Hugging Face folder or hub id to a loaded model and tokenizer, or a reason why not."""

from __future__ import annotations

import importlib.resources
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

from gym_rm.errors import ConfigError, nearest
from gym_rm.engine.loading.lora import Adapter, find_adapter
from gym_rm.engine.loading.families import Family, choose_family, recognise
from gym_rm.engine.backbones.heads import headed_model
from gym_rm.engine.text.renderer import own_template

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as it was loaded.

    Attributes:
        model: in evaluation mode, on its device.
        tokenizer: the one saved beside it.
        name: folder, hub id, or `"embedded"`.
        revision: commit of the weights, where the hub told.
        kind: which kind of reward model its family is; `"auto"` where only the model itself can tell.
        options: what its family sets: options of the kind, pooling, a chat template.
    """

    model: PreTrainedModel
    tokenizer: Any
    name: str
    revision: str | None = None
    kind: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)


def embedded(name: str) -> str:
    """Folder of a model that ships with the package."""
    return str(importlib.resources.files("gym_rm") / "assets" / name)


def load_checkpoint(
    path: str | os.PathLike[str] | None,
    *,
    kind: str = "auto",
    head: str | None = None,
    base: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    device_map: str | Mapping[str, Any] | None = None,
    attn_implementation: str | None = None,
    quantization_config: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Load a checkpoint for scoring: safetensors only, every weight present.

    Args:
        path: None for the embedded reward model, a folder, or a hub id; also of a LoRA adapter.
        kind, head: what the checkpoint is, where it does not tell; see `choose_family`.
        base: of an adapter, instead of the one that it names.
        dtype: `"auto"` is the checkpoint's own precision on a GPU and float32 on a CPU, where bfloat16 is far slower.
        device: `"auto"` is the GPU if there is one.
        device_map: passed to accelerate, for a model larger than a device; `device` is then ignored.
        trust_remote_code: run Python from the checkpoint, for families that cannot be loaded otherwise.

    Raises:
        ConfigError: no such folder, not a reward model, weights missing (a head that was never saved), unknown dtype.
    """
    name = "embedded" if path is None else os.fspath(path)
    source = embedded("reward_model") if path is None else name
    if (
        path is not None
        and not Path(source).exists()
        and (source.count("/") != 1 or source.startswith((".", "/", "~")))
    ):
        raise ConfigError(f"there is no folder {source!r}, and it is not a hub id (owner/name) either.")
    place = resolve_device(device)
    loading: dict[str, Any] = {
        "device_map": device_map,
        "attn_implementation": attn_implementation,
        "quantization_config": quantization_config,
    }
    try:
        adapter = find_adapter(source, revision, base)
        if adapter is not None:
            model, tokenizer, family = _load_adapted(adapter, kind, dtype, place, loading)
        else:
            if base is not None:
                raise ConfigError(f"base={os.fspath(base)!r} came with {source!r}, which is no adapter.")
            model, tokenizer, family = _load(source, kind, head, dtype, place, revision, trust_remote_code, loading)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if isinstance(error, ConfigError | torch.OutOfMemoryError):
            raise
        raise ConfigError(f"cannot load {source!r} as a reward model: {error}") from error
    if device_map is None and quantization_config is None and getattr(model, "quantization_method", None) is None:
        model = model.to(place)
    return Checkpoint(
        model.eval(),
        tokenizer,
        name,
        getattr(model.config, "_commit_hash", None) or revision,
        family.kind,
        _with_template(family, tokenizer),
    )


def _load(
    source: str,
    kind: str,
    head: str | None,
    dtype: str | torch.dtype,
    place: torch.device,
    revision: str | None,
    trust_remote_code: bool,
    loading: Mapping[str, Any],
) -> tuple[PreTrainedModel, Any, Family]:
    raw, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
    remote = recognise(PreTrainedConfig(architectures=raw.get("architectures")), (), source)
    if remote is not None and remote.loader == "remote" and not trust_remote_code:
        raise ConfigError(
            f"{source!r} ({remote.name}) runs only by code of its own: {remote.needs}. If you trust the checkpoint's "
            "Python, pass trust_remote_code=True."
        )
    # What transformers has itself never needs the checkpoint's code, trusted or not.
    native = raw.get("model_type") in CONFIG_MAPPING
    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code and not native)
    files = tensor_files(source, revision)
    if trust_remote_code and not native and head is not None:
        family = Family("own code", "decoder" if kind == "auto" else kind, "remote", options={"head": head})
    else:
        family = choose_family(config, files, source, kind=kind, head=head)
    match family.loader:
        case "classifier":
            model_class: Any = AutoModelForSequenceClassification
        case "causal":
            model_class = AutoModelForCausalLM
        case "heads":
            beside = {tensor: file for tensor, file in files.items() if tensor.partition(".")[0] in family.heads}
            shapes = tensor_shapes(source, beside, revision)
            model_class = headed_model(config, shapes, backbone=family.backbone, activation=family.activation)
        case "remote":
            classifier = "AutoModelForSequenceClassification" in raw.get("auto_map", {})
            model_class = AutoModelForSequenceClassification if classifier else AutoModel
    remote_code = {"trust_remote_code": trust_remote_code and not native} if family.loader != "heads" else {}
    model, info = model_class.from_pretrained(
        source,
        config=config,
        dtype=resolve_dtype(dtype, place, config),
        revision=revision,
        use_safetensors=True,
        output_loading_info=True,
        **remote_code,
        **loading,
    )
    _check_present(info["missing_keys"], source, config)
    tokenizer = AutoTokenizer.from_pretrained(
        source, config=config, revision=revision, trust_remote_code=trust_remote_code
    )
    return model, tokenizer, family


def _load_adapted(
    adapter: Adapter, kind: str, dtype: str | torch.dtype, place: torch.device, loading: Mapping[str, Any]
) -> tuple[PreTrainedModel, Any, Family]:
    if loading["quantization_config"] is not None:
        raise ConfigError("an adapter is merged into its base, which must not be quantised; merge and save it first.")
    causal = kind in ("generative", "implicit")
    model_class: Any = AutoModelForCausalLM if causal else AutoModelForSequenceClassification
    config = AutoConfig.from_pretrained(adapter.base)
    if adapter.num_labels is not None:
        config.num_labels = adapter.num_labels
    model, info = model_class.from_pretrained(
        adapter.base,
        config=config,
        dtype=resolve_dtype(dtype, place, config),
        use_safetensors=True,
        output_loading_info=True,
        **loading,
    )
    lacking = [key for key in info["missing_keys"] if not adapter.holds(key)]
    if lacking:
        raise ConfigError(
            f"neither the adapter {adapter.source!r} nor its base {adapter.base!r} has weights for {sorted(lacking)}: "
            "they would be random. Train the adapter with modules_to_save=['score'] (task_type='SEQ_CLS'), or pass "
            "base= a reward model that has its head."
        )
    tokenizer = AutoTokenizer.from_pretrained(adapter.tokenizer)
    return adapter.merge_into(model), tokenizer, Family("adapter", kind)


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
            f"{source!r} holds no safetensors weights, and pickled ones are not read: they can run code. Convert them "
            "once with from_pretrained(...).save_pretrained(...), or pass the revision that holds a converted copy "
            "(on the hub often a pull request: revision='refs/pr/1')."
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
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N'; got {device!r}.") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r} was asked for, but torch sees no GPU; pass device='cpu' or 'auto'.")
    return place


def resolve_dtype(dtype: str | torch.dtype, device: torch.device, config: PreTrainedConfig) -> torch.dtype:
    """A precision by name; `"auto"` is the checkpoint's own on a GPU and float32 elsewhere."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        own = getattr(config, "dtype", None) or torch.float32
        return own if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be 'auto' or one of {sorted(DTYPES)}; got {dtype!r}.{nearest(dtype, DTYPES)}")
    return DTYPES[dtype]


def _with_template(family: Family, tokenizer: Any) -> dict[str, Any]:
    """The family's options; its template only where the tokenizer has none, and what the text must end with."""
    options = {name: value for name, value in family.options.items() if name != "chat_template"}
    if family.suffix or "chat_template" in family.options:
        own = own_template(tokenizer)
        template = own or family.options.get("chat_template")
        if template is not None and (own is None or family.suffix):
            options["chat_template"] = template + family.suffix
    return options


def _check_present(missing: Iterable[str], source: str, config: PreTrainedConfig) -> None:
    lacking = sorted(missing)
    if lacking:
        raise ConfigError(
            f"{source!r} has no weights for {lacking[:5]}{' and more' if len(lacking) > 5 else ''}: they would be "
            f"random. Its architecture is {config.architectures}; a reward model must hold its head."
        )
