"""From the rollouts of a step to what its tokens learn: one pure function over the table of all ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_rm.errors import ConfigError
from gym_rm.policy import advantages as estimators
from gym_rm.policy.advantages import Array
from gym_rm.policy.grpo_settings import GRPOSettings
from gym_rm.policy.rollouts import RolloutTable


def estimate(table: RolloutTable, settings: GRPOSettings) -> tuple[Array, NDArray[np.bool_]]:
    """Return the advantages of the tokens `[N]`, and which turns count in the loss `[M]`.

    Args:
        table: the rollouts of all ranks, whose rewards are compared.
        settings: settings of the run, without `null` where there is a default.

    Raises:
        ConfigError: `advantage.steps` with a scorer that rates no steps.
    """
    options = settings.advantage
    rewards = estimators.overlong_penalty(
        table.column("reward"),
        table.column("num_tokens"),
        table.column("finished"),
        max_new_tokens=settings.sampling.max_new_tokens or 0,
        buffer=options.overlong_buffer,
        penalty=options.overlong_penalty,
    )
    advantages = _of_turns(table, rewards, settings).repeat(table.lengths)
    counted = np.isfinite(rewards)
    if options.steps is not None:
        advantages = options.reward_weight * advantages + _of_steps(table, settings)
        counted &= np.array([bool(options.reward_weight) or len(each) > 0 for each in table.steps])
    if options.overlong == "filter":
        counted &= table.column("finished")
    if options.dynamic_sampling:
        counted &= ~np.isin(table.column("group"), zero_variance_groups(table, settings))
    return advantages, counted[table.owners]


def zero_variance_groups(table: RolloutTable, settings: GRPOSettings) -> NDArray[Any]:
    """Return the groups whose rewards, or all components for GDPO, are equal: they teach nothing."""
    rewards = table.column("reward")
    if settings.advantage.steps is not None:
        of_steps = estimators.step_values(table.steps, settings.advantage.steps)
        rewards = np.stack([of_steps, rewards], axis=1) if settings.advantage.reward_weight else of_steps
    if settings.advantage.estimator == "gdpo":
        parts = np.array([*table.components.values()])
        rewards = np.where(np.isfinite(rewards)[:, None], parts.T, math.nan)
    return estimators.zero_variance_groups(rewards, table.column("group"))


def _of_turns(table: RolloutTable, rewards: Array, settings: GRPOSettings) -> Array:
    """Return the advantage of each turn `[M]`: that of its episode, or its own among the same turns of its group."""
    options = settings.advantage
    choice: dict[str, Any] = {"estimator": options.estimator, "std_floor": options.std_floor}
    if not options.per_turn:
        choice |= {"components": table.components, "component_weights": options.component_weights}
        groups = table.column("group")
        of_turns: Array = estimators.estimate_advantages(rewards, groups, **choice)[table.owners]
        return of_turns
    turn_rewards = [[turn.reward for turn in rollout.turns] for rollout in table.rollouts]
    for of_episode, rollout, reward in zip(turn_rewards, table.rollouts, rewards, strict=True):
        of_episode[-1] += reward - rollout.reward  # penalties are taken from the last turn
    numbers = np.concatenate([np.arange(len(each)) for each in turn_rewards])
    to_go = np.concatenate([estimators.rewards_to_go(each) for each in turn_rewards])
    return estimators.estimate_advantages(to_go, table.groups * settings.env.max_turns + numbers, **choice)


def _of_steps(table: RolloutTable, settings: GRPOSettings) -> Array:
    """Return the advantage of the step of each token `[N]`."""
    options = settings.advantage
    if not any(map(len, table.steps)) and np.isfinite(table.column("reward")).any():
        raise ConfigError(f"advantage.steps={options.steps!r} needs a process reward model; no reply has steps.")
    of_steps = estimators.step_advantages(
        table.steps,
        table.column("group"),
        credit=str(options.steps),
        estimator=options.estimator,
        std_floor=options.std_floor,
    )
    return table.spread_over_tokens(of_steps)
