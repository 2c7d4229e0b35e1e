"""Decoding with a model's own forward and cache; prompts are padded on the left, as its `generate` does."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gym_rm.errors import ConfigError
from gym_rm.generation.completions import TokenIds


class ModelDecoder:
    """Decodes with the model's own forward and cache; prompts are padded on the left.

    Args:
        model: causal language model, also with peft adapters.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._accepted = inspect.signature(base.forward).parameters

    @torch.no_grad()
    def start(self, prompts: Sequence[TokenIds], prompt_of_row: NDArray[np.int64], max_new_tokens: int) -> Tensor:
        """Compute the prompts; see `LeanDecoder`."""
        device = self.model.get_input_embeddings().weight.device
        lengths = np.array([len(prompt) for prompt in prompts])
        longest = int(lengths.max())
        ids = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[longest - len(prompt) :] = prompt
        mask = np.arange(longest) >= longest - lengths[:, None]
        self._mask = torch.ones(len(prompts), longest + max_new_tokens, dtype=torch.int64, device=device)
        self._mask[:, :longest] = torch.as_tensor(mask, device=device)
        self._length = longest
        self._cache: Any = None
        positions = (self._mask[:, :longest].cumsum(1) - 1).clamp_(min=0)
        logits = self._forward(torch.as_tensor(ids, device=device), positions)
        self._positions = torch.as_tensor(lengths, device=device)
        self.keep(torch.as_tensor(prompt_of_row, device=device))
        return logits

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each row; see `LeanDecoder`."""
        self._length += 1
        logits = self._forward(tokens[:, None], self._positions[:, None])
        self._positions += 1
        return logits

    @torch.no_grad()
    def keep(self, rows: Tensor) -> None:
        """Keep only these rows; see `LeanDecoder`."""
        self._mask, self._positions = self._mask[rows], self._positions[rows]
        self._cache.reorder_cache(rows)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        options = {"position_ids": positions, "logits_to_keep": 1}
        output = self.model(
            input_ids=ids,
            attention_mask=self._mask[:, : self._length],
            past_key_values=self._cache,
            use_cache=True,
            **{name: value for name, value in options.items() if name in self._accepted},
        )
        self._cache = output.get("past_key_values")
        if self._cache is None:
            raise ConfigError(f"{type(self.model).__name__} keeps no keys and values (use_cache), so it cannot sample.")
        logits: Tensor = output.logits[:, -1]
        return logits
