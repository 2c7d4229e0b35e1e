"""A judgement after every step of the reply, read at the step tokens that the renderer writes."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gym_rm.errors import ConfigError, RenderError
from gym_rm.engine.kinds.decoder import DecoderRewardModel
from gym_rm.engine.backbones.heads import Head
from gym_rm.engine.kinds.reward_model import Batch, FloatArray
from gym_rm.engine.text.renderer import Presentation, Rendered, token_of
from gym_rm.engine.token_tree import IntArray

Reduction: TypeAlias = Literal["min", "mean", "last", "product"]
REDUCTIONS = ("min", "mean", "last", "product")


class ProcessRewardModel(DecoderRewardModel):
    """The probability that each step is good, and their minimum, mean, last or product as the reward.

    The reply is split at `step_separator` and `step_token` is written after every step, as the model card of
    Qwen2.5-Math-PRM (arXiv 2501.07301) does it. A reply that spells the step token gets it as plain text.

    Args:
        model: the backbone with its head.
        tokenizer: to look up the step token.
        head: two outputs are the logits of (bad, good), whose softmax is taken; one output is squashed by a sigmoid.
        step_token: the token at which the model was trained to judge.
        step_separator: what separates steps in a reply.
        reduction: of the steps to one reward.
        good_label: which of two outputs is the good one.

    Raises:
        ConfigError: the step token is not one token, or the head has more than two outputs.
    """

    kind = "process"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        head: Head | None = None,
        step_token: str,
        step_separator: str = "\n\n",
        reduction: Reduction = "min",
        good_label: int = 1,
    ) -> None:
        super().__init__(model, head=head, pooling="last")
        if self.num_values > 2 or good_label not in (0, 1):
            raise ConfigError(
                f"a process reward model says good or bad; this head has {self.num_values} outputs, good_label is "
                f"{good_label}."
            )
        if reduction not in REDUCTIONS:
            raise ConfigError(f"reduction must be one of {REDUCTIONS}; got {reduction!r}.")
        self.presentation = Presentation(step_token=step_token, step_separator=step_separator)
        self.reduction = reduction
        self._good = good_label
        self._step_id = token_of(tokenizer, step_token)
        self._outputs, self.num_values = self.num_values, 1

    @property
    def settings(self) -> dict[str, Any]:
        """How steps are marked and reduced."""
        shown = self.presentation
        return {"step_token": shown.step_token, "step_separator": shown.step_separator, "reduction": self.reduction}

    def reads(self, rendered: Rendered) -> IntArray:
        """The step tokens."""
        positions = np.flatnonzero(rendered.input_ids == self._step_id)
        if not len(positions):
            raise RenderError("the conversation has no step to judge: its last message must be a reply with some text.")
        return positions

    def forward(self, batch: Batch) -> Tensor:
        """Probability of a good step at the batch's reads, float32 `[R, 1]`."""
        logits = super().forward(batch)
        if self._outputs == 1:
            return torch.sigmoid(logits)
        return torch.softmax(logits, dim=1)[:, self._good, None]

    def reduce(self, values: FloatArray, starts: IntArray) -> tuple[FloatArray, FloatArray]:
        """Reduced steps `[M]`; no parts."""
        steps, first = values[:, 0], starts[:-1]
        match self.reduction:
            case "min":
                rewards = np.minimum.reduceat(steps, first)
            case "mean":
                rewards = np.add.reduceat(steps, first) / np.diff(starts).astype(np.float32)
            case "product":
                rewards = np.multiply.reduceat(steps, first)
            case _:
                rewards = steps[starts[1:] - 1]
        return rewards, np.empty((len(first), 0), dtype=np.float32)

    def step_rewards(self, values: FloatArray) -> FloatArray:
        """Probability of every step."""
        return values[:, 0]
