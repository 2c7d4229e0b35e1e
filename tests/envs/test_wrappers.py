"""Gymnasium's vector wrappers around `RewardVectorEnv`, rendering, and closing."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError
from gymnasium.wrappers import vector as vector_wrappers

import gym_rm
from gym_rm.envs.settings import same_step_statistics
from gym_rm.errors import warn_once
from tests.envs.environments import Recorder, length_reward, make, one_turn, prompt


@pytest.mark.skipif(not same_step_statistics(), reason="RecordEpisodeStatistics does not reset its counts in SAME_STEP")
@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_record_episode_statistics(mode):
    envs = vector_wrappers.RecordEpisodeStatistics(make(2, autoreset_mode=mode))
    envs.reset(seed=0)
    returns, lengths = np.zeros(2), np.zeros(2)
    over = np.zeros(2, dtype=bool)
    for _ in range(12):
        _, rewards, terminations, truncations, infos = envs.step(["four", "eight888"])
        played = ~over if mode == "NextStep" else np.array([True, True])
        returns, lengths = returns + rewards, lengths + played
        done = terminations | truncations
        if done.any():
            assert infos["episode"]["r"][done].tolist() == returns[done].tolist()
            assert infos["episode"]["l"][done].tolist() == lengths[done].tolist()
        returns[done], lengths[done] = 0, 0
        over = done
    assert envs.episode_count > 0


def test_array_conversion_does_not_change_text():
    torch = pytest.importorskip("torch")
    pytest.importorskip("array_api_compat")
    envs = vector_wrappers.NumpyToTorch(one_turn(2))
    observations, _ = envs.reset(seed=0)
    assert observations[0][0]["content"].startswith("question")
    observations, rewards, terminations, _, infos = envs.step(["four", "eight888"])
    assert rewards.tolist() == [1.0, 2.0]
    assert isinstance(terminations, torch.Tensor)
    assert infos["final_obs"][1][-1] == {"role": "assistant", "content": "eight888"}


@pytest.mark.parametrize(
    ("version", "mode", "warned"),
    [
        ("1.3.0", "SameStep", True),
        ("1.3.0", "NextStep", False),
        ("1.10.0", "SameStep", False),
    ],
)
def test_gymnasium_versions_that_report_wrong_returns_are_reported(monkeypatch, caplog, version, mode, warned):
    warn_once.cache_clear()
    monkeypatch.setattr(gym, "__version__", version)
    make(2, autoreset_mode=mode)
    assert ("RecordEpisodeStatistics" in caplog.text) == warned


# --- rendering and closing


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
