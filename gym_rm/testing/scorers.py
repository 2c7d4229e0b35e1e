"""A conformance check for scorers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_rm.errors import ConfigError
from gym_rm.scorer import Scorer, check_signature
from gym_rm.scores import Scores, ScoringError
from gym_rm.types import Conversation, Prompt

LONE_SURROGATE = "\ud800"
CONVERSATIONS: tuple[Conversation, ...] = (
    ({"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}),
    ({"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is five, I think."}),
    ({"role": "user", "content": "Say nothing."}, {"role": "assistant", "content": ""}),
    (
        {"role": "user", "content": "Grüße auf Chinesisch?"},
        {"role": "assistant", "content": "你好"},
        {"role": "user", "content": "And as a picture?"},
        {"role": "assistant", "content": "👋"},
    ),
    (
        {"role": "user", "content": "Count to fifty."},
        {"role": "assistant", "content": " ".join(map(str, range(1, 51)))},
    ),
)


def check_scorer(
    scorer: Scorer,
    conversations: Sequence[Conversation] | None = None,
    prompts: Sequence[Prompt] | None = None,
    *,
    atol: float = 1e-5,
) -> None:
    """Check that scores are valid and do not depend on the batch, and that errors are reported.

    Args:
        scorer: scorer to check.
        conversations: at least two conversations that it can score; None for a built-in set.
        prompts: prompt of each conversation; None makes one for each, with `answer="4"`.
        atol: maximum difference of a reward between batches; 0.0 requires bit-equal rewards. Equal conversations in
            one call must always get bit-equal rewards.

    Raises:
        AssertionError: the scorer breaks the contract of `gym_rm.scorer.Scorer`.

    Example:
        >>> import gym_rm
        >>> check_scorer(gym_rm.load_scorer(lambda conversations: [len(c) for c in conversations]))
    """
    assert isinstance(scorer, Scorer), f"{scorer!r} must have a method score(conversations, prompts=None)."
    try:
        check_signature(scorer)
    except ConfigError as error:
        raise AssertionError(str(error)) from error
    given = [list(conversation) for conversation in (CONVERSATIONS if conversations is None else conversations)]
    assert len(given) >= 2, "conversations must have at least two entries."
    rows = list(prompts) if prompts is not None else [_prompt(one, k) for k, one in enumerate(given)]
    assert len(rows) == len(given), (
        f"prompts must have one entry per conversation, got {len(rows)} entries for {len(given)}."
    )
    kept = copy.deepcopy((given, rows))
    whole = scorer.score(given, rows)
    assert (given, rows) == kept, "score must not change its conversations and prompts."
    _check_scores(whole, len(given), "score(conversations, prompts)")
    assert not whole.failed_rows, f"rows {whole.failed_rows} have errors, but score raised no ScoringError."
    _check_scores(scorer.score([]), 0, "score([])")
    _check_scores(scorer.score([], []), 0, "score([], [])")

    backwards = scorer.score(given[::-1], rows[::-1])
    _check_close(backwards.rewards[::-1], whole.rewards, atol, "in reverse order")
    alone = np.concatenate([scorer.score([one], [row]).rewards for one, row in zip(given, rows, strict=True)])
    _check_close(alone, whole.rewards, atol, "with one call per conversation")
    doubled = scorer.score([*given, *copy.deepcopy(given)], [*rows, *rows]).rewards
    assert np.array_equal(doubled[: len(given)], doubled[len(given) :]), (
        f"equal conversations in one call got different rewards: {doubled[: len(given)]} and {doubled[len(given) :]}."
    )
    _check_close(doubled[: len(given)], whole.rewards, atol, "with every conversation repeated")
    _check_failures(scorer, given, rows, whole, atol)


def _prompt(conversation: Conversation, index: int) -> Prompt:
    return Prompt(tuple(conversation[:-1]), f"prompt {index}", answer="4")


def _check_scores(scores: Scores, size: int, call: str) -> None:
    assert isinstance(scores, Scores), f"{call} returned a {type(scores).__name__}, expected gym_rm.Scores."
    assert len(scores) == size, f"{call} returned {len(scores)} scores for {size} conversations."
    finite = np.isfinite(scores.rewards)
    for row, error in enumerate(scores.errors):
        assert finite[row] == (error is None), (
            f"{call}: row {row} has the reward {scores.rewards[row]} and the error {error!r}; "
            "expected a finite reward without an error, or NaN with an error."
        )
    for name in ("num_tokens", "truncated_tokens"):
        counts = getattr(scores, name)
        assert (counts >= 0).all(), f"{call}: {name} must not be negative, got {counts}."


def _check_close(found: NDArray[Any], expected: NDArray[Any], atol: float, how: str) -> None:
    difference = np.abs(found - expected).max(initial=0.0)
    assert difference <= atol, (
        f"rewards scored {how} differ by {difference:.3g}, more than {atol}: got {found}, expected {expected}."
    )


def _check_failures(scorer: Scorer, given: list[list[Any]], rows: list[Prompt], whole: Scores, atol: float) -> None:
    """Check that an invalid conversation gets a score or an error, and that the other rows keep their scores."""
    bad: Conversation = ({"role": "user", "content": "?"}, {"role": "assistant", "content": LONE_SURROGATE})
    try:
        scores = scorer.score([given[0], bad, given[1]], [rows[0], _prompt(bad, 1), rows[1]])
    except ScoringError as error:
        scores = error.scores
    except Exception as error:
        raise AssertionError(
            f"a conversation with a lone surrogate raised {type(error).__name__}: {error}; expected a ScoringError "
            "that keeps the scores of the other conversations."
        ) from error
    _check_scores(scores, 3, "score with an invalid conversation")
    assert scores.failed_rows in ((), (1,)), (
        f"an invalid conversation in row 1 gave errors in rows {scores.failed_rows}; expected none in other rows."
    )
    _check_close(scores.rewards[[0, 2]], whole.rewards[:2], atol, "together with an invalid conversation")
