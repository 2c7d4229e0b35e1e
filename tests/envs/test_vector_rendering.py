"""Rendering and closing."""

import gymnasium as gym
import pytest
from gymnasium.error import ClosedEnvironmentError

import gym_rm
from tests.envs.environments import Recorder, length_reward, make, one_turn, prompt


def test_ansi_shows_the_last_scored_reply_after_an_autoreset():
    envs = make(2, prompts=[prompt(0)], render_mode="ansi")
    envs.reset(seed=0)
    assert envs.render()[1] == "--- environment 1, prompt p0\nuser: question 0"
    envs.step(["four", "\x1b[2Jgone"])
    first, second = envs.render()
    assert first.endswith("assistant: four\n--- reward 1, episode over")
    assert "\x1b" not in second
    assert "\\x1b[2Jgone" in second


def test_human_prints_after_reset_and_step(capsys):
    env = gym.make("RewardModel-v0", reward_model=length_reward, prompts=[prompt(0)], render_mode="human")
    env.reset(seed=0)
    assert "question 0" in capsys.readouterr().out
    env.step("[bold]four[/bold]")
    assert env.render() is None
    assert "assistant: [bold]four[/bold]" in capsys.readouterr().out


def test_human_prints_at_most_eight_transcripts(capsys):
    one_turn(100, render_mode="human").reset(seed=0)
    assert "and 92 more" in capsys.readouterr().out


def test_render_without_render_mode_warns():
    with pytest.warns(UserWarning, match="without a render_mode"):
        assert make(2).render() is None


def test_close_may_be_repeated_and_later_calls_raise():
    envs = make(2)
    envs.reset(seed=0)
    envs.close()
    envs.close()
    with pytest.raises(ClosedEnvironmentError, match="is closed"):
        envs.step(["a", "b"])
    with pytest.raises(ClosedEnvironmentError, match="is closed"):
        envs.reset()


class ClosingRecorder(Recorder):
    closed = 0

    def close(self):
        ClosingRecorder.closed += 1


@pytest.mark.parametrize("own", [True, False])
def test_only_a_scorer_that_the_environment_made_is_closed(own, monkeypatch):
    monkeypatch.setitem(gym_rm.scorers.load.SCORER_KINDS, "closing", f"{__name__}:ClosingRecorder")
    ClosingRecorder.closed = 0
    make(2, reward_model={"kind": "closing"} if own else ClosingRecorder()).close()
    assert ClosingRecorder.closed == own
