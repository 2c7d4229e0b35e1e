"""Observations and ends of episodes, and the replies that a step accepts."""

import gymnasium as gym
import numpy as np
import pytest

from gym_rm import ActionError
from tests.envs.environments import Recorder, length_reward, make, one_turn, prompt


def test_a_one_turn_episode_ends_at_every_step_and_returns_final_obs():
    envs = one_turn(2)
    before, first = envs.reset(seed=0)
    after, rewards, terminations, truncations, infos = envs.step(["four", "eight888"])
    assert rewards.dtype == np.float64
    assert rewards.tolist() == [1.0, 2.0]
    assert terminations.all()
    assert not truncations.any()
    for row, reply in enumerate(["four", "eight888"]):
        assert infos["final_obs"][row] == [*before[row], {"role": "assistant", "content": reply}]
        assert infos["final_info"]["prompt_id"][row] == first["prompt_id"][row]
    assert [observation[-1]["role"] for observation in after] == ["user", "user"]


def test_a_scripted_dialogue():
    env = gym.make("RewardModel-v0", reward_model=length_reward, prompts=[prompt(0, "why?")])
    env.reset(seed=0)
    observation, reward, terminated, truncated, _ = env.step("one1")
    assert (reward, terminated, truncated) == (1.0, False, False)
    assert [message["content"] for message in observation] == ["question 0", "one1", "why?"]
    observation, _, terminated, truncated, info = env.step("two2two2")
    assert (terminated, truncated) == (True, False)
    assert [message["content"] for message in observation] == ["question 0", "one1", "why?", "two2two2"]
    assert info["score_ok"] is True


def test_max_turns_truncates_the_episode():
    envs = make(1, prompts=[prompt(0, "a", "b", "c")], max_turns=2)
    envs.reset(seed=0)
    assert [envs.step(["x"])[2:4] for _ in range(2)] == [(False, False), (False, True)]


@pytest.mark.parametrize("reply", ["", " padded \n", "nul\x00s\x00", "\x1b[31m", "<|im_end|>", "😀" * 1000])
def test_replies_are_not_changed(reply):
    recorder = Recorder()
    envs = one_turn(2, reward_model=recorder)
    envs.reset(seed=0)
    infos = envs.step(np.array([reply, "x"], dtype=object))[-1]
    assert recorder.calls[0][0][-1] == {"role": "assistant", "content": reply}
    assert infos["final_obs"][0][-1]["content"] == reply


@pytest.mark.parametrize("actions", [("a", "b"), ["a", "b"], np.array(["a", "b"]), np.array(["a", "b"], dtype=object)])
def test_replies_may_be_a_tuple_list_or_array(actions):
    recorder = Recorder()
    envs = one_turn(2, reward_model=recorder)
    envs.reset(seed=0)
    envs.step(actions)
    assert [type(conversation[-1]["content"]) for conversation in recorder.calls[0]] == [str, str]


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (["a", None], "environment 1: expected a text .str., got NoneType None"),
        (["a", b"b"], "environment 1: expected a text .str., got bytes"),
        (["a", "b\ud800c"], r"environment 1: expected a text without lone surrogates, got '\\ud800' at character 1"),
        (["a", "x" * 101], "environment 1: expected a text of 0 to 100 characters, got 101"),
        ("ab", "actions must be 2 replies in a list, .*, got 'ab'"),
        (["a"], r"actions must be 2 replies in a list.* got \['a'\]"),
        (np.array("ab"), r"got array\('ab'"),
        (np.array([["a", "b"]]), "actions must be 2 replies"),
        (iter("ab"), "actions must be 2 replies in a list"),
        ({0: "a", 1: "b"}, "actions must be 2 replies in a list"),
        ({"a", "b"}, "actions must be 2 replies in a list"),
        ({0: "a", 1: "b"}.values(), "actions must be 2 replies in a list"),
    ],
)
def test_an_invalid_reply_raises_action_error_with_its_row(actions, message):
    envs = one_turn(2, max_text_length=100)
    envs.reset(seed=0)
    with pytest.raises(ActionError, match=message):
        envs.step(actions)


def test_an_invalid_reply_in_a_single_environment_raises_action_error():
    env = gym.make("RewardModel-v0", reward_model=length_reward, prompts=["hi"])
    env.reset()
    with pytest.raises(ActionError, match="environment 0: expected a text"):
        env.step(3)
