"""Bytes of the tensors that a forward or a backward keeps, counted operation by operation in transformers and gym_rm.

Everything here depends on the sizes of a model, not on the work, and is computed once for each model. Tests compare
`kept` with what torch saves for the backward (`torch.autograd.graph.saved_tensors_hooks`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from gym_rm.planning.model.loading import Layer, ModelShape

FUSED = frozenset({"llama", "qwen2", "qwen3", "mistral"})  # gym_rm.engine.backbones.fused.MODEL_TYPES
SOFT_CAPPED = frozenset({"gemma2"})  # attention step by step, because its logits have a soft cap
HEAD_NORMS = frozenset({"qwen3", "qwen3_moe", "gemma3_text", "gemma3"})
WIDE_NORMS = frozenset({"gemma", "gemma2", "gemma3_text", "gemma3"})  # the product with the weight is in float32 too
GELU_PARTS = frozenset({"gpt2"})  # computes gelu from five tensors
RELATIVE = 512  # distances that DeBERTa scores: 256 buckets to each side, as in all published models
PAGE = 32  # gym_rm.engine.backbones.tree_attention.PAGE_SIZE
GROUP_PAGES = 512  # gym_rm.engine.backbones.tree_attention.PAGES_AT_ONCE


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes for each token, and for each token and token of its text (attention matrices and masks).

    Attributes:
        token: bytes for each token.
        pair: bytes for each token times the length of its text.
        once: bytes that do not grow with the tokens.
        text: bytes for each text.
    """

    token: float
    pair: float = 0.0
    once: float = 0.0
    text: float = 0.0

    def of(self, tokens: float, length: float) -> float:
        """Return the bytes of so many tokens in texts of this length."""
        return tokens * (self.token + self.pair * length + self.text / length) + self.once


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


def _is_gated(layer: Layer, hidden: int) -> bool:
    """Return whether an MLP has three matrices: `intermediate` then counts two numbers for each column."""
    return layer.active_mlp < 1.75 * hidden * layer.intermediate


def _chosen(layer: Layer) -> float:
    """Return how many experts compute a token, shared ones included; 1 for a dense MLP."""
    return max(1.0, layer.active_mlp / (layer.mlp / layer.experts)) if layer.experts else 1.0


def _layer_kept(shape: ModelShape, layer: Layer, size: float, split: float, *, masks: bool, mode: str) -> Bytes:
    """Return what one layer keeps. `mode` is `train` (with dropout), `eval` (without) or `lora`."""
    hidden, kind = shape.hidden, shape.model_type
    queries, keys = layer.heads * layer.head_dim * split, layer.kv_heads * layer.head_dim * split
    values = layer.heads * layer.value_dim * split
    heads, inner = layer.heads * split, layer.intermediate * split
    frozen = mode == "lora"
    pair, text = 0.0, 0.0
    once = 4.0 * 4 * hidden if kind in WIDE_NORMS else 0.0
    if _is_gated(layer, hidden):
        mlp = 2 * inner * size  # gate, its activation, up, and their product
        if layer.experts:
            mlp += 2 * _chosen(layer) * hidden * size + 64 * _chosen(layer)
    else:
        mlp = (5 if kind in GELU_PARTS else 2) * inner * size
    if kind == "modernbert":
        token = 10 * hidden * size + 4 * heads + 16
        pair = size if masks else 0.0
    elif kind in GELU_PARTS or not _is_gated(layer, hidden):
        relative = kind == "deberta-v2"
        token = (10 if mode != "eval" or relative else 8) * hidden * size + 16
        if mode == "eval" and not relative:
            token += 4 * heads
            pair = size if masks else 0.0
        else:
            pair = 3 * heads * size  # scores, their dropout, and its mask
        if relative:
            token += 2 * heads * RELATIVE * size
            pair += 9.0  # indices of the distances, which the texts of a batch share, and the mask
            text = 2.0 * hidden * RELATIVE * size  # queries and keys of the distances, for each text
            once = 2.0 * hidden * RELATIVE * size
    else:
        norms = max(2, (layer.norms - 2 * layer.head_dim * (kind in HEAD_NORMS)) // hidden)
        normed = 4 if kind in WIDE_NORMS else size
        token = (2 * queries + 2 * values) * size + norms * hidden * (4 + (0 if frozen else normed)) + norms * 4
        token += 2 * hidden * size  # inputs of the projections
        if kind in HEAD_NORMS:
            token += (queries + keys) * (4 + (0 if frozen else normed)) + 4 * (heads + layer.kv_heads * split)
        if kind in SOFT_CAPPED:
            pair = heads * (size + max(size, 4 if size < 4 else size))
        else:
            token += 4 * heads
            pair = size if masks else 0.0
    return Bytes(token + mlp, pair, once, text)


@functools.lru_cache(maxsize=1024)
def kept(shape: ModelShape, size: float, split: float, masks: bool, mode: str) -> Kept:
    """Return what training keeps for the backward.

    Args:
        shape: sizes of the model.
        size: bytes of a number in a forward.
        split: share of heads and inner columns on one device: 1 / tensor_parallel_size.
        masks: whether attention keeps a mask for each layer, as scaled dot product attention does on a CPU.
        mode: `train`, `eval` for a model without dropout, or `lora` if its weights are frozen.
    """
    each = [(_layer_kept(shape, layer, size, split, masks=masks, mode=mode), n) for layer, n in shape.layers]
    layers = Bytes(*(sum(getattr(b, part) * n for b, n in each) for part in ("token", "pair", "once", "text")))
    largest = max((b for b, _ in each), key=lambda b: b.token)
    hidden = shape.hidden
    steps = max(_inner_of_backward(layer, hidden) for layer, _ in shape.layers) * split
    heads = max(layer.heads for layer, _ in shape.layers) * split
    by_hand = shape.model_type in SOFT_CAPPED or shape.model_type == "deberta-v2"
    return Kept(
        layers=layers,
        layer=largest,
        inputs=Bytes(shape.num_layers * hidden * size),
        outside=Bytes((3 * hidden + 4) * max(size, 4.0) + 16),
        backward=Bytes((steps + 2 * hidden) * size, heads * size if by_hand else 0.0),
    )


def _inner_of_backward(layer: Layer, hidden: int) -> float:
    """Return the numbers of gradients inside an MLP at a time."""
    return float(layer.intermediate if _is_gated(layer, hidden) else 2 * layer.intermediate)


@functools.lru_cache(maxsize=1024)
def forward(shape: ModelShape, size: float, split: float, masks: bool) -> Bytes:
    """Return what a forward without gradients has at its largest moment, for layers as transformers runs them."""
    worst = Bytes(0.0)
    for layer, _ in shape.layers:
        hidden = shape.hidden
        queries, keys = layer.heads * layer.head_dim * split, layer.kv_heads * layer.head_dim * split
        inner, heads = layer.intermediate * split, layer.heads * split
        if _is_gated(layer, hidden):
            mlp = 1.5 * inner + (2 * _chosen(layer) * hidden if layer.experts else 0.0)
        else:
            mlp = (5 if shape.model_type in GELU_PARTS else 2) * inner
        by_hand = shape.model_type in SOFT_CAPPED or shape.model_type == "deberta-v2"
        attention = 4 * queries + 2 * keys + 2 * queries * (shape.model_type != "modernbert")
        if shape.model_type == "deberta-v2":
            attention += 2 * layer.heads * RELATIVE
        pair = (4 * heads if by_hand else (1.0 if masks else 0.0)) * size
        token = (3 * hidden + max(mlp, attention)) * size
        if token + pair > worst.token + worst.pair:
            worst = Bytes(token, pair)
    return worst


@dataclass(frozen=True, slots=True)
class TreeBytes:
    """Bytes of one layer over a token tree at its three largest moments, for each token and for each place in pages.

    Attributes:
        call: in the attention of one group of pages: for tokens, for places.
        joined: when the groups are joined and put into the tokens' order.
        mlp: for tokens, in the MLP.
        group: for places in one group of pages, during `call`.
    """

    call: tuple[float, float]
    joined: tuple[float, float]
    mlp: float
    group: float

    def of(self, tokens: float, places: float) -> float:
        """Return the bytes of the largest moment."""
        call = self.call[0] * tokens + self.call[1] * places + self.group * min(places, GROUP_PAGES * PAGE)
        return max(call, self.joined[0] * tokens + self.joined[1] * places, self.mlp * tokens)


@functools.lru_cache(maxsize=1024)
def tree_forward(shape: ModelShape, size: float, split: float, pages: bool) -> TreeBytes:
    """Return what scoring a token tree has at a time, read off `fused_forward`, `attend` and the layers' forward.

    `pages` is whether attention runs on groups of pages, as on a CPU.
    """
    found = []
    for layer, _ in shape.layers:
        hidden = shape.hidden
        queries, keys = layer.heads * layer.head_dim * split, layer.kv_heads * layer.head_dim * split
        heads, inner = layer.heads * split, layer.intermediate * split
        before = 2 * hidden + 2 * layer.head_dim + queries + 2 * keys  # residual, normed states, positions, projections
        gathered = queries + 2 * keys  # of the queries' tiles, and of the pages
        scores = 4 * PAGE * heads + 2 * queries if shape.model_type in SOFT_CAPPED else 0.0
        group = (2 * keys + scores) * size if pages else 0.0
        if shape.model_type in FUSED:
            mlp = (3 * hidden + 2 * layer.head_dim + 2 * keys + queries + inner) * size
        else:
            mlp = forward(shape, size, split, False).token
        call = (before * size, (gathered + queries) * size)
        joined = ((before + queries) * size, (gathered + 2 * queries) * size)
        found.append(TreeBytes(call, joined, mlp, group))
    return max(found, key=lambda each: each.of(4096.0, 5120.0))


@functools.lru_cache(maxsize=1024)
def largest_products(shape: ModelShape) -> float:
    """Return the bytes of the products that loading a scorer tries, see `same_products`, in float32."""
    worst = 0.0
    for layer, _ in shape.layers:
        columns = layer.intermediate / (2 if _is_gated(layer, shape.hidden) else 1) / _chosen(layer)
        columns = max(columns, layer.heads * layer.head_dim)
        worst = max(worst, TRIED_ROWS * (2 * columns + shape.hidden) + columns * shape.hidden)
    return 0.0 if shape.model_type in GELU_PARTS else 4.0 * worst


TRIED_ROWS = 2064  # gym_rm.engine.backbones.batch_invariance.TESTED_ROWS


@functools.lru_cache(maxsize=1024)
def largest_parameter(shape: ModelShape) -> float:
    """Return the numbers of the largest parameter."""
    inside = max(
        max(layer.intermediate * shape.hidden / (1 if layer.experts else 2), layer.mlp * 0.67 if layer.experts else 0)
        for layer, _ in shape.layers
    )
    return max(float(shape.vocabulary * shape.hidden), inside)
