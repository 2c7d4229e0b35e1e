"""Files of a checkpoint: find them, read JSON and headers of tensors, and refuse whatever could run code."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub
import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from gym_rm.checks import model_source, offer_functions
from gym_rm.documents import read_mapping
from gym_rm.engine.text.tokenizers import load_tokenizer
from gym_rm.errors import ConfigError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HUB_SECONDS = 10  # to find out whether a hub repository exists


@contextlib.contextmanager
def refusing_malformed(source: str, role: str = "a reward model") -> Iterator[None]:
    """Turn every error of reading a checkpoint into a ConfigError, because its files can be malformed in any way."""
    try:
        yield
    except (ConfigError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError(f"cannot load {source!r} as {role}: {type(error).__name__}: {error}") from error


def require_source(source: str, revision: str | None = None, *, option: str = "path") -> None:
    """Check that a folder or a hub repository exists, with at most one request to the hub.

    Error messages name the `option` that contains the source.

    Raises:
        ConfigError: the folder cannot be read, or there is neither a folder nor a repository of this name.
    """
    if os.path.isdir(source):
        return
    if os.path.exists(source):
        hint = offer_functions(source)
        raise ConfigError(f"{option}={source!r} is a file; expected the folder that contains config.json.{hint}")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        raise ConfigError(f"{option}={source!r} does not exist and is not a hub id (owner/name).")
    try:
        files = ("config.json", "adapter_config.json")
        cached = (huggingface_hub.try_to_load_from_cache(source, name, revision=revision) for name in files)
        if not any(isinstance(path, str) for path in cached):
            huggingface_hub.HfApi().model_info(source, revision=revision, timeout=HUB_SECONDS)
    except Exception as error:  # invalid, missing, private, offline, or the hub cannot be reached
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{option}={source!r} is not a folder, and the hub repository cannot be opened: {type(error).__name__}: "
            f"{reason}"
        ) from error


def absolute(source: str) -> str:
    """Return the absolute path of a folder, which other processes and later working directories find; or the hub id."""
    return os.path.abspath(source) if os.path.isdir(source) else source


def find_file(source: str, name: str, revision: str | None = None) -> Path | None:
    """Return the path of a file of a checkpoint; None if the checkpoint does not have it."""
    found = cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def read_config(source: str, revision: str | None = None) -> dict[str, Any]:
    """Return the content of a checkpoint's `config.json`.

    Raises:
        ConfigError: the file is missing or malformed.
    """
    file = find_file(source, "config.json", revision)
    if file is None:
        raise ConfigError(f"{source!r} has no config.json; expected a checkpoint saved with save_pretrained.")
    return read_mapping(file, "a configuration")


def check_tokenizer(tokenizer: Any) -> Any:
    """Return the user's tokenizer, given as an object, or as a folder or hub id to load it from.

    Raises:
        ConfigError: the value is neither, or the tokenizer cannot be loaded.
    """
    if isinstance(tokenizer, str | os.PathLike):
        source = model_source("tokenizer", os.fspath(tokenizer))
        require_source(source, option="tokenizer")
        return load_tokenizer(source)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(
            "tokenizer must be a Hugging Face tokenizer, or the folder or hub id to load it from; got "
            f"{type(tokenizer).__name__} {tokenizer!r:.80}."
        )
    return tokenizer


def tensor_files(source: str, revision: str | None = None) -> dict[str, str]:
    """Return the file of each tensor of a checkpoint.

    Raises:
        ConfigError: the checkpoint has no safetensors (other formats can run code when they are read), its index is
            malformed, or the index names a file that is not a safetensors file of the checkpoint.
    """
    whole = find_file(source, WEIGHTS, revision)
    if whole is not None:
        with open_tensors(whole) as tensors:
            return dict.fromkeys(tensors.keys(), WEIGHTS)
    index = find_file(source, INDEX, revision)
    if index is None:
        raise ConfigError(
            f"{source!r} has no safetensors weights, and pickled weights are not read, because they can run code. "
            "Convert them with from_pretrained(...).save_pretrained(...), or pass the revision of a converted copy "
            "(on the hub often a pull request: revision='refs/pr/1')."
        )
    files = read_mapping(index, "tensors").get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ConfigError(f"{str(index)!r} must have a weight_map from tensors to files; got {files!r:.80}.")
    for file in files.values():
        if not _is_inside(file):
            raise ConfigError(
                f"{str(index)!r} must name safetensors files inside the checkpoint; got {file!r:.200}, which is not "
                "read."
            )
    return files


def refuse_separate_head(source: str, revision: str | None, files: Collection[str]) -> None:
    """Raise ConfigError if a folder has a head in a file that is not one of the files with its tensors."""
    names = os.listdir(source) if os.path.isdir(source) else ["value_head.safetensors", "value_head.bin"]
    for name in sorted(name for name in names if re.search(r"head.*\.(safetensors|bin)$", name)):
        if name not in files and find_file(source, name, revision) is not None:
            raise ConfigError(
                f"{source!r} has a head in {name!r}, as LLaMA-Factory saves it, which is not read. Put its tensors "
                f"into {WEIGHTS} and pass head= with their first name; or move the file away if it is not needed."
            )


def tensor_headers(
    source: str, files: Mapping[str, str], revision: str | None = None
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype (such as `"F32"`) of tensors, read from the headers of their files.

    Raises:
        ConfigError: a file is missing, is not a safetensors file, or does not contain a tensor.
    """
    headers: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in sorted(set(files.values())):
        path = find_file(source, file, revision)
        if path is None:
            raise ConfigError(f"{source!r} has no file {file!r}, which {INDEX} names; download it again.")
        with open_tensors(path) as tensors:
            for tensor in (t for t, f in files.items() if f == file):
                header = tensors.get_slice(tensor)
                headers[tensor] = tuple(header.get_shape()), str(header.get_dtype())
    return headers


@contextlib.contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file; its header must describe exactly the bytes that follow.

    Raises:
        ConfigError: the file is not a whole safetensors file, or does not contain a tensor that is asked for.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError, LookupError) as error:
        raise ConfigError(f"{str(file)!r} is not a whole safetensors file: {error}; download it again.") from error


def _is_inside(file: Any) -> bool:
    """Return whether an index names a safetensors file below its own folder; the name counts, links are allowed."""
    if not isinstance(file, str) or not file.endswith(".safetensors") or "\\" in file or "\0" in file:
        return False
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts
