"""What is learned from the values of a micro-batch: the loss of each objective, and what to measure.

Shapes: `[N]` conversations of a micro-batch, `[R, K]` values at the positions that are read, K outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from gym_rm.data.pairs import decided_pairs
from gym_rm.engine.kinds import Kind
from gym_rm.engine.kinds.multi_head import MultiHeadKind
from gym_rm.engine.kinds.process import ProcessKind
from gym_rm.errors import ConfigError
from gym_rm.evaluation.pairs import pair_metrics
from gym_rm.training import losses
from gym_rm.training.comparison_batches import MicroBatch
from gym_rm.training.comparison_sets import EncodedComparison
from gym_rm.training.reward_model_settings import RewardLossSettings


@dataclass
class Outcomes:
    """What a set of comparisons came to, to compute metrics from; plain lists, so that ranks can exchange them.

    Attributes:
        losses: sums of losses, and the weight that divides each.
        pairs: `(chosen, rejected, tokens of chosen, tokens of rejected)`.
        errors: `(objective, prediction, target)` of ratings.
        steps: `(logit, label)` of steps.
    """

    losses: list[tuple[float, float]] = field(default_factory=list)
    pairs: list[tuple[float, float, int, int]] = field(default_factory=list)
    errors: list[tuple[str, float, float]] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)

    @classmethod
    def joined(cls, parts: Iterable[Outcomes]) -> Outcomes:
        """Return the outcomes of all comparisons of several parts."""
        every = list(parts)
        names = [each.name for each in fields(cls)]
        return cls(*([one for part in every for one in getattr(part, name)] for name in names))

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name; undefined ones are left out."""
        weight = sum(weight for _, weight in self.losses)
        values: dict[str, float | None] = {"loss": sum(loss for loss, _ in self.losses) / weight if weight else None}
        if self.pairs:
            chosen, rejected, chosen_tokens, rejected_tokens = np.array(self.pairs).T
            measured = pair_metrics(chosen, rejected, chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens)
            values |= {name: value for name, value in measured.as_dict().items() if name not in ("loss", "num_failed")}
        for objective in sorted({name for name, _, _ in self.errors}):
            predictions, targets = np.array([error[1:] for error in self.errors if error[0] == objective]).T
            values[f"mse_{objective}"] = float(np.mean((predictions - targets) ** 2))
            if predictions.std() > 0 and targets.std() > 0:
                values[f"correlation_{objective}"] = float(np.corrcoef(predictions, targets)[0, 1])
        if self.steps:
            logits, labels = np.array(self.steps).T
            values["num_steps"] = len(labels)
            values["step_accuracy"] = float(np.mean((logits > 0) == (labels >= 0.5)))
        return {name: float(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Objective:
    """The loss of a run for a kind of reward model, and what it is divided by; `objectives` names its outputs."""

    settings: RewardLossSettings
    kind: Kind
    objectives: tuple[str, ...]

    def weight(self, examples: Iterable[EncodedComparison]) -> float:
        """Return the number of terms in the mean loss: comparisons, or ratings, or labels of steps that are present."""
        match self.settings.objective:
            case "ratings":
                return float(sum((~np.isnan(each.targets)).sum() for each in examples))
            case "steps":
                return float(sum((~np.isnan(each.labels)).sum() for each in examples))
        return float(sum(1 for _ in examples))

    def loss(self, values: Tensor, micro: MicroBatch) -> tuple[Tensor, Outcomes]:
        """Return the sum of the losses of a micro-batch, a scalar in float32, and its outcomes.

        Args:
            values: `[R, K]`, in the order of `micro.value_index`.
            micro: the comparisons.
        """
        match self.settings.objective:
            case "ratings":
                return self._ratings(values, micro)
            case "steps":
                return self._steps(values, micro)
        return self._preferences(values, micro)

    def _preferences(self, values: Tensor, micro: MicroBatch) -> tuple[Tensor, Outcomes]:
        rewards = self.rewards(values, micro)
        sizes = [len(each.sequences) for each in micro.examples]
        starts = np.cumsum([0, *sizes])
        per_example = self._preference_losses(rewards, micro.examples, starts)
        if self.settings.centring:
            means = torch.stack([part.mean() for part in torch.split(rewards, sizes)])
            per_example = per_example + self.settings.centring * (2 * means).square()
        plain, shown = rewards.detach().cpu().numpy().astype(np.float64), per_example.detach().cpu().tolist()
        outcomes = Outcomes([(loss, 1.0) for loss in shown])
        for example, start in zip(micro.examples, starts, strict=False):
            for better, worse in decided_pairs(example.ranks.tolist()):
                tokens = example.num_tokens
                outcomes.pairs.append((plain[start + better], plain[start + worse], tokens[better], tokens[worse]))
        return per_example.sum(), outcomes

    def _preference_losses(self, rewards: Tensor, examples: Sequence[EncodedComparison], starts: np.ndarray) -> Tensor:
        """Return the loss of each comparison `[C]`: the mean over its pairs, or that of its ranking."""
        settings, device = self.settings, rewards.device
        if settings.preferences == "plackett_luce":
            ranks = torch.tensor(np.concatenate([each.ranks for each in examples]), device=device)
            groups = torch.tensor(np.repeat(np.arange(len(examples)), np.diff(starts)), device=device)
            return losses.plackett_luce(rewards, ranks, groups)
        ties = settings.preferences == "rao_kupper"
        rows = [
            (number, start + first, start + second, float(np.sign(each.ranks[second] - each.ranks[first])))
            for number, (each, start) in enumerate(zip(examples, starts, strict=False))
            for first, second in (
                itertools.combinations(range(len(each.ranks)), 2) if ties else decided_pairs(each.ranks.tolist())
            )
        ]
        number, first, second = torch.tensor([row[:3] for row in rows], device=device).T
        outcome = torch.tensor([row[3] for row in rows], device=device)
        one, other = rewards[first], rewards[second]
        if ties:
            per_pair = losses.rao_kupper(one, other, outcome, log_theta=settings.tie_parameter)
        elif settings.preferences == "margin_bradley_terry":
            margin = torch.tensor([each.margin for each in examples], dtype=torch.float32, device=device)[number]
            per_pair = losses.bradley_terry(one, other, margin=margin)
        else:
            per_pair = losses.bradley_terry(one, other)
        counts = torch.bincount(number, minlength=len(examples)).clamp_min(1)
        return per_pair.new_zeros(len(examples)).index_add(0, number, per_pair) / counts

    def rewards(self, values: Tensor, micro: MicroBatch) -> Tensor:
        """Return the reward of each conversation `[N]`, as it is in scoring."""
        lengths = [len(sequence.read_positions) for each in micro.examples for sequence in each.sequences]
        last = values[torch.tensor(np.cumsum(lengths) - 1, device=values.device)]
        if isinstance(self.kind, MultiHeadKind):
            return (last * torch.from_numpy(self.kind.weights).to(last)).sum(dim=1)
        return last[:, 0]

    def _ratings(self, values: Tensor, micro: MicroBatch) -> tuple[Tensor, Outcomes]:
        targets = torch.tensor(np.concatenate([each.targets for each in micro.examples]), dtype=torch.float32)
        terms = losses.regression(values, targets.to(values.device))
        outcomes = Outcomes()
        predictions, lost = values.detach().cpu().tolist(), terms.detach().cpu().tolist()
        for predicted, wanted, of_row in zip(predictions, targets.tolist(), lost, strict=True):
            known = [
                (name, prediction, target)
                for name, prediction, target in zip(self.objectives, predicted, wanted, strict=True)
                if not np.isnan(target)
            ]
            outcomes.losses.append((sum(of_row), float(len(known))))
            outcomes.errors += known
        return terms.sum(), outcomes

    def _steps(self, values: Tensor, micro: MicroBatch) -> tuple[Tensor, Outcomes]:
        assert isinstance(self.kind, ProcessKind)
        labels = torch.tensor(np.concatenate([each.labels for each in micro.examples]), dtype=torch.float32)
        good = self.kind.good_label
        logits = values[:, 0] if values.shape[1] == 1 else values[:, good] - values[:, 1 - good]
        terms = losses.process_supervision(logits, labels.to(values.device))
        outcomes = Outcomes()
        rows = zip(logits.detach().cpu().tolist(), labels.tolist(), terms.detach().cpu().tolist(), strict=True)
        for logit, label, lost in rows:
            if not np.isnan(label):
                outcomes.losses.append((lost, 1.0))
                outcomes.steps.append((logit, label))
        return terms.sum(), outcomes


def make_objective(settings: RewardLossSettings, kind: Kind, component_names: Sequence[str]) -> Objective:
    """Return the objective for a model; `auto` is resolved.

    Raises:
        ConfigError: the model has no outputs for the objective.
    """
    process = isinstance(kind, ProcessKind)
    chosen = settings.objective
    if chosen == "auto":
        chosen = "steps" if process else "ratings" if len(component_names) > 1 else "preferences"
    if (chosen == "steps") != process:
        raise ConfigError(
            f"loss.objective={chosen!r} does not fit a reward model of kind {kind.name!r}; steps are learned with "
            "model.reward_model_kwargs {kind: process, step_token: ...}."
        )
    return Objective(settings.model_copy(update={"objective": chosen}), kind, tuple(component_names))
