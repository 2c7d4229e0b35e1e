"""Sizes of a model from its name, its folder or inline sizes."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.resources
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gym_rm.checks import describe
from gym_rm.errors import ConfigError
from gym_rm.planning.model.configs import shape_from_config
from gym_rm.planning.model.settings import read_config, unknown_settings
from gym_rm.planning.model.shape import Layer, ModelShape
from gym_rm.planning.model.weights import count_parameters
from gym_rm.planning.quantities import Basis

__all__ = ["Layer", "ModelShape", "known_models", "load_shape", "read_config", "shape_from_config"]

# Ends of names of models that have the sizes of the model without it.
VARIANTS = re.compile(r"-(Instruct|Base|Chat|it|pt|SFT|DPO|hf|Thinking|2507)$", re.IGNORECASE)


def load_shape(model: str | None, config: Any, *, num_labels: int | None, name: str) -> ModelShape:
    """Return the sizes of a model.

    Args:
        model: folder with a `config.json`, the path of such a file, hub id or name of a known model; None for `config`.
        config: inline sizes, with the names of a `config.json`; None for `model`.
        num_labels: numbers that a reward model's head computes; None for a language model.
        name: of the component, for messages.

    A folder's safetensors headers are counted; where the number is not that of the sizes, the counted one is used. A
    hub id is looked up in the table of known models first. Others need the hub's `config.json`.

    Raises:
        ConfigError: neither or both are given, a size is missing or impossible, or the model cannot be found.
    """
    if (model is None) == (config is None):
        given = "neither" if model is None else "both"
        raise ConfigError(
            f"{name}: give either model (a folder, a hub id or a known name) or config (sizes), got {given}."
        )
    if model is None:
        return _inline(config, num_labels, name)
    if not isinstance(model, str) or not model.strip():
        raise ConfigError(
            f"{name}: model must be a folder, a hub id or the name of a known model, got {describe(model)}."
        )
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path, num_labels, name)
    if path.is_file():
        return shape_from_config(read_config(path), name=name, num_labels=num_labels, source=str(path))
    if model.startswith((".", "~", os.sep)) or model.endswith((".json", os.sep)):
        raise ConfigError(f"{name}: the model {model!r} does not exist; expected a folder with a config.json.")
    return _named(model, num_labels, name)


def _inline(config: Any, num_labels: int | None, name: str) -> ModelShape:
    if not isinstance(config, Mapping):
        raise ConfigError(f"{name}: config must be a mapping with the names of config.json, got {describe(config)}.")
    if problems := unknown_settings(config):
        raise ConfigError(f"{name}: {' '.join(problems)}")
    shape = shape_from_config(config, name=name, num_labels=num_labels, source="given sizes")
    if "model_type" in config or "text_config" in config:
        return shape
    note = "the sizes have no model_type, and are taken for a model like Llama"
    return dataclasses.replace(shape, basis=Basis.ASSUMPTION, notes=(note,))


def _folder(path: Path, num_labels: int | None, name: str) -> ModelShape:
    """Return the sizes of a folder, with the number of parameters in its weights if it has some."""
    config = read_config(path)
    text = config.get("text_config")
    layers = (text if isinstance(text, Mapping) else config).get("num_hidden_layers")
    counted = count_parameters(path, layers if isinstance(layers, int) else None)
    exists = counted.parameters is not None
    source = f"config.json of {str(path)!r}"
    shape = shape_from_config(config, name=name, num_labels=num_labels, source=source, approximate=exists)
    if counted.parameters is None:
        if "no safetensors" in counted.why:
            return shape
        return dataclasses.replace(shape, notes=(*shape.notes, f"parameters are not counted: {counted.why}"))
    body, output = shape.computed_parameters - shape.head, shape.vocabulary * shape.hidden
    # A checkpoint can have another head than the one that is planned, or store a tied output layer twice.
    if counted.parameters in {shape.computed_parameters, body, body + output, body + shape.hidden}:
        source = f"{source}; its weights have the same number of parameters"
        return dataclasses.replace(shape, source=source, basis=Basis.MEASURED)
    note = f"its weights have {counted.parameters:,} parameters, and its sizes give {shape.computed_parameters:,}"
    return dataclasses.replace(
        shape,
        counted=counted.parameters,
        basis=Basis.MEASURED,
        source=f"parameters counted in the weights, layers from {source}",
        notes=(*shape.notes, f"{note}; the first number is used"),
    )


def _named(model: str, num_labels: int | None, name: str) -> ModelShape:
    found = _look_up(model)
    if found is None:
        config = _hub_config(model, name)
        return shape_from_config(config, name=name, num_labels=num_labels, source=f"config.json of {model} on the hub")
    known, config = found
    source = f"table of known models, {known}: {config['source']}"
    notes = (config["note"],) if "note" in config else ()
    if known.rpartition("/")[2].lower() != model.rpartition("/")[2].lower():
        notes = (*notes, f"{model} has the sizes of {known}; tokens that were added are not counted")
    shape = shape_from_config(config, name=name, num_labels=num_labels, source=source)
    return dataclasses.replace(shape, basis=Basis.TABLE, notes=(*notes, *shape.notes))


@functools.cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the configurations of known models by hub id, each with its `source`."""
    models: dict[str, dict[str, Any]] = _table()["models"]
    return {**models, **{name: models[same] for name, same in _table()["same_sizes"].items()}}


@functools.cache
def _table() -> dict[str, Any]:
    text = (
        importlib.resources.files("gym_rm")
        .joinpath("planning", "model", "known_models.json")
        .read_text(encoding="utf-8")
    )
    table: dict[str, Any] = json.loads(text)
    return table


def _look_up(model: str) -> tuple[str, dict[str, Any]] | None:
    """Return the known model of this name, with or without its organisation and the end for its variant."""
    names = {name.lower(): name for name in known_models()}
    last_names: dict[str, list[str]] = {}
    for name in known_models():
        last_names.setdefault(name.partition("/")[2].lower(), []).append(name)
    while True:
        last = last_names.get(model.lower(), [])
        known = names.get(model.lower()) or (last[0] if len(last) == 1 else None)
        shorter = VARIANTS.sub("", model)
        if known is not None:
            known = _table()["same_sizes"].get(known, known)
            return known, known_models()[known]
        if shorter == model:
            return None
        model = shorter


def _hub_config(model: str, name: str) -> dict[str, Any]:
    close = difflib.get_close_matches(model.lower(), [known.lower() for known in known_models()], n=3, cutoff=0.5)
    names = {known.lower(): known for known in known_models()}
    listed = f" Nearest known: {', '.join(names[each] for each in close)}." if close else ""
    advice = f"Give a folder with its config.json, or sizes: config: {{hidden_size: ..., ...}}.{listed}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) is None:
        raise ConfigError(f"{name}: {model!r} is neither a folder nor the name of a known model or a hub id. {advice}")
    try:
        return _download_config(model)
    except Exception as error:  # the hub and the network raise many types
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.120}"
        raise ConfigError(
            f"{name}: {model!r} is not in the table of known models, and its config.json cannot be had from the hub "
            f"({reason}). {advice}"
        ) from error


def _download_config(model: str) -> dict[str, Any]:
    """Return the `config.json` of a hub id, from the hub's cache or in one request without retries."""
    import huggingface_hub
    from huggingface_hub.utils._headers import build_hf_headers

    cached = huggingface_hub.try_to_load_from_cache(model, "config.json")
    if isinstance(cached, str):
        return read_config(Path(cached))
    address = huggingface_hub.hf_hub_url(model, "config.json")
    headers = build_hf_headers()
    reply = huggingface_hub.get_session().get(address, headers=headers, timeout=10, follow_redirects=True)
    reply.raise_for_status()
    config = reply.json()
    if not isinstance(config, dict):
        raise ConfigError(f"config.json of {model!r} is not a JSON object.")
    return config
