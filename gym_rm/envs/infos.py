"""Per-environment values as Gymnasium's vector `infos`: arrays `[N]`, each with a mask `_name` of the rows it is for.

The layout is the one that `SyncVectorEnv` builds from the infos of single environments: rows outside the mask hold
zero (None in arrays of objects), and a value that no row has is absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gym_rm.reports.metrics import RewardMetrics, reward_metrics
from gym_rm.types import Scores

Infos: TypeAlias = dict[str, Any]
Mask: TypeAlias = NDArray[np.bool_]


def add_values(infos: Infos, name: str, values: NDArray[Any], rows: Mask) -> None:
    """Put `values[rows]` under a name; both arrays are `[N]`."""
    if rows.any():
        column = np.full(len(rows), None if values.dtype == object else 0, dtype=values.dtype)
        column[rows] = values[rows]
        infos[name], infos[f"_{name}"] = column, rows.copy()


def add_group(infos: Infos, name: str, group: Infos) -> None:
    """Put infos within infos under a name, for the rows of any of them."""
    masks = [group[f"_{key}"] for key in group if f"_{key}" in group]
    if masks:
        infos[name], infos[f"_{name}"] = group, np.logical_or.reduce(masks)


def infos_of_row(infos: Mapping[str, Any], row: int) -> Infos:
    """The info dict that one environment alone would have given, of Python scalars."""
    found: Infos = {}
    for name, values in infos.items():
        mask = infos.get(f"_{name}")
        if mask is not None and mask[row]:
            if isinstance(values, Mapping):
                found[name] = infos_of_row(values, row)
            else:
                found[name] = values[row] if values.dtype == object else values[row].item()
    return found


@dataclass(frozen=True, slots=True)
class StepScores:
    """What one step paid, one entry per environment.

    Attributes:
        scored: bool `[N]`, the rows whose conversation was given to the scorer.
        ok: bool `[N]`, those of them that got a score.
        rewards: float64 `[N]`, finite: the score, the fallback where there is none, 0.0 where nothing was scored.
        num_tokens: int64 `[N]`.
        truncated_tokens: int64 `[N]`.
        heads: float64 `[N]` each.
    """

    scored: Mask
    ok: Mask
    rewards: NDArray[np.float64]
    num_tokens: NDArray[np.int64]
    truncated_tokens: NDArray[np.int64]
    heads: Mapping[str, NDArray[np.float64]]

    @classmethod
    def empty(cls, num_envs: int) -> StepScores:
        """A step in which nothing was scored."""
        scored, ok = np.zeros((2, num_envs), dtype=np.bool_)
        num_tokens, truncated_tokens = np.zeros((2, num_envs), dtype=np.int64)
        return cls(scored, ok, np.zeros(num_envs), num_tokens, truncated_tokens, {})

    @classmethod
    def from_scores(cls, scores: Scores, rows: Sequence[int], fallback: float | None) -> StepScores:
        """From the scores of all environments (`spread_scores`), of which `rows` were asked for."""
        scored = np.zeros(len(scores), dtype=np.bool_)
        scored[rows] = True
        ok = scored & np.isfinite(scores.rewards)
        assert fallback is not None or bool(ok[rows].all())
        rewards = np.where(ok, scores.rewards, np.where(scored, fallback or 0.0, 0.0)).astype(np.float64)
        heads = {name: np.asarray(values, dtype=np.float64) for name, values in scores.heads.items()}
        return cls(scored, ok, rewards, scores.num_tokens, scores.truncated_tokens, heads)

    def metrics(self) -> RewardMetrics:
        """Statistics over the rows that were scored."""
        return reward_metrics(
            np.where(self.ok, self.rewards, np.nan)[self.scored],
            num_tokens=self.num_tokens[self.scored],
            truncated_tokens=self.truncated_tokens[self.scored],
            heads={name: values[self.scored] for name, values in self.heads.items()},
        )

    def add_to(self, infos: Infos, rows: Mask) -> None:
        """Add the values of those `rows` that were scored."""
        scored = self.scored & rows
        add_values(infos, "score_ok", self.ok, scored)
        add_values(infos, "num_tokens", self.num_tokens, scored)
        add_values(infos, "truncated_tokens", self.truncated_tokens, scored)
        heads: Infos = {}
        for name, values in self.heads.items():
            add_values(heads, name, values, scored & self.ok & np.isfinite(values))
        add_group(infos, "heads", heads)


def spread_scores(scores: Scores, rows: Sequence[int], num_envs: int) -> Scores:
    """The scores of the conversations of `rows` as scores of all N environments.

    A reward that is not finite becomes an error; rows that were not asked for hold NaN and no error.
    """

    def spread(values: NDArray[Any], rest: float) -> NDArray[Any]:
        column = np.full(num_envs, rest, dtype=values.dtype)
        column[rows] = values
        return column

    errors: list[str | None] = [None] * num_envs
    for row, reward, error in zip(rows, scores.rewards.tolist(), scores.errors, strict=True):
        errors[row] = error if error is not None or math.isfinite(reward) else f"the reward is {reward}"
    rewards = spread(scores.rewards, np.nan)
    rewards[[error is not None for error in errors]] = np.nan
    return Scores(
        rewards=rewards,
        heads={name: spread(np.asarray(values, dtype=np.float64), np.nan) for name, values in scores.heads.items()},
        num_tokens=spread(scores.num_tokens, 0),
        truncated_tokens=spread(scores.truncated_tokens, 0),
        errors=tuple(errors),
        provenance=scores.provenance,
        workload=scores.workload,
    )
