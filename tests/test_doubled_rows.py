"""Twice the rows need at most twice the calls: nothing looks at all rows for each row."""

import sys
from pathlib import Path

import gymnasium as gym
import pytest

import gym_rm
from gym_rm.types import Prompt

PACKAGE = str(Path(gym_rm.__file__).parent)


def rewards(conversations):
    return [1.0] * len(conversations)


def reward_of_one(conversation, prompt):
    return 1.0 if prompt else None


SCORERS = {
    "function": rewards,
    "function of one row": reward_of_one,
    "weighted": {"kind": "weighted", "scorers": {"a": rewards, "b": reward_of_one}},
    "ensemble": {"kind": "ensemble", "scorers": [rewards, rewards]},
    "format": {"kind": "format", "pattern": "r.*"},
    "length": {"kind": "length", "max_length": 5},
    "repetition": {"kind": "repetition"},
    "reward model": None,
}


def calls(work):
    """Return how often functions of gym_rm are entered, generators and comprehensions included."""
    count = 0

    def record(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def score(scorer, size):
    question = {"role": "user", "content": "Why?"}
    rows = [[question, {"role": "assistant", "content": f"reply {row}"}] for row in range(size)]
    prompts = [Prompt((question,), f"p{row}", answer="4") for row in range(size)]
    scorer.score(rows[:2], prompts[:2])
    return calls(lambda: scorer.score(rows, prompts))


@pytest.mark.parametrize("name", SCORERS)
def test_a_scorer_makes_at_most_twice_the_calls(name):
    scorer = gym_rm.load_scorer(SCORERS[name])
    assert score(scorer, 128) < 2.1 * score(scorer, 64)


@pytest.mark.parametrize("settings", [{}, {"group_size": 4}, {"reward_on": "end"}], ids=str)
def test_a_step_makes_at_most_twice_the_calls(settings):
    def step(size):
        envs = gym.make_vec("RewardModel-v0", size, reward_model=rewards, **settings)
        envs.reset(seed=0)
        envs.step(["a"] * size)
        return calls(lambda: envs.step(["b"] * size))

    assert step(128) < 2.1 * step(64)
