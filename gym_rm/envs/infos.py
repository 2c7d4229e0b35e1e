"""Per-environment values as Gymnasium's vector `infos`: arrays `[N]`, each with a mask `_name` of the rows it is for.

The layout is the one that `SyncVectorEnv` builds from the infos of single environments: rows outside the mask hold
zero (None in arrays of objects), and a value that no row has is absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gym_rm.errors import ConfigError
from gym_rm.reports.metrics import RewardMetrics, reward_metrics
from gym_rm.scores import Scores

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


RESERVED = frozenset(
    {"prompt_id", "answer", "group_id", "score_ok", "num_tokens", "truncated_tokens", "components", "metrics"}
    | {"final_obs", "final_info", "episode"}
)
"""Names that the environment and Gymnasium's wrappers give to infos of their own."""


@dataclass(frozen=True, slots=True)
class StepScores:
    """The scores of one step, one entry per environment.

    Attributes:
        scores: `[N]`; rows outside of `scored` hold nothing.
        scored: bool `[N]`, the rows whose conversation was given to the scorer.
        rewards: float64 `[N]`, finite: the score, the fallback where there is none, 0.0 where nothing was scored.
    """

    scores: Scores
    scored: Mask
    rewards: NDArray[np.float64]

    @classmethod
    def of(cls, scores: Scores, rows: Sequence[int], num_envs: int, fallback_reward: float | None) -> StepScores:
        """From the scores of the environments `rows`.

        Raises:
            ConfigError: an info of the scorer under a name that the environment uses itself.
            ScoringError: rows without a score, named by environment, where there is no fallback.
        """
        if clash := sorted(RESERVED & scores.infos.keys()):
            raise ConfigError(f"the scorer's info {clash[0]!r} is also an info of the environment; rename it.")
        spread = scores.scatter(rows, num_envs)
        if fallback_reward is None:
            spread.raise_for_errors()
        scored = np.zeros(num_envs, dtype=np.bool_)
        scored[list(rows)] = True
        ok = scored & np.isfinite(spread.rewards)
        rewards = np.where(ok, spread.rewards.astype(np.float64), np.where(scored, fallback_reward or 0.0, 0.0))
        return cls(spread, scored, rewards)

    @property
    def ok(self) -> Mask:
        """Bool `[N]`, the rows that got a score."""
        return self.scored & np.isfinite(self.scores.rewards)

    def metrics(self) -> RewardMetrics:
        """Statistics over the rows that were scored."""
        scores = self.scores
        return reward_metrics(
            np.where(self.ok, self.rewards, np.nan)[self.scored],
            num_tokens=scores.num_tokens[self.scored],
            truncated_tokens=scores.truncated_tokens[self.scored],
            components={name: values[self.scored] for name, values in scores.components.items()},
        )

    def add_to(self, infos: Infos, rows: Mask) -> None:
        """Add the values of those `rows` that were scored."""
        scored = self.scored & rows
        add_values(infos, "score_ok", self.ok, scored)
        add_values(infos, "num_tokens", self.scores.num_tokens, scored)
        add_values(infos, "truncated_tokens", self.scores.truncated_tokens, scored)
        components: Infos = {}
        for name, values in self.scores.components.items():
            add_values(components, name, values.astype(np.float64), scored & self.ok & np.isfinite(values))
        add_group(infos, "components", components)
        for name, values in self.scores.infos.items():
            add_values(infos, name, _column(values), scored)


def _column(values: Any) -> NDArray[Any]:
    """An array of float64, int64, bool or objects, as `SyncVectorEnv` would collect the values of single rows."""
    array = np.asarray(values)
    kind = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}.get(array.dtype.kind, object)
    return array.astype(kind)
