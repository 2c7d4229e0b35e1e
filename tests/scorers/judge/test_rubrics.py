"""Rubrics: criteria with weights, one verdict for each, and the reward."""

import json
import math
import re

import gymnasium as gym
import numpy as np
import pytest
from conftest import user

from gym_rm import ConfigError, Prompt, load_scorer
from gym_rm.generation.chat import ChatReply
from gym_rm.scorer import try_score
from gym_rm.scorers.judge.scorer import JudgeScorer
from tests.scorers.judge.test_scorer import ask

CRITERION = re.compile(r"^Criterion \((.*)\): has (.*)$", re.MULTILINE)
MARK = re.compile(r"Verdict ([A-Z]{6}): ")
REPLY = re.compile(r"reply to grade\]\n(.*?)\n\[", re.DOTALL)


class Checker:
    """Chat model that answers criteria of the form "has WORD": the reply has this word or not."""

    def __init__(self, answer=None):
        self.answer, self.asked = answer, []

    def reply(self, conversations, *, seeds, deadline=math.inf):
        self.asked += [conversation[1]["content"] for conversation in conversations]
        return [ChatReply(self.one(conversation[1]["content"]), finished=True) for conversation in conversations]

    def one(self, question):
        (mark,), (reply,) = set(MARK.findall(question)), REPLY.findall(question)
        ((_, word),) = CRITERION.findall(question)
        answer = "yes" if word in reply else "no"
        return self.answer(mark, answer) if self.answer else f"Verdict {mark}: {answer}"


RUBRIC = [
    {"criterion": "has four", "weight": 3, "name": "number"},
    {"criterion": "has please", "weight": 1, "name": "polite"},
    {"criterion": "has damn", "weight": -2, "name": "rude"},
]


def test_each_criterion_is_a_component_and_weights_make_the_reward():
    judge = JudgeScorer(Checker(), rubric=RUBRIC)
    scores = judge.score(ask("four", "please, damn four"))
    np.testing.assert_allclose(scores.rewards, [3 / 4, (3 + 1 - 2) / 4])
    assert {name: values.tolist() for name, values in scores.components.items()} == {
        "number": [1.0, 1.0],
        "polite": [0.0, 1.0],
        "rude": [0.0, -1.0],
    }
    assert len(judge.model.asked) == 6


def test_rows_bring_their_own_criteria_under_the_names_of_public_data_sets():
    rubrics = [
        [{"criterion": "has four", "points": 5, "tags": ["axis:accuracy"]}],
        [{"description": "has five", "weight": 2, "name": "five"}, {"text": "has six"}],
        json.dumps(["has seven"]),
    ]
    prompts = [Prompt((user("2 + 2?"),), f"p{k}", metadata={"rubric": each}) for k, each in enumerate(rubrics)]
    scores = JudgeScorer(Checker(), mode="rubric").score(ask("four", "five", "eight"), prompts)
    np.testing.assert_allclose(scores.rewards, [1.0, 2 / 3, 0.0])
    assert list(scores.components) == ["has four", "five", "has six", "has seven"]
    assert np.isnan(scores.components["five"]).tolist() == [True, False, True]


def test_a_row_without_criteria_or_with_malformed_ones_is_an_error_of_its_row():
    metadata = [{"rubric": RUBRIC}, {}, {"rubric": [{"weight": 1}]}, {"rubric": [{"criterion": "a", "weight": "x"}]}]
    prompts = [Prompt((user("2 + 2?"),), f"p{k}", metadata=each) for k, each in enumerate(metadata)]
    scores = try_score(JudgeScorer(Checker(), mode="rubric"), ask(*"abcd"), prompts)
    assert scores.failed_rows == (1, 2, 3)
    assert "no field `rubric`" in scores.errors[1]
    assert "criterion 1 of the rubric" in scores.errors[2]


def test_a_missing_verdict_is_an_error_and_never_0():
    def some(mark, answer):
        return f"Verdict {mark}: {'perhaps' if answer == 'yes' else answer}"

    scores = try_score(JudgeScorer(Checker(some), rubric=RUBRIC), ask("four", "five"))
    assert scores.failed_rows == (0,)
    assert "no verdict with the mark" in scores.errors[0]
    assert math.isnan(scores.rewards[0])


def test_choices_between_worst_and_best_have_values_between():
    def partly(mark, answer):
        return f"Verdict {mark}: Partly"

    rubric = [{"criterion": "has proofs", "choices": ["no", "partly", "yes"]}]
    assert JudgeScorer(Checker(partly), rubric=rubric).score(ask("4")).rewards.tolist() == [0.5]


def test_a_rubric_of_faults_alone_has_no_positive_weight():
    scores = try_score(JudgeScorer(Checker(), rubric=[{"criterion": "has damn", "weight": -1}]), ask("damn"))
    assert "no weight of the rubric is positive" in scores.errors[0]


@pytest.mark.parametrize(
    ("rubric", "reason"),
    [
        ([], "at least one"),
        ([{"criterion": ""}], "criterion 1"),
        ([{"criterion": "a", "name": "n"}, {"criterion": "b", "name": "n"}], "two criteria with the name 'n'"),
        ([{"criterion": "a", "weigth": -5}], "unknown field 'weigth'. Did you mean 'weight'"),
        ([{"criterion": "a", "choices": ["no", "No"]}], "choices must differ"),
        ([3], "must be a text or a dict"),
    ],
)
def test_malformed_rubrics_are_refused(rubric, reason):
    with pytest.raises(ConfigError, match=reason):
        JudgeScorer(Checker(), rubric=rubric)


def test_a_text_is_no_list_of_criteria():
    with pytest.raises(ConfigError, match="a list of criteria"):
        JudgeScorer(Checker(), mode="rubric", rubric="Is it short?")


def test_rows_with_a_rubric_can_be_judged_in_other_ways_too():
    class Silent(Checker):
        def one(self, question):
            return "no"

    prompts = [Prompt((user("2 + 2?"),), "p", metadata={"rubric": RUBRIC})] * 2
    reasons = {}
    for style in ("genrm", "selene", None):
        judge = JudgeScorer(Silent(), max_retries=0, **({"style": style} if style else {}))
        reasons[style] = try_score(judge, ask("a", "b"), prompts).errors[0]
    assert "there is no verdict" in reasons["genrm"]  # it was asked
    assert "judge it with mode='rubric'" in reasons["selene"]
    assert "judge it with mode='rubric'" in reasons[None]


def test_an_environment_tells_the_value_of_each_criterion():
    rows = [{"prompt": "2 + 2?", "rubric": RUBRIC}]
    judge = load_scorer({"kind": "judge", "model": Checker(), "mode": "rubric"})
    envs = gym.make_vec("RewardModel-v0", num_envs=2, prompts=rows, reward_model=judge)
    envs.reset(seed=0)
    _, rewards, _, _, infos = envs.step(["four", "damn"])
    assert rewards.tolist() == [0.75, -0.5]
    assert infos["final_info"]["components"]["rude"].tolist() == [0.0, -1.0]
