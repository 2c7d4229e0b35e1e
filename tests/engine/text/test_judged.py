"""Scorers of answers without their thinking."""

import gymnasium as gym
import numpy as np
import pytest

import gym_rm
from gym_rm.config import parse_settings
from gym_rm.engine.text.judged import JudgedOptions
from gym_rm.errors import ConfigError
from gym_rm.scorer import provenance_of
from gym_rm.scores import Scores, ScoringError
from gym_rm.types import Prompt


def dialogue(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[k % 2], "content": content} for k, content in enumerate(contents)]


def lengths(conversations, prompts):
    """Score the length of all assistant turns; prompts shift it."""
    texts = ["".join(each["content"] for each in one if each["role"] == "assistant") for one in conversations]
    shifts = [0.0] * len(texts) if prompts is None else [float(prompt.answer) for prompt in prompts]
    return Scores.from_rewards([len(text) + shift for text, shift in zip(texts, shifts, strict=True)])


ROWS = [
    dialogue("?", "plain"),
    dialogue("?", "<think>ab</think>four"),
    dialogue("?", "<think>abc"),
    dialogue("?", "<think>a</think>x", "!", "</think>y\n"),
]


def score(rows=ROWS, prompts=None, as_empty=False, **options):
    judged = parse_settings(JudgedOptions, {"judged": "answer", **options})
    kept, given, complete = judged.read(rows, prompts, as_empty=as_empty)
    return complete(lengths(kept, given))


def test_thinking_is_not_judged_and_a_reply_without_an_answer_is_an_error():
    scores = score()
    np.testing.assert_array_equal(scores.rewards, [5, 4, np.nan, 2])
    assert scores.errors[2].startswith("the thinking of the reply has not ended")
    assert "unfinished=" in scores.errors[2]
    assert "fallback_reward=" in scores.errors[2]


def test_the_outcome_of_a_reply_without_an_answer_is_declared():
    assert score(unfinished=-2.0).rewards.tolist() == [5, 4, -2, 2]
    assert score(as_empty=True).rewards.tolist() == [5, 4, 0, 2]


def test_rows_keep_their_prompts():
    prompts = [Prompt((), "p", answer=str(100 * row)) for row in range(4)]
    assert score(prompts=prompts, unfinished=0.0).rewards.tolist() == [5, 104, 0, 302]


def test_lengths_are_those_of_replies_with_thinking():
    scores = score(unfinished=0.0)
    assert scores.has_info("answer_characters").tolist() == [False, True, True, False]
    infos = {name: values[scores.has_info(name)].tolist() for name, values in scores.infos.items()}
    assert infos == {"thinking_characters": [2, 3], "answer_characters": [4, 0]}
    assert not score(ROWS[:1]).infos


def test_all_is_what_the_scorer_itself_gives():
    assert score(judged="all").rewards.tolist() == lengths(ROWS, None).rewards.tolist()


def test_the_template_can_have_opened_the_thinking():
    rows = [dialogue("?", "plain"), dialogue("?", "Hm</think>four")]
    scores = score(rows, thinking="opened", unfinished=0.0)
    assert scores.rewards.tolist() == [0, 4]


@pytest.mark.parametrize("options", [{"judged": "thinking"}, {"thinking": "open"}, {"unfinished": "low"}])
def test_an_invalid_option_is_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        parse_settings(JudgedOptions, options)


def test_what_is_no_conversation_is_left_to_the_scorer():
    scorer = gym_rm.load_scorer({"kind": "length", "max_length": 9, "judged": "answer"})
    with pytest.raises(ConfigError, match="conversations must be a list of conversations"):
        scorer.score([["text"]])
    with pytest.raises(ScoringError, match="part of the type 'image'"):
        scorer.score([[{"role": "assistant", "content": [{"type": "image"}]}]])


# --- through the package


THINKING = dialogue("What is 2 + 2?", "It may be \\boxed{5}.</think>It is \\boxed{4}.")
CUT = dialogue("What is 2 + 2?", "It is \\boxed{4}, so")
FOUR = Prompt((THINKING[0],), "p", answer="4")


def test_a_mixture_passes_the_options_to_its_members():
    members = {
        "math": {"kind": "math", "thinking": "opened"},
        "rm": {"judged": "answer", "thinking": "opened", "unfinished": -1.5},
        "length": {"kind": "length", "max_length": 16, "buffer": 8, "judged": "answer", "thinking": "opened"},
    }
    mixture = gym_rm.load_scorer({"kind": "weighted", "scorers": members})
    scores = mixture.score([THINKING, CUT], [FOUR, FOUR])
    mixture.close()
    plain = gym_rm.load_scorer().score([dialogue(THINKING[0]["content"], "It is \\boxed{4}.")])
    assert scores.components["math"].tolist() == [1.0, 0.0]
    assert scores.infos["math/verdict"].tolist() == ["right", "no_answer"]
    assert scores.components["rm"].tolist() == [plain.rewards[0], -1.5]
    assert scores.components["length"].tolist() == [-1.0, -1.0]
    assert scores.infos["rm/answer_characters"].tolist() == [16, 0]


def test_an_environment_takes_the_options_of_its_verifier():
    envs = gym.make_vec("Math-v0", num_envs=2, prompts=[FOUR], thinking="opened")
    envs.reset(seed=0)
    _, rewards, _, _, infos = envs.step([THINKING[-1]["content"], CUT[-1]["content"]])
    envs.close()
    assert rewards.tolist() == [1.0, 0.0]
    assert infos["final_info"]["verdict"].tolist() == ["right", "no_answer"]
    assert infos["final_info"]["thinking_characters"].tolist() == [20, len(CUT[-1]["content"])]


def test_options_that_change_scores_are_in_the_provenance():
    changed = {"judged": "answer", "thinking": "opened"}
    for path in ({}, {"kind": "length", "max_length": 9}):
        settings = [provenance_of(gym_rm.load_scorer({**path, **options})).settings for options in ({}, changed)]
        assert not settings[0].keys() & changed.keys()
        assert settings[1].items() >= changed.items()
