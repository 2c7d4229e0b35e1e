"""Rewards of judgements: by preference, by distance, by NVIDIA's formula; without a verdict, and without a label."""

import json

import pytest

from gym_rm import ConfigError, Prompt, load_scorer
from gym_rm.scorer import try_score
from gym_rm.scorers.judge.styles import load_style, style_names
from gym_rm.testing import check_scorer

NVIDIA = load_scorer(kind="verdict", formula="generative_reward_model")


def fields(first, second, ranking, **rubric):
    return {"score_1": first, "score_2": second, "ranking": ranking, **rubric}


def answer(overall, *rubrics):
    """Return an answer with numbers of the whole, and of rubrics 1, 2, ..."""
    parts = [fields(*each, rubric_id=number) for number, each in enumerate(rubrics, start=1)]
    return json.dumps({"rubric_evaluations": parts, "overall": fields(*overall)})


def score(scorer, reply, **label):
    """Return the reward, the verdict and the error of a reply."""
    prompt = Prompt(({"role": "user", "content": "Which is better?"},), "p", metadata=label)
    scores = try_score(scorer, [[*prompt.messages, {"role": "assistant", "content": reply}]], [prompt])
    return float(scores.rewards[0]), scores.infos["verdict"][0], scores.errors[0]


def labelled(overall, *rubrics):
    """Return a label with numbers of the whole, and of rubrics 1, 2, ..."""
    parts = [fields(*each, rubric_id=number) for number, each in enumerate(rubrics, start=1)]
    return {"ground_truth_overall": fields(*overall), "ground_truth_rubric_scores": parts}


@pytest.mark.parametrize(
    ("said", "preferred", "reward", "verdict"),
    [
        (fields(5, 2, 1), 1, 1.0, "right"),
        (fields(5, 2, 1), 2, 0.0, "wrong"),
        (fields(3, 3, 4), 2, 1.0, "right"),
        ({"ranking": 4}, 1, 0.0, "wrong"),
        ({"score_1": 3, "score_2": 3}, 1, 0.0, "tie"),
        ({"score_1": 3}, 1, 0.0, "unreadable"),
        (fields(9, 2, 1), 1, 0.0, "unreadable"),
    ],
)
def test_the_right_preference_is_paid(said, preferred, reward, verdict):
    scorer = load_scorer(kind="verdict", style="genrm")
    assert score(scorer, json.dumps(said), preferred=preferred) == (reward, verdict, None)


def test_the_mark_of_the_question_must_stand_in_the_verdict():
    scorer = load_scorer(kind="verdict")
    assert score(scorer, "Verdict BCDFGH: A", preferred=1, judge_mark="BCDFGH")[0] == 1.0
    assert score(scorer, "Verdict: A", preferred=1, judge_mark="BCDFGH")[1] == "unreadable"


def test_a_preference_is_also_known_by_a_ranking_or_by_two_scores():
    scorer = load_scorer(kind="verdict", style="skywork-critic")
    for overall in ({"ranking": 5.0}, {"score_1": 1, "score_2": 2}, {"score_1": 3, "score_2": 3, "ranking": 4}):
        assert score(scorer, "[[B]]", ground_truth_overall=overall)[:2] == (1.0, "right")


@pytest.mark.parametrize(
    ("said", "label", "reward"),
    [
        (fields(3, 2, 3), fields(5, 1, 1), -7.0),
        (fields(3, 2, 3), {"ranking": 2, "score_1": None}, -2.0),
        (fields(3, 2, 3), {"score_2": 4}, -2.0),
        ({"score_1": 3, "score_2": 2}, {"ranking": 2}, -100.0),
    ],
)
def test_distances_are_of_the_fields_that_the_label_has(said, label, reward):
    scorer = load_scorer(kind="verdict", style="genrm", formula="distance")
    assert score(scorer, json.dumps(said), ground_truth_overall=label)[0] == reward


@pytest.mark.parametrize(
    ("reply", "label", "reward"),
    [
        (answer((5, 1, 1), (5, 1, 1)), labelled((5, 1, 1), (5, 1, 1)), 0.0),
        (answer((3, 3, 3), (3, 3, 3)), labelled((5, 1, 1), (5, 1, 1)), -12.0),
        (answer((4, 2, 2), (3, 3, 3), (3, 3, 3)), labelled((4, 2, 2), (5, 1, 1), (3, 4, 5)), -3.25),
        (answer((4, 2, 2), (5, 1, 1), (3, 3, 3)), labelled((4, 2, 2), (5, 1, 1), (3, 4, 5)), -1.25),
        (answer((2, 4, 4), (5, 1, 1)), labelled((4, 2, 2)), -8.0),
        (answer((3, 3, 3), (3, 3, 3)), {"ground_truth_overall": {"ranking": 1.0}}, -4.0),
        (answer((3, 3, 3), (3, 3, 3)), {"ground_truth_rubric_scores": [{"rubric_id": 1, "ranking": 5}]}, -2.0),
        ("So:\n```json\n" + answer((3, 3, 3), (3, 3, 3)) + "\n```\nThat is {all}.", labelled((3, 3, 3)), 0.0),
        (
            answer((3, 3, 3), (3, 3, 3)).replace('"overall"', r'"why": "\(\Delta\\\)", "overall"'),
            labelled((3, 3, 3)),
            0.0,
        ),
        (answer(("3", 3, 3), (3, 3, 3)), labelled((3, 3, 3)), 0.0),
    ],
)
def test_the_formula_of_nvidia(reply, label, reward):
    assert score(NVIDIA, reply, **label)[0] == reward


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "Response 1 is better.",
        answer((5, 1, 1), (5, 1, 1)) * 2,
        answer((5, 1, 1)),
        json.dumps({"overall": fields(5, 1, 1)}),
        json.dumps(fields(5, 1, 1)),
        answer((5, 1, 1), (5, 1, 1), (5, 1, 1)),
        answer((5, 1, 1), (5, 1, 1)).replace('"rubric_id": 1', '"rubric_id": 99'),
        answer((5, 1, float("nan")), (5, 1, 1)),
        answer((5, 1, 1), (5, 1, None)),
        answer((5, 1, 1), (5, 1, 1))[:-1],
        answer((True, 1, 1), (5, 1, 1)),
        answer((1e300, 1, 1), (5, 1, 1)),  # its distance is no reward that a trainer can use
        answer((1e308, -1e308, 1), (5, 1, 1)),
        '{"a":' * 10_000 + answer((5, 1, 1), (5, 1, 1)),
        json.dumps({"rubric_evaluations": [fields(5, 1, 1, rubric_id=1)] * 2, "overall": fields(5, 1, 1)}),
    ],
)
def test_other_answers_than_one_object_with_these_rubrics_are_unreadable(reply):
    assert score(NVIDIA, reply, **labelled((5, 1, 1), (5, 1, 1))) == (-100.0, "unreadable", None)


def test_a_label_that_prefers_no_reply_makes_no_verdict_right_or_wrong():
    for label in ({"score_1": 4}, fields(3, 3, 3.5)):
        assert score(NVIDIA, answer((5, 1, 1), (5, 1, 1)), ground_truth_overall=label)[1] is None


@pytest.mark.parametrize(
    ("formula", "label"),
    [
        ("preference", {}),
        ("preference", {"ground_truth_overall": {"score_1": 5}}),
        ("preference", {"preferred": 3}),
        ("distance", {"preferred": 1}),
        ("distance", {"ground_truth_overall": {"ranking": "high"}}),
        ("distance", {"ground_truth_overall": 4}),
        ("distance", {"ground_truth_overall": fields(8, 7, 3)}),  # on the scale of genrm, 5 and 5 would be nearest
        ("distance", {"ground_truth_rubric_scores": [{"rubric_id": 1, "ranking": 5}]}),
        ("generative_reward_model", {"ground_truth_rubric_scores": [{"ranking": 5}]}),
        ("generative_reward_model", {"ground_truth_rubric_scores": [{"rubric_id": 1}, {"rubric_id": 1, "ranking": 2}]}),
    ],
)
def test_what_the_label_lacks_is_an_error_and_no_number(formula, label):
    style = None if formula == "generative_reward_model" else "genrm"
    reward, verdict, error = score(
        load_scorer(kind="verdict", style=style, formula=formula), json.dumps(fields(5, 1, 1)), **label
    )
    assert (reward != reward, verdict, error.kind) == (True, None, "invalid")


def test_the_outcome_of_a_reply_without_a_verdict_is_declared():
    for unreadable, expected in ((-1.5, -1.5), (0, 0.0)):
        scorer = load_scorer(kind="verdict", style="genrm", unreadable=unreadable)
        assert score(scorer, "Hm.", preferred=1) == (expected, "unreadable", None)
    reward, verdict, error = score(load_scorer(kind="verdict", style="genrm", unreadable="error"), "Hm.", preferred=1)
    assert reward != reward
    assert verdict is None
    assert "there is no verdict" in error


def test_thinking_is_no_verdict():
    scorer = load_scorer(kind="verdict", style="rm-r1")
    assert score(scorer, "<think>[[A]]</think>[[B]]", preferred=2)[0] == 1.0
    assert score(scorer, "<think>[[B]]", preferred=2)[1] == "unreadable"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"style": "nemotron-reward-principle"}, "a style that compares two"),
        ({"style": "skywork-critic", "formula": "distance"}, "that writes their scores"),
        ({"style": "genrm", "formula": "generative_reward_model"}, "has no verdict for formula"),
        ({"formula": "accuracy"}, "formula must be one of"),
        ({"unreadable": "zero"}, "unreadable must be a finite number"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        load_scorer(kind="verdict", **options)


def test_every_style_that_compares_has_the_scorer():
    for style in style_names():
        if "pairwise" in load_style(style).modes:
            assert score(load_scorer(kind="verdict", style=style), "Hm.", preferred=1) == (0.0, "unreadable", None)


def test_it_keeps_the_contract_of_scorers():
    prompt = Prompt(({"role": "user", "content": "Which?"},), "p", metadata={"preferred": 1})
    replies = [[*prompt.messages, {"role": "assistant", "content": text}] for text in ("[[A]]", "[[B]]", "Hm.")]
    check_scorer(load_scorer(kind="verdict", style="rm-r1"), replies, prompts=[prompt] * 3)
