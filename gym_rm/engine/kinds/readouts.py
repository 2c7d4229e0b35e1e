"""What the executor computes where a kind reads: weightless descriptions, from which `backbones.heads` makes heads.

Shapes: values are float32 `[R, K]`, K numbers for each of R positions that are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class ModuleHead:
    """A module of the model, applied in float32 to the hidden state: K = its outputs.

    Attributes:
        name: of the module in the model.
    """

    name: str


@dataclass(frozen=True, slots=True)
class TokenLogits:
    """Logits of some tokens of the vocabulary: K = their number.

    Attributes:
        token_ids: which tokens.
    """

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenLogProbabilities:
    """Log-probability of the token at the position, given the tokens before it: K = 2, under policy and reference."""


@dataclass(frozen=True, slots=True)
class GatedHead:
    """Objectives, then their gates, side by side: K = twice the number of objectives.

    Attributes:
        regression, gate: names of the two modules in the model.
        outputs: what the regression's numbers per objective are: quantiles, or (mean, log variance).
    """

    regression: str
    gate: str
    outputs: Literal["quantiles", "normal"]


@dataclass(frozen=True, slots=True)
class ClassifierLogits:
    """The logits of a classifier that pools by itself: K = its labels. Positions only name the row."""


@dataclass(frozen=True, slots=True)
class MarkerPairs:
    """`head(source, first) - head(source, second)` of the hidden states at three marker tokens: K = 1 (PairRM).

    Attributes:
        head: name of the module in the model.
        markers: ids of the tokens before the source, the first and the second candidate.
    """

    head: str
    markers: tuple[int, int, int]


Readout: TypeAlias = ModuleHead | TokenLogits | TokenLogProbabilities | GatedHead | ClassifierLogits | MarkerPairs
