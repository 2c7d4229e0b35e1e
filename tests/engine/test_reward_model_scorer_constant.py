"""A reward model that gives all conversations the same score is reported."""

import pytest
import torch

import gym_rm
from gym_rm.errors import warn_once

MESSAGE = "exactly the same score to all different conversations"


@pytest.fixture
def scorer(saved_model):
    warn_once.cache_clear()
    return gym_rm.load_scorer(saved_model())


@pytest.fixture
def untrained(scorer):
    """A scorer whose head is zero."""
    (model,) = scorer.executor.models
    torch.nn.init.zeros_(model.score.weight)
    scorer.clear_cache()
    return scorer


def said(*replies):
    return [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": reply}] for reply in replies]


def test_three_constant_calls_are_reported_once(untrained, caplog):
    for call in range(5):
        untrained.score(said("a", "b"))
        assert (MESSAGE in caplog.text) == (call >= 2)
    assert caplog.text.count(MESSAGE) == 1


@pytest.mark.parametrize("replies", [["a", "a"], ["a"]], ids=["equal", "one"])
def test_equal_or_single_conversations_are_not_reported(untrained, caplog, replies):
    for _ in range(4):
        untrained.score(said(*replies))
    assert MESSAGE not in caplog.text


def test_scores_that_differ_are_not_reported(scorer, caplog):
    for _ in range(4):
        scorer.score(said("a", "b"))
    assert MESSAGE not in caplog.text


def test_a_function_may_return_the_same_reward_for_all_conversations(caplog):
    warn_once.cache_clear()
    zeros = gym_rm.load_scorer(lambda conversations: [0.0] * len(conversations))
    for _ in range(4):
        zeros.score(said("a", "b"))
    assert not caplog.text
