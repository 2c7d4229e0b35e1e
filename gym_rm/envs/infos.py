"""Per-environment values in the format of Gymnasium's vector `infos`: arrays `[N]`, each with a mask `_name`.

The format is the one that `SyncVectorEnv` builds from the infos of single environments. Rows outside the mask are zero
(None in arrays of objects). A name without a value in any row is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gym_rm.errors import ConfigError
from gym_rm.scores import Scores

Infos: TypeAlias = dict[str, Any]
Mask: TypeAlias = NDArray[np.bool_]


def add_values(infos: Infos, name: str, values: NDArray[Any], rows: Mask) -> None:
    """Store `values[rows]` under a name, unless `rows` is empty; `values` is `[N, ...]`, `rows` is `[N]`."""
    if rows.any():
        column = np.full(values.shape, None if values.dtype == object else 0, dtype=values.dtype)
        column[rows] = values[rows]
        infos[name], infos[f"_{name}"] = column, rows.copy()


def add_group(infos: Infos, name: str, group: Infos) -> None:
    """Store nested infos under a name; its mask is True in every row that has at least one of them."""
    masks = [group[f"_{key}"] for key in group if f"_{key}" in group]
    if masks:
        infos[name], infos[f"_{name}"] = group, np.logical_or.reduce(masks)


def infos_of_row(infos: Mapping[str, Any], row: int) -> Infos:
    """Return the infos of one row as a single environment returns them, with Python scalars."""
    found: Infos = {}
    for name, values in infos.items():
        mask = infos.get(f"_{name}")
        if mask is not None and mask[row]:
            if isinstance(values, Mapping):
                found[name] = infos_of_row(values, row)
            else:
                value = values[row]
                found[name] = value.item() if isinstance(value, np.generic) else value
    return found


RESERVED = frozenset(
    {"prompt_id", "answer", "group_id", "score_ok", "num_tokens", "truncated_tokens", "components"}
    | {"step_rewards", "step_ends"}
    | {"tools", "tool_calls", "tool_errors", "final_obs", "final_info", "episode"}
)
"""Names of infos that the environment and Gymnasium's wrappers set themselves."""


@dataclass(frozen=True, slots=True)
class StepScores:
    """The scores of one step, one entry per environment.

    Attributes:
        scores: `[N]`; rows outside `scored` have no score.
        scored: bool `[N]`, rows whose conversation was passed to the scorer.
        rewards: float64 `[N]`, always finite: the score, the fallback reward if the score is missing, or 0.0 for rows
            outside `scored`.
    """

    scores: Scores
    scored: Mask
    rewards: NDArray[np.float64]

    @classmethod
    def of(cls, scores: Scores, rows: Sequence[int], num_envs: int, fallback_reward: float | None) -> StepScores:
        """Build the scores of one step from the scores of the environments `rows`.

        Raises:
            ConfigError: an info of the scorer has a reserved name.
            ScoringError: scores are missing and there is no fallback reward; the error names the environments.
        """
        for name in scores.infos:
            if name in RESERVED or name.startswith("_"):
                raise ConfigError(
                    f"infos[{name!r}] of the scorer has a name that the environment uses (names with an underscore "
                    "are masks); rename it."
                )
        spread = scores.scatter(rows, num_envs)
        if fallback_reward is None:
            spread.raise_for_errors()
        scored = np.zeros(num_envs, dtype=np.bool_)
        scored[list(rows)] = True
        ok = scored & np.isfinite(spread.rewards)
        rewards = np.where(ok, spread.rewards, np.where(scored, fallback_reward or 0.0, 0.0))
        return cls(spread, scored, rewards)

    @property
    def ok(self) -> Mask:
        """Bool `[N]`, rows that have a score."""
        return self.scored & np.isfinite(self.scores.rewards)

    def add_to(self, infos: Infos, rows: Mask) -> None:
        """Add the values of those `rows` that were scored to `infos`."""
        scored = self.scored & rows
        add_values(infos, "score_ok", self.ok, scored)
        add_values(infos, "num_tokens", self.scores.num_tokens, scored)
        add_values(infos, "truncated_tokens", self.scores.truncated_tokens, scored)
        components: Infos = {}
        for name, values in self.scores.components.items():
            add_values(components, name, values, scored & self.ok & np.isfinite(values))
        add_group(infos, "components", components)
        for name in ("step_rewards", "step_ends"):
            if (steps := getattr(self.scores, name)) is not None:
                has_steps = np.array([len(each) > 0 for each in steps])
                add_values(infos, name, np.fromiter(steps, object, len(steps)), scored & self.ok & has_steps)
        for name, values in self.scores.infos.items():
            add_values(infos, name, values, scored & self.scores.has_info(name))
