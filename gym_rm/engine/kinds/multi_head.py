"""Several outputs, combined into one reward by fixed weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from gym_rm.checks import finite
from gym_rm.engine.kinds.decoder import LastTokenKind, PoolingOptions, padding_of
from gym_rm.engine.kinds.kind import ModelFacts, Reduction
from gym_rm.engine.kinds.readouts import ClassifierLogits, ModuleHead
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.token_tree import IntArray
from gym_rm.errors import ConfigError, nearest
from gym_rm.scores import FloatArray

Weights: TypeAlias = Mapping[str, float] | Sequence[float]


def component_names(config: Any, size: int) -> tuple[str, ...]:
    """Return names for `size` outputs: the configuration's labels, or numbered names if it has none."""
    labels = tuple(str(label) for _, label in sorted((config.id2label or {}).items()))
    if len(labels) == size and not all(re.fullmatch(r"LABEL_\d+", label) for label in labels):
        return labels
    return tuple(f"objective_{index}" for index in range(size))


def weights_of(names: Sequence[str], weights: Weights) -> FloatArray:
    """Return weights `[H]` for named components.

    Args:
        names: names of the H components.
        weights: a mapping by name (missing names get 0), or a list.

    Raises:
        ConfigError: a name is unknown, or the number of weights is not H.
    """
    size = len(names)
    wrong = f"weights must be numbers by name, or one number for each of {list(names)}; got {weights!r:.200}."
    if isinstance(weights, Mapping):
        unknown = sorted(map(str, set(weights) - set(names)))
        if unknown:
            raise ConfigError(
                f"weights has unknown components {unknown}; the model has {list(names)}." + nearest(unknown[0], names)
            )
        if not weights:
            raise ConfigError(wrong)
        weights = [weights.get(name, 0.0) for name in names]
    if isinstance(weights, str) or not isinstance(weights, Sequence | np.ndarray) or len(weights) != size:
        raise ConfigError(wrong)
    return np.array([finite(f"weights[{name!r}]", each) for name, each in zip(names, weights, strict=True)], np.float32)


@dataclass(frozen=True, slots=True)
class MultiHeadKind(LastTokenKind):
    """Kind whose reward is the weighted sum of several outputs, which are its components.

    Attributes:
        weights: float32 `[H]`.
    """

    name = "multi_head"

    weights: FloatArray = field(default_factory=lambda: np.empty(0, dtype=np.float32))

    class Options(PoolingOptions):
        """Options of `kind="multi_head"`."""

        weights: Any = None
        """`{label: weight}` (missing labels get 0), or a list; None for `objective_weights` in config.json."""
        head: str = "score"
        """Name of the head in the model. A model without this head must be a classifier with its own pooling."""

    @classmethod
    def of(cls, facts: ModelFacts, options: Options) -> MultiHeadKind:
        """See `Kind.of`."""
        weights = options.weights if options.weights is not None else getattr(facts.config, "objective_weights", None)
        if weights is None:
            raise ConfigError(
                "kind='multi_head' needs weights= ({label: weight}, or a list) or objective_weights in config.json."
            )
        decoder = options.head in facts.heads
        outputs = facts.outputs_of(options.head) if decoder else facts.config.num_labels
        names = component_names(facts.config, outputs)
        numbers = weights_of(names, weights)
        return cls(
            ModuleHead(options.head) if decoder else ClassifierLogits(),
            InputFormat(encoder=not decoder),
            names,
            {
                **({"pooling": options.pooling, "head": options.head} if decoder else {}),
                "weights": dict(zip(names, numbers.tolist(), strict=True)),
            },
            pooling=options.pooling if decoder else "last",
            padding=padding_of(facts.config) if decoder else None,
            weights=numbers,
        )

    def reduce(self, values: FloatArray, starts: IntArray) -> Reduction:
        """Return weighted sums `[M]` as rewards and outputs `[M, H]` as components."""
        components = values[starts[1:] - 1]
        # Not a matrix product, whose rounding depends on the number of rows.
        return Reduction((components * self.weights).sum(axis=1), components)
