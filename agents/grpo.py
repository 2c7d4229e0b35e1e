"""GRPO (arXiv 2402.03300) on `RewardModel-v0`, in one file: train a policy against a reward model.

    python agents/grpo.py                             # embedded policy, reward model and prompts; needs no GPU
    python agents/grpo.py seed=2 steps=50             # change any setting (--help lists them)
    python agents/grpo.py --config run.yaml steps=50  # read settings from a file, then change some
    python agents/grpo.py policy.model=Qwen/Qwen3-0.6B env.reward_model=Skywork/Skywork-Reward-V2-Qwen3-0.6B \\
        env.prompts=prompts.jsonl                     # use your own models (folders, hub ids) and prompts
    torchrun --nproc-per-node 8 agents/grpo.py --config run.yaml optimizer.fsdp=true

Read the file from top to bottom: the algorithm (pure functions), a step (sample, score, learn), a run. A run that was
stopped or killed goes on if the same command is repeated with the same `output`.

Shapes: B = completions, N = sampled tokens of all completions, one after the other; `[N]` arrays are never padded.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from torch import Tensor
from transformers.utils import logging as transformers_logging

import gym_rm
from gym_rm.config import load_config
from gym_rm.errors import ConfigError
from gym_rm.evaluation.answers import is_right
from gym_rm.evaluation.audit import audit_warning
from gym_rm.reports.live import LiveView
from gym_rm.reports.monitor import signs
from gym_rm.reports.plots import plot_run
from gym_rm.reports.rollout_metrics import Outcome, rollout_metrics
from gym_rm.reports.runs import read_run
from gym_rm.reports.tables import conversations_table, results_table
from gym_rm.training.ahead import RolloutsAhead
from gym_rm.training.learner import Learner
from gym_rm.training.playing import Measurements, Rollouts
from gym_rm.training.policy_defaults import complete, open_scorer, read_prompts, rounding_error
from gym_rm.training.policy_run import PolicyRun, Stop
from gym_rm.training.policy_settings import GRPOSettings, settings_help
from gym_rm.training.rollouts import Episode, Samples
from gym_rm.training.stopping import hearing_signals

# --- the algorithm ---------------------------------------------------------------------------------------------------
# B rewards of episodes, compared within groups; N sampled tokens of a micro-batch, in a row, without padding.

Array = NDArray[np.float64]
Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
LARGEST_REWARD = 1e30  # its square is finite in float64, and itself in float32
MAX_LOG_RATIO = 20.0  # keeps exp() and its gradient finite


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

    The std of the others would be 0 for the only reward that differs, which would then be divided by nothing or by the
    rounding error of its siblings, and a group of two would never be divided.
    """
    return rloo(rewards, std_floor) / max(deviation(rewards), std_floor)


GROUP_ESTIMATORS = {
    "grpo": grpo,
    "grpo_no_std": dr_grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "leave_one_out": leave_one_out,
}


def groups_with_signal(rewards: Array, groups: NDArray[Any]) -> list[Rows]:
    """Return the rows of each group that has a signal: at least two rewards, not all equal.

    Args:
        rewards: `[B]`, or `[B, C]` for C components, which have a signal if one of them has. A component that no row of
            a group has belongs to other prompts. A row without another value has failed: it is left out of its group.
        groups: `[B]`, equal for the rows of a group.
    """
    parts = rewards if rewards.ndim == 2 else rewards[:, None]
    finite, found = np.isfinite(parts), []
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        own = finite[rows].any(axis=0)
        rows = rows[finite[rows][:, own].all(axis=1) & own.any()]
        if len(rows) > 1 and (parts[rows][:, own] != parts[rows[0], own]).any():
            found.append(rows)
    return found


def flat_groups(rewards: Array, groups: NDArray[Any]) -> NDArray[Any]:
    """Return the ids of groups without a signal, for dynamic sampling (DAPO, arXiv 2503.14476, section 3.2)."""
    return np.setdiff1d(groups, [groups[rows[0]] for rows in groups_with_signal(rewards, groups)])


def estimate_advantages(
    rewards: Array,
    groups: NDArray[Any],
    *,
    estimator: str,
    std_floor: float,
    components: Mapping[str, Array] | None = None,
    component_weights: Mapping[str, float] | None = None,
) -> Array:
    """Return the advantage of each episode of a step, float64 `[B]`.

    The order of the rows changes nothing. The advantage is exactly 0 for a failed row (its reward is not finite), which
    is left out of all statistics, for a group of one, and for a group of equal rewards.

    Args:
        rewards: `[B]`, of all ranks.
        groups: `[B]`, equal for the episodes of a prompt.
        estimator: one of `GROUP_ESTIMATORS`, `reinforce_plus_plus` or `gdpo`.
        std_floor: lower bound of what divides. At the noise of the rewards, a group that differs only by noise gets
            small advantages.
        components: parts of the reward by name, `[B]` each, for `gdpo`.
        component_weights: weights of the parts, 1 for those not named.

    Raises:
        ConfigError: an unknown component, or a reward beyond 1e30.
    """
    largest = np.abs(rewards[np.isfinite(rewards)]).max(initial=0.0)
    if largest > LARGEST_REWARD:
        raise ConfigError(f"rewards must be within +-{LARGEST_REWARD:g}, got {largest:g}; scale them down.")
    if estimator == "gdpo":
        return gdpo(rewards, groups, components or {}, component_weights or {}, std_floor)
    if estimator == "reinforce_plus_plus":
        return reinforce_plus_plus(rewards, groups, std_floor)
    advantages = np.zeros(len(rewards))
    for rows in groups_with_signal(rewards, groups):
        advantages[rows] = GROUP_ESTIMATORS[estimator](rewards[rows], std_floor)
    return advantages


def reinforce_plus_plus(rewards: Array, groups: NDArray[Any], std_floor: float) -> Array:
    """`r - mean of the group`, whitened over the batch (REINFORCE++ with a baseline, arXiv 2501.03262).

    Groups without a signal are left out of the batch statistics, so that they stay at exactly 0.
    """
    advantages = np.zeros(len(rewards))
    if members := groups_with_signal(rewards, groups):
        for rows in members:
            advantages[rows] = centred(rewards[rows])
        rows = np.concatenate(members)
        advantages[rows] = grpo(advantages[rows], std_floor)
    return advantages


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


def overlong_penalty(
    rewards: Array, lengths: Rows, finished: Mask, *, max_new_tokens: int, buffer: int, penalty: float
) -> Array:
    """Return rewards `[B]` minus a penalty for length, which rises from 0 to `penalty` over the last `buffer` tokens.

    DAPO, arXiv 2503.14476, section 3.4. Completions that were cut have the whole penalty. It is subtracted, so it is a
    penalty for negative rewards too.
    """
    if not buffer:
        return rewards
    share = np.clip((lengths - (max_new_tokens - buffer)) / buffer, 0.0, 1.0)
    return rewards - penalty * np.where(finished, share, 1.0)


def kl_penalised(rewards: Array, log_probs: Array, reference_log_probs: Array, rows: Rows, coef: float) -> Array:
    """Return rewards minus `coef * sum(log p - log p_ref)` over the tokens of each (arXiv 2009.01325, section 3.4).

    `rows [N]` has the reward that each token belongs to; a reward without tokens stays.
    """
    return rewards - coef * np.bincount(rows, weights=log_probs - reference_log_probs, minlength=len(rewards))


def token_weights(lengths: Rows, kept: Mask, *, normalisation: str, max_new_tokens: int) -> Array:
    """Return the weight of each token of B completions in the loss of an update, float64 `[B]`.

    With these weights the loss is a sum, so micro-batches and ranks add up. Completions that are not `kept` (overlong
    filtering, DAPO) have weight 0 and count in no mean.

    Args:
        lengths: number of tokens of each completion of the update, on all ranks `[B]`.
        kept: `[B]`.
        normalisation: `token_mean` is a mean over tokens (DAPO, arXiv 2503.14476, section 3.3), `sequence_mean` over
            completions of the mean of each (GRPO), `constant_length` divides by `max_new_tokens` (Dr. GRPO).
        max_new_tokens: most tokens in a completion.
    """
    count = max(1, np.count_nonzero(kept))
    divisors = {
        "token_mean": max(1, lengths[kept].sum()),
        "sequence_mean": count * np.maximum(lengths, 1),
        "constant_length": count * max_new_tokens,
    }
    return np.where(kept, 1.0 / divisors[normalisation], 0.0)


@dataclass(frozen=True)
class LossTerms:
    """Loss of a micro-batch and what happened in it: scalars, all but `loss` without gradient.

    All but `ratio_max` are weighted sums over tokens, which add up over micro-batches and ranks. Divided by `weight`
    they are means: of the divergence from the reference, of the entropy, of the tokens at the lower and the upper bound
    of the ratio, of the importance weights, and of the tokens where these were capped.
    """

    loss: Tensor
    weight: Tensor
    kl: Tensor
    entropy: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    importance: Tensor
    capped: Tensor
    ratio_max: Tensor


def policy_loss(
    log_probs: Tensor,
    *,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    rows: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    objective: str = "ppo",
    ratio: str = "token",
    reference_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    sampler_log_probs: Tensor | None = None,
    importance_cap: float | None = None,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> LossTerms:
    """Return `-sum(weights * (importance * gain - kl_coef * kl + entropy_coef * entropy))` over N tokens.

    Args:
        log_probs: log-probabilities of the tokens under the policy, `[N]` as all tensors here.
        old_log_probs: under the policy before the first update with these tokens, without gradient.
        advantages, weights: advantage of each token's completion; weight of each token, see `token_weights`.
        rows: completion of each token, int64. A completion is not divided among micro-batches.
        clip_low, clip_high, dual_clip, objective: see `gains`.
        ratio: probability ratio of each `token`; or of the `sequence`, which is the exponential of the mean log-ratio
            of a completion (GSPO, arXiv 2507.18071; its loss has the weights `sequence_mean`).
        reference_log_probs: under the reference policy, see `divergence`.
        sampler_log_probs: as the sampler computed them. Where it computes other probabilities than the trainer, gains
            are multiplied by `min(exp(old - sampler), importance_cap)`, without gradient (truncated importance
            sampling; Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training).
        entropy: entropies of the policy where it sampled the tokens.
    """
    zero = torch.zeros_like(log_probs)
    log_ratios = log_probs - old_log_probs
    ratios = bounded_exp(log_ratios if ratio == "token" else row_means(log_ratios, rows))
    gain, low, high = gains(ratios, log_probs, advantages, objective, (1 - clip_low, 1 + clip_high), dual_clip)
    importance, capped = torch.ones_like(zero), zero
    if sampler_log_probs is not None and importance_cap is not None:
        importance = bounded_exp(old_log_probs - sampler_log_probs).detach()
        importance, capped = importance.clamp(max=importance_cap), (importance > importance_cap).to(zero)
    kl = zero if reference_log_probs is None else divergence(log_probs, reference_log_probs, estimator=kl_estimator)
    entropy = zero if entropy is None else entropy
    loss = (weights * (kl_coef * kl - importance * gain - entropy_coef * entropy)).sum()
    sums = [(weights * each.detach()).sum() for each in (zero + 1, kl, entropy, low, high, importance, capped)]
    return LossTerms(loss, *sums, torch.where(weights > 0, ratios, 0.0).detach().max())


def gains(
    ratios: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    objective: str,
    bounds: tuple[float, float],
    dual_clip: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the policy gains by each token, and where the lower and the upper bound was reached `[N]`.

    `ppo`: `min(ratio * A, clip(ratio) * A)` (arXiv 1707.06347, section 3), but at least `dual_clip * A` for negative
    advantages (arXiv 1912.09729); a token beyond a bound has no gradient. `cispo`: `clip(ratio) * A * log p` with a
    constant ratio, so that every token has a gradient (MiniMax-M1, arXiv 2506.13585, section 3.1; there, `clip_low` is
    1, which is no bound). `reinforce`: `A * log p`, the plain policy gradient.
    """
    clipped, low, high = ratios.clamp(*bounds), ratios < bounds[0], ratios > bounds[1]
    if objective == "cispo":
        return clipped.detach() * advantages * log_probs, low, high
    if objective == "reinforce":
        return advantages * log_probs, torch.zeros_like(low), torch.zeros_like(high)
    negative = advantages < 0
    gain = torch.minimum(ratios * advantages, clipped * advantages)
    low, high = low & negative, high & (advantages > 0)
    if dual_clip is not None:
        gain = torch.where(negative, torch.maximum(gain, dual_clip * advantages), gain)
        high = high | (negative & (ratios > dual_clip))
    return gain, low, high


def divergence(log_probs: Tensor, reference_log_probs: Tensor, *, estimator: str) -> Tensor:
    """Return an estimate of the divergence of the policy from the reference at each sampled token `[N]`.

    With `d = reference - policy`: `k1` is `-d`, `k2` is `d^2 / 2`, `k3` is `exp(d) - 1 - d` (Schulman, Approximating KL
    divergence, 2020). The values of `k1` and `k3` are unbiased. In a loss only the gradient counts: that of `k1` is 0
    in expectation, so it adds noise and holds nothing back (use it in the reward); that of `k2` is the gradient of the
    divergence; that of `k3` is near it where the policies are near each other.
    """
    difference = reference_log_probs - log_probs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    difference = difference.clamp(max=MAX_LOG_RATIO)
    return difference.expm1() - difference


def bounded_exp(values: Tensor) -> Tensor:
    return values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def row_means(values: Tensor, rows: Tensor) -> Tensor:
    """Return for each token the mean over the tokens of its completion `[N]`."""
    _, row, counts = rows.unique(return_inverse=True, return_counts=True)
    return (torch.zeros_like(counts, dtype=values.dtype).index_add(0, row, values) / counts)[row]


# --- a step: learn from the episodes ---------------------------------------------------------------------------------


def learn(
    learner: Learner, episodes: Sequence[Episode], settings: GRPOSettings, *, step: int, noise: float
) -> tuple[dict[str, Any], np.ndarray]:
    """Update the policy on the episodes of a step; return metrics, and the advantage of each episode.

    Args:
        learner: the policy.
        episodes: this rank's episodes. Statistics and means are over the episodes of all ranks.
        settings: settings of the run.
        step: number of the step.
        noise: rounding error of the rewards, relative to the largest.
    """
    samples, loss, options = Samples.of(episodes), settings.loss, settings.optimizer
    sampled = np.concatenate([turn.completion.log_probs for turn in samples.turns])
    once = options.updates_per_step * options.epochs == 1
    batches = learner.batches(samples.turns, samples.groups)
    spare = min(batches, key=lambda batch: batch.num_tokens)
    # With a single update the old log-probabilities are the current ones, so they are not computed separately.
    old = None if once else samples.in_order([batch.turns for batch in batches], learner.log_probs(batches))
    reference = None
    if learner.measures_kl:
        reference = samples.in_order([batch.turns for batch in batches], learner.log_probs(batches, reference=True))
    rewards = shaped_rewards(samples, sampled, reference, settings)
    advantages, kept = advantages_of(learner, samples, rewards, settings, noise)

    sums: dict[str, Tensor | float] = {}
    for share in shares_of(settings, step):
        inside = np.flatnonzero(np.isin(samples.groups, share))
        packed = batches if once else learner.batches(samples.turns, samples.groups, chosen=inside)
        every_length, ours = learner.shared(samples.lengths)
        every_kept, _ = learner.shared(kept & np.isin(samples.groups, share))
        weights = token_weights(
            every_length,
            every_kept,
            normalisation=loss.normalisation,
            max_new_tokens=settings.sampling.max_new_tokens,
        )[ours]
        for batch, counts in learner.passes(packed, spare=spare):
            log_probs, entropy = learner.forward(batch)
            at, rows = samples.tokens_of(batch.turns), batch.rows

            def tensor(values: np.ndarray, device: torch.device = log_probs.device) -> Tensor:
                return torch.as_tensor(values, dtype=torch.float32, device=device)

            terms = policy_loss(
                log_probs,
                old_log_probs=log_probs.detach() if old is None else tensor(old[at]),
                advantages=tensor(advantages[rows]),
                weights=tensor(weights[rows] * counts),
                rows=torch.as_tensor(batch.rows, device=log_probs.device),
                clip_low=loss.clip_low,
                clip_high=loss.clip_high,
                dual_clip=loss.dual_clip,
                objective=loss.objective,
                ratio=loss.ratio,
                reference_log_probs=None if reference is None else tensor(reference[at]),
                kl_coef=loss.kl_coef if loss.kl_in == "loss" else 0.0,
                kl_estimator=loss.kl_estimator,
                sampler_log_probs=tensor(sampled[at]) if loss.importance_cap else None,
                importance_cap=loss.importance_cap,
                entropy=entropy,
                entropy_coef=loss.entropy_coef,
            )
            learner.backward(terms.loss)
            for name, value in vars(terms).items():
                sums[name] = sums.get(name, 0.0) + value.detach()
        changed = learner.update() if every_kept.any() else learner.skip_update()
    sums["flat_groups"] = len(groups_to_replace(episodes, settings)) / settings.env.num_prompts
    sums["unique_tokens"] = sum(each.num_tokens for batch in batches for each in batch.batches)
    metrics = step_metrics(
        learner.summed({name: float(each) for name, each in sums.items()}),
        updates=options.updates_per_step * options.epochs,
        with_kl=reference is not None,
    )
    metrics |= {"advantage_std": float(learner.shared(advantages)[0].std()), **changed}
    return metrics, np.array([advantages[samples.owners == row].mean() for row in range(len(episodes))])


def step_metrics(totals: Mapping[str, float], *, updates: int, with_kl: bool) -> dict[str, Any]:
    """Return the metrics of the updates of a step from the sums of `LossTerms` over micro-batches and ranks."""
    names = {"entropy": "entropy", "clipped_low": "clipped_low", "clipped_high": "clipped_high"}
    names |= {"importance_mean": "importance", "importance_capped": "capped"} | ({"kl": "kl"} if with_kl else {})
    weight = totals["weight"]
    # A step without a token that counts has no means: 0 would be read as no entropy and no divergence.
    means = {name: totals[of] / weight if weight else None for name, of in names.items()}
    return {
        "loss": totals["loss"] / updates,
        **means,
        "clipped": (totals["clipped_low"] + totals["clipped_high"]) / weight if weight else None,
        "flat_groups": totals["flat_groups"],
        "unique_tokens": int(totals["unique_tokens"]),
    }


def shaped_rewards(
    samples: Samples, sampled: np.ndarray, reference: np.ndarray | None, settings: GRPOSettings
) -> np.ndarray:
    """Return the rewards of the episodes `[B]`, less the penalties that the settings ask for."""
    rewards, options, loss = samples.column("reward"), settings.advantage, settings.loss
    if options.overlong_buffer:
        rewards = overlong_penalty(
            rewards,
            samples.column("num_tokens"),
            samples.column("finished"),
            max_new_tokens=settings.sampling.max_new_tokens,
            buffer=options.overlong_buffer,
            penalty=options.overlong_penalty,
        )
    if loss.kl_in == "reward" and reference is not None:
        rewards = kl_penalised(
            rewards, sampled, reference, np.repeat(samples.owners, samples.lengths), coef=loss.kl_coef
        )
    return rewards


def advantages_of(
    learner: Learner, samples: Samples, rewards: np.ndarray, settings: GRPOSettings, noise: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the advantages of the turns `[M]`, and which of them count in the loss `[M]`."""
    options, groups = settings.advantage, samples.column("group")
    units, owners = rewards, samples.owners
    if options.per_turn:
        numbers = np.concatenate([np.arange(len(episode.turns)) for episode in samples.episodes])
        units, owners = (
            rewards_to_go(samples.episodes, rewards, discount=options.discount),
            np.arange(len(samples.turns)),
        )
        groups = samples.groups * settings.env.max_turns + numbers
    every, ours = learner.shared(units)
    largest = np.abs(every[np.isfinite(every)]).max(initial=0.0)
    components = None
    if options.estimator == "gdpo":
        own = sorted({name for episode in samples.episodes for name in episode.components})
        names = sorted(set(learner.gathered_objects(own)))  # prompts of other ranks may have other components
        rows = [[episode.components.get(name, math.nan) for episode in samples.episodes] for name in names]
        components = {name: learner.shared(np.array(row))[0] for name, row in zip(names, rows, strict=True)}
    advantages = estimate_advantages(
        every,
        learner.shared(groups)[0],
        estimator=options.estimator,
        std_floor=options.std_floor or max(0.1, 2 * noise * largest),
        components=components,
        component_weights=options.component_weights,
    )[ours]
    kept = np.isfinite(rewards)
    if options.overlong == "filter":
        kept &= samples.column("finished")
    if options.dynamic_sampling:
        kept &= ~np.isin(samples.column("group"), groups_to_replace(samples.episodes, settings))
    return advantages[owners], kept[samples.owners]


def groups_to_replace(episodes: Sequence[Episode], settings: GRPOSettings) -> np.ndarray:
    """Return the groups of whole episodes without a signal: those whose rewards, or components for GDPO, are equal."""
    rewards = np.array([episode.reward for episode in episodes])
    if settings.advantage.estimator == "gdpo":
        names = sorted({name for episode in episodes for name in episode.components})
        parts = [[episode.components.get(name, math.nan) for name in names] for episode in episodes]
        rewards = np.where(np.isfinite(rewards)[:, None], np.array(parts), math.nan)
    return flat_groups(rewards, np.array([episode.group for episode in episodes]))


def rewards_to_go(episodes: Sequence[Episode], rewards: np.ndarray, *, discount: float) -> np.ndarray:
    """Return the discounted sum of rewards from each turn on `[M]`; penalties of an episode are at its last turn."""
    found = []
    for episode, reward in zip(episodes, rewards, strict=True):
        own = [turn.reward for turn in episode.turns]
        own[-1] += reward - episode.reward
        sums = [math.fsum(discount**k * later for k, later in enumerate(own[number:])) for number in range(len(own))]
        found += sums if math.isfinite(reward) else [math.nan] * len(own)
    return np.array(found)


def shares_of(settings: GRPOSettings, step: int) -> Iterator[np.ndarray]:
    """Yield the groups of each update of a step, in another order for each epoch."""
    for epoch in range(settings.optimizer.epochs):
        order = np.random.default_rng([settings.seed, step, epoch]).permutation(settings.env.num_prompts)
        yield from np.array_split(order, settings.optimizer.updates_per_step)


# --- a run -----------------------------------------------------------------------------------------------------------


def outcome(episode: Episode) -> Outcome:
    """Return what metrics read of an episode; its answer is checked without the reward model."""
    reply = episode.turns[-1].completion.text
    right = None if episode.answer is None else is_right(reply, episode.answer)
    components, verdicts = dict(episode.components), episode.verdicts
    return Outcome(episode.reward, episode.num_tokens, episode.finished, reply, right, components, verdicts)


def train(settings: GRPOSettings, console: Console) -> Stop | None:
    """Train a policy, or go on with a run; return why it ended before its last step, or None."""
    torch.set_num_threads(settings.threads)
    learner = Learner(settings)
    console = console if learner.is_main else Console(quiet=True)
    prompts, held_out = read_prompts(settings)
    scorer = open_scorer(settings, learner.device)
    rollouts = Rollouts(settings, learner, prompts, scorer, without_signal=groups_to_replace)
    measurements = Measurements(settings, learner, held_out, scorer, rollouts.source)
    run = PolicyRun(settings, learner, (prompts, held_out))
    ahead = RolloutsAhead(
        rollouts.make,
        rollouts.source.current_weights,
        max_staleness=settings.max_staleness,
        num_steps=settings.steps,
        step=run.step,
        made=run.pending,
    )
    if (warning := audit_warning(scorer, settings.env.audit)) is not None:
        console.print(f"[yellow]{escape(warning)}[/]", highlight=False)
    console.print(
        f"policy {learner.start.name} ({learner.start.model.num_parameters():,} parameters) on {learner.device}, "
        f"reward model {settings.env.reward_model or 'embedded'}, {len(prompts)} prompts, {len(held_out)} held out, "
        f"seed {settings.seed}" + (f", going on after step {run.step}" if run.step else ""),
        highlight=False,
    )

    def measure() -> None:
        """Answer every held-out prompt once."""
        if held_out:
            episodes = measurements.make()
            metrics = rollout_metrics([outcome(episode) for episode in episodes])
            run.log("held_out", run.step, metrics)
            run.add_conversations("held_out", episodes, right=[outcome(each).right for each in episodes])
            run.measured(metrics)
            view.measured(run.step, metrics, [episode.turns[-1].completion.text for episode in episodes])

    def log_step(episodes: Sequence[Episode], advantages: np.ndarray, metrics: dict[str, Any], seconds: float) -> None:
        """Write the metrics of a step and, now and then, its first groups."""
        outcomes = learner.gathered_objects([outcome(episode) for episode in episodes])
        every = rollout_metrics(outcomes) | {"staleness": min(run.step - 1, settings.max_staleness)} | metrics
        if settings.advantage.dynamic_sampling:
            every["extra_batches"] = max(learner.gathered_objects([episode.attempt for episode in episodes]))
        every["tokens_per_second"] = sum(each.num_tokens for each in outcomes) / seconds
        run.log("train", run.step, every)
        view.update(run.step, every)
        if run.is_due(settings.eval.every):
            count = settings.logged_groups * settings.env.group_size
            shown = learner.gathered_objects(list(zip(episodes, advantages.tolist(), strict=True))[:count])[:count]
            right = [outcome(episode).right for episode, _ in shown]
            run.add_conversations("train", [each for each, _ in shown], right=right, advantages=[a for _, a in shown])

    with contextlib.ExitStack() as stack:
        for each in (run, rollouts, measurements, ahead):
            stack.callback(each.close)
        view = stack.enter_context(LiveView(console, settings.steps, history=run.history()))
        heard = stack.enter_context(hearing_signals(signal.SIGTERM, signal.SIGINT))
        if run.step == 0:
            measure()
        stop = run.reason_to_stop(heard())  # a run that stopped stays so if it is repeated
        while stop is None and run.step < settings.steps:
            started = time.perf_counter()
            with run.saved_after_errors(ahead):
                episodes = ahead.take(run.step + 1)  # sample and score
            if settings.env.sleep:
                scorer.sleep()
            learning = time.perf_counter()
            updated, advantages = learn(learner, episodes, settings, step=run.step + 1, noise=rounding_error(scorer))
            run.step += 1
            if settings.loss.reference_every and run.step % settings.loss.reference_every == 0:
                learner.refresh_reference()
            ended = time.perf_counter()
            seconds = {**rollouts.seconds(), "update": ended - learning}
            log_step(episodes, advantages, {**updated, "phase_seconds": seconds}, ended - started)
            if run.is_due(settings.eval.every):
                measure()
            stop = run.reason_to_stop(heard())
            if stop is not None or run.is_due(settings.checkpoint.save_every or settings.eval.every):
                run.save(ahead)
        if stop is None or not stop.can_go_on:
            run.finish()
    return stop


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=settings_help(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="name=value", help="settings to change, such as policy.model=folder seed=2"
    )
    parser.add_argument("--config", type=Path, help="YAML file of settings")
    arguments = parser.parse_args()
    console = Console()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        settings = complete(load_config(GRPOSettings, arguments.config, arguments.overrides))
        stop = train(settings, console)
    except (gym_rm.GymRMError, FloatingPointError, OSError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        for note in getattr(error, "__notes__", ()):
            console.print(escape(note), highlight=False)
        raise SystemExit(2) from error
    except KeyboardInterrupt as error:  # while models are loaded
        console.print("interrupted", highlight=False)
        raise SystemExit(130) from error
    if int(os.environ.get("RANK", 0)) == 0:
        show_results(Path(settings.output), stop, console)
    raise SystemExit(0 if stop is None else stop.exit_code)


def show_results(folder: Path, stop: Stop | None, console: Console) -> None:
    results = read_run(folder)
    if results.before_and_after():
        console.print(conversations_table(results))
    if results.training:
        console.print(results_table(results))
        for sign in signs(results):
            console.print(f"[yellow]{escape(sign.message)} {escape(sign.what_to_turn)}[/]", highlight=False)
        console.print(f"picture: {plot_run(results, folder / 'curve.png')}", highlight=False)
    if stop is not None:
        steps = results.training[-1]["step"] if results.training else 0
        console.print(f"stopped after step {steps}: {stop.reason}", highlight=False)
    if stop is None or not stop.can_go_on:
        console.print(f"policy:  {folder / 'final'}", highlight=False)
    else:
        console.print(f"repeat the command with output={folder} to go on", highlight=False)
    console.print(f"report:  gym-rm report {folder}", highlight=False)


if __name__ == "__main__":
    main()
