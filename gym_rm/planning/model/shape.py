"""Sizes of a model: parameters, what a token computes, and what it leaves in the cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gym_rm.planning.quantities import Basis


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of one layer.

    Attributes:
        attention: parameters of the attention's matrices and their biases.
        mlp: parameters of the MLP; of a mixture of experts, of all experts and the router.
        active_mlp: those parameters of the MLP that one token is multiplied with.
        norms: parameters of the norms.
        heads: query heads; 0 for a layer without attention over tokens.
        kv_heads: key and value heads.
        head_dim: width of a query and a key.
        value_dim: width of a value.
        cached: numbers that a token leaves in the KV cache; 0 for an encoder, which generates nothing.
        window: tokens that a token attends to at most; None for all.
        intermediate: numbers that a token has inside the MLP at a time: of the gate and of the product with it.
        experts: number of experts; 0 for a dense MLP.
        linear: inputs plus outputs of all matrices that `all-linear` of peft gives LoRA adapters.
    """

    attention: int
    mlp: int
    active_mlp: int
    norms: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    cached: int
    window: int | None
    intermediate: int
    experts: int = 0
    linear: int = 0

    @property
    def parameters(self) -> int:
        """All parameters of the layer."""
        return self.attention + self.mlp + self.norms

    @property
    def matmul(self) -> int:
        """Parameters that one token is multiplied with."""
        return self.attention + self.active_mlp


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        name: hub id, folder, or what the user called it.
        layers: pairs of a layer and how many such layers there are.
        hidden: width of a hidden state.
        vocabulary: number of tokens.
        embedding: parameters of all embeddings.
        head: parameters of the head; the output layer of a language model counts 0 if it is tied to the embedding.
        head_width: numbers that the head computes for a token: the vocabulary, or one for each objective.
        other: parameters outside of layers, embeddings and head, such as the last norm.
        max_length: tokens of the longest text that the model was made for; None if its configuration does not say.
        bidirectional: whether every token attends to all tokens (an encoder).
        source: where the sizes are from.
        counted: parameters counted in the model's own weights, where they differ from the sum of the sizes; else None.
        basis: what kind of source `parameters` has.
        notes: what the reader of a plan should know about these sizes.
        model_type: type of the configuration, such as `qwen3`; it says how layers are computed.
        stored: dtype of the weights' files; None if the configuration does not say.

    Example:
        >>> from gym_rm.planning.model.loading import shape_from_config
        >>> shape = shape_from_config({"model_type": "llama", "vocab_size": 1000, "hidden_size": 64,
        ...     "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4}, name="tiny")
        >>> shape.parameters
        210240
    """

    name: str
    layers: tuple[tuple[Layer, int], ...]
    hidden: int
    vocabulary: int
    embedding: int
    head: int
    head_width: int
    other: int
    max_length: int | None
    bidirectional: bool
    source: str
    counted: int | None = None
    basis: Basis = Basis.FORMULA
    notes: tuple[str, ...] = ()
    model_type: str = ""
    stored: str | None = None

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return sum(count for _, count in self.layers)

    @property
    def computed_parameters(self) -> int:
        """Sum of the sizes."""
        return self.embedding + self.head + self.other + sum(layer.parameters * n for layer, n in self.layers)

    @property
    def parameters(self) -> int:
        """All parameters: those counted in the weights, or else the sum of the sizes."""
        return self.computed_parameters if self.counted is None else self.counted

    @property
    def active_parameters(self) -> int:
        """Parameters of the layers that one token is multiplied with."""
        return sum(layer.matmul * n for layer, n in self.layers)

    @property
    def heads(self) -> int:
        """Number of query heads that every layer's number is a multiple of."""
        return math.gcd(*(layer.heads for layer, _ in self.layers))

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads that every layer's number is a multiple of."""
        return math.gcd(*(layer.kv_heads for layer, _ in self.layers))

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer."""
        return max(layer.parameters for layer, _ in self.layers)

    @property
    def is_language_model(self) -> bool:
        """Whether the head computes one number for each token of the vocabulary."""
        return self.head_width == self.vocabulary

    def lora_parameters(self, rank: int) -> int:
        """Return the parameters of LoRA adapters of this rank on all linear layers but the head.

        A linear layer with `i` inputs and `o` outputs has `rank * (i + o)` (arXiv 2106.09685, section 4.1). This is
        what peft 0.21 trains with `target_modules="all-linear"`, with experts where peft adapts those of the type, and
        then with the layers beside experts, which it leaves out. A new head is not counted.
        """
        return rank * sum(layer.linear * n for layer, n in self.layers)

    def cached_numbers(self, length: int) -> int:
        """Return how many numbers a text of this length leaves in the KV cache; windows bound what a layer keeps."""
        return sum(
            layer.cached * (length if layer.window is None else min(length, layer.window)) * n
            for layer, n in self.layers
        )

    def pairs_attended(self, length: int) -> float:
        """Return the products of one query and one key times heads and layers, for a text of this length."""
        total = 0.0
        for layer, n in self.layers:
            window = length if layer.window is None else min(length, layer.window)
            if self.bidirectional:
                pairs = float(length) * window
            else:
                pairs = window * (window + 1) / 2 + (length - window) * float(window)
            total += pairs * layer.heads * (layer.head_dim + layer.value_dim) / 2 * n
        return total
