"""The user's turns: `respond`, a scorer with `respond`, and errors in them."""

import numpy as np
import pytest

from gym_rm import ConfigError, Scores
from tests.envs.environments import Recorder, make, prompt, say_more


def test_respond_returns_the_user_turns():
    envs = make(1, prompts=["hi"], respond=say_more)
    envs.reset(seed=0)
    (observation,), *_ = envs.step(["one"])
    assert observation[-1] == {"role": "user", "content": "more?"}
    _, _, terminations, _, _ = envs.step(["two"])
    assert terminations.all()


@pytest.mark.parametrize("answer", [3, "\ud800"])
def test_an_invalid_user_turn_raises_config_error_and_changes_nothing(answer):
    answers = [answer, "fine"]
    envs = make(2, respond=lambda conversations, prompts, scores: answers)
    envs.reset(seed=0)
    with pytest.raises(ConfigError, match="environment 0: respond returned an invalid turn"):
        envs.step(["a", "b"])
    answers[0] = None
    observations, _, terminations, _, _ = envs.step(["a", "b"])
    assert terminations.tolist() == [True, False]
    assert [message["content"] for message in observations[1]][1:] == ["b", "fine"]


def test_respond_is_called_once_per_step_with_the_scores_of_all_rows():
    events = []

    class OrderedRecorder(Recorder):
        def score(self, conversations, prompts=None):
            events.append(("score", [c[-1]["content"] for c in conversations]))
            return super().score(conversations, prompts)

    def respond(conversations, prompts, scores):
        events.append(("respond", [c[-1]["content"] for c in conversations], scores.rewards.tolist()))
        return ["more?" if reward < 3 else None for reward in scores.rewards]

    envs = make(3, reward_model=OrderedRecorder(), respond=respond, prompts=[prompt(0)], autoreset_mode="Disabled")
    envs.reset(seed=0)
    observations, _, terminations, truncations, _ = envs.step(["a", "bb", "ccc"])
    assert events == [("score", ["a", "bb", "ccc"]), ("respond", ["a", "bb", "ccc"], [1.0, 2.0, 3.0])]
    assert terminations.tolist() == [False, False, True]
    assert not truncations.any()
    assert [o[-1]["content"] for o in observations] == ["more?", "more?", "ccc"]


def test_with_reward_on_end_respond_is_called_before_the_scorer_without_scores():
    events = []
    recorder = Recorder()

    def respond(conversations, prompts, scores):
        events.append((len(recorder.calls), scores))
        return [None if c[-1]["content"] == "done" else "go on" for c in conversations]

    envs = make(2, reward_model=recorder, respond=respond, reward_on="end", prompts=[prompt(0)])
    envs.reset(seed=0)
    _, rewards, terminations, _, _ = envs.step(["done", "not yet"])
    assert events == [(0, None)]
    assert (rewards.tolist(), terminations.tolist()) == ([4.0, 0.0], [True, False])
    assert [[c[-1]["content"] for c in call] for call in recorder.calls] == [["done"]]


def test_a_scorer_can_end_an_episode():
    class EndsWhenRight(Recorder):
        def score(self, conversations, prompts=None):
            ends = ["right" in conversation[-1]["content"] for conversation in conversations]
            verdicts = np.array(["right" if each else "wrong" for each in ends], dtype=object)
            return Scores.from_rewards(ends, terminations=ends, infos={"verdict": verdicts})

    envs = make(2, reward_model=EndsWhenRight(), prompts=[prompt(0, "again?", "and again?")], autoreset_mode="Disabled")
    envs.reset(seed=0)
    observations, _, terminations, _, infos = envs.step(["right", "wrong"])
    assert terminations.tolist() == [True, False]
    assert [o[-1]["content"] for o in observations] == ["right", "again?"]
    assert infos["verdict"].tolist() == ["right", "wrong"]


def test_respond_of_the_scorer_is_used_unless_respond_is_set():
    class RespondingRecorder(Recorder):
        def respond(self, conversations, prompts, scores):
            return [f"you said {conversation[-1]['content']}" for conversation in conversations]

    for options, said in (({}, "you said a"), ({"respond": say_more}, "more?")):
        envs = make(1, reward_model=RespondingRecorder(), prompts=["hi"], **options)
        envs.reset(seed=0)
        (observation,), *_ = envs.step(["a"])
        assert observation[-1]["content"] == said


def test_a_step_can_be_repeated_after_an_error_in_respond():
    answers = iter([RuntimeError("the simulator is down"), None])

    def respond(conversations, prompts, scores):
        answer = next(answers)
        if answer is not None:
            raise answer
        return ["go on"] * len(conversations)

    envs = make(1, respond=respond, prompts=["hi"])
    envs.reset(seed=0)
    with pytest.raises(RuntimeError, match="the simulator is down"):
        envs.step(["a"])
    (observation,), *_ = envs.step(["a"])
    assert [message["content"] for message in observation] == ["hi", "a", "go on"]
