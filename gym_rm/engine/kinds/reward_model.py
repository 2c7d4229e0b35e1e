"""What every kind of reward model answers: where to read, what to compute there, how to make a reward of it.

Shapes: `[R]` values read by one batch, `[M]` sequences of a call, `[K]` numbers per value, `[H]` named parts.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from gym_rm.engine.backbones.tree_attention import to_device
from gym_rm.engine.text.renderer import Presentation, Rendered
from gym_rm.engine.token_tree import IntArray, PaddedBatch, TokenTree

Layout: TypeAlias = Literal["tree", "padded", "one_by_one"]
Pooling: TypeAlias = Literal["last", "hf"]
Batch: TypeAlias = TokenTree | PaddedBatch
FloatArray: TypeAlias = NDArray[np.float32]


class RewardModel(abc.ABC):
    """A loaded reward model of one kind.

    Attributes:
        model: the Hugging Face model, in evaluation mode.
        layout: how batches must be laid out for this architecture, decided once at load by `choose_layout`.
        presentation: what the renderer writes beside the messages for this kind.
        part_names: names of the `[H]` parts of the reward, in `Scores.heads`.
        num_values: `[K]`, numbers per value read.
    """

    kind: ClassVar[str]

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.presentation = Presentation()
        self.layout: Layout = "one_by_one"
        self.part_names: tuple[str, ...] = ()
        self.num_values = 1
        self.fused = False

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """Everything that holds weights."""
        return (self.model,)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without dropout and autocast, for a model that may be in training; it is left as it was."""
        training = [part for whole in self.modules for part in whole.modules() if part.training]
        for part in training:
            part.training = False
        try:
            with torch.autocast(self.device.type, enabled=False):
                yield
        finally:
            for part in training:
                part.training = True

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        place: torch.device = next(self.model.parameters()).device
        return place

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the backbone; heads are float32 whatever it is."""
        precision: torch.dtype = next(self.model.base_model.parameters()).dtype
        return precision

    @property
    def settings(self) -> dict[str, Any]:
        """What else decides the number, for `Scores.provenance`."""
        return {}

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model's positions allow; None where the configuration names no limit."""
        for name, module in self.model.named_modules():
            learned = name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding)
            if learned and module.padding_idx is not None:
                # Learned positions that start behind the padding index, as in RoBERTa.
                return int(module.num_embeddings - module.padding_idx - 1)
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return int(limit) if limit and limit > 0 else None  # XLNet says -1

    @property
    def num_embeddings(self) -> int | None:
        """How many token ids the model has embeddings for; None where it does not look them up in a table."""
        try:
            table = self.model.get_input_embeddings()
        except NotImplementedError:
            return None
        return table.num_embeddings if isinstance(table, torch.nn.Embedding) else None

    @property
    def bytes_per_token(self) -> int:
        """Activations of one token in one layer, generously: what a budget by free memory divides by."""
        config = self.model.config.get_text_config()
        hidden = int(config.hidden_size)
        inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
        return self.dtype.itemsize * (12 * hidden + 4 * inner)

    def reads(self, rendered: Rendered) -> IntArray:
        """Increasing positions in the ids at which a value is wanted, at least one; by default the last token.

        Raises:
            RenderError: this text has no position to read; its row gets the reason.
        """
        return np.array([len(rendered.input_ids) - 1])

    @abc.abstractmethod
    def forward(self, batch: Batch) -> torch.Tensor:
        """Values of a batch at its reads, float32 `[R, K]`, on `device`; carries gradients where they are enabled."""

    def trial(self, batch: Batch) -> torch.Tensor:
        """What `choose_layout` compares, `[R, ...]`; a kind whose values can hide a difference overrides it."""
        return self.forward(batch)

    def reduce(self, values: FloatArray, starts: IntArray) -> tuple[FloatArray, FloatArray]:
        """Rewards `[M]` and parts `[M, H]` from the values `[R, K]` of M sequences.

        `starts` is `[M + 1]`: the values of sequence m are `values[starts[m]:starts[m + 1]]`.
        """
        return values[starts[1:] - 1, 0], np.empty((len(starts) - 1, 0), dtype=np.float32)

    def step_rewards(self, values: FloatArray) -> FloatArray | None:
        """One reward per value read, float32 `[R]`, where a value is the judgement of one step; else None."""
        return None


def as_plain(batch: PaddedBatch, device: torch.device, padding: int) -> dict[str, torch.Tensor]:
    """A padded batch as keyword arguments of a Hugging Face model; no mask where there is no padding."""
    columns = np.arange(batch.input_ids.shape[1])
    real = columns < batch.lengths[:, None]
    inputs = {"input_ids": to_device(np.where(real, batch.input_ids, padding).astype(np.int64), device)}
    if not real.all():
        inputs["attention_mask"] = to_device(real.astype(np.int64), device)
    if (batch.second_segments < batch.lengths).any():
        types = (columns >= batch.second_segments[:, None]) & real
        inputs["token_type_ids"] = to_device(types.astype(np.int64), device)
    return inputs
