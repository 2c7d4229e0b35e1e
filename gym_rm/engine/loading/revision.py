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
TEMPLATES = "additional_chat_templates"  # folder beside the tokenizer


def revision_of(source: str, revision: str | None, weight_files: Iterable[str]) -> str | None:
    """Return the commit of a hub repository, or `"sha256:..."` of the files of a folder.

    The digest covers every byte of the weights and of the small files beside them, but not the folder's name and the
    files' times: a copy has the same digest. It takes about one second per gigabyte.
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
        with (folder / name).open("rb") as file:
            whole.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return f"sha256:{whole.hexdigest()[:16]}"


def revision_of_model(source: str, revision: str | None = None) -> str | None:
    """Return the revision of a model in a folder or a repository, or of one of the package, as `revision_of` does."""
    source = model_source("model", source)
    return revision_of(source, revision, tensor_files(source, revision).values())


def revision_of_tokenizer(source: str) -> str | None:
    """Return the revision of a tokenizer in a folder or a repository of its own, as `revision_of` does."""
    source = model_source("tokenizer", source)
    return revision_of(source, None, [] if os.path.isdir(source) else ["tokenizer_config.json"])
