"""Several objectives and how they become one number: by fixed weights, or by a network that reads the prompt.

Shapes: `[H]` objectives, `[Q]` quantiles of one objective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gym_rm.errors import ConfigError, RenderError, nearest
from gym_rm.engine.kinds.decoder import DecoderRewardModel
from gym_rm.engine.kinds.encoder import EncoderRewardModel
from gym_rm.engine.backbones.heads import in_float32, width
from gym_rm.engine.kinds.reward_model import Batch, FloatArray, Pooling, RewardModel
from gym_rm.engine.text.renderer import Rendered
from gym_rm.engine.token_tree import IntArray

Weights: TypeAlias = Mapping[str, float] | Sequence[float] | str


@dataclass(frozen=True)
class Objectives:
    """Names of the objectives and their weights `[H]` in the reward.

    Example:
        >>> Objectives.of(["helpful", "verbose"], {"helpful": 1.0, "verbose": -0.3}).weights.tolist()
        [1.0, -0.30000001192092896]
    """

    names: tuple[str, ...]
    weights: FloatArray

    @classmethod
    def of(cls, names: Sequence[str], weights: Weights) -> Objectives:
        """Objectives with weights by name (the others get 0), a list of them, one objective's name, `"mean"`, `"sum"`.

        Raises:
            ConfigError: an unknown name, or another number of weights.
        """
        size = len(names)
        if isinstance(weights, str):
            whole = {"mean": np.full(size, 1 / size), "sum": np.ones(size)}
            if weights in whole and weights not in names:
                return cls(tuple(names), whole[weights].astype(np.float32))
            weights = {weights: 1.0}
        if isinstance(weights, Mapping):
            unknown = sorted(set(weights) - set(names))
            if unknown:
                raise ConfigError(
                    f"weights name the objectives {unknown}, and the model has {list(names)}."
                    + nearest(unknown[0], [*names, "mean", "sum"])
                )
            weights = [float(weights.get(name, 0.0)) for name in names]
        if len(weights) != size:
            raise ConfigError(f"weights has {len(weights)} numbers for {size} objectives {list(names)}.")
        return cls(tuple(names), np.asarray(weights, dtype=np.float32))


class MultiHeadRewardModel(RewardModel):
    """A classifier with one output per objective; the reward is their weighted sum, the objectives its parts.

    Args:
        inner: the decoder or encoder that computes the objectives.
        objectives: their names and weights.
    """

    kind = "multi_head"

    def __init__(self, inner: DecoderRewardModel | EncoderRewardModel, objectives: Objectives) -> None:
        super().__init__(inner.model)
        self.inner = inner
        self.objectives = objectives
        self.presentation = inner.presentation
        self.num_values = inner.num_values
        self.part_names = objectives.names
        self.fused = inner.fused

    @property
    def settings(self) -> dict[str, Any]:
        """The weights, and where the head reads."""
        weights = dict(zip(self.objectives.names, self.objectives.weights.tolist(), strict=True))
        return {**self.inner.settings, "weights": weights}

    def reads(self, rendered: Rendered) -> IntArray:
        """Where the inner model reads."""
        return self.inner.reads(rendered)

    def forward(self, batch: Batch) -> Tensor:
        """Objectives at the batch's reads, float32 `[R, H]`."""
        self.inner.fused = self.fused
        return self.inner.forward(batch)

    def trial(self, batch: Batch) -> Tensor:
        """What the inner model compares."""
        self.inner.fused = self.fused
        return self.inner.trial(batch)

    def reduce(self, values: FloatArray, starts: IntArray) -> tuple[FloatArray, FloatArray]:
        """Weighted sums `[M]` and objectives `[M, H]`."""
        parts = values[starts[1:] - 1]
        return parts @ self.objectives.weights, parts


class GatedHead:
    """Objectives and their gates, side by side.

    Args:
        regression, gate: modules on hidden states.
        normal: an objective's numbers are mean and log variance, not quantiles.
    """

    def __init__(self, regression: torch.nn.Module, gate: torch.nn.Module, *, normal: bool) -> None:
        self.size = width(gate)
        self.num_values = 2 * self.size
        self._regression, self._gate, self._normal = regression, gate, normal

    def __call__(self, hidden: Tensor) -> Tensor:
        """Objectives and gates of hidden states, float32 `[R, 2H]`."""
        numbers = in_float32(self._regression, hidden).reshape(len(hidden), self.size, -1)
        objectives = numbers[:, :, 0] if self._normal else numbers.mean(dim=2)
        return torch.cat([objectives, in_float32(self._gate, hidden).to(objectives.device)], dim=1)


class GatedRewardModel(DecoderRewardModel):
    """Objectives weighted by a gating network: `sum_h gate_h(prompt) * (objectives(reply) @ transform)_h`.

    ArmoRM (arXiv 2406.12845, section 3.2); with several numbers per objective the mean over its quantiles, QRM
    (arXiv 2409.10164, section 3); or the means of its normal distributions, URM (arXiv 2410.00847, section 4).

    Args:
        model: with the heads `regression` and `gate`, and perhaps a parameter `reward_transform_matrix` `[H, H]`.
        names: of the objectives; they are the parts of the reward, before the transform.
        regression, gate: names of the two heads in the model.
        layout: what an objective's numbers are: quantiles next to each other, or (mean, log variance).
        prompt_end: token ids whose last occurrence ends the prompt: the gate reads the first of them. None: it reads
            where the objectives are read.
        pooling: see `DecoderRewardModel`.
    """

    kind = "gated"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        names: Sequence[str],
        regression: str = "regression_layer",
        gate: str = "gating",
        layout: Literal["quantiles", "normal"] = "quantiles",
        prompt_end: Sequence[int] | None = None,
        pooling: Pooling = "hf",
    ) -> None:
        head = GatedHead(model.get_submodule(regression), model.get_submodule(gate), normal=layout == "normal")
        if len(names) != head.size:
            raise ConfigError(f"{len(names)} names for the {head.size} objectives of {model.name_or_path!r}.")
        super().__init__(model, head=head, pooling=pooling)
        self.part_names = tuple(names)
        transform = getattr(model, "reward_transform_matrix", None)
        self._transform = np.eye(head.size) if transform is None else transform.detach().double().cpu().numpy()
        self._prompt_end = None if prompt_end is None else np.asarray(prompt_end, dtype=np.int32)

    def reads(self, rendered: Rendered) -> IntArray:
        """The end of the prompt, where the gate reads, and the end of the text, where the objectives are read."""
        last = super().reads(rendered)
        if self._prompt_end is None:
            return last
        windows = np.lib.stride_tricks.sliding_window_view(rendered.input_ids, len(self._prompt_end))
        found = np.flatnonzero((windows == self._prompt_end).all(axis=1)) if len(windows) else windows
        if not len(found) or found[-1] >= last[0]:
            raise RenderError(
                "the text has no start of an assistant's turn, where the gating network reads: the conversation must "
                "hold a reply, under the chat template that the reward model was trained with."
            )
        return np.array([found[-1], last[0]])

    def reduce(self, values: FloatArray, starts: IntArray) -> tuple[FloatArray, FloatArray]:
        """Gated sums `[M]` and objectives `[M, H]`."""
        size = len(self.part_names)
        gates, objectives = values[starts[:-1], size:], values[starts[1:] - 1, :size]
        rewards = (gates * (objectives @ self._transform)).sum(axis=1)
        return rewards.astype(np.float32), objectives
