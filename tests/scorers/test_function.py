"""A plain function as a scorer: accepted signatures, the arguments of the call, and its return values."""

import copy
import functools
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


def prompt_of(answer, **fields):
    return Prompt(({"role": "user", "content": "2 + 2?"},), f"asks for {answer}", answer=answer, **fields)


SAID = [said("one"), said("three"), said("")]
PROMPTS = [prompt_of("one"), prompt_of("2"), prompt_of("")]


def length(conversations):
    return [len(conversation[-1]["content"]) for conversation in conversations]


def right(conversations, prompts):
    return [
        float(conversation[-1]["content"] == prompt.answer)
        for conversation, prompt in zip(conversations, prompts, strict=True)
    ]


class Verifier:
    """One reward function in several callable forms."""

    def __call__(self, conversations, prompts):
        return right(conversations, prompts)

    def method(self, conversations, prompts):
        return right(conversations, prompts)


# --- signatures of functions with and without prompts


def scaled(scale, conversations, prompts, *, offset=0.0):
    return [scale * value + offset for value in right(conversations, prompts)]


def keyword_only(conversations, *, prompts):
    return right(conversations, prompts)


def with_a_default(conversations, prompts=None):
    return right(conversations, prompts)


WITH_PROMPTS = {
    "second parameter": right,
    "keyword only": keyword_only,
    "default": with_a_default,
    "callable object": Verifier(),
    "bound method": Verifier().method,
    "partial": functools.partial(scaled, 1.0),
}


@pytest.mark.parametrize("form", WITH_PROMPTS)
def test_functions_that_receive_prompts(form):
    scorer = FunctionScorer(WITH_PROMPTS[form])
    assert scorer.score(SAID, PROMPTS).rewards.tolist() == [1, 0, 1]
    assert scorer.score([], []).rewards.shape == (0,)


def takes_more_keywords(conversations, **options):
    assert not options
    return length(conversations)


def has_a_setting(conversations, scale=1.0):
    assert scale == 1.0
    return length(conversations)


WITHOUT_PROMPTS = {
    "one parameter": length,
    "**kwargs": takes_more_keywords,
    "a setting with a default": has_a_setting,
    "lambda of any name": lambda c: length(c),
    "builtin": functools.partial(map, lambda conversation: len(conversation[-1]["content"])),
}


@pytest.mark.parametrize("form", WITHOUT_PROMPTS)
def test_functions_that_do_not_receive_prompts(form):
    scorer = FunctionScorer(WITHOUT_PROMPTS[form])
    assert scorer.score(SAID).rewards.tolist() == [3, 5, 0]
    assert scorer.score(SAID, PROMPTS).rewards.tolist() == [3, 5, 0]
    assert scorer.score([]).rewards.shape == (0,)


def one_too_many(conversations, prompts, tokenizer):
    return right(conversations, prompts)


def another_required_keyword(conversations, *, tokenizer):
    return length(conversations)


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (lambda: [0.0], r"\[\]"),
        (one_too_many, r"\['conversations', 'prompts', 'tokenizer'\]"),
        (another_required_keyword, r"\['conversations', 'tokenizer'\]"),
        (lambda conversations, prompts, /: [], r"\['conversations', 'prompts'\]"),
        (lambda **options: [], r"\['options'\]"),
    ],
)
def test_a_function_with_other_parameters_raises_config_error_at_load(function, parameters):
    name = getattr(function, "__qualname__", "")
    with pytest.raises(
        ConfigError, match=r"must take \(conversations\) or .*got the parameters " + parameters
    ) as caught:
        load_scorer(function)
    assert f"the reward function {name}" in str(caught.value)


# --- arguments of the call


def test_a_row_without_a_prompt_has_an_error_if_the_function_requires_prompts():
    with pytest.raises(ScoringError, match="3 of 3"):
        FunctionScorer(right).score(SAID)
    with pytest.raises(ScoringError) as caught:
        FunctionScorer(right).score(SAID, [PROMPTS[0], None, PROMPTS[2]])
    assert caught.value.rows == (1,)
    assert caught.value.scores.rewards[[0, 2]].tolist() == [1, 1]
    reason = "the reward function right requires the prompt of this conversation, but it is missing; pass prompts="
    assert caught.value.scores.errors == (None, reason, None)


def test_a_function_with_optional_prompts_receives_none_for_missing_prompts():
    seen = []

    def optional(conversations, prompts=None):
        seen.append(prompts if prompts is None else [prompt and prompt.answer for prompt in prompts])
        return length(conversations)

    scorer = FunctionScorer(optional)
    scorer.score(SAID)
    scorer.score(SAID, [PROMPTS[0], None, None])
    assert seen == [None, ["one", None, None]]


def test_a_function_may_change_its_arguments():
    def strip(conversations, prompts):
        for conversation, prompt in zip(conversations, prompts, strict=True):
            conversation[-1]["content"] = conversation[-1]["content"].strip()
            del conversation[0]
            prompt.messages[0]["content"] = "other"
            prompt.metadata["seen"] = True
        conversations.reverse()
        prompts.pop()
        return length(reversed(conversations))

    conversations, prompts = [said(" one "), said("a")], [prompt_of("one", metadata={"level": "easy"}), prompt_of("a")]
    before = copy.deepcopy((conversations, prompts))
    assert load_scorer(strip).score(conversations, prompts).rewards.tolist() == [3, 1]
    assert (conversations, prompts) == before


# --- the scorer itself


def test_a_verifier_passes_check_scorer():
    check_scorer(FunctionScorer(lambda conversations, prompts: [float(p.answer == "4") for p in prompts]))
    check_scorer(FunctionScorer(right), SAID, PROMPTS)
    check_scorer(FunctionScorer(length))


def test_the_user_simulator_of_a_callable_object_is_kept():
    class Verifier:
        def __call__(self, conversations):
            return [1.0] * len(conversations)

        def respond(self, conversations, prompts, scores):
            return [None] * len(conversations)

    verifier = Verifier()
    assert FunctionScorer(verifier).respond == verifier.respond
    assert FunctionScorer(length).respond is None


@pytest.mark.parametrize("function", [length, functools.partial(length), Verifier()])
def test_the_provenance_has_the_module_and_a_digest_of_its_source(function):
    provenance = FunctionScorer(function).score(SAID, PROMPTS).provenance
    assert provenance.model.startswith(f"{__name__}:")
    assert provenance.revision.startswith("sha256:")


# --- numbers


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0.1, 1e300],
        np.array([1.0, 0.0, 1.0], dtype=np.float16),
        [np.float32(1), np.int8(0), np.bool_(True)],
        torch.tensor([1, 0, 1], dtype=torch.bfloat16),
        [Decimal("1"), Fraction(0), 1],
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
        (0.5, "returned float 0.5 for 3 conversations; it must return a list with one number or None per conversation"),
        ("123", "returned str '123' for 3 conversations"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, "returned dict {0: 1.0, 1: 1.0, 2: 1.0} for 3 conversations"),
        ({0.0, 1.0, 2.0}, "returned set"),
        (
            [1.0, [2.0], 3.0],
            r"returned list \[2.0\] for conversation 1; it must return a number, or None for a missing score",
        ),
        ([1.0, 2.0, "good"], "returned str 'good' for conversation 2"),
    ],
)
def test_a_function_must_return_a_number_for_every_conversation(returned, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_scorer(lambda conversations: returned).score(SAID)
    assert "the reward function test_a_function_must_return" in str(caught.value)


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


def test_a_series_is_read_by_position_or_refused():
    pandas = pytest.importorskip("pandas")
    series = pandas.Series([1.0, 0.0, 0.5], index=[2, 0, 1])
    assert FunctionScorer(lambda conversations: series).score(SAID).rewards.tolist() == [1.0, 0.0, 0.5]
    with pytest.raises(ConfigError, match="returned DataFrame"):
        FunctionScorer(lambda conversations: pandas.DataFrame([[1.0] * 3] * 3)).score(SAID)
    with pytest.raises(ConfigError, match="prompts must have one entry per conversation, got"):
        FunctionScorer(right).score(SAID, pandas.Series(PROMPTS, index=[2, 1, 0]))
