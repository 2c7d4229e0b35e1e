"""Calls of the scorer: what it receives, and when it is called."""

import copy
import enum
import re

import gymnasium as gym
import numpy as np
import pytest

from gym_rm import Scores
from tests.envs.environments import Recorder, make, one_turn, prompt, until_long


def test_all_conversations_of_a_step_are_scored_in_one_call():
    recorder = Recorder()
    envs = one_turn(5, reward_model=recorder)
    envs.reset(seed=0)
    envs.step(list("abcde"))
    assert [[c[-1]["content"] for c in call] for call in recorder.calls] == [list("abcde")]


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


def test_conversations_passed_to_the_scorer_do_not_change_later():
    recorder = Recorder()
    envs = make(1, reward_model=recorder, prompts=[prompt(0, "why?", "sure?")])
    envs.reset(seed=0)
    envs.step(["a"])
    kept = copy.deepcopy(recorder.calls[0])
    (observation,), *_ = envs.step(["b"])
    observation[0]["content"] = "changed"
    assert recorder.calls[0] == kept
    (observation,), *_ = envs.step(["c"])
    assert recorder.calls[-1][0][0]["content"] == "question 0"


class PromptRecorder(Recorder):
    """Recorder that also stores the prompts of every call."""

    def __init__(self):
        super().__init__()
        self.prompts = []

    def score(self, conversations, prompts=None):
        self.prompts.append(prompts)
        return super().score(conversations, prompts)


def test_every_conversation_is_scored_with_its_prompt():
    scorer = PromptRecorder()
    envs = make(3, reward_model=scorer, autoreset_mode="NextStep")
    _, infos = envs.reset(seed=3)
    started = list(infos["prompt_id"])
    envs.step(["a", "b", "c"])
    assert [each.prompt_id for each in scorer.prompts[0]] == started
    for call, prompts in zip(scorer.calls, scorer.prompts, strict=True):
        for conversation, each in zip(call, prompts, strict=True):
            assert conversation[0] == each.messages[0]


def test_a_verifier_is_a_function_of_conversations_and_prompts():
    def verify(conversations, prompts):
        return [float(p.answer in c[-1]["content"]) for c, p in zip(conversations, prompts, strict=True)]

    rows = [{"question": "2 + 2?", "answer": 4}, {"question": "3 + 3?", "answer": "6"}]
    envs = gym.make_vec("RewardModel-v0", num_envs=2, reward_model=verify, prompts=rows)
    envs.reset(options={"prompt_indices": [1, 0]})
    assert envs.step(["It is 6.", "It is 6."])[1].tolist() == [1.0, 0.0]


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
