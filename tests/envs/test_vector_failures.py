"""Missing scores, fallback rewards, and exceptions of the scorer."""

import pytest
from gymnasium.utils.env_checker import data_equivalence

from gym_rm import ConfigError, ScoringError
from gym_rm.errors import warn_once
from tests.envs.environments import Recorder, make, one_turn, prompt


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
    envs = make(3, reward_model=Recorder(), autoreset_mode="NextStep", max_reply_length=4, prompts=[prompt(0, *"abcd")])
    envs.reset(seed=0)
    envs.step(["too long", "x", "x"])
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
    assert infos["metrics"]["count"].tolist() == [1, 0, 1]
    assert (envs.metrics.num_samples, envs.metrics.num_failed, envs.metrics.mean) == (2, 1, 3.0)


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


# --- reward functions that raise -----------------------------------------------------------------------------------


class Calls:
    """Reward function that raises for a batch with the reply "bad"."""

    def __init__(self):
        self.sizes = []

    def __call__(self, conversations):
        self.sizes.append(len(conversations))
        replies = [conversation[-1]["content"] for conversation in conversations]
        return [1.0 / (reply != "bad") for reply in replies]


@pytest.fixture
def warnings(caplog):
    warn_once.cache_clear()
    return caplog


def test_only_the_row_that_a_function_raises_for_gets_the_fallback_reward(warnings):
    envs = one_turn(3, reward_model=Calls(), fallback_reward=-5.0, autoreset_mode="NextStep")
    envs.reset(seed=0)
    _, rewards, *_, infos = envs.step(["a", "bad", "c"])
    assert rewards.tolist() == [1.0, -5.0, 1.0]
    assert infos["score_ok"].tolist() == [True, False, True]
    assert infos["metrics"]["count"].tolist() == [1, 0, 1]
    assert envs.metrics.num_failed == 1
    assert "the scorer raised ZeroDivisionError" in warnings.text


def test_a_function_that_raises_is_called_again_with_whole_groups():
    function = Calls()
    envs = one_turn(4, group_size=2, reward_model=function, fallback_reward=-5.0)
    envs.reset(seed=0)
    assert envs.step(["a", "bad", "c", "d"])[1].tolist() == [-5.0, -5.0, 1.0, 1.0]
    assert function.sizes == [4, 2, 2]


def test_a_function_that_raises_for_every_row_is_reported(warnings):
    def broken(conversations):
        return [undefined_name for _ in conversations]  # noqa: F821

    envs = one_turn(2, reward_model=broken, fallback_reward=0.0, autoreset_mode="NextStep")
    envs.reset(seed=0)
    _, rewards, *_, infos = envs.step(["a", "b"])
    assert (rewards.tolist(), infos["score_ok"].tolist()) == ([0.0, 0.0], [False, False])
    assert f"the scorer raised NameError at {__file__}" in warnings.text
    assert len(warnings.records) == 2  # one for the exception, one for fallback rewards
    envs.step(["a", "b"])
    assert len(warnings.records) == 2


def test_without_a_fallback_reward_the_exception_of_the_function_is_raised():
    function = Calls()
    envs = one_turn(2, reward_model=function)
    envs.reset(seed=0)
    with pytest.raises(ZeroDivisionError):
        envs.step(["a", "bad"])
    assert function.sizes == [2]
    assert envs.step(["a", "b"])[1].tolist() == [1.0, 1.0]


def test_an_invalid_return_value_is_never_replaced_by_the_fallback_reward():
    envs = one_turn(2, reward_model=lambda conversations: [1.0], fallback_reward=0.0)
    envs.reset(seed=0)
    with pytest.raises(ConfigError, match="must return one value per conversation"):
        envs.step(["a", "b"])


def test_an_interrupt_is_never_replaced_by_the_fallback_reward():
    def interrupted(conversations):
        raise KeyboardInterrupt

    envs = one_turn(2, reward_model=interrupted, fallback_reward=0.0)
    envs.reset(seed=0)
    with pytest.raises(KeyboardInterrupt):
        envs.step(["a", "b"])
