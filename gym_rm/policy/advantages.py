"""From rewards to advantages: the estimators of GRPO and its successors, as pure functions of arrays.

The policy answers each prompt several times, and the replies of a prompt are a group. What a reply is worth is how much
better its reward r is than those of its group: no value model is needed, which is the idea of GRPO. The estimators
differ in the baseline that they subtract and in what they divide by.

| estimator | advantage | source |
| --- | --- | --- |
| `grpo` | `(r - mean) / std` of the group | GRPO, arXiv 2402.03300, section 4.1.2 |
| `dr_grpo` | `r - mean` | Dr. GRPO, arXiv 2503.20783, section 3 |
| `rloo` | `r - mean of the others` | RLOO, arXiv 2402.14740 |
| `leave_one_out` | `(r - mean of the others) / std` of the whole group | `rloo`, divided as in `grpo` |
| `gdpo` | weighted sum of each component's `grpo`, whitened over the batch | GDPO, arXiv 2601.05242 |

`step_advantages` compares the rewards of the steps of replies, see there.

The order of rows changes no bit. An advantage is exactly 0 for a row that failed (its reward is not finite), which is
left out of all statistics, for a group of one, and for a group of equal rewards. B rewards, in all functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_rm.errors import ConfigError

Array = NDArray[np.float64]
LARGEST_REWARD = 1e30  # its square is finite in float64, and itself in float32
STEP_TEMPERATURE = 0.05  # PURE has 0.1, for step rewards from -1 to 1; ours are probabilities


def estimate_advantages(
    rewards: Array,
    groups: NDArray[Any],
    *,
    estimator: str,
    std_floor: float,
    components: Mapping[str, Array] | None = None,
    component_weights: Mapping[str, float] | None = None,
) -> Array:
    """Return the advantages of a step, float64 `[B]`.

    Args:
        rewards: `[B]`, of all ranks.
        groups: `[B]`, equal for the replies to a prompt.
        estimator: one of `GROUP_ESTIMATORS`, or `gdpo`.
        std_floor: lower bound of what divides. At the noise of the rewards, a group that differs only by noise gets
            small advantages.
        components: parts of the reward by name, `[B]` each, for `gdpo`.
        component_weights: weights of the parts, 1 for those not named.

    Raises:
        ConfigError: an unknown component, or a reward beyond 1e30.
    """
    rewards, groups = np.asarray(rewards, dtype=np.float64), np.asarray(groups)  # a Series has labels
    largest = np.abs(rewards[np.isfinite(rewards)]).max(initial=0.0)
    if largest > LARGEST_REWARD:
        raise ConfigError(f"rewards must be within +-{LARGEST_REWARD:g}, got {largest:g}; scale them down.")
    if estimator == "gdpo":
        return gdpo(rewards, groups, components or {}, component_weights or {}, std_floor)
    advantages = np.zeros(len(rewards))
    for rows in groups_with_signal(rewards, groups):
        advantages[rows] = GROUP_ESTIMATORS[estimator](rewards[rows], std_floor)
    return advantages


def centred(values: Array) -> Array:
    """Return `values - mean`, from the exactly rounded sum, so that the order of the values changes nothing."""
    return values - math.fsum(values) / len(values)


def deviation(values: Array) -> float:
    """Return the standard deviation with divisor n - 1, from centred values: two passes, no `E[x^2] - E[x]^2`."""
    return math.sqrt(math.fsum(centred(values) ** 2) / (len(values) - 1))


def grpo(rewards: Array, std_floor: float) -> Array:
    """`(r - mean) / std` (GRPO, arXiv 2402.03300, section 4.1.2)."""
    return centred(rewards) / max(deviation(rewards), std_floor)


def dr_grpo(rewards: Array, std_floor: float) -> Array:
    """`r - mean` (Dr. GRPO, arXiv 2503.20783, section 3: dividing favours prompts that are too easy or too hard)."""
    return centred(rewards)


def rloo(rewards: Array, std_floor: float) -> Array:
    """`r - mean of the others`, an unbiased baseline (RLOO, arXiv 2402.14740)."""
    return centred(rewards) * (len(rewards) / (len(rewards) - 1))


def leave_one_out(rewards: Array, std_floor: float) -> Array:
    """`(r - mean of the others) / std` with the std of the whole group.

    The std of the others would be 0 for the only reward that differs.
    """
    return rloo(rewards, std_floor) / max(deviation(rewards), std_floor)


GROUP_ESTIMATORS = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "leave_one_out": leave_one_out}


def gdpo(
    rewards: Array, groups: NDArray[Any], components: Mapping[str, Array], weights: Mapping[str, float], floor: float
) -> Array:
    """Weighted sum of each component's GRPO advantages, whitened over the batch (GDPO, arXiv 2601.05242).

    The batch is divided by the standard deviation that it would have without the floor in the groups. Otherwise
    whitening would bring back the noise that the floor made small.
    """
    if not components:
        raise ConfigError("estimator 'gdpo' needs the components of the reward, and the scorer gives none.")
    for name in weights:
        if name not in components:
            raise ConfigError(f"unknown component {name!r}, expected one of {sorted(components)}.")
    names = sorted(components)
    parts = np.where(np.isfinite(rewards)[:, None], np.stack([components[name] for name in names], axis=1), np.nan)
    advantages, unbounded = np.zeros(len(rewards)), np.zeros(len(rewards))
    if members := groups_with_signal(parts, groups):
        for rows in members:
            for name, values in zip(names, parts[rows].T, strict=True):
                if np.isfinite(values[0]) and (values != values[0]).any():
                    advantages[rows] += weights.get(name, 1.0) * grpo(values, floor)
                    unbounded[rows] += weights.get(name, 1.0) * grpo(values, 1e-100)
        rows = np.concatenate(members)
        advantages[rows] = centred(advantages[rows]) / max(deviation(unbounded[rows]), floor)
    return advantages


def groups_with_signal(rewards: Array, groups: NDArray[Any]) -> list[NDArray[np.int64]]:
    """Return the rows of each group that has a signal: at least two rewards, not all equal.

    Args:
        rewards: `[B]`, or `[B, C]` for C components, which have a signal if one of them has. A component that no row of
            a group has belongs to other prompts. A row without another value has failed: it is left out of its group.
        groups: `[B]`, equal for the rows of a group.
    """
    parts = rewards if rewards.ndim == 2 else rewards[:, None]
    finite, members = np.isfinite(parts), []
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        own = finite[rows].any(axis=0)
        rows = rows[finite[rows][:, own].all(axis=1) & own.any()]
        if len(rows) > 1 and (parts[rows][:, own] != parts[rows[0], own]).any():
            members.append(rows)
    return members


def step_advantages(
    steps: Sequence[Array], groups: NDArray[Any], *, credit: str, estimator: str, std_floor: float
) -> list[Array]:
    """Return the advantage of each step of each reply, from the rewards of the steps.

    | credit | advantage of step t | source |
    | --- | --- | --- |
    | `min` | A(lowest step) x sum of w_i over steps i >= t, w = softmax(-r / 0.05) | PURE, arXiv 2504.15275 |
    | `sum` | sum of A(step i) over steps i >= t, compared with all of the group | GRPO, 2402.03300, section 4.1.3 |
    | `last` | A(last step), for every step | the reward of the outcome |

    A is the estimator's advantage. PURE lays the lowest reward on the steps by w; here A of the lowest reward is laid,
    so that an average reply teaches nothing at any step. A further step can only lower the minimum, so no number of
    steps pays. With `sum`, each step above the mean of all steps pays: a policy splits its reply into more steps, until
    training collapses (PURE).

    Args:
        steps: rewards of the steps of B replies `[S]` each. One that is empty or has a value that is not finite is left
            out.
        groups: `[B]`, equal for the replies to a prompt.
        credit: `min`, `sum` or `last`.
        estimator, std_floor: see `estimate_advantages`; not `gdpo`.
    """
    options: dict[str, Any] = {"estimator": estimator, "std_floor": std_floor}
    values = step_values(steps, credit)
    if credit == "sum":
        rated = groups[np.isfinite(values)]
        lone = np.isnan(values) | [np.count_nonzero(rated == group) < 2 for group in groups]
        sizes = [len(each) for each in steps]
        compared = np.where(np.repeat(lone, sizes), np.nan, np.concatenate(steps))
        parts = np.split(estimate_advantages(compared, np.repeat(groups, sizes), **options), np.cumsum(sizes)[:-1])
        return [np.array(rewards_to_go(part.tolist())) for part in parts]
    found = []
    for each, advantage in zip(steps, estimate_advantages(values, groups, **options), strict=True):
        weights = np.exp((each.min() - each) / STEP_TEMPERATURE) if advantage and credit == "min" else np.ones(1)
        found.append(np.full(len(each), advantage) * (weights[::-1].cumsum()[::-1] / weights.sum()))
    return found


def step_values(steps: Sequence[Array], credit: str) -> Array:
    """Return what the steps of each reply are worth together `[B]`; NaN for one that `step_advantages` leaves out."""
    values: dict[str, Callable[[Array], float]] = {"min": min, "sum": math.fsum, "last": lambda each: each[-1]}
    return np.array([values[credit](each) if len(each) and np.isfinite(each).all() else math.nan for each in steps])


def zero_variance_groups(rewards: Array, groups: NDArray[Any]) -> NDArray[Any]:
    """Return the ids of groups without a signal, for dynamic sampling (DAPO, arXiv 2503.14476, section 3.2)."""
    return np.setdiff1d(groups, [groups[rows[0]] for rows in groups_with_signal(rewards, groups)])


def overlong_penalty(
    rewards: Array,
    lengths: NDArray[np.int64],
    finished: NDArray[np.bool_],
    *,
    max_new_tokens: int,
    buffer: int,
    penalty: float,
) -> Array:
    """Return rewards minus a penalty for length, which rises from 0 to `penalty` over the last `buffer` tokens.

    DAPO, arXiv 2503.14476, section 3.4. Completions that were cut have the whole penalty. It is subtracted, so it is a
    penalty for negative rewards too. A buffer of 0 is no penalty.
    """
    if not buffer:
        return rewards
    share = np.clip((lengths - (max_new_tokens - buffer)) / buffer, 0.0, 1.0)
    return rewards - penalty * np.where(finished, share, 1.0)


def rewards_to_go(rewards: Sequence[float]) -> list[float]:
    """Return the sum of the rewards of an episode `[T]` from each turn on."""
    return [math.fsum(rewards[turn:]) for turn in range(len(rewards))]
