"""Losses for training reward models, as pure functions; all are computed in float32 or float64.

Each returns one value per term: per pair, per group, or per label, with 0 where a label is missing. The loss of a step
is their sum over micro-batches and ranks, divided by the number of terms in all of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0) -> Tensor:
    """Return `-log sigmoid(chosen - rejected - margin)` `[P]`, finite with a finite gradient for every difference.

    Sources: Bradley and Terry (1952); the margin is from Llama 2 (arXiv 2307.09288, section 3.2.2).

    Args:
        chosen: rewards of the preferred replies `[P]`.
        rejected: rewards of the rejected replies `[P]`.
        margin: minimum difference between the rewards of a pair, `[P]` or one number for all pairs.

    Example:
        >>> import torch
        >>> loss = bradley_terry(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 0.0]))
        >>> [round(value, 4) for value in loss.tolist()]
        [0.1269, 0.6931]
    """
    difference = _at_least_float32(chosen) - _at_least_float32(rejected)
    return -F.logsigmoid(difference - (margin.to(difference) if isinstance(margin, Tensor) else margin))


def rao_kupper(first: Tensor, second: Tensor, outcome: Tensor, *, log_theta: float) -> Tensor:
    """Return the negative log-likelihood of wins and ties `[P]`, where a tie is a difference below a threshold.

    With `d = first - second`: `P(first wins) = sigmoid(d - log_theta)`, `P(second wins) = sigmoid(-d - log_theta)`, and
    a tie has the remaining probability.

    Source: Rao and Kupper, Ties in paired-comparison experiments (JASA 62, 1967).

    Args:
        first: rewards of the first replies `[P]`.
        second: rewards of the second replies `[P]`.
        outcome: 1 if the first reply is better, -1 if the second is, 0 for a tie `[P]`.
        log_theta: the threshold, above 0.
    """
    difference = _at_least_float32(first) - _at_least_float32(second)
    threshold = torch.full((), log_theta, dtype=difference.dtype, device=difference.device)
    first_wins, second_wins = F.logsigmoid(difference - threshold), F.logsigmoid(-difference - threshold)
    # P(tie) = (theta^2 - 1) P(first wins) P(second wins).
    log_factor = 2.0 * threshold + torch.log(-torch.expm1(-2.0 * threshold))
    return -(first_wins * (outcome >= 0) + second_wins * (outcome <= 0) + log_factor * (outcome == 0))


def plackett_luce(rewards: Tensor, ranks: Tensor, groups: Tensor) -> Tensor:
    """Return the negative log-likelihood of rankings, in which the best reply that is left is chosen again and again.

    Reply i of a group contributes `logsumexp(rewards of its rivals and itself) - reward of i`; its rivals are the
    replies with the same or a higher rank, so equal ranks draw rewards together. A group of two is a Bradley-Terry
    pair; a group of one has the loss 0.

    Sources: Luce (1959) and Plackett, The analysis of permutations (1975); the ties of Breslow (1974), as in the
    partial likelihood of Cox.

    Args:
        rewards: rewards of all replies of all groups `[N]`, in any order.
        ranks: rank of each reply within its group `[N]`; lower is better.
        groups: number of the group of each reply `[N]`.

    Returns:
        One value per group, by ascending number.
    """
    rewards = _at_least_float32(rewards)
    names, group = torch.unique(groups, return_inverse=True)
    itself = torch.eye(len(rewards), dtype=torch.bool, device=rewards.device)
    rivals = (group[:, None] == group) & (ranks >= ranks[:, None])
    candidates = rewards.expand(len(rewards), -1).masked_fill(~(itself | rivals), -torch.inf)
    losses = torch.logsumexp(candidates, dim=1) - rewards
    return losses.new_zeros(len(names)).index_add(0, group, losses)


def regression(predictions: Tensor, targets: Tensor) -> Tensor:
    """Return the squared error of every objective, in the shape of the targets.

    Sources: HelpSteer2 (arXiv 2406.08673) and the first stage of ArmoRM (arXiv 2406.12845).

    Args:
        predictions: outputs of the head `[N, O]`, or `[N]` for one objective.
        targets: ratings in the same shape; NaN where a rating is missing.
    """
    predictions = _at_least_float32(predictions)
    errors = predictions - targets.to(predictions.dtype).nan_to_num()
    return torch.where(targets.isnan(), 0.0, errors.square())


def process_supervision(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross-entropy of the label of every step `[S]`.

    Sources: Lightman et al., Let's verify step by step (arXiv 2305.20050, section 2.6), and Wang et al., Math-Shepherd
    (arXiv 2312.08935, section 3), whose soft labels are shares of correct continuations.

    Args:
        logits: logits of a good step `[S]`.
        labels: 1 for a good step, 0 for a bad one, or a share between them; NaN where a label is missing `[S]`.
    """
    logits = _at_least_float32(logits)
    shares = labels.to(logits.dtype).nan_to_num()
    losses = F.binary_cross_entropy_with_logits(logits, shares, reduction="none")
    return torch.where(labels.isnan(), 0.0, losses)


def _at_least_float32(values: Tensor) -> Tensor:
    return values.float() if values.element_size() < 4 else values
