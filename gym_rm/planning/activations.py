"""Bytes of the tensors that a forward or a backward keeps, counted operation by operation in transformers and gym_rm.

They depend on the sizes of a model alone. Tests compare `kept` with what torch saves for the backward
(`torch.autograd.graph.saved_tensors_hooks`), and the constants of the engine with the engine.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from gym_rm.planning.model.shape import Layer, ModelShape

SOFT_CAPPED = frozenset({"gemma2"})  # attention step by step, because its logits have a soft cap
HEAD_NORMS = frozenset({"qwen3", "qwen3_moe", "gemma3_text"})
WIDE_NORMS = frozenset({"gemma", "gemma2", "gemma3_text"})  # the product with the weight is in float32 too
PAGE_SIZE = 32  # of gym_rm.engine.backbones.tree_attention
PAGES_AT_ONCE = 32  # of gym_rm.engine.backbones.tree_attention
TESTED_ROWS = 2064  # the largest of gym_rm.engine.backbones.batch_invariance


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes for each token, and for each token and token of its text (attention matrices and masks)."""

    token: float
    pair: float = 0.0

    def of(self, tokens: float, length: float) -> float:
        """Return the bytes of so many tokens in texts of this length."""
        return tokens * (self.token + self.pair * length)


@dataclass(frozen=True, slots=True)
class Kept:
    """What training keeps of a forward for the backward.

    Attributes:
        layers: of all layers.
        layer: of the layer that keeps the most.
        inputs: the hidden states between layers, which gradient checkpointing keeps instead of `layers`.
        outside: of the embedding and the last norm.
        backward: gradients inside a layer, beside what was kept.
    """

    layers: Bytes
    layer: Bytes
    inputs: Bytes
    outside: Bytes
    backward: Bytes


def _experts_of_a_token(layer: Layer) -> float:
    return max(1.0, layer.active_mlp / (layer.mlp / layer.experts)) if layer.experts else 1.0


def _layer_kept(shape: ModelShape, layer: Layer, size: float, split: float, *, masks: bool, frozen: bool) -> Bytes:
    hidden, kind, heads, kv_heads = shape.hidden, shape.model_type, layer.heads * split, layer.kv_heads * split
    chosen = _experts_of_a_token(layer)
    mlp = 2 * layer.intermediate * split * size  # gate, its activation, up, and their product
    mlp += 2 * chosen * hidden * size + 64 * chosen if layer.experts else 0.0
    in_norms = 2 * layer.head_dim if kind in HEAD_NORMS else 0
    norms = max(2, (layer.norms - in_norms) // hidden)
    # A norm keeps its input in float32, and what it multiplies with a weight that is trained.
    normed = 4 + (0.0 if frozen else 4 if kind in WIDE_NORMS else size)
    token = (4 * heads * layer.head_dim + 2 * hidden) * size + norms * (hidden * normed + 4)
    if kind in HEAD_NORMS:
        token += (heads + kv_heads) * (layer.head_dim * normed + 4)
    if kind in SOFT_CAPPED:
        return Bytes(token + mlp, heads * (size + max(size, 4.0)))
    return Bytes(token + 4 * heads + mlp, size if masks else 0.0)


@functools.lru_cache(maxsize=1024)
def kept(shape: ModelShape, size: float, split: float, masks: bool, frozen: bool = False) -> Kept:
    """Return what training keeps for the backward.

    Args:
        shape: sizes of the model.
        size: bytes of a number in a forward.
        split: share of heads and inner columns on one device: 1 / tensor_parallel_size.
        masks: whether attention keeps a mask for each layer, as scaled dot product attention does on a CPU.
        frozen: whether its weights are not trained, beside LoRA adapters.
    """
    parts = [(_layer_kept(shape, layer, size, split, masks=masks, frozen=frozen), n) for layer, n in shape.layers]
    layers = Bytes(*(sum(getattr(part, name) * n for part, n in parts) for name in Bytes.__slots__))
    hidden = shape.hidden
    inner = max(layer.intermediate for layer, _ in shape.layers) * split
    return Kept(
        layers=layers,
        layer=max((part for part, _ in parts), key=lambda part: part.token),
        inputs=Bytes(shape.num_layers * hidden * size),
        outside=Bytes((3 * hidden + 4) * max(size, 4.0) + 16),
        backward=Bytes(
            (inner + 2 * hidden) * size, shape.heads * split * size if shape.model_type in SOFT_CAPPED else 0.0
        ),
    )


@functools.lru_cache(maxsize=1024)
def forward(shape: ModelShape, size: float, split: float, masks: bool) -> Bytes:
    """Return what a forward without gradients has at its peak, for layers as transformers runs them."""
    hidden, capped = shape.hidden, shape.model_type in SOFT_CAPPED
    peaks = []
    for layer, _ in shape.layers:
        queries, keys = layer.heads * layer.head_dim * split, layer.kv_heads * layer.head_dim * split
        mlp = 1.5 * layer.intermediate * split + (2 * _experts_of_a_token(layer) * hidden if layer.experts else 0)
        attention = 6 * queries + 2 * keys
        pair = 4 * layer.heads * split if capped else 1.0 if masks else 0.0
        peaks.append(Bytes((3 * hidden + max(mlp, attention)) * size, pair * size))
    return max(peaks, key=lambda peak: peak.token + peak.pair)


def tree_forward(shape: ModelShape, size: float, split: float, *, tokens: float, places: float, pages: bool) -> float:
    """Return the bytes that scoring a token tree has at its peak, in the largest layer.

    Args:
        shape, size, split: as for `kept`.
        tokens, places: unique tokens of the tree, and places in the pages of attention that they fill.
        pages: whether attention runs over groups of pages, as on a CPU.
    """
    token, place, group = _tree_layer(shape, size, split, pages)
    attention = token * tokens + place * places + group * min(places, PAGES_AT_ONCE * PAGE_SIZE)
    return max(attention, forward(shape, size, split, False).token * tokens)


@functools.lru_cache(maxsize=1024)
def _tree_layer(shape: ModelShape, size: float, split: float, pages: bool) -> tuple[float, float, float]:
    """Return the bytes of attention over a tree: for a token, for a place in pages, and for one in a group of them."""
    peaks = []
    for layer, _ in shape.layers:
        queries, keys = layer.heads * layer.head_dim * split, layer.kv_heads * layer.head_dim * split
        scores = 4 * PAGE_SIZE * layer.heads * split + 2 * queries if shape.model_type in SOFT_CAPPED else 0.0
        token = 2 * (shape.hidden + layer.head_dim + queries + keys)  # residual, normed states, positions, projections
        place = 3 * queries + 2 * keys  # of the queries' tiles and of the pages, and both orders of the result
        peaks.append((token * size, place * size, (2 * keys + scores) * size if pages else 0.0))
    return max(peaks)


def tested_products(shape: ModelShape) -> float:
    """Return the bytes of the products in float32 that loading a scorer tries for batch invariance."""
    columns = max(
        max(layer.intermediate / 2 / _experts_of_a_token(layer), layer.heads * layer.head_dim)
        for layer, _ in shape.layers
    )
    return 4.0 * (TESTED_ROWS * (2 * columns + shape.hidden) + columns * shape.hidden)


def largest_parameter(shape: ModelShape) -> float:
    """Return the numbers of the largest parameter."""
    inside = (layer.mlp * 0.67 if layer.experts else layer.intermediate * shape.hidden / 2 for layer, _ in shape.layers)
    return max(float(shape.vocabulary * shape.hidden), *inside)
