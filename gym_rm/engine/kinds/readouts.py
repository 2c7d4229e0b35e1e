"""Descriptions of the values that the executor computes. `backbones.heads` builds the heads from them.

Shapes: values are float32 `[R, K]`, with K numbers for each of R positions to read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ModuleHead:
    """Outputs of a module of the model, applied to the hidden state in float32. K is the number of outputs.

    Attributes:
        name: name of the module in the model.
    """

    name: str


@dataclass(frozen=True, slots=True)
class TokenLogits:
    """Logits of K tokens of the vocabulary.

    Attributes:
        token_ids: ids of the tokens.
    """

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenLogProbabilities:
    """Log-probability of the token at each position, under the model, and under the reference if there is one."""


@dataclass(frozen=True, slots=True)
class ClassifierLogits:
    """Logits of a classifier with its own pooling. K is the number of labels. A position only selects the sequence."""


Readout: TypeAlias = ModuleHead | TokenLogits | TokenLogProbabilities | ClassifierLogits
