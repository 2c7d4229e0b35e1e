"""Batches that failed: save them with what is needed to run them again, and read them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gym_rm.engine.debugging import failed_folder
from gym_rm.engine.executors.executor import LoadSpec, ModelInfo, ModelSource
from gym_rm.engine.kinds import readouts
from gym_rm.engine.loading.checkpoint import LoadOptions, ModelFiles, open_checkpoint
from gym_rm.engine.token_tree import Batch, PaddedBatch, TokenTree
from gym_rm.errors import ConfigError, logger

MOST_SAVED = 20  # batches of one process, so that a broken model does not fill the disk
_saved = itertools.count(1)


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """A batch that was saved.

    Attributes:
        batch: the batch.
        about: plain values: the error, the forward, the model and its options, its files' digest, and versions.
    """

    batch: Batch
    about: dict[str, Any]


def save_failed(batch: Batch, reason: str, spec: LoadSpec, info: ModelInfo) -> str | None:
    """Save a batch and return its file; None if `GYM_RM_SAVE_FAILED` is not set, or was filled by this process."""
    folder = failed_folder()
    if folder is None or (number := next(_saved)) > MOST_SAVED:
        return None
    readout = {"type": type(spec.readout).__name__, **dataclasses.asdict(spec.readout)}
    sources = [_options_of(source) for source in spec.sources]
    options = {name: getattr(spec, name) for name in ("tree", "quantization", "prefix_cache_tokens")}
    about = {
        "type": type(batch).__name__,
        "reason": reason,
        "models": sources,
        "readout": readout,
        "options": options,
        "info": dataclasses.asdict(info),
    }
    arrays = {each.name: getattr(batch, each.name) for each in dataclasses.fields(batch)}
    arrays = {name: np.ascontiguousarray(value) for name, value in arrays.items() if value is not None}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"batch-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{number}.safetensors"
        save_file(arrays, file, metadata={"gym_rm": json.dumps(about)})
    except (OSError, SafetensorError) as error:  # the batch's own error must still be told
        logger.warning("a failed batch cannot be saved in %s: %s", folder, error)
        return None
    return str(file)


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
        ConfigError: the model was passed in by the caller, or its folder is not here.
    """
    about = failed.about
    if None in about["models"]:
        raise ConfigError(
            "the model of this batch was passed in by a program, which must run it itself: read_failed(file).batch "
            "goes to executor.run."
        )
    model, *others = (open_checkpoint(LoadOptions(**options)) for options in about["models"])
    readout = dict(about["readout"])
    made = getattr(readouts, readout.pop("type"))
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in readout.items()}
    return LoadSpec(model, made(**values), others[0] if others else None, **about["options"])


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
