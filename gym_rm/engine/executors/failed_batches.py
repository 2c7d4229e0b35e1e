"""Batches that failed: save them with what is needed to run them again, and read them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import nn

from gym_rm.engine.debugging import failed_folder
from gym_rm.engine.executors.executor import LoadSpec, ModelSource
from gym_rm.engine.kinds import readouts
from gym_rm.engine.loading.checkpoint import LoadOptions, ModelFiles, open_checkpoint
from gym_rm.engine.token_tree import Batch, PaddedBatch, TokenTree
from gym_rm.errors import ConfigError, brief, logger, warn_once

if TYPE_CHECKING:
    from gym_rm.engine.executors.loaded_model import LoadedModel

MOST_SAVED = 20  # batches of one process, so that a broken model does not fill the disk
SAMPLES = 16  # values of a tensor
_saved: list[str] = []


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """A batch that was saved.

    Attributes:
        batch: the batch.
        about: plain values: the error, the forward, the model and its options, its files' digest, and versions.
    """

    batch: Batch
    about: dict[str, Any]


def save_failed(batch: Batch, reason: str, model: LoadedModel) -> str | None:
    """Save a batch and return its file; None if `GYM_RM_SAVE_FAILED` is not set, or this process has saved enough."""
    folder, spec = failed_folder(), model.spec
    if folder is None:
        return None
    if len(_saved) >= MOST_SAVED:
        warn_once(f"this process has saved {MOST_SAVED} failed batches in {folder}, and saves no more.")
        return None
    file = folder / f"batch-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{len(_saved) + 1}.safetensors"
    try:
        about = {
            "type": type(batch).__name__,
            "reason": reason,
            "models": [_options_of(source) for source in spec.sources],
            "readout": {"type": type(spec.readout).__name__, **dataclasses.asdict(spec.readout)},
            "options": {name: getattr(spec, name) for name in ("tree", "quantization", "prefix_cache_tokens")},
            "info": dataclasses.asdict(model.info),
            "weights": weights_digest(model.models) if spec.num_ranks == 1 else None,  # a rank has a part of them
        }
        arrays = {each.name: getattr(batch, each.name) for each in dataclasses.fields(batch)}
        arrays = {name: np.ascontiguousarray(value) for name, value in arrays.items() if value is not None}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(arrays, file, metadata={"gym_rm": json.dumps(about)})
    except Exception as error:  # such as a full disk or a lost GPU; the batch's own error must still be told
        logger.warning("a failed batch cannot be saved in %s: %s", folder, brief(error))
        return None
    _saved.append(str(file))
    return str(file)


def weights_digest(models: Sequence[nn.Module]) -> str:
    """Return a digest of some values of every tensor of models; training and `update_weights` change it."""
    digest = hashlib.sha256()
    for model in models:
        for name, tensor in sorted(model.state_dict().items()):
            values = tensor.detach().reshape(-1)
            some = values[:: max(1, len(values) // SAMPLES)].float().cpu().numpy()
            digest.update(name.encode() + some.tobytes())
    return digest.hexdigest()[:16]


def read_failed(file: str | os.PathLike[str]) -> FailedBatch:
    """Return a batch that `save_failed` wrote.

    Raises:
        ConfigError: the file is no saved batch.
    """
    try:
        with safe_open(file, "np") as tensors:
            about = json.loads(tensors.metadata()["gym_rm"])
            arrays = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        made: Batch = {"TokenTree": TokenTree, "PaddedBatch": PaddedBatch}[about["type"]](**arrays)
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{os.fspath(file)!r} is not a batch that GYM_RM_SAVE_FAILED saved: {type(error).__name__}: {error}"
        ) from error
    return FailedBatch(made, about)


def spec_of(failed: FailedBatch) -> LoadSpec:
    """Return the model and the readout of a saved batch.

    Raises:
        ConfigError: the model was passed in by the caller, its folder is not here, or the file is damaged.
    """
    about = failed.about
    if None in about.get("models", ()):
        raise ConfigError(
            "the model of this batch was passed in by a program, which must run it itself: read_failed(file).batch "
            "goes to executor.run."
        )
    try:
        model, *others = (open_checkpoint(LoadOptions(**options)) for options in about["models"])
        readout = dict(about["readout"])
        made = getattr(readouts, readout.pop("type"))
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in readout.items()}
        return LoadSpec(model, made(**values), others[0] if others else None, **about["options"])
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"the saved batch does not say how to load its model: {brief(error)}.") from error


def _options_of(source: ModelSource) -> dict[str, Any] | None:
    """Return the options that open a checkpoint again; None for a model that was passed in."""
    if not isinstance(source, ModelFiles):
        return None
    names = ("kind", "head", "base", "attn_implementation", "revision")
    given = {name: getattr(source.options, name) for name in names}
    texts = {name: str(getattr(source.options, name)).removeprefix("torch.") for name in ("dtype", "device")}
    tokenizer = source.options.tokenizer
    return {
        **given,
        **texts,
        "path": source.source,
        "ignored_tensors": source.options.ignored_tensors,
        "tokenizer": os.fspath(tokenizer) if isinstance(tokenizer, str | os.PathLike) else None,
    }
