"""Load tokenizers, without running code of a checkpoint, and look up single tokens."""

from __future__ import annotations

import os
from typing import Any

from gym_rm.checks import model_source
from gym_rm.errors import ConfigError


def load_tokenizer(source: str | os.PathLike[str], **options: Any) -> Any:
    """Return the tokenizer of a folder, a hub id or an embedded model.

    Args:
        source: folder, hub id, or a name such as `"embedded:policy"`.
        **options: further arguments of `AutoTokenizer.from_pretrained`.

    Raises:
        ConfigError: the files of the tokenizer are missing or malformed, or the tokenizer needs its own code.
    """
    from transformers import AutoTokenizer  # loads torch

    source = model_source("tokenizer", os.fspath(source))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
        vocabulary = len(tokenizer) - len(tokenizer.added_tokens_decoder)
    except Exception as error:  # its files can be malformed in any way
        raise ConfigError(f"the tokenizer of {source!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if vocabulary <= 2:  # without files, transformers makes a tokenizer of special tokens and marks of word boundaries
        raise ConfigError(
            f"{source!r} has no tokenizer (such as tokenizer.json); save the model's tokenizer there with "
            "save_pretrained, or pass tokenizer= (a tokenizer, a folder or a hub id)."
        )
    return tokenizer


def answer_tokens(tokenizer: Any, answers: tuple[str, str]) -> tuple[int, int]:
    """Return the ids of the good and the bad answer.

    Raises:
        ConfigError: an answer is not exactly one token, or both are the same token.
    """
    good, bad = (token_of(tokenizer, answer) for answer in answers)
    if good == bad:
        raise ConfigError(f"answers must be two different tokens; got {answers!r}.")
    return good, bad


def token_of(tokenizer: Any, text: str) -> int:
    """Return the id of a text that is a single token.

    Raises:
        ConfigError: the text is not exactly one token.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or (ids[0] == tokenizer.unk_token_id and text != tokenizer.unk_token):
        raise ConfigError(f"{text!r} is not a single token of {tokenizer.name_or_path!r}: it is encoded as {ids}.")
    return int(ids[0])
