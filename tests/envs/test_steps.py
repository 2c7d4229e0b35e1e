"""A step: the replies that it takes, what is scored, what it returns, and what a failure leaves behind."""

import copy
import enum
import re

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import VectorEnv
from hypothesis import given
from hypothesis import strategies as st
from recording import rating_steps

from gym_rm import ActionError, ConfigError, Scores, ScoringError
from gym_rm.envs.infos import StepScores, add_values
from tests.envs.environments import MODES, Recorder, make, one_turn, prompt, until_long


def test_an_episode_that_ends_returns_its_final_observation():
    envs = one_turn(2)
    before, first = envs.reset(seed=0)
    after, _, terminations, _, infos = envs.step(["four", "eight888"])
    assert terminations.all()
    for row, reply in enumerate(["four", "eight888"]):
        assert infos["final_obs"][row] == [*before[row], {"role": "assistant", "content": reply}]
        assert infos["final_info"]["prompt_id"][row] == first["prompt_id"][row]
    assert [observation[-1]["role"] for observation in after] == ["user", "user"]


@pytest.mark.parametrize("reply", ["", " padded \n", "nul\x00s\x00", "\x1b[31m", "<|im_end|>", "😀" * 1000])
@pytest.mark.parametrize("kind", [list, tuple, lambda replies: np.array(replies, dtype=object)])
def test_replies_are_not_changed(reply, kind):
    recorder = Recorder()
    envs = one_turn(2, reward_model=recorder)
    envs.reset(seed=0)
    infos = envs.step(kind([reply, "x"]))[-1]
    assert recorder.calls[0][0][-1] == {"role": "assistant", "content": reply}
    assert infos["final_obs"][0][-1]["content"] == reply


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (["a", None], "environment 1: expected a text .str., got NoneType None"),
        (["a", b"b"], "environment 1: expected a text .str., got bytes"),
        (["a", "b\ud800c"], r"environment 1: expected a text without lone surrogates, got '\\ud800' at character 1"),
        (["a", "x" * 101], "environment 1: expected a text of at most 100 characters, got 101"),
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


# --- scores


def test_reward_on_end_scores_only_ended_episodes():
    recorder = Recorder()
    envs = make(2, reward_model=recorder, reward_on="end", respond=until_long, prompts=[prompt(0, "why?")])
    envs.reset(seed=0)
    _, rewards, _, _, infos = envs.step(["x", "long"])
    assert rewards.tolist() == [0.0, 4.0]
    assert [len(call) for call in recorder.calls] == [1]
    assert "score_ok" not in infos
    _, rewards, _, _, infos = envs.step(["yy", "x"])
    assert rewards.tolist() == [2.0, 0.0]
    assert infos["final_info"]["score_ok"].tolist() == [True, False]


def test_infos_of_every_type_reach_the_environment_in_a_partial_step():
    def score(conversations):
        n = len(conversations)
        infos = {"text": ["yes"] * n, "pair": np.ones((n, 2)), "count": [3] * n, "list": [[1], [1, 2]][:n]}
        return Scores.from_rewards([1.0] * n, infos=infos, terminations=[False] * n)

    envs = make(2, reward_model=score, prompts=[prompt(0, "a", "b")])
    envs.reset(seed=0)
    observations, _, _, _, infos = envs.step(["x", ""], rows=np.array([True, False]))
    assert (infos["text"].tolist(), infos["_text"].tolist()) == (["yes", None], [True, False])
    assert infos["pair"].tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert infos["count"].dtype == np.int64
    assert infos["list"][0] == [1]
    assert len(observations[0]) == 3


EXACT = [16777217.0, 0.1, 1e300, -1e-300]


@pytest.mark.parametrize("reward_on", ["turn", "end"])
def test_the_number_of_a_function_is_the_reward_of_the_step(reward_on):
    envs = one_turn(4, reward_model=lambda conversations: EXACT, reward_on=reward_on)
    envs.reset(seed=0)
    _, rewards, *_ = envs.step(["x"] * 4)
    assert rewards.tolist() == EXACT


class Loud(str):
    def __str__(self):
        return "LOUD"


class Reply(str, enum.Enum):  # noqa: UP042 (str() of a StrEnum is its text)
    YES = "yes"


@pytest.mark.parametrize("reply", [Loud("yes"), Reply.YES, np.str_("yes")], ids=["__str__", "enum", "numpy"])
def test_a_reply_is_its_characters_also_for_subclasses_of_str(reply):
    recorder = Recorder()
    envs = make(1, reward_model=recorder, prompts=[prompt(0, "more?")])
    envs.reset(seed=0)
    observations, *_ = envs.step([reply])
    assert recorder.calls[0][0][-1]["content"] == observations[0][-2]["content"] == "yes"
    assert type(observations[0][-2]["content"]) is str


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.sampled_from([np.int64, np.float64, np.bool_, object]))
def test_the_format_equals_gymnasiums(mask, dtype):
    rows, values = np.array(mask), np.arange(len(mask)).astype(dtype)
    ours = {}
    add_values(ours, "x", values[rows], np.flatnonzero(rows), len(mask))
    envs = VectorEnv()
    envs.num_envs = len(mask)
    expected = {}
    for row in np.flatnonzero(rows):
        value = str(values[row]) if dtype is object else values[row].item()
        expected = envs._add_info(expected, {"x": value}, row)
    assert ours.keys() == expected.keys()
    for name in ours:
        assert ours[name].dtype == expected[name].dtype
        assert [str(each) for each in ours[name]] == [str(each) for each in expected[name]]


def test_an_info_of_the_scorer_with_a_reserved_name_raises_config_error():
    scores = Scores.from_rewards([1.0], infos={"prompt_id": np.array(["x"], dtype=object)})
    with pytest.raises(ConfigError, match=r"infos\['prompt_id'\] of the scorer has a name that the environment uses"):
        StepScores.of(scores, [0], 1, None)


def test_steps_are_arrays_of_the_rows_that_were_scored_also_in_final_info():
    keywords = {"prompts": ["Why?"], "reward_model": rating_steps, "fallback_reward": 0.0}
    envs = gym.make_vec("RewardModel-v0", 3, autoreset_mode="SameStep", **keywords)
    envs.reset(seed=0)
    infos = envs.step(["One.\n\nTwo two.", "", "One."])[-1]["final_info"]
    assert infos["step_rewards"][0].tolist() == [0.4, 0.8]
    assert [None if each is None else each.tolist() for each in infos["step_ends"]] == [[4, 14], None, [4]]
    assert infos["_step_rewards"].tolist() == infos["_step_ends"].tolist() == [True, False, True]
    single = gym.make("RewardModel-v0", **keywords)
    single.reset(seed=0)
    assert single.step("One.\n\nTwo two.")[-1]["step_ends"].tolist() == [4, 14]


def test_every_conversation_is_scored_with_its_prompt():
    def score(conversations, prompts):
        return [float(c[0] == p.messages[0]) for c, p in zip(conversations, prompts, strict=True)]

    envs = make(3, reward_model=score, autoreset_mode="NextStep")
    envs.reset(seed=3)
    assert envs.step(["a", "b", "c"])[1].tolist() == [1, 1, 1]


def test_the_scorer_and_the_caller_may_keep_conversations():
    recorder = Recorder()
    envs = make(1, reward_model=recorder, prompts=[prompt(0, "why?", "sure?")])
    envs.reset(seed=0)
    envs.step(["a"])
    kept = copy.deepcopy(recorder.calls[0])
    (observation,), *_ = envs.step(["b"])
    observation[0]["content"] = "changed"
    envs.step(["c"])
    assert recorder.calls[0] == kept
    assert recorder.calls[-1][0][0]["content"] == "question 0"


# --- failures


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


def test_the_cost_of_a_step_is_known_and_its_batches_have_its_name_in_the_log(caplog):
    env = gym.make_vec("RewardModel-v0", num_envs=2, prompts=["1+1?"])
    env.reset(seed=0)
    assert env.unwrapped.workload is None
    with caplog.at_level("DEBUG", logger="gym_rm"):
        env.step(["2", "3"])
    assert env.unwrapped.workload.num_batches == 1
    assert env.unwrapped.workload.unique_tokens < env.unwrapped.workload.num_tokens, "both rows share the prompt"
    assert any(re.match(r"step-\d+/score-\d+: batch 0", record.getMessage()) for record in caplog.records)
    env.close()
