"""Base class of the kinds of reward model.

A `Kind` defines the format of the input, the positions at which values are read, and how these values become rewards
and components. It holds no weights: the executor holds them and computes the values.

Shapes: `[R]` values that are read, `[M]` sequences, `[K]` numbers per value, `[H]` components.
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
    """Properties of a model that are known before its weights are loaded.

    Attributes:
        name: folder, hub id or class name, for error messages.
        config: the Hugging Face configuration.
        heads: number of outputs of each head, by name. Modules without linear layers are not heads.
        tokenizer: the tokenizer.
    """

    name: str
    config: Any
    heads: Mapping[str, int]
    tokenizer: Any

    def outputs_of(self, head: str) -> int:
        """Return the number of outputs of a head.

        Raises:
            ConfigError: the model has no such head.
        """
        for name in (head, head.partition(".")[0]):
            if name in self.heads:
                return self.heads[name]
        raise ConfigError(
            f"{self.name!r} has no head {head!r}; it has {sorted(self.heads)}.{nearest(head, self.heads)} Pass the "
            "name of the head as head=."
        )


@dataclass(frozen=True, slots=True)
class Reduction:
    """Rewards and components of M sequences.

    Attributes:
        rewards: float32 `[M]`.
        components: float32 `[M, H]`.
        steps: float32 `[R]`, one reward per step, for process reward models; else None.
    """

    rewards: FloatArray
    components: FloatArray
    steps: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class Kind(abc.ABC):
    """One kind of reward model, set up for one model.

    Attributes:
        readout: description of the values that the executor computes at the positions to read.
        input_format: text that is added to the messages.
        component_names: names of the `[H]` components of the reward.
        settings: other settings that change the reward, for `Scores.provenance`.
    """

    name: ClassVar[str]
    Options: ClassVar[type[Config]]
    """Options of this kind. The docstring under each field is its help text."""

    readout: Readout
    input_format: InputFormat = field(default_factory=InputFormat)
    component_names: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    @abc.abstractmethod
    def of(cls, facts: ModelFacts, options: Any) -> Kind:
        """Create this kind for a model, with an instance of `Options`.

        Raises:
            ConfigError: the model is not of this kind, or an option is invalid for it.
        """

    def read_positions(self, rendered: Rendered) -> IntArray:
        """Return the increasing positions of the tokens to read, at least one. The default is the last token.

        Raises:
            ConversationError: the text has no position to read. Its row gets this error.
        """
        return np.array([len(rendered.input_ids) - 1])

    def reduce(self, values: FloatArray, starts: IntArray) -> Reduction:
        """Compute rewards and components from the values `[R, K]` of M sequences; the default is the last value.

        `starts` is `[M + 1]`. The values of sequence m are `values[starts[m]:starts[m + 1]]`.
        """
        return Reduction(values[starts[1:] - 1, 0], no_components(len(starts) - 1))


def no_components(size: int) -> FloatArray:
    """Return an empty array of components, `[M, 0]`."""
    return np.empty((size, 0), dtype=np.float32)
