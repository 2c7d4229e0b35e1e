"""Decoding of Llama-like models with cached keys and values, in few operations.

R rows begin with P distinct prompts. A prompt is computed once, and its keys and values are kept once: the queries of
all rows of the prompt are one matrix product.

Shapes: P prompts of at most L tokens; R rows with T own tokens so far, in G groups of n slots that share a prompt; H
query heads and H_kv key heads of size D.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from gym_rm.engine.backbones.attention import Attention, LayerCall
from gym_rm.engine.backbones.llama import forward_fingerprint, llama_forward, rotary_positions
from gym_rm.engine.loading.trial import max_batchable_length
from gym_rm.generation.completions import TokenIds
from gym_rm.generation.packed_layers import PackedLayers, can_pack_layers

PROMPT_TOKENS = 16_384  # of prompts that are computed at a time
_capture_stream = functools.cache(torch.cuda.Stream)  # one for all graphs, because cuBLAS keeps memory for each


def lean_obstacle(model: Any) -> str | None:
    """Return why `LeanDecoder` cannot run a model; None if it can."""
    backbone, name = getattr(model, "model", None), type(model).__name__
    if not type(model).__module__.startswith("transformers.") or not hasattr(backbone, "layers"):
        return f"{name} is not a decoder of transformers"
    if forward_fingerprint(backbone) is None or type(model.get_output_embeddings()) is not nn.Linear:
        return f"{name} has other layers than Llama, Mistral and Qwen, or adapters or hooks"
    if max_batchable_length(model.config) is not None:
        return "its rotary frequencies depend on the length of the text"
    return None


class LeanDecoder:
    """Decodes a Llama-like model in few operations, without gradients; it reads the model's own weights.

    Args:
        model: causal language model without a `lean_obstacle`.

    Attributes:
        code: code that it replaces, see `forward_fingerprint`.
        multiple: rows attend to a multiple of so many of their places; those without a token yet are hidden.
    """

    multiple = 1

    def __init__(self, model: Any) -> None:
        self.model, self._backbone = model, model.model
        self.code = forward_fingerprint(self._backbone)
        self._keys = 0  # places of a row that a step attends to; 0 before the first step of an arrangement
        self._graph: Any = None  # of CUDA

    @torch.inference_mode()
    def start(self, prompts: Sequence[TokenIds], prompt_of_row: NDArray[np.int64], max_new_tokens: int) -> Tensor:
        """Compute P prompts and return the logits `[P, V]` of their next tokens.

        Args:
            prompts: P distinct prompts.
            prompt_of_row: `[R]`, index of the prompt with which each row begins; every prompt has a row.
            max_new_tokens: most tokens that the rows grow by.
        """
        weight, attention = self._backbone.embed_tokens.weight, self._backbone.layers[0].self_attn
        self._shared: list[Tensor] = []  # of each layer, keys and values of the groups' prompts; frees those before
        self._suffixes: list[Tensor] = []  # and those of the rows' own tokens, in slots
        # New packed weights, because an optimizer may have changed the model's without a trace.
        self._packed = PackedLayers(self.model) if can_pack_layers(self.model) else None
        lengths = np.array([len(prompt) for prompt in prompts])
        self._lengths = torch.as_tensor(lengths, device=weight.device)
        self._longest, self._room, self._steps = int(lengths.max()), max_new_tokens, 0
        self._even = bool((lengths == self._longest).all())
        self._now: int | Tensor = 0 if self.multiple == 1 else self._lengths.new_zeros(1)  # place of the newest tokens
        positions = torch.arange(self._longest + max_new_tokens, device=weight.device)
        self._cos, self._sin = rotary_positions(self._backbone, weight[:1], positions)
        heads = len(attention.k_proj.weight) // attention.head_dim
        shape = (2, heads, len(prompts), self._longest, attention.head_dim)
        self._none = weight.new_zeros(1, 1, 1)
        self._shared = [weight.new_zeros(shape) for _ in range(self._backbone.config.num_hidden_layers)]
        self._suffixes = [each[:, :, :1, :0] for each in self._shared]
        logits = [self._prompts(prompts[part], part) for part in _parts(lengths)]
        self._prompt_of_row = np.asarray(prompt_of_row)
        self._arrange_rows(np.arange(len(prompts)), self._lengths.new_zeros(len(prompt_of_row)))
        return torch.cat(logits)

    def _prompts(self, prompts: Sequence[TokenIds], part: slice) -> Tensor:
        """Fill the cache of some prompts, and return the logits `[P, V]` of their next tokens."""
        grid = _Grid(prompts, self._lengths.device)
        cache = [both[:, :, part, : grid.longest].transpose(1, 2) for both in self._shared]
        attention = functools.partial(_attend_prompts, grid, cache)
        return self._logits(grid.ids, grid.positions, attention, grid.last)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to each row, int64 `[R]`, and return the logits `[R, V]`, which the next step overwrites."""
        self._tokens.copy_(tokens)
        keys = (self._steps // self.multiple + 1) * self.multiple
        self._steps += 1
        if keys != self._keys:  # other shapes; this step also loads their kernels
            self._keys = keys
            self._output: Tensor | None = None  # of the graph, once it is captured
            return self._step()
        if self._output is None:
            self._output = self._capture()
        self._graph.replay()
        return self._output

    def _step(self) -> Tensor:
        """Append the tokens. While the number of keys stays, shapes and addresses of all operations are the same."""
        self._biases: dict[int | None, Tensor | None] = {}
        logits = self._logits(self._tokens, self._row_lengths + self._now, self._attend_rows)
        self._now += 1
        return logits

    def _capture(self) -> Tensor:
        """Record `_step` as a CUDA graph, in the memory of the one before, and return the logits of its replays."""
        graph, pool = torch.cuda.CUDAGraph(), None if self._graph is None else self._graph.pool()
        with torch.cuda.stream(_capture_stream(self._lengths.device)):
            graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads may wait for the GPU meanwhile
            try:
                logits = self._step()
            finally:
                graph.capture_end()
        self._graph = graph
        return logits

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, an ascending int64 index."""
        self._prompt_of_row = self._prompt_of_row[rows.cpu().numpy()]
        self._arrange_rows(self._slots.prompts, self._slot_of_row[rows])

    def _arrange_rows(self, prompts: NDArray[np.int64], before: Tensor) -> None:
        """Give the rows slots, and move what they had in the slots before, beside groups with these prompts."""
        device = self._lengths.device
        slots = self._slots = Slots(self._prompt_of_row)
        indices = (slots.prompts, slots.rows, self._prompt_of_row, np.searchsorted(prompts, slots.prompts))
        groups, rows, of_row, of_group = (torch.as_tensor(index, device=device) for index in indices)
        self._slot_of_row, self._row_lengths = rows, self._lengths[of_row]
        self._tokens, self._keys = torch.zeros_like(rows), 0
        lengths, keys = self._lengths[groups][:, None], torch.arange(self._longest, device=device)
        # Places of the keys of a prompt among the own tokens of its rows: below 0, and of padding one never reached.
        self._places = torch.where(keys < lengths, keys - lengths, self._room)
        source = torch.zeros(slots.count, dtype=torch.int64, device=device).index_copy_(0, rows, before)
        stays, (kinds, heads, _, _, size) = np.array_equal(prompts, slots.prompts), self._shared[0].shape
        make = self._none.new_empty if self.multiple == 1 else self._none.new_zeros  # a hidden key must be a number
        for layer in range(len(self._shared)):  # one copy of a layer at a time is beside all others
            if not stays:
                self._shared[layer] = self._shared[layer].index_select(2, of_group)
            moved = make(kinds, heads, slots.count, self._room, size)
            for part in range(kinds):
                moved[part, :, :, : self._steps] = self._suffixes[layer][part, :, source, : self._steps]
            self._suffixes[layer] = moved

    def _attend_rows(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention output `[R, H * D]` of the newest tokens; see `Attention`."""
        layer, scale, slots, longest = call.layer, call.scale, self._slots, self._longest
        groups, heads, size = len(slots.prompts), key.shape[1], key.shape[2]
        rows = None if slots.full else self._slot_of_row
        at = slice(None) if slots.full and self.multiple == 1 else self._slot_of_row
        for cache, states in zip(self._suffixes[layer], (key, value), strict=True):
            cache[:, at, self._now] = states.transpose(0, 1)
        suffix_keys, suffix_values = self._suffixes[layer].flatten(1, 2)[:, :, self._seen(call.window)]
        keys, values = self._shared[layer].flatten(1, 2)
        # Heads come first, so that the slots of a group follow each other for each head.
        query = _in_slots(query, rows, slots.count).view(slots.count, heads, -1, size).transpose(0, 1).contiguous()
        of_prompt, of_suffix = (
            torch.baddbmm(self._none, queries, stored.transpose(1, 2), beta=0, alpha=scale)
            for queries, stored in ((query.view(heads * groups, -1, size), keys), (query.flatten(0, 1), suffix_keys))
        )
        scores = torch.cat([of_prompt.view(len(suffix_keys), -1, longest), of_suffix], dim=-1)
        if (bias := self._bias_of(call.window)) is not None:
            scores.view(heads, groups, -1, scores.shape[-1])[..., : bias.shape[-1]].add_(bias)
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        from_prompt = weights.view(heads * groups, -1, weights.shape[-1])[..., :longest].bmm(values)
        attended = from_prompt.view(query.flatten(0, 1).shape).baddbmm_(weights[..., longest:], suffix_values)
        attended = attended.view(query.shape).transpose(0, 1).reshape(slots.count, -1)
        return attended if rows is None else attended[rows]

    def _seen(self, window: int | None) -> slice:
        """Return the places of a row that the steps with this number of keys see."""
        return slice(0 if window is None else max(0, self._keys - self.multiple + 1 - window), self._keys)

    def _bias_of(self, window: int | None) -> Tensor | None:
        """Return 0 for the keys that the newest tokens see, else -inf, `[G, 1, L]` or `[G, 1, L + S]`; None if all."""
        hides = window is not None and self._longest + self._keys > window
        if self._even and self.multiple == 1 and not hides:
            return None
        if window not in self._biases:
            places = self._places
            if self.multiple > 1:  # else all own keys are seen
                own = torch.arange(self._room, device=places.device)[self._seen(window)]
                places = torch.cat([places, own.expand(len(places), -1)], dim=1)
            hidden = places > self._now
            if window is not None:
                hidden |= places <= self._now - window
            self._biases[window] = torch.where(hidden[:, None], -torch.inf, 0.0).to(self._cos.dtype)
        return self._biases[window]

    def _logits(self, ids: Tensor, at: Tensor, attention: Attention, reads: Tensor | None = None) -> Tensor:
        x, rotary = self._backbone.embed_tokens(ids), (self._cos[at], self._sin[at])
        if self._packed is not None:
            return self._packed.logits(x, rotary, attention, reads)
        head = self.model.get_output_embeddings()
        return linear(llama_forward(self._backbone, x, rotary, attention, reads=reads), head.weight, head.bias)


class GraphDecoder(LeanDecoder):
    """`LeanDecoder` on CUDA, each step of which is one launch of a graph instead of hundreds of kernels."""

    multiple = 64


class Slots:
    """Where R rows are: groups of slots beside one prompt each.

    Attributes:
        prompts: int64 `[G]`, the prompt of each group.
        width: n, number of slots of a group.
        count: number of all slots.
        rows: int64 `[R]`, the slot of each row.
        full: whether every slot has a row, in the order of the rows.
    """

    def __init__(self, prompt_of_row: NDArray[np.int64]) -> None:
        prompts, group, counts = np.unique(prompt_of_row, return_inverse=True, return_counts=True)
        rank = np.empty(len(group), dtype=np.int64)  # of each row among those of its prompt
        rank[np.argsort(group, kind="stable")] = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
        # A prompt with many more rows than others gets several groups, so that few slots stay empty.
        self.width = int(min(counts.max(), 2 * math.ceil(len(group) / len(prompts))))
        parts = -(-counts // self.width)
        first = np.cumsum(parts) - parts
        self.prompts = np.repeat(prompts, parts)
        self.count = len(self.prompts) * self.width
        self.rows = (first[group] + rank // self.width) * self.width + rank % self.width
        self.full = np.array_equal(self.rows, np.arange(self.count))


class _Grid:
    """Tokens of prompts, one after another, and their places in the padded grid `[P, L]`."""

    def __init__(self, prompts: Sequence[TokenIds], device: torch.device) -> None:
        lengths = np.array([len(prompt) for prompt in prompts])
        self.longest = int(lengths.max())
        positions = np.concatenate([np.arange(length) for length in lengths])
        starts = np.repeat(np.arange(len(prompts)) * self.longest, lengths)
        self.ids = torch.as_tensor(np.concatenate(prompts).astype(np.int64), device=device)
        self.positions, self.lengths = (torch.as_tensor(numbers, device=device) for numbers in (positions, lengths))
        self.last = torch.as_tensor(np.cumsum(lengths) - 1, device=device)
        even = bool((lengths == self.longest).all())
        self._places = None if even else torch.as_tensor(starts + positions, device=device)

    def pad(self, states: Tensor) -> Tensor:
        """Return the states `[N, H, D]` of all tokens in the grid, `[P, H, L, D]`; 0 at padding."""
        if self._places is not None:
            grid = states.new_zeros(len(self.lengths) * self.longest, *states.shape[1:])
            states = grid.index_copy_(0, self._places, states)
        return states.view(len(self.lengths), self.longest, *states.shape[1:]).transpose(1, 2)

    def unpad(self, grid: Tensor) -> Tensor:
        """Return the states `[N, H, D]` of the tokens from the grid `[P, H, L, D]`."""
        flat = grid.transpose(1, 2).flatten(0, 1)
        return flat if self._places is None else flat[self._places]

    def mask(self, window: int | None, *, only_last: bool) -> Tensor | None:
        """Return which keys a query sees, bool `[L, L]`, or `[P, 1, 1, L]` for the last tokens; None if causal."""
        keys = torch.arange(self.longest, device=self.ids.device)
        queries = self.lengths[:, None, None, None] - 1 if only_last else keys[:, None]
        if window is not None and window < self.longest:
            return (keys <= queries) & (keys > queries - window)
        return keys <= queries if only_last else None


def _attend_prompts(
    grid: _Grid,
    cache: Sequence[Tensor],
    call: LayerCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Store keys and values, and return the attention output `[Q, H, D]`; see `Attention`."""
    pairs = zip(cache[call.layer], (key, value), strict=True)
    keys, values = (stored.copy_(grid.pad(states)) for stored, states in pairs)
    mask = grid.mask(call.window, only_last=call.only_reads)
    attended = scaled_dot_product_attention(
        query.unsqueeze(2) if call.only_reads else grid.pad(query),
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=call.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[:, :, 0] if call.only_reads else grid.unpad(attended)


def _in_slots(states: Tensor, rows: Tensor | None, count: int) -> Tensor:
    """Return the states of rows `[R, H, D]` in their slots, `[count, H, D]`; 0 in empty slots."""
    return states if rows is None else states.new_zeros(count, *states.shape[1:]).index_copy_(0, rows, states)


def _parts(lengths: NDArray[np.int64]) -> Iterator[slice]:
    """Yield slices of prompts whose grid has at most `PROMPT_TOKENS` places, or of one prompt."""
    first = 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or (stop + 1 - first) * lengths[first : stop + 1].max() > PROMPT_TOKENS:
            yield slice(first, stop)
            first = stop
