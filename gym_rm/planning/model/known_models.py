"""Sizes of a model from its name, its folder or inline sizes."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.resources
import json
import os
import re
from pathlib import Path
from typing import Any

from gym_rm.checks import model_source
from gym_rm.errors import ConfigError
from gym_rm.planning.model.config_sizes import read_config, shape_from_config
from gym_rm.planning.model.shape import ModelShape

# Ends of names of models that have the sizes of the model without it.
VARIANTS = re.compile(r"-(Instruct|Base|Chat|it|pt|SFT|DPO|hf|Thinking|2507)$", re.IGNORECASE)


def load_shape(model: str | None, config: Any, *, num_labels: int | None, name: str) -> ModelShape:
    """Return the sizes of a model. A hub id is looked up in the table of known models, then on the hub.

    Args:
        model: folder with a `config.json`, the path of such a file, hub id or name of a known model; None for `config`.
        config: inline sizes, with the names of a `config.json`; None for `model`.
        num_labels: numbers that a reward model's head computes; None for a language model.
        name: of the component, for messages.

    Raises:
        ConfigError: neither or both are given, a size is missing or impossible, or the model cannot be found.
    """
    if (model is None) == (config is None):
        given = "neither" if model is None else "both"
        raise ConfigError(
            f"{name}: give either model (a folder, a hub id or a known name) or config (sizes), got {given}."
        )
    if model is None:
        return shape_from_config(config, name=name, num_labels=num_labels, source="given sizes", by_hand=True)
    path = Path(os.path.expanduser(model_source(name, model)))
    if os.path.exists(path) or model.startswith((".", "~", os.sep)) or model.endswith((".json", os.sep)):
        if not os.path.exists(path):
            raise ConfigError(f"{name}: the model {model!r} does not exist; expected a folder with a config.json.")
        source = f"config.json of {model!r}"
        return shape_from_config(read_config(path), name=name, num_labels=num_labels, source=source)
    return _named(model, num_labels, name)


def _named(model: str, num_labels: int | None, name: str) -> ModelShape:
    known = _look_up(model)
    if known is None:
        source = f"config.json of {model} on the hub"
        return shape_from_config(_hub_config(model, name), name=name, num_labels=num_labels, source=source)
    entry = known_models()[known]
    source = f"table of known models, {known}: {entry['source']}"
    shape = shape_from_config(entry, name=name, num_labels=num_labels, source=source)
    if known.rpartition("/")[2].lower() == model.rpartition("/")[2].lower():
        return shape
    note = f"{model} has the sizes of {known}; tokens that were added are not counted"
    return dataclasses.replace(shape, notes=(note, *shape.notes))


@functools.cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the configurations of known models by hub id, each with its `source`."""
    models: dict[str, dict[str, Any]] = _table()["models"]
    return {**models, **{name: models[same] for name, same in _table()["same_sizes"].items()}}


@functools.cache
def _table() -> dict[str, Any]:
    file = importlib.resources.files("gym_rm").joinpath("planning", "model", "known_models.json")
    table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return table


def _look_up(model: str) -> str | None:
    """Return the known model of this name, with or without its organisation and the end for its variant."""
    by_name: dict[str, set[str]] = {}
    for known in known_models():
        for name in (known, known.partition("/")[2]):
            by_name.setdefault(name.lower(), set()).add(known)
    while len(matches := by_name.get(model.lower(), set())) != 1:
        shorter = VARIANTS.sub("", model)
        if shorter == model:
            return None
        model = shorter
    (known,) = matches
    same: str = _table()["same_sizes"].get(known, known)
    return same


def _hub_config(model: str, name: str) -> dict[str, Any]:
    names = {known.lower(): known for known in known_models()}
    close = difflib.get_close_matches(model.lower(), names, n=3, cutoff=0.5)
    listed = f" Nearest known: {', '.join(names[match] for match in close)}." if close else ""
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
    """Return the `config.json` of a hub id, from the hub's cache or the hub."""
    import huggingface_hub

    return read_config(Path(huggingface_hub.hf_hub_download(model, "config.json", etag_timeout=10)))
