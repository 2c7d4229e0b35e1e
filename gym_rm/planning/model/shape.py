"""Sizes of a model: parameters, what a token computes, and what it leaves in the cache."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of one layer.

    Attributes:
        attention: parameters of the attention's matrices and their biases.
        mlp: parameters of the MLP; of a mixture of experts, of all experts and the router.
        active_mlp: those parameters of the MLP that one token is multiplied with.
        norms: parameters of the norms.
        heads, kv_heads: numbers of query heads, and of key and value heads.
        head_dim: width of a query, a key and a value.
        window: tokens that a token attends to at most; None for all.
        intermediate: numbers that a token has inside the MLP at a time: of the gate and of the product with it.
        experts: number of experts; 0 for a dense MLP.
        linear: inputs plus outputs of all matrices, which LoRA adapters of rank 1 have as parameters.
    """

    attention: int
    mlp: int
    active_mlp: int
    norms: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    intermediate: int
    experts: int = 0
    linear: int = 0

    @property
    def parameters(self) -> int:
        """All parameters of the layer."""
        return self.attention + self.mlp + self.norms

    @property
    def cached(self) -> int:
        """Numbers that a token leaves in the KV cache."""
        return 2 * self.kv_heads * self.head_dim


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
        source: where the sizes are from.
        notes: what the reader of a plan should know about these sizes.
        model_type: type of the configuration, such as `qwen3`; it says how layers are computed.

    Example:
        >>> from gym_rm.planning.model.config_sizes import shape_from_config
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
    source: str
    notes: tuple[str, ...] = ()
    model_type: str = ""

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return sum(count for _, count in self.layers)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.embedding + self.head + self.other + sum(layer.parameters * n for layer, n in self.layers)

    @property
    def active_parameters(self) -> int:
        """Parameters of the layers that one token is multiplied with."""
        return sum((layer.attention + layer.active_mlp) * n for layer, n in self.layers)

    @property
    def heads(self) -> int:
        """Number of query heads that every layer's number is a multiple of."""
        return math.gcd(*(layer.heads for layer, _ in self.layers))

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads that every layer's number is a multiple of."""
        return math.gcd(*(layer.kv_heads for layer, _ in self.layers))

    @property
    def is_language_model(self) -> bool:
        """Whether the head computes one number for each token of the vocabulary."""
        return self.head_width == self.vocabulary

    def lora_parameters(self, rank: int) -> int:
        """Return the parameters of LoRA adapters of this rank on all linear layers except the output layer.

        An adapter has two matrices, and `rank * (inputs + outputs)` parameters (LoRA, arXiv 2106.09685, section 4.1).
        peft trains fewer where it takes several matrices for one, or leaves experts out. A new head is not counted.
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
            pairs = window * (window + 1) / 2 + (length - window) * float(window)
            total += pairs * layer.heads * layer.head_dim * n
        return total

    def pairs_between(self, prefix: float, end: float) -> float:
        """Return the products of queries and keys of the tokens from `prefix` to `end` of a text, times their width."""
        return self.pairs_attended(int(end)) - (self.pairs_attended(int(prefix)) if prefix >= 1 else 0.0)

    def weights_read(self, tokens: float) -> float:
        """Return the parameters of the layers that so many tokens meet; experts that none of them chose are not."""
        total = 0.0
        for layer, count in self.layers:
            used = float(layer.mlp)
            if layer.experts:
                used *= 1.0 - (1.0 - layer.active_mlp / layer.mlp) ** max(tokens, 1.0)
            total += count * (layer.attention + used)
        return total

    def numbers_of_heads(self, context: float) -> float:
        """Return the numbers of keys and values that the query heads read one after the other."""
        return sum(
            2 * count * layer.heads * layer.head_dim * min(context, layer.window or context)
            for layer, count in self.layers
        )

    def elementwise_numbers(self, tp: int, *, eager: bool) -> float:
        """Return the numbers that one token reads and writes outside of products.

        Fused: about 10 hidden states a layer, the inside of the MLP, the queries and the keys. Eager, as in
        transformers: a norm has 7 hidden states and a residual 3, the same for queries and keys and 10 for their
        rotation, and 5 of the gate and the product inside the MLP.
        """
        hidden, wide, inside = (20.0, 17.0, 2.5) if eager else (10.0, 2.0, 1.5)
        inner = sum(
            count * (inside * layer.intermediate + wide * (layer.heads + layer.kv_heads) * layer.head_dim)
            for layer, count in self.layers
        )
        return hidden * self.hidden * self.num_layers + inner / tp
