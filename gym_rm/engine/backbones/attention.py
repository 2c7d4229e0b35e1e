"""What a decoder layer asks of its attention, whatever computes it: pages, nodes, or the rows of a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One layer's call of the attention.

    Attributes:
        layer: number of the layer, whose keys and values a cache may keep.
        scale: factor of the scores.
        window: sliding window of the layer, or None.
        only_reads: whether the queries are those of the tokens that are read, instead of all.
        dropout: share of the weights that training drops.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2, arXiv 2408.00118, section 2), or None.
        sinks: one number per head, which adds to the denominator of the softmax only (gpt-oss), or None.
    """

    layer: int
    scale: float
    window: int | None = None
    only_reads: bool = False
    dropout: float = 0.0
    softcap: float | None = None
    sinks: Tensor | None = None


class Attention(Protocol):
    """Attention of all layers: what a query attends to is known to the object."""

    def __call__(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention output, `[Q, H, D]` or `[Q, H * D]`.

        Args:
            call: the layer and its settings.
            query: `[Q, H, D]`, of all tokens, or of those that are read.
            key, value: `[T, H_kv, D]`, of all tokens.
        """
