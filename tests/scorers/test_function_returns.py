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
        (1.0, 0.0, 1.0),
        [True, False, True],
        np.array([1, 0, 1]),
        np.array([1.0, 0.0, 1.0], dtype=np.float16),
        [np.float32(1), np.int8(0), np.bool_(True)],
        torch.tensor([1.0, 0.0, 1.0]),
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


def test_a_function_may_be_a_generator():
    def one_by_one(conversations):
        yield from length(conversations)

    assert FunctionScorer(one_by_one).score(SAID).rewards.tolist() == [3, 5, 0]


def test_a_function_may_return_a_column_of_a_data_frame():
    pandas = pytest.importorskip("pandas")
    column = pandas.DataFrame({"reward": [1.0, 0.0, 1.0]}, index=[7, 8, 9])["reward"]
    assert FunctionScorer(lambda conversations: column).score(SAID).rewards.tolist() == [1, 0, 1]


def test_none_and_infinity_give_missing_scores():
    with pytest.raises(ScoringError) as caught:
        load_scorer(lambda conversations: [1.0, None, float("inf")]).score(SAID)
    scores = caught.value.scores
    assert scores.rewards[0] == 1.0
    assert np.isnan(scores.rewards[1:]).all()
    assert scores.errors == (None, "the reward function returned None", "the reward is inf")


@pytest.mark.parametrize("value", [float("nan"), np.nan, -np.inf, torch.tensor(float("nan")), np.array(np.nan)])
def test_a_number_that_is_not_finite_gives_a_missing_score(value):
    with pytest.raises(ScoringError) as caught:
        FunctionScorer(lambda conversations: [1.0, value, 2.0]).score(SAID)
    assert caught.value.rows == (1,)
    assert caught.value.scores.errors[1] == f"the reward is {float(value)}"
    assert caught.value.scores.rewards_or_none() == [1.0, None, 2.0]


def test_none_for_every_row_gives_only_missing_scores():
    with pytest.raises(ScoringError) as caught:
        FunctionScorer(lambda conversations: [None] * 3).score(SAID)
    assert caught.value.scores.errors == ("the reward function returned None",) * 3


# --- invalid return values


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "must return one value per conversation, got 1 values for 3"),
        ([1.0] * 4, "got 4 values for 3"),
        ([], "got 0 values for 3"),
        (
            0.5,
            "returned float 0.5 for 3 conversations; it must return a list with one number or None per conversation",
        ),
        (np.float32(0.5), r"returned float32 np.float32\(0.5\) for 3 conversations"),
        (np.array(0.5), r"returned ndarray array\(0.5\) for 3 conversations"),
        (torch.tensor(0.5), r"returned Tensor tensor\(0.5000\) for 3 conversations"),
        (None, "returned NoneType None for 3 conversations"),
        ("123", "returned str '123' for 3 conversations"),
        (b"123", "returned bytes b'123' for 3 conversations"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, "returned dict {0: 1.0, 1: 1.0, 2: 1.0} for 3 conversations"),
        ({1.0, 2.0, 3.0}, "returned set {1.0, 2.0, 3.0} for 3 conversations"),
        (
            [1.0, [2.0], 3.0],
            r"returned list \[2.0\] for conversation 1; it must return a number, or None for a missing score",
        ),
        ([1.0, 2.0, "good"], "returned str 'good' for conversation 2"),
        ([1.0, 1j, 2.0], "returned complex 1j for conversation 1"),
        (np.ones((3, 2)), r"returned ndarray array\(\[1., 1.\]\) for conversation 0"),
        (torch.ones(3, 2), r"returned Tensor tensor\(\[1., 1.\]\) for conversation 0"),
    ],
)
def test_a_function_must_return_a_number_for_every_conversation(returned, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_scorer(lambda conversations: returned).score(SAID)
    assert "the reward function test_a_function_must_return" in str(caught.value)


@pytest.mark.parametrize("text", ["1.0", "nan", b"1"])
def test_a_text_with_a_number_raises_config_error(text):
    with pytest.raises(ConfigError, match=f"returned {type(text).__name__} .* for conversation 1"):
        FunctionScorer(lambda conversations: [1.0, text, 2.0]).score(SAID)


def test_an_integer_too_large_for_a_float_raises_config_error():
    with pytest.raises(ConfigError, match=r"returned int 1000.* for conversation 1; it must return a number"):
        FunctionScorer(lambda conversations: [1.0, 10**400, 2.0]).score(SAID)


def test_the_function_must_return_one_value_per_row_with_a_prompt():
    """The function receives only the two conversations with a prompt, so a third value is an error."""
    with pytest.raises(ConfigError, match="must return one value per conversation, got 3 values for 2"):
        FunctionScorer(lambda conversations, prompts: [1.0] * 3).score(SAID, [PROMPTS[0], None, PROMPTS[2]])


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


def raises_with_scores(conversations):
    return failed_in_the_middle(conversations).raise_for_errors()


@pytest.mark.parametrize("function", [failed_in_the_middle, raises_with_scores])
def test_errors_of_returned_or_raised_scores_are_kept(function):
    with pytest.raises(ScoringError) as caught:
        FunctionScorer(function).score(SAID)
    assert caught.value.rows == (1,)
    assert caught.value.scores.errors == (None, "no number in the reply", None)
    assert caught.value.scores.rewards_or_none() == [1.0, None, 2.0]


def test_errors_of_raised_scores_are_assigned_to_the_rows_of_the_call():
    def fail_the_second(conversations, prompts):
        return Scores.from_rewards([1.0, np.nan], errors=[None, "no number in the reply"]).raise_for_errors()

    with pytest.raises(ScoringError) as caught:
        FunctionScorer(fail_the_second).score(SAID, [PROMPTS[0], None, PROMPTS[2]])
    assert caught.value.rows == (1, 2)
    assert caught.value.scores.errors[2] == "no number in the reply"


def test_a_returned_reward_that_is_not_finite_gets_an_error():
    def not_finite(conversations):
        scores = graded(conversations)
        scores.rewards[1:] = [np.nan, np.inf]
        return scores

    with pytest.raises(ScoringError) as caught:
        FunctionScorer(not_finite).score(SAID)
    assert caught.value.scores.errors == (None, "the reward is nan", "the reward is inf")
    assert np.isnan(caught.value.scores.rewards[1:]).all()


def test_scores_of_a_wrong_length_raise_config_error():
    with pytest.raises(ConfigError, match="must return one value per conversation, got 2 values for 3"):
        FunctionScorer(lambda conversations: graded(conversations[1:])).score(SAID)


def test_a_scoring_error_of_another_scorer_called_by_the_function_is_raised():
    def score_twice(conversations):
        return load_scorer(lambda doubled: [None] * len(doubled)).score([*conversations, *conversations]).rewards[:3]

    with pytest.raises(ScoringError, match="6 of 6 conversations could not be scored"):
        FunctionScorer(score_twice).score(SAID)


def test_numbers_are_kept_in_float64():
    numbers = [16777217, 0.1, 1e300, 2**53 - 1]
    scores = FunctionScorer(lambda conversations: numbers).score([said("one")] * 4)
    assert scores.rewards.tolist() == numbers
    assert scores.take([2, 1]).rewards.tolist() == [1e300, 0.1]


def test_a_number_that_float64_cannot_represent_raises_config_error():
    with pytest.raises(ConfigError, match="returned int 1000"):
        FunctionScorer(lambda conversations: [10**400]).score([said("one")])


def test_the_repr_names_the_function():
    assert repr(FunctionScorer(length)) == "FunctionScorer(length)"
