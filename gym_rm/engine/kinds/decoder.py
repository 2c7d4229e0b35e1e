"""Models with one output: a head that is read at one token of the text, or a classifier with its own pooling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from gym_rm.config import Config, NonNegativeInt
from gym_rm.engine.kinds.kind import Kind, ModelFacts
from gym_rm.engine.kinds.readouts import ClassifierLogits, ModuleHead, TokenLogits
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.rendered import Rendered
from gym_rm.engine.token_tree import IntArray
from gym_rm.errors import ConfigError, warn_once

Pooling: TypeAlias = Literal["last", "hf"]


@dataclass(frozen=True, slots=True)
class LastTokenKind(Kind):
    """Base class of the kinds that read at the end of the text.

    Attributes:
        pooling: see `PoolingOptions`.
        padding: id of the padding token in the configuration, or None.
    """

    pooling: Pooling = "hf"
    padding: int | None = None

    def read_positions(self, rendered: Rendered) -> IntArray:
        """Return the position of the token at which the head was trained to read."""
        ids = rendered.input_ids
        last = len(ids) - 1
        if self.padding is None or ids[last] != self.padding:
            return np.array([last])
        content = np.flatnonzero(ids != self.padding)
        hugging_face = int(content[-1]) if len(content) else 0
        warn_once(
            f"texts end with the padding token {self.padding}: pooling='hf' reads at position "
            f"{hugging_face - last - 1}, as the Hugging Face head does, and pooling='last' at position -1. "
            f"Using pooling={self.pooling!r}."
        )
        return np.array([hugging_face if self.pooling == "hf" else last])


class PoolingOptions(Config):
    """Option for the token at which a head reads."""

    pooling: Pooling = "hf"
    """`"hf"` reads at the last token whose id is not `config.pad_token_id`, as the Hugging Face head does. `"last"`
    reads at the last token of the text. They differ if the text ends with the padding token, for example in
    checkpoints that pad with EOS."""


def padding_of(config: Any) -> int | None:
    """Return the id of the padding token in a configuration, or None."""
    padding = getattr(config.get_text_config(), "pad_token_id", None)
    return None if padding is None else int(padding)


@dataclass(frozen=True, slots=True)
class DecoderKind(LastTokenKind):
    """Kind whose reward is the single output of a head at the end of the text."""

    name = "decoder"

    class Options(PoolingOptions):
        """Options of `kind="decoder"`."""

        head: str = "score"
        """Name of the head in the model."""
        token_id: NonNegativeInt | None = None
        """Id of a vocabulary token whose logit is the reward; None to use the head."""

    @classmethod
    def of(cls, facts: ModelFacts, options: Options) -> DecoderKind:
        """See `Kind.of`."""
        shared: dict[str, Any] = {
            "pooling": options.pooling,
            "padding": padding_of(facts.config),
            "settings": dict(options),
        }
        if options.token_id is not None:
            size = facts.config.get_text_config().vocab_size
            if options.token_id >= size:
                raise ConfigError(f"token_id must be below {size}, the size of the vocabulary; got {options.token_id}.")
            return cls(TokenLogits((options.token_id,)), InputFormat(joins_pairs=True), **shared)
        require_one_output(facts, facts.outputs_of(options.head), "decoder")
        return cls(ModuleHead(options.head), **shared)


@dataclass(frozen=True, slots=True)
class EncoderKind(Kind):
    """Kind whose reward is the logit of a `...ForSequenceClassification` model with its own pooling and one label."""

    name = "encoder"

    class Options(Config):
        """`kind="encoder"` has no options."""

    @classmethod
    def of(cls, facts: ModelFacts, options: Options) -> EncoderKind:
        """See `Kind.of`."""
        require_one_output(facts, facts.config.num_labels, "encoder")
        return cls(ClassifierLogits(), InputFormat(encoder=True))


def require_one_output(facts: ModelFacts, outputs: int, kind: str) -> None:
    """Raise ConfigError if the head does not have exactly one output."""
    if outputs != 1:
        raise ConfigError(
            f"{facts.name!r} has a head with {outputs} outputs, but kind={kind!r} needs exactly one; pass "
            "kind='multi_head' with weights= to combine them."
        )
