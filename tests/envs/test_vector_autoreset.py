"""Autoreset modes, and steps of only some rows."""

import numpy as np
import pytest
from gymnasium.error import ResetNeeded

from tests.envs.environments import MODES, Recorder, make, one_turn, prompt, until_long


def test_next_step_ignores_the_reply_of_a_row_that_restarts():
    recorder = Recorder()
    envs = make(2, reward_model=recorder, autoreset_mode="NextStep", prompts=[prompt(0), prompt(1)])
    envs.reset(seed=0)
    assert envs.step(["a", "bb"])[2].all()
    observations, rewards, terminations, _, infos = envs.step([None, "ignored"])
    assert rewards.tolist() == [0.0, 0.0]
    assert not terminations.any()
    assert [len(observation) for observation in observations] == [1, 1]
    assert "score_ok" not in infos
    assert len(recorder.calls) == 1


def test_next_step_scores_only_rows_that_do_not_restart():
    recorder = Recorder()
    envs = make(2, reward_model=recorder, autoreset_mode="NextStep", respond=until_long, prompts=[prompt(0, "a", "b")])
    envs.reset(seed=0)
    envs.step(["long", "x"])
    *_, infos = envs.step(["ignored", "yy"])
    assert [len(call) for call in recorder.calls] == [2, 1]
    assert infos["_score_ok"].tolist() == [False, True]
    assert infos["_prompt_id"].tolist() == [True, True]


def test_disabled_requires_a_reset_of_ended_episodes():
    envs = one_turn(2, autoreset_mode="Disabled")
    envs.reset(seed=0)
    observations, _, terminations, _, infos = envs.step(["a", "b"])
    assert observations[0][-1] == {"role": "assistant", "content": "a"}
    assert "final_obs" not in infos
    with pytest.raises(ResetNeeded, match=r"environments \[0, 1\] have ended"):
        envs.step(["c", "d"])
    envs.reset(options={"reset_mask": terminations})
    envs.step(["c", "d"])


@pytest.mark.parametrize("mode", MODES)
def test_step_before_reset_raises_reset_needed(mode):
    with pytest.raises(ResetNeeded, match="call reset"):
        make(2, autoreset_mode=mode).step(["a", "b"])


def test_rows_left_out_of_a_step_do_not_change():
    recorder = Recorder()
    envs = make(3, reward_model=recorder, prompts=[prompt(0, "why?")])
    before, _ = envs.reset(seed=0)
    after, rewards, _, _, infos = envs.step([None, "four", "x"], rows=np.array([False, True, False]))
    assert rewards.tolist() == [0.0, 4.0, 0.0]
    assert [len(call) for call in recorder.calls] == [1]
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1][-1]["content"] == "why?"
    assert infos["_prompt_id"].tolist() == [False, True, False]


def test_next_step_does_not_restart_a_row_that_is_left_out_of_the_step():
    envs = make(2, prompts=[prompt(0)], autoreset_mode="NextStep")
    envs.reset(seed=0)
    envs.step(["one", None], rows=np.array([True, False]))
    observations, _, terminations, _, _ = envs.step([None, "two"], rows=np.array([False, True]))
    assert (len(observations[0]), terminations.tolist()) == (2, [False, True])
    observations, _, terminations, _, _ = envs.step(["ignored", "ignored"])
    assert ([len(observation) for observation in observations], terminations.any()) == ([1, 1], False)
