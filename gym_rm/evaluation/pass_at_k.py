"""pass@k and cons@k: how often k samples of a policy solve a prompt, from n >= k graded samples of each prompt."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from gym_rm.checks import integer
from gym_rm.errors import ConfigError
from gym_rm.scorers.math.answers import normal_text
from gym_rm.scorers.math.numbers import parse_number

Groups = Sequence[Sequence[float]]


def pass_at_k(rewards: Groups, k: int, *, threshold: float | None = None) -> float:
    """Return the probability that at least one of k samples is right, averaged over prompts.

    For c right ones of n samples it is `1 - C(n - c, k) / C(n, k)`, the mean over all subsets of k samples, so it is
    unbiased: Chen et al. 2021, arXiv 2107.03374, section 2.1.

    Args:
        rewards: for each prompt, the rewards of its n samples; n may differ between prompts.
        k: number of samples that are drawn.
        threshold: a sample is right if its reward is at least this; None requires rewards of 0 and 1.

    Raises:
        ConfigError: k is more than the samples of a prompt, or a reward is missing, or neither 0 nor 1.

    Example:
        >>> pass_at_k([[1, 0, 0, 0], [0, 0, 0, 0]], k=2)
        0.25
    """
    right = _right(rewards, k, threshold)
    return float(np.mean([1 - math.comb(each.size - int(each.sum()), k) / math.comb(each.size, k) for each in right]))


def cons_at_k(
    answers: Sequence[Sequence[str | None]], rewards: Groups, k: int, *, threshold: float | None = None
) -> float:
    """Return the probability that the most frequent answer of k samples is right, averaged over prompts.

    It is the exact mean over all subsets of k of the n samples. Ties are broken at random: each of the most frequent
    answers counts with the same share. A sample without an answer has no vote; a subset without votes is wrong. Numbers
    are the same answer if their values are equal (`1,000` and `1000.0`), other answers if their texts are.

    Args:
        answers: for each prompt, the extracted answers of its n samples, None for those without one.
        rewards: for each prompt, the rewards of its n samples. If equal answers have different rewards, their mean
            counts.
        k: number of samples that vote.
        threshold: as for `pass_at_k`.

    Raises:
        ConfigError: as for `pass_at_k`; or a prompt has not as many answers as rewards.

    Example:
        >>> cons_at_k([["4", "4", "5"]], [[1, 1, 0]], k=3), cons_at_k([["4", "5"]], [[1, 0]], k=2)
        (1.0, 0.5)
    """
    right = _right(rewards, k, threshold)
    if [len(each) for each in answers] != [each.size for each in right]:
        raise ConfigError(
            f"answers must have one entry per reward, got {[len(each) for each in answers]!r:.80} for "
            f"{[each.size for each in right]!r:.80}."
        )
    return float(np.mean([_majority(*pair, k) for pair in zip(answers, right, strict=True)]))


def _right(rewards: Groups, k: int, threshold: float | None) -> list[NDArray[np.bool_]]:
    """Return which samples of each prompt are right."""
    integer("k", k, minimum=1)
    groups = [np.asarray(each, dtype=np.float64) for each in rewards]
    if not groups:
        raise ConfigError("rewards must have at least one prompt, got none.")
    for prompt, group in enumerate(groups):
        if group.ndim != 1 or group.size < k:
            raise ConfigError(
                f"rewards of prompt {prompt} must be at least k={k} samples, got the shape {group.shape}; sample more, "
                "or use a smaller k."
            )
        if np.isnan(group).any():
            raise ConfigError(f"rewards of prompt {prompt} has missing values; leave out samples that have no reward.")
        if threshold is None and not np.isin(group, (0.0, 1.0)).all():
            odd = group[~np.isin(group, (0.0, 1.0))][0]
            raise ConfigError(f"rewards of prompt {prompt} must be 0 or 1, got {odd}; pass threshold=.")
    return [group >= (1.0 if threshold is None else threshold) for group in groups]


def _majority(answers: Sequence[str | None], right: NDArray[np.bool_], k: int) -> float:
    """Return the probability that a majority vote of k random samples is right."""
    votes: dict[Hashable, list[bool]] = {}
    for answer, is_right in zip(answers, right.tolist(), strict=True):
        if answer is not None:
            votes.setdefault(_key(answer), []).append(is_right)
    silent = len(answers) - sum(map(len, votes.values()))
    total = 0.0
    for winner, given in votes.items():
        if not any(given):
            continue
        others = [len(each) for key, each in votes.items() if key != winner]
        wins = sum(
            math.comb(len(given), most) * _shared_wins(others, silent, k - most, most)
            for most in range(1, min(k, len(given)) + 1)
        )
        total += wins * sum(given) / len(given)
    return total / math.comb(len(answers), k)


def _shared_wins(counts: Sequence[int], silent: int, drawn: int, most: int) -> float:
    """Return in how many ways the other samples give no answer more than `most` votes, ties divided by their number.

    Args:
        counts: number of samples of each other answer.
        silent: number of samples without an answer.
        drawn: number of samples that are drawn from all of these.
        most: votes of the winner.
    """
    ways = {(0, 0): 1}  # (drawn, ties): number of subsets
    for count in counts:
        added: dict[tuple[int, int], int] = {}
        for (used, ties), number in ways.items():
            for votes in range(min(count, most, drawn - used) + 1):
                key = (used + votes, ties + (votes == most))
                added[key] = added.get(key, 0) + number * math.comb(count, votes)
        ways = added
    return sum(number * math.comb(silent, drawn - used) / (ties + 1) for (used, ties), number in ways.items())


def _key(answer: str) -> Hashable:
    number = parse_number(answer)
    return normal_text(answer) if number is None else (number.value, number.percent)
