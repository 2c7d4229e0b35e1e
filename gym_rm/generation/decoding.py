"""Decoding of Llama-like models with cached keys and values, in few operations.

R rows begin with P distinct prompts. A prompt is computed once, and its keys and values are kept once: the queries of
all rows of the prompt are one matrix product.

Shapes: P prompts of at most L tokens; R rows with T own tokens so far, in G groups of n seats that share a prompt; H
query heads and H_kv key heads of size D.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from gym_rm.engine.backbones.fused import fusable_code
from gym_rm.engine.loading.trial import longest_shared
from gym_rm.generation.completions import TokenIds

OCCUPIED = 0.6  # share of seats that are taken, below which the rows move together
PROMPT_TOKENS = 16_384  # of prompts that are computed at a time


class Decoder(Protocol):
    """Computes the next token's logits of rows that grow by one token at a time.

    Attributes:
        worth: share of the rows that must have ended for `keep` to pay.
    """

    worth: float

    def start(self, prompts: Sequence[TokenIds], prompt_of_row: NDArray[np.int64], max_new_tokens: int) -> Tensor:
        """Compute P prompts and return the logits `[P, V]` of their next tokens.

        Args:
            prompts: P distinct prompts.
            prompt_of_row: `[R]`, index of the prompt with which each row begins; every prompt has a row.
            max_new_tokens: most tokens that the rows grow by.
        """

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to each row, int64 `[R]`, and return the logits `[R, V]` of the next ones."""

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, an ascending int64 index."""


def lean_obstacle(model: Any) -> str | None:
    """Return why `LeanDecoder` cannot run a model; None if it can."""
    backbone, name = getattr(model, "model", None), type(model).__name__
    if not type(model).__module__.startswith("transformers.") or not hasattr(backbone, "layers"):
        return f"{name} is not a decoder of transformers"
    if fusable_code(backbone) is None or type(model.get_output_embeddings()) is not nn.Linear:
        return f"{name} has other layers than Llama, Mistral and Qwen, or adapters or hooks"
    if longest_shared(model.config) is not None:
        return "its rotary frequencies depend on the length of the text"
    return None


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer. Queries, keys and values are one product, gate and up another."""

    input_norm: Any
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    qk_eps: float
    out: Any
    mlp_norm: Any
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Any
    scaling: float
    window: int | None


class _Seats:
    """Where R rows sit: groups of seats beside one prompt each.

    Attributes:
        prompts: int64 `[G]`, the prompt of each group.
        width: n, number of seats of a group.
        rows: int64 `[R]`, the seat of each row.
        full: whether every seat is taken, in the order of the rows.
    """

    def __init__(self, prompt_of_row: NDArray[np.int64]) -> None:
        found, group, counts = np.unique(prompt_of_row, return_inverse=True, return_counts=True)
        rank = np.empty(len(group), dtype=np.int64)  # of each row among those of its prompt
        rank[np.argsort(group, kind="stable")] = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
        # A prompt with many more rows than others gets several groups, so that few seats stay empty.
        self.width = int(min(counts.max(), 2 * math.ceil(len(group) / len(found))))
        parts = -(-counts // self.width)
        first = np.cumsum(parts) - parts
        self.prompts = np.repeat(found, parts)
        self.rows = (first[group] + rank // self.width) * self.width + rank % self.width
        self.full = np.array_equal(self.rows, np.arange(len(self.prompts) * self.width))


class LeanDecoder:
    """Decodes a Llama-like model in few operations, without gradients. It computes with copies of joined weights.

    Args:
        model: causal language model without a `lean_obstacle`.
    """

    worth = 0.0

    def __init__(self, model: Any) -> None:
        self.model, self._backbone = model, model.model
        attention = self._backbone.layers[0].self_attn
        self._dim = int(attention.head_dim)
        self._kv_heads = attention.k_proj.weight.shape[0] // self._dim
        self._heads = attention.q_proj.weight.shape[0] // self._dim
        self.refresh()

    @torch.inference_mode()
    def refresh(self) -> None:
        """Read the weights again."""
        self._layers = [
            _read_layer(layer) for layer in self._backbone.layers[: self._backbone.config.num_hidden_layers]
        ]

    @torch.inference_mode()
    def start(self, prompts: Sequence[TokenIds], prompt_of_row: NDArray[np.int64], max_new_tokens: int) -> Tensor:
        """Compute the prompts; see `Decoder`."""
        weight = self._backbone.embed_tokens.weight
        lengths = np.array([len(prompt) for prompt in prompts])
        self._lengths = torch.as_tensor(lengths, device=weight.device)
        self._room, self._steps = max_new_tokens, 0
        places = torch.arange(int(lengths.max()) + max_new_tokens, device=weight.device)
        cos, sin = self._backbone.rotary_emb(weight[:1, None], places[None])
        self._cos, self._sin = (part[0, :, None, : self._dim // 2] for part in (cos, sin))
        shape = (len(prompts), self._kv_heads, int(lengths.max()), self._dim)
        self._cache: list[tuple[Tensor, Tensor]] = [
            (weight.new_zeros(shape), weight.new_zeros(shape)) for _ in self._layers
        ]
        parts = [self._prompts(prompts[part], part) for part in _parts(lengths)]
        self._prompt_of_row = np.asarray(prompt_of_row)
        self._suffixes: list[tuple[Tensor, Tensor]] = []
        self._seat_of_row: Tensor | None = None
        self._row_lengths = self._lengths
        self._sit(None)
        return self._logits(torch.cat(parts))

    def _prompts(self, prompts: Sequence[TokenIds], part: slice) -> Tensor:
        """Fill the cache of some prompts, and return the hidden states `[P, hidden]` of their last tokens."""
        grid = _Grid(prompts, self._lengths.device)
        cache = [(key[part, :, : grid.longest], value[part, :, : grid.longest]) for key, value in self._cache]
        x = self._backbone.embed_tokens(grid.ids)
        cos, sin = self._cos[grid.positions], self._sin[grid.positions]
        for number, layer in enumerate(self._layers):
            padded = grid.pad(self._qkv(layer, x, cos, sin))
            queries, keys, values = torch.split(padded, [self._heads, self._kv_heads, self._kv_heads], dim=2)
            for stored, new in zip(cache[number], (keys, values), strict=True):
                stored.copy_(new.transpose(1, 2))
            if number < len(self._layers) - 1:
                mask = grid.mask(layer.window)
                repeats = self._heads // self._kv_heads
                attended = scaled_dot_product_attention(
                    queries.transpose(1, 2),
                    keys.transpose(1, 2).repeat_interleave(repeats, dim=1),
                    values.transpose(1, 2).repeat_interleave(repeats, dim=1),
                    attn_mask=mask,
                    is_causal=mask is None,
                    scale=1.0,
                )
                x = self._finish(layer, x, grid.unpad(attended.transpose(1, 2).flatten(2)))
        # The last layer runs only at the last tokens.
        last = queries[torch.arange(len(prompts), device=x.device), grid.lengths - 1]
        scores = last.view(len(prompts), self._kv_heads, -1, self._dim) @ cache[-1][0].transpose(-1, -2)
        scores += self._bias(grid.lengths, grid.longest, grid.lengths - 1, layer.window).view(len(prompts), 1, 1, -1)
        attended = scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ cache[-1][1]
        return self._finish(layer, x[grid.last], attended.flatten(1))

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each row; see `Decoder`."""
        x = self._backbone.embed_tokens(tokens)
        at = self._row_lengths + self._steps
        cos, sin = self._cos[at], self._sin[at]
        biases = {window: self._seat_bias(window) for window in {layer.window for layer in self._layers}}
        self._steps += 1
        for number, layer in enumerate(self._layers):
            qkv = self._qkv(layer, x, cos, sin)
            if self._seat_of_row is None:
                attended = self._attend(number, qkv, biases[layer.window])
            else:
                self._taken[self._seat_of_row] = qkv
                attended = self._attend(number, self._taken, biases[layer.window])[self._seat_of_row]
            x = self._finish(layer, x, attended)
        return self._logits(x)

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Keep only these rows; see `Decoder`."""
        self._prompt_of_row = self._prompt_of_row[rows.cpu().numpy()]
        seats = rows if self._seat_of_row is None else self._seat_of_row[rows]
        if len(rows) < OCCUPIED * len(self._seats.prompts) * self._seats.width:
            self._sit(seats)
            return
        if self._seat_of_row is None:
            self._taken = self._empty_seats()
        self._seat_of_row, self._row_lengths = seats, self._row_lengths[rows]

    def _sit(self, before: Tensor | None) -> None:
        """Give the rows new seats, and move their keys and values from the seats before, if they had some."""
        device, like = self._lengths.device, self._cache[0][0]
        seats = self._seats = _Seats(self._prompt_of_row)
        groups = torch.as_tensor(seats.prompts, device=device)
        rows = torch.as_tensor(seats.rows, device=device)
        self._group_lengths = self._lengths[groups]
        self._row_lengths = self._lengths[torch.as_tensor(self._prompt_of_row, device=device)]
        every = np.array_equal(seats.prompts, np.arange(len(self._lengths)))
        self._shared = self._cache if every else [(key[groups], value[groups]) for key, value in self._cache]
        shape = (len(groups) * seats.width, self._kv_heads, self._room, self._dim)
        old, self._suffixes = self._suffixes, []
        for number in range(len(self._layers)):
            pair = (like.new_empty(shape), like.new_empty(shape))
            if before is not None:
                for new, stored in zip(pair, old[number], strict=True):
                    if not seats.full:
                        new[:, :, : self._steps] = 0  # of empty seats
                    new[rows, :, : self._steps] = stored[before, :, : self._steps]
            self._suffixes.append(pair)
        self._seat_of_row = None if seats.full else rows
        self._taken = self._empty_seats()
        longest = like.shape[2]
        self._open = None if bool((self._lengths == longest).all()) else self._bias(self._group_lengths, longest)

    def _empty_seats(self) -> Tensor:
        seats = len(self._seats.prompts) * self._seats.width
        like: Tensor = self._cache[0][0]
        return like.new_zeros(seats, self._heads + 2 * self._kv_heads, self._dim)

    def _seat_bias(self, window: int | None) -> Tensor | None:
        """Return what is added to the scores of the prompts' keys, `[G, 1, 1, 1, L]`."""
        if window is None or self._cache[0][0].shape[2] + self._steps < window:
            return self._open
        queries = self._group_lengths + self._steps
        return self._bias(self._group_lengths, self._cache[0][0].shape[2], queries, window)

    def _bias(self, lengths: Tensor, longest: int, queries: Tensor | None = None, window: int | None = None) -> Tensor:
        """Return 0 for the keys of the prompt in the window of the query, and -inf for others, `[G, 1, 1, 1, L]`."""
        keys = torch.arange(longest, device=lengths.device)
        hidden = keys >= lengths[:, None]
        if window is not None and queries is not None:
            hidden |= keys <= queries[:, None] - window
        zeros = torch.zeros(hidden.shape, dtype=self._cos.dtype, device=lengths.device)
        bias: Tensor = zeros.masked_fill_(hidden, -torch.inf)[:, None, None, None]
        return bias

    def _qkv(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return scaled queries, keys and values `[N, H + 2 H_kv, D]`, normed and rotated as the layer does it."""
        states = linear(_norm(layer.input_norm, x), layer.qkv, layer.qkv_bias).view(len(x), -1, self._dim)
        turned = states[:, : self._heads + self._kv_heads]
        if layer.qk_norm is not None:
            turned.copy_(_rms(turned, layer.qk_norm, layer.qk_eps))
        states[:, : self._heads] *= layer.scaling
        first, second = torch.split(turned, self._dim // 2, dim=-1)
        crossed = first * sin
        first.mul_(cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).add_(crossed)
        return states

    def _attend(self, number: int, qkv: Tensor, bias: Tensor | None) -> Tensor:
        """Return the attention output `[G n, H D]` of the newest tokens, of which keys and values are stored."""
        groups, width, heads = len(self._seats.prompts), self._seats.width, self._kv_heads
        q, k, v = torch.split(qkv, [self._heads, heads, heads], dim=1)
        suffix_keys, suffix_values = self._suffixes[number]
        suffix_keys[:, :, self._steps - 1], suffix_values[:, :, self._steps - 1] = k, v
        window = self._layers[number].window
        seen = slice(0 if window is None else max(0, self._steps - window), self._steps)
        keys, values = self._shared[number]
        q = q.view(groups, width, heads, -1, self._dim)
        repeats, longest = q.shape[3], keys.shape[2]
        of_prompt = q.transpose(1, 2).reshape(groups, heads, width * repeats, self._dim) @ keys.transpose(-1, -2)
        of_suffix = q.reshape(-1, heads, repeats, self._dim) @ suffix_keys[:, :, seen].transpose(-1, -2)
        of_prompt = of_prompt.view(groups, heads, width, repeats, longest)
        if bias is not None:
            of_prompt += bias
        of_suffix = of_suffix.view(groups, width, heads, repeats, -1)
        scores = torch.cat([of_prompt, of_suffix.transpose(1, 2)], dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32).to(qkv.dtype)
        from_prompt = weights[..., :longest].flatten(2, 3) @ values
        from_suffix = weights[..., longest:].transpose(1, 2).flatten(0, 1) @ suffix_values[:, :, seen]
        from_prompt = from_prompt.view(groups, heads, width, repeats, self._dim).transpose(1, 2)
        return from_suffix.view(from_prompt.shape).add_(from_prompt).view(groups * width, -1)

    def _finish(self, layer: _Layer, x: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output from its input and the attention output; x is overwritten."""
        x = _add_product(x, attended, layer.out)
        gate, up = linear(_norm(layer.mlp_norm, x), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return _add_product(x, silu(gate).mul_(up), layer.down)

    def _logits(self, x: Tensor) -> Tensor:
        head = self.model.get_output_embeddings()
        return linear(_norm(self._backbone.norm, x), head.weight, head.bias)


class _Grid:
    """Tokens of prompts, one after another, and their places in the padded grid `[P, L]`."""

    def __init__(self, prompts: Sequence[TokenIds], device: torch.device) -> None:
        lengths = np.array([len(prompt) for prompt in prompts])
        self.longest = int(lengths.max())
        positions = np.concatenate([np.arange(length) for length in lengths])
        starts = np.repeat(np.arange(len(prompts)) * self.longest, lengths)
        self.ids = torch.as_tensor(np.concatenate(prompts).astype(np.int64), device=device)
        self.positions, self.lengths = (torch.as_tensor(each, device=device) for each in (positions, lengths))
        self.last = torch.as_tensor(np.cumsum(lengths) - 1, device=device)
        even = bool((lengths == self.longest).all())
        self._places = None if even else torch.as_tensor(starts + positions, device=device)
        self._count = len(prompts)

    def pad(self, states: Tensor) -> Tensor:
        """Return the states of all tokens in the grid, `[P, L, ...]`; 0 at padding."""
        if self._places is not None:
            grid = states.new_zeros(self._count * self.longest, *states.shape[1:])
            states = grid.index_copy_(0, self._places, states)
        return states.view(self._count, self.longest, *states.shape[1:])

    def unpad(self, grid: Tensor) -> Tensor:
        """Return the states of the tokens from the grid."""
        flat = grid.flatten(0, 1)
        return flat if self._places is None else flat[self._places]

    def mask(self, window: int | None) -> Tensor | None:
        """Return the mask `[L, L]` of a window; None for a causal mask."""
        if window is None or window >= self.longest:
            return None
        return (
            torch.ones(self.longest, self.longest, dtype=torch.bool, device=self.ids.device).tril_().triu_(1 - window)
        )


def _read_layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    gate_up = [mlp.gate_proj, mlp.up_proj]
    norm, eps = None, 0.0
    if hasattr(attention, "q_norm"):
        heads = [len(each.weight) // attention.head_dim for each in qkv[:2]]
        norms = (attention.q_norm, attention.k_norm)
        norm = torch.cat([each.weight.expand(count, -1) for each, count in zip(norms, heads, strict=True)])
        eps = attention.q_norm.variance_epsilon
    # The sliding window is in the configuration for Mistral and in each layer for Qwen; Llama has none.
    holder = attention.config if attention.config.model_type == "mistral" else attention
    return _Layer(
        input_norm=layer.input_layernorm,
        qkv=torch.cat([each.weight for each in qkv]),
        qkv_bias=_joined_bias(qkv),
        qk_norm=norm,
        qk_eps=eps,
        out=attention.o_proj,
        mlp_norm=layer.post_attention_layernorm,
        gate_up=torch.cat([each.weight for each in gate_up]),
        gate_up_bias=_joined_bias(gate_up),
        down=mlp.down_proj,
        scaling=attention.scaling,
        window=getattr(holder, "sliding_window", None),
    )


def _joined_bias(modules: Sequence[Any]) -> Tensor | None:
    if all(module.bias is None for module in modules):
        return None
    return torch.cat(
        [module.weight.new_zeros(len(module.weight)) if module.bias is None else module.bias for module in modules]
    )


def _parts(lengths: NDArray[np.int64]) -> Iterator[slice]:
    """Yield slices of prompts whose grid has at most `PROMPT_TOKENS` places, or of one prompt."""
    first = 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or (stop + 1 - first) * lengths[first : stop + 1].max() > PROMPT_TOKENS:
            yield slice(first, stop)
            first = stop


def _norm(module: Any, x: Tensor) -> Tensor:
    return _rms(x, module.weight, module.variance_epsilon)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = x.float()
    scale = torch.rsqrt(torch.linalg.vector_norm(values, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps))
    return (values * scale).mul_(weight).to(x.dtype)


def _add_product(x: Tensor, y: Tensor, module: Any) -> Tensor:
    x.addmm_(y, module.weight.t())
    return x if module.bias is None else x.add_(module.bias)
