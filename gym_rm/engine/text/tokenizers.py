"""Loading of tokenizers, without running code of a checkpoint unless the user allows it."""

from __future__ import annotations

import os
from typing import Any

from gym_rm.errors import ConfigError


def load_tokenizer(source: str | os.PathLike[str], *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return the tokenizer of a folder or hub id.

    Args:
        source: folder or hub id.
        trust_remote_code: whether Python code from the checkpoint may run.
        **options: further arguments of `AutoTokenizer.from_pretrained`.

    Raises:
        ConfigError: the files of the tokenizer are missing or malformed, or the tokenizer needs its own code.
    """
    from transformers import AutoTokenizer  # loads torch

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
        vocabulary = len(tokenizer) - len(tokenizer.added_tokens_decoder)
    except Exception as error:  # its files can be malformed in any way
        raise ConfigError(
            f"the tokenizer of {os.fspath(source)!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if vocabulary <= 2:  # without files, transformers makes a tokenizer of special tokens and marks of word boundaries
        raise ConfigError(
            f"{os.fspath(source)!r} has no tokenizer (such as tokenizer.json); save the model's tokenizer there with "
            "save_pretrained, or pass tokenizer= (a tokenizer, a folder or a hub id)."
        )
    return tokenizer
