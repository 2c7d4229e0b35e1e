"""Missing scores, fallback rewards, and exceptions of the scorer."""

import pytest
from gymnasium.utils.env_checker import data_equivalence

from gym_rm import ConfigError, ScoringError
from tests.envs.environments import Recorder, make, one_turn, prompt, until_long


def test_a_missing_score_raises_and_the_same_step_can_be_repeated():
    recorder = Recorder()
    envs, twin = (make(2, reward_model=scorer, autoreset_mode="Disabled") for scorer in (recorder, Recorder()))
    envs.reset(seed=4)
    twin.reset(seed=4)
    with pytest.raises(ScoringError, match="row 1: asked to fail") as failure:
        envs.step(["good", "FAIL"])
    assert failure.value.rows == (1,)
    assert failure.value.scores.rewards[0] == 4.0
    assert data_equivalence(envs.step(["good", "fine"]), twin.step(["good", "fine"]))


def test_the_error_names_the_environment_not_the_row_of_the_call():
    envs = make(3, reward_model=Recorder(), autoreset_mode="NextStep", respond=until_long, prompts=[prompt(0, *"abcd")])
    envs.reset(seed=0)
    envs.step(["done", "x", "x"])
    with pytest.raises(ScoringError, match="row 2: asked to fail") as failure:
        envs.step(["ignored", "ok", "FAIL"])
    assert failure.value.rows == (2,)


def test_a_fallback_reward_is_marked_and_left_out_of_the_statistics():
    envs = one_turn(3, reward_model=Recorder(), fallback_reward=-5, autoreset_mode="NextStep")
    envs.reset(seed=0)
    _, rewards, _, _, infos = envs.step(["aa", "FAIL", "bbbb"])
    assert rewards.tolist() == [2.0, -5.0, 4.0]
    assert infos["score_ok"].tolist() == [True, False, True]
    assert infos["_components"].tolist() == [True, False, True]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_a_reward_that_is_not_finite_raises_scoring_error(value):
    envs = one_turn(2, reward_model=lambda conversations: [1.0, value])
    envs.reset(seed=0)
    with pytest.raises(ScoringError, match="row 1"):
        envs.step(["a", "b"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_step_can_be_repeated(error):
    class InterruptedScorer(Recorder):
        def score(self, conversations, prompts=None):
            super().score(conversations, prompts)
            if len(self.calls) == 2:
                raise error
            return Recorder().score(conversations)

    envs, twin = make(2, reward_model=InterruptedScorer()), make(2, reward_model=Recorder())
    envs.reset(seed=0)
    twin.reset(seed=0)
    envs.step(["a", "b"])
    twin.step(["a", "b"])
    with pytest.raises(error):
        envs.step(["cc", "dd"])
    assert data_equivalence(envs.step(["cc", "dd"]), twin.step(["cc", "dd"]))


@pytest.mark.parametrize("fallback_reward", [None, 0.0])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_of_the_scorer_is_never_replaced_by_the_fallback_reward(fallback_reward, error):
    def function(conversations):
        if conversations[1][-1]["content"] == "bad":
            raise error
        return [1.0, 1.0]

    envs = one_turn(2, reward_model=function, fallback_reward=fallback_reward)
    envs.reset(seed=0)
    with pytest.raises(error):
        envs.step(["a", "bad"])
    assert envs.step(["a", "b"])[1].tolist() == [1.0, 1.0]


def test_an_invalid_return_value_is_never_replaced_by_the_fallback_reward():
    envs = one_turn(2, reward_model=lambda conversations: [1.0], fallback_reward=0.0)
    envs.reset(seed=0)
    with pytest.raises(ConfigError, match="must return one value per conversation"):
        envs.step(["a", "b"])
