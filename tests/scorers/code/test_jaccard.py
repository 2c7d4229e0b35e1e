"""Similarity to a reference by words, as in NeMo RL."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gym_rm
from gym_rm import Prompt, ScoringError
from gym_rm.scorers.code.jaccard import CodeJaccardScorer, similarity
from gym_rm.testing import check_scorer

QUESTION = {"role": "user", "content": "Double x."}


def said(text):
    return [QUESTION, {"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("reply", "reference", "expected"),
    [
        ("return 2 * x", "return 2 * x", 1.0),
        (" Return 2 * X\n", "return 2 * x", 1.0),
        ("a b c", "a b d", 0.5),
        ("a a a a", "a", 1 / 7),
        ("", "a", 0.0),
        ("", "", 1.0),
        ("x", "y", 0.0),
    ],
)
def test_similarity_is_that_of_the_words_times_that_of_the_lengths(reply, reference, expected):
    assert similarity(reply, reference) == pytest.approx(expected)


@given(st.text(), st.text())
def test_similarity_is_symmetric_and_a_share(one, two):
    assert 0.0 <= similarity(one, two) == similarity(two, one) <= 1.0


def test_the_reference_may_be_a_field_of_the_row():
    prompt = Prompt((QUESTION,), "p", metadata={"canonical_solution": "return x + x"})
    assert CodeJaccardScorer().score([said("return x + x")], [prompt]).rewards.tolist() == [1.0]


def test_a_row_without_a_reference_has_no_score():
    with pytest.raises(ScoringError, match="no answer and none of"):
        CodeJaccardScorer().score([said("x")], [Prompt((QUESTION,), "p")])
    with pytest.raises(ScoringError, match="no answer and none of"):
        CodeJaccardScorer().score([said("x")])


def test_it_passes_the_checks_of_scorers():
    check_scorer(gym_rm.load_scorer({"kind": "code_jaccard"}))
