"""Return values of a plain function: numbers, None or `Scores`, and errors for all other values."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from gym_rm import ConfigError, Prompt, Scores, ScoringError, load_scorer
from gym_rm.scorers.function import FunctionScorer
from gym_rm.testing import check_scorer


def said(text):
    return [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": text}]


SAID = [said("one"), said("three"), said("")]
PROMPTS = [Prompt(tuple(said("")[:1]), answer, answer=answer) for answer in ("one", "2", "")]


def length(conversations):
    return [len(conversation[-1]["content"]) for conversation in conversations]


# --- numbers


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0, 1],
        [True, False, True],
        np.array([1.0, 0.0, 1.0], dtype=np.float16),
        [np.float32(1), np.int8(0), np.bool_(True)],
        torch.tensor([1, 0, 1], dtype=torch.bfloat16),
        torch.tensor([[1.0], [0.0], [1.0]]),
        [Decimal("1"), Fraction(0), 1],
        dict.fromkeys("abc", 1).values(),
    ],
    ids=lambda returned: f"{type(returned).__name__} of {type(next(iter(returned))).__name__}",
)
def test_a_function_may_return_any_list_of_numbers(returned):
    scores = FunctionScorer(lambda conversations: returned).score(SAID)
    assert scores.rewards.dtype == np.float64
    assert scores.rewards.tolist() == [float(value) for value in returned]


def test_none_and_infinity_give_missing_scores():
    with pytest.raises(ScoringError) as caught:
        load_scorer(lambda conversations: [1.0, None, float("inf")]).score(SAID)
    scores = caught.value.scores
    assert scores.rewards[0] == 1.0
    assert np.isnan(scores.rewards[1:]).all()
    assert scores.errors == (None, "the reward function returned None", "the reward is inf")


# --- invalid return values


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "must return one value per conversation, got 1 values for 3"),
        (
            0.5,
            "returned float 0.5 for 3 conversations; it must return a list with one number or None per conversation",
        ),
        (np.array(0.5), r"returned ndarray array\(0.5\) for 3 conversations"),
        ("123", "returned str '123' for 3 conversations"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, "returned dict {0: 1.0, 1: 1.0, 2: 1.0} for 3 conversations"),
        (
            [1.0, [2.0], 3.0],
            r"returned list \[2.0\] for conversation 1; it must return a number, or None for a missing score",
        ),
        ([1.0, 2.0, "good"], "returned str 'good' for conversation 2"),
        ([1.0, 1j, 2.0], "returned complex 1j for conversation 1"),
        (torch.ones(3, 2), r"returned Tensor tensor\(\[1., 1.\]\) for conversation 0"),
    ],
)
def test_a_function_must_return_a_number_for_every_conversation(returned, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_scorer(lambda conversations: returned).score(SAID)
    assert "the reward function test_a_function_must_return" in str(caught.value)


def test_the_error_for_an_invalid_value_names_the_row_of_the_call():
    """The function receives only the rows with a prompt, but the error must name the row of the whole call."""
    with pytest.raises(ConfigError, match="returned str 'bad' for conversation 2"):
        FunctionScorer(lambda conversations, prompts: [1.0, "bad"]).score(SAID, [PROMPTS[0], None, PROMPTS[2]])


def test_an_exception_of_the_function_is_raised_unchanged():
    def broken(conversations):
        yield from (len(None) for _ in conversations)

    with pytest.raises(TypeError, match="has no len"):
        load_scorer(broken).score(SAID)


# --- returned scores


def graded(conversations):
    """Return scores with components, terminations and infos."""
    replies = [conversation[-1]["content"] for conversation in conversations]
    return Scores.from_rewards(
        length(conversations),
        components={"length": np.array(length(conversations), dtype=np.float32)},
        terminations=[reply == "one" for reply in replies],
        infos={"reply": np.array(replies, dtype=object)},
    )


def test_a_function_may_return_scores():
    scores = FunctionScorer(graded).score(SAID)
    assert scores.rewards.tolist() == [3, 5, 0]
    assert scores.components["length"].tolist() == [3, 5, 0]
    assert scores.terminations.tolist() == [True, False, False]
    assert scores.infos["reply"].tolist() == ["one", "three", ""]
    assert (scores.provenance.scorer, scores.provenance.model) == ("FunctionScorer", f"{__name__}:graded")
    check_scorer(FunctionScorer(graded))


def test_returned_scores_are_assigned_to_the_rows_with_a_prompt():
    with pytest.raises(ScoringError) as caught:
        FunctionScorer(lambda conversations, prompts: graded(conversations)).score(SAID, [PROMPTS[0], None, PROMPTS[2]])
    scores = caught.value.scores
    assert caught.value.rows == (1,)
    assert "requires the prompt of this conversation" in scores.errors[1]
    assert scores.rewards_or_none() == [3, None, 0]
    assert scores.terminations.tolist() == [True, False, False]
    assert scores.infos["reply"].tolist() == ["one", None, ""]


def failed_in_the_middle(conversations):
    return Scores.from_rewards([1.0, np.nan, 2.0], errors=[None, "no number in the reply", None])


def test_errors_of_returned_scores_are_kept():
    with pytest.raises(ScoringError) as caught:
        FunctionScorer(failed_in_the_middle).score(SAID)
    assert caught.value.rows == (1,)
    assert caught.value.scores.errors == (None, "no number in the reply", None)
    assert caught.value.scores.rewards_or_none() == [1.0, None, 2.0]


def test_numbers_are_kept_in_float64():
    numbers = [16777217, 0.1, 1e300, 2**53 - 1]
    scores = FunctionScorer(lambda conversations: numbers).score([said("one")] * 4)
    assert scores.rewards.tolist() == numbers
    assert scores.take([2, 1]).rewards.tolist() == [1e300, 0.1]
