"""Names for the exact files of a checkpoint, so that scores of two versions of a folder are never mixed."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable
from pathlib import Path

from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from gym_rm.checks import model_source
from gym_rm.engine.loading.files import tensor_files

# Files beside the weights that change scores: configurations, tokenizers, templates and the checkpoint's own code.
SMALL_FILES = frozenset({".json", ".jinja", ".model", ".txt", ".py"})
SAMPLES, SAMPLE_BYTES = 64, 65_536  # parts of a file of weights
TEMPLATES = "additional_chat_templates"  # folder beside the tokenizer


def revision_of(source: str, revision: str | None, weight_files: Iterable[str], *, sampled: bool = False) -> str | None:
    """Return the commit of a hub repository, or `"sha256:..."` of the files of a folder.

    The digest covers every byte of the weights and of the small files beside them, but not the folder's name and the
    files' times: a copy has the same digest. It takes about one second per gigabyte; `sampled` is a digest of parts of
    each file of weights, by which processes that load the same model find out cheaply whether they do.
    """
    folder = Path(source)
    names = sorted(set(weight_files))
    if not folder.is_dir():
        file = cached_file(source, names[0], revision=revision)
        return None if file is None else extract_commit_hash(str(file), None)
    beside = itertools.chain(folder.iterdir(), (folder / TEMPLATES).glob("*.jinja"))
    small = (str(file.relative_to(folder)) for file in beside if file.suffix in SMALL_FILES and file.is_file())
    whole = hashlib.sha256()
    for name in sorted({*names, *small}):
        path = folder / name
        whole.update(f"{name} {_sample(path) if sampled and name in names else _digest(path)}\n".encode())
    return f"{'sampled' if sampled else 'sha256'}:{whole.hexdigest()[:16]}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sample(path: Path) -> str:
    """Return a digest of the size of a file and of some parts of it, from its start to its end."""
    size = path.stat().st_size
    parts = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(number * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
            parts.update(file.read(SAMPLE_BYTES))
    return parts.hexdigest()


def revision_of_model(source: str, revision: str | None = None) -> str | None:
    """Return the revision of a model in a folder or a repository, or of one of the package, as `revision_of` does."""
    source = model_source("model", source)
    return revision_of(source, revision, tensor_files(source, revision).values())


def revision_of_tokenizer(source: str) -> str | None:
    """Return the revision of a tokenizer in a folder or a repository of its own, as `revision_of` does."""
    source = model_source("tokenizer", source)
    return revision_of(source, None, [] if os.path.isdir(source) else ["tokenizer_config.json"])
