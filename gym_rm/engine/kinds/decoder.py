"""A causal language model with a head: the reward is read at one token of the conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from gym_rm.config import Config, NonNegativeInt
from gym_rm.engine.kinds.kind import Kind, ModelFacts, Reduction, no_components
from gym_rm.engine.kinds.readouts import ModuleHead, TokenLogits
from gym_rm.engine.text.rendered import Rendered
from gym_rm.engine.token_tree import IntArray
from gym_rm.errors import ConfigError, warn_once
from gym_rm.scores import FloatArray

Pooling: TypeAlias = Literal["last", "hf"]


@dataclass(frozen=True, slots=True)
class LastTokenKind(Kind):
    """What kinds share that read at the end of the text.

    Attributes:
        pooling: see `DecoderKind.Options`.
        padding: the configuration's padding token, or None.
    """

    pooling: Pooling = "hf"
    padding: int | None = None

    def read_positions(self, rendered: Rendered) -> IntArray:
        """The token at which the head was trained to read."""
        ids = rendered.input_ids
        last = len(ids) - 1
        if self.padding is None or ids[last] != self.padding:
            return np.array([last])
        content = np.flatnonzero(ids != self.padding)
        hugging_face = int(content[-1]) if len(content) else 0
        warn_once(
            f"texts end in the padding token {self.padding}: the Hugging Face head reads position "
            f"{hugging_face - last - 1} from the end, the last token is at -1. Reading at "
            f"{'the former' if self.pooling == 'hf' else 'the latter'}; pooling='hf' or 'last' decides."
        )
        return np.array([hugging_face if self.pooling == "hf" else last])


class PoolingOptions(Config):
    """Where a head reads."""

    pooling: Pooling = "hf"
    """`"hf"` reads where the Hugging Face head reads, at the last token whose id is not `config.pad_token_id`;
    `"last"` at the last token of the text. They differ where the text ends in the padding token, as with checkpoints
    that pad with EOS."""


def padding_of(config: Any) -> int | None:
    """The padding token that a configuration names, or None."""
    padding = getattr(config.get_text_config(), "pad_token_id", None)
    return None if padding is None else int(padding)


@dataclass(frozen=True, slots=True)
class DecoderKind(LastTokenKind):
    """One number at the end of the text: the reward."""

    name = "decoder"

    class Options(PoolingOptions):
        """Options of `kind="decoder"`."""

        head: str = "score"
        """Name of the head in the model."""
        token_id: NonNegativeInt | None = None
        """Read the logit of this token of the vocabulary instead of a head."""

    @classmethod
    def of(cls, facts: ModelFacts, options: Options) -> DecoderKind:
        """See `Kind.of`."""
        shared: dict[str, Any] = {
            "pooling": options.pooling,
            "padding": padding_of(facts.config),
            "settings": {"pooling": options.pooling},
        }
        if options.token_id is not None:
            return cls(TokenLogits((options.token_id,)), **shared)
        require_one_output(facts, facts.outputs_of(options.head), "decoder")
        return cls(ModuleHead(options.head), **shared)

    def reduce(self, values: FloatArray, starts: IntArray) -> Reduction:
        """The last value of each sequence."""
        return Reduction(values[starts[1:] - 1, 0], no_components(len(starts) - 1))


def require_one_output(facts: ModelFacts, outputs: int, kind: str) -> None:
    """Raise `ConfigError` for a head of another width than a single reward."""
    if outputs != 1:
        raise ConfigError(
            f"{facts.name!r} has a head of {outputs} outputs, and kind={kind!r} reads one; "
            "kind='multi_head' with weights= makes one number of them."
        )
