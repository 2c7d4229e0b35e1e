"""What every kind of reward model answers, without weights: what to write, where to read, how values become a reward.

The weights are elsewhere, in an executor. Whoever scores holds a `Kind`: it turns conversations into positions to read,
and the values read there into rewards and components.

Shapes: `[R]` values read by one batch, `[M]` sequences of a call, `[K]` numbers per value, `[H]` components.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from gym_rm.config import Config
from gym_rm.engine.kinds.readouts import Readout
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.rendered import Rendered
from gym_rm.engine.token_tree import IntArray
from gym_rm.errors import ConfigError, nearest
from gym_rm.scores import FloatArray


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known about a model before its weights are loaded.

    Attributes:
        name: folder, hub id or class name, for errors.
        config: its Hugging Face configuration.
        heads: the modules beside the backbone and how many numbers each gives; empty for one without linear layers.
        tokenizer: its tokenizer.
    """

    name: str
    config: Any
    heads: Mapping[str, int]
    tokenizer: Any

    def outputs_of(self, head: str) -> int:
        """How many numbers a head gives.

        Raises:
            ConfigError: the model has no such head.
        """
        for name in (head, head.partition(".")[0]):
            if name in self.heads:
                return self.heads[name]
        raise ConfigError(
            f"{self.name!r} has no head {head!r}; it has {sorted(self.heads)}.{nearest(head, self.heads)} Pass head=."
        )


@dataclass(frozen=True, slots=True)
class Reduction:
    """What M sequences earned.

    Attributes:
        rewards: float32 `[M]`.
        components: float32 `[M, H]`.
        steps: float32 `[R]`, one reward per value read, where a value is the judgement of one step; else None.
    """

    rewards: FloatArray
    components: FloatArray
    steps: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class Kind(abc.ABC):
    """One kind of reward model, for one model.

    Attributes:
        readout: what the executor computes at the positions that are read.
        input_format: what is written besides the messages.
        component_names: names of the `[H]` components of the reward.
        settings: what else decides the number, for `Scores.provenance`.
    """

    name: ClassVar[str]
    Options: ClassVar[type[Config]]
    """The options of this kind; the text under each field is its help."""

    readout: Readout
    input_format: InputFormat = field(default_factory=InputFormat)
    component_names: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    @abc.abstractmethod
    def of(cls, facts: ModelFacts, options: Any) -> Kind:
        """This kind for a model.

        Args:
            facts: what is known about the model.
            options: an instance of `Options`.

        Raises:
            ConfigError: the model is not of this kind, or an option does not fit it.
        """

    def read_positions(self, rendered: Rendered) -> IntArray:
        """Increasing positions in the ids at which a value is read, at least one; by default the last token.

        Raises:
            ConversationError: this text has no position to read; its row gets the reason.
        """
        return np.array([len(rendered.input_ids) - 1])

    @abc.abstractmethod
    def reduce(self, values: FloatArray, starts: IntArray) -> Reduction:
        """Rewards and components from the values `[R, K]` of M sequences.

        `starts` is `[M + 1]`: the values of sequence m are `values[starts[m]:starts[m + 1]]`.
        """


def no_components(size: int) -> FloatArray:
    """`[M, 0]`."""
    return np.empty((size, 0), dtype=np.float32)
