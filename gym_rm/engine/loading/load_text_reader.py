"""How a decoder reads conversations, by its tokenizer alone."""

from __future__ import annotations

from typing import Any

from gym_rm.config import divide_settings
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.renderer import Renderer, TextReader
from gym_rm.engine.text.text_options import TextOptions
from gym_rm.engine.text.tokenizers import load_tokenizer

UNLIMITED = 10**9  # tokenizers without a limit have a much larger `model_max_length`


def reader_of_tokenizer(path: str, **options: Any) -> TextReader:
    """Return how a decoder with this tokenizer and its chat template reads conversations.

    Args:
        path: folder or hub id.
        **options: the fields of `TextOptions`.

    Raises:
        ConfigError: the folder has no tokenizer, it has no chat template, or an option is unknown or invalid.
    """
    (text,) = divide_settings(options, TextOptions, owner="a tokenizer")
    tokenizer = load_tokenizer(path)
    own = tokenizer.model_max_length
    limit = text.max_length or (own if own < UNLIMITED else None)
    options = {**dict(text), "max_length": None, "overlong": "error"}  # no conversation is shortened: lengths are known
    return TextReader(Renderer(tokenizer, input_format=InputFormat(), **options), limit, path)
