"""Number of calls between a step of the environment and the model; few calls are easy to follow in a debugger."""

import sys
from pathlib import Path

import gymnasium as gym
import pytest

import gym_rm

PACKAGE = str(Path(gym_rm.__file__).parent)
REPLIES = ["The sum is 42.", "I don't know."]


@pytest.fixture(scope="module")
def envs():
    envs = gym.make_vec("RewardModel-v0", num_envs=2)
    yield envs
    envs.close()


def calls_of_the_package():
    """Return the names of the functions of gym_rm on the call stack, the outermost first."""
    calls = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return calls[::-1]


def test_a_step_reaches_the_fused_forward_in_at_most_eight_calls(envs, monkeypatch):
    """A hook on the backbone would disable the fused forward, so the test replaces the forward of the embedding."""
    (model,) = envs.unwrapped.scorer.executor.models
    embedding, seen = model.get_input_embeddings(), []

    def forward(ids):
        seen.append(calls_of_the_package())
        return type(embedding).forward(embedding, ids)

    monkeypatch.setattr(embedding, "forward", forward)
    envs.reset(seed=0)
    envs.step(REPLIES)
    (calls,) = seen
    assert calls[0] == "RewardVectorEnv.step"
    assert calls[-1] == "DecoderBackbone._llama_states"
    assert len(calls[1:-1]) <= 8, "\n".join(calls)


def test_a_step_with_a_function_enters_few_functions_of_the_package():
    entered = []

    def record(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append(frame.f_code.co_qualname)

    envs = gym.make_vec("RewardModel-v0", num_envs=2, reward_model=lambda conversations: [1.0, 2.0])
    envs.reset(seed=0)
    before = sys.getprofile()
    sys.setprofile(record)
    try:
        envs.step(REPLIES)
    finally:
        sys.setprofile(before)
    assert entered[0] == "RewardVectorEnv.step"
    assert len(entered) < 270, "\n".join(entered)
