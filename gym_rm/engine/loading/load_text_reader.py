"""How a model reads conversations, from its folder and without its weights."""

from __future__ import annotations

from typing import Any

from gym_rm.config import divide_settings
from gym_rm.engine.kinds import KINDS, check_kind, detect_kind
from gym_rm.engine.loading.checkpoint import open_checkpoint, split_options
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.renderer import Renderer, TextReader
from gym_rm.engine.text.text_options import TextOptions
from gym_rm.engine.text.tokenizers import load_tokenizer

UNLIMITED = 10**9  # tokenizers without a limit have a much larger `model_max_length`


def reader_of_reward_model(path: str | None = None, **options: Any) -> TextReader:
    """Return how a reward model reads conversations.

    Args:
        path: folder or hub id; None for the embedded reward model.
        **options: the fields of `LoadOptions`, `TextOptions` and of the kind's `Options`.

    Raises:
        ConfigError: the checkpoint is not a reward model, or an option is unknown or invalid.
    """
    load, others = split_options({"path": path, **options})
    checkpoint = open_checkpoint(load)
    kind = checkpoint.family.kind
    kind = detect_kind(checkpoint.facts) if kind == "auto" else check_kind(kind)
    text, of_kind = divide_settings(
        {**checkpoint.family.options, **others},
        TextOptions,
        KINDS[kind].Options,
        owner=f"a reward model of kind {kind!r}",
    )
    found = KINDS[kind].of(checkpoint.facts, of_kind)
    limit = getattr(checkpoint.config.get_text_config(), "max_position_embeddings", None)
    if found.input_format.encoder and limit:  # some count positions that no token has
        limit = min(limit, checkpoint.tokenizer.model_max_length)
    return TextReader(
        _unlimited(checkpoint.tokenizer, text, found.input_format),
        text.max_length or (limit if limit and limit > 0 else None),
        checkpoint.name,
    )


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
    return TextReader(_unlimited(tokenizer, text, InputFormat()), limit, path)


def _unlimited(tokenizer: Any, text: TextOptions, input_format: InputFormat) -> Renderer:
    """Return a renderer that does not shorten conversations, so that all lengths are known."""
    options = {**dict(text), "max_length": None, "overlong": "error"}
    return Renderer(tokenizer, input_format=input_format, **options)
