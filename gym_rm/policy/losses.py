"""The loss of GRPO and its successors over sampled tokens, as pure functions of tensors.

With the probability ratio `r = p / p_old` of a token and the advantage A of its completion or its step, the loss of an
update is

    -sum over tokens of  weight (importance min(r A, clip(r, 1 - low, 1 + high) A) - kl_coef KL + entropy_coef entropy)

| part | source |
| --- | --- |
| clipped ratio | PPO, arXiv 1707.06347, section 3; two bounds: DAPO, arXiv 2503.14476, section 3.1 |
| weight: mean over completions, mean over tokens, constant length | GRPO; DAPO, section 3.3; Dr. GRPO, 2503.20783 |
| KL | `k3`: Schulman, Approximating KL divergence, 2020 |
| importance: truncated, for a sampler with other numerics than the trainer | Yao et al. 2025, see `policy_loss` |

N sampled tokens of a micro-batch, one completion after the other, never padded: all tensors are `[N]`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gym_rm.policy.grpo_settings import PolicyLossSettings

MAX_LOG_RATIO = 20.0  # keeps exp() and its gradient finite


def token_weights(
    lengths: NDArray[Any], kept: NDArray[Any], *, normalisation: str, max_new_tokens: int
) -> NDArray[np.float64]:
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
    count = max(1, int(np.count_nonzero(kept)))
    divisors: dict[str, Any] = {
        "token_mean": max(1, lengths[kept].sum()),
        "sequence_mean": count * np.maximum(lengths, 1),
        "constant_length": count * max_new_tokens,
    }
    return np.where(kept, 1.0 / divisors[normalisation], 0.0)


@dataclass(frozen=True)
class LossInputs:
    """What the loss knows of each token besides its log-probability now; tensors `[N]` without gradient.

    Attributes:
        old_log_probs: log-probabilities under the policy before the first update with these tokens.
        sampler_log_probs: as the sampler computed them.
        reference_log_probs: under the reference policy; None if the divergence is not measured.
        advantages: advantage of each token: that of its completion, or of its step.
        weights: weight of each token, see `token_weights`.
    """

    old_log_probs: Tensor
    sampler_log_probs: Tensor
    reference_log_probs: Tensor | None
    advantages: Tensor
    weights: Tensor


@dataclass(frozen=True)
class LossTerms:
    """Loss of a micro-batch and what happened in it: scalars, all but `loss` without gradient.

    The others are weighted sums over tokens, which add up over micro-batches and ranks. Divided by `weight`
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


def policy_loss(log_probs: Tensor, entropy: Tensor, inputs: LossInputs, settings: PolicyLossSettings) -> LossTerms:
    """Return `-sum(weights * (importance * gain - kl_coef * kl + entropy_coef * entropy))` over the tokens.

    Where the sampler computes other probabilities than the trainer, gains are multiplied by `min(exp(old - sampler),
    importance_cap)`, without gradient (truncated importance sampling; Yao et al. 2025, Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training).

    Args:
        log_probs, entropy: log-probabilities of the tokens, and entropies where they were sampled, of the policy now.
        inputs, settings: what else is known of the tokens, and the settings of a run's loss.
    """
    zero = torch.zeros_like(log_probs)
    ratios = bounded_exp(log_probs - inputs.old_log_probs)
    lowest, highest = 1 - settings.clip_low, 1 + settings.clip_high
    gain = torch.minimum(ratios * inputs.advantages, ratios.clamp(lowest, highest) * inputs.advantages)
    importance, capped = torch.ones_like(zero), zero
    if settings.importance_cap is not None:
        importance = bounded_exp(inputs.old_log_probs - inputs.sampler_log_probs).detach()
        capped = (importance > settings.importance_cap).to(zero)
        importance = importance.clamp(max=settings.importance_cap)
    kl = zero
    if inputs.reference_log_probs is not None:
        kl = divergence(log_probs, inputs.reference_log_probs)
    weights = inputs.weights
    loss = (weights * (settings.kl_coef * kl - importance * gain - settings.entropy_coef * entropy)).sum()

    def total(values: Tensor) -> Tensor:
        return (weights * values.detach()).sum()

    return LossTerms(
        loss=loss,
        weight=weights.sum(),
        kl=total(kl),
        entropy=total(entropy),
        clipped_low=total((ratios < lowest) & (inputs.advantages < 0)),
        clipped_high=total((ratios > highest) & (inputs.advantages > 0)),
        importance=total(importance),
        capped=total(capped),
    )


def divergence(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Return an estimate of the divergence of the policy from the reference at each sampled token.

    With `d = reference - policy` it is `exp(d) - 1 - d`, called k3 (Schulman, Approximating KL divergence, 2020): never
    negative and unbiased, with a gradient near that of the divergence where the policies are near each other.
    """
    difference = (reference_log_probs - log_probs).clamp(max=MAX_LOG_RATIO)
    return difference.expm1() - difference


def bounded_exp(values: Tensor) -> Tensor:
    """Return `exp(values)`, with the values clamped to where it and its gradient are finite."""
    return values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def update_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return metrics of a step from its updates: sums of `LossTerms` over micro-batches and ranks, and the optimizer's.

    A step without a token that counts has no means: 0 would be read as no entropy and no divergence.
    """

    def total(*names: str) -> float:
        return math.fsum(update[name] for update in updates for name in names)

    def mean(*names: str) -> float | None:
        return total(*names) / total("weight") if total("weight") else None

    return {
        "loss": total("loss") / len(updates),
        "entropy": mean("entropy"),
        "clipped_low": mean("clipped_low"),
        "clipped_high": mean("clipped_high"),
        "importance_mean": mean("importance"),
        "importance_capped": mean("capped"),
        "kl": mean("kl"),
        "clipped": mean("clipped_low", "clipped_high"),
        "unique_tokens": int(total("unique_tokens")),
        **{name: updates[-1][name] for name in ("grad_norm", "learning_rate") if name in updates[-1]},
    }
