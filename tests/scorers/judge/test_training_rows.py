"""Rows from which a judge is trained: the judge's own questions in both orders, and what is known of the pairs."""

import math
from dataclasses import replace

import pytest

from gym_rm import ConfigError, load_scorer
from gym_rm.data.comparisons import load_comparisons
from gym_rm.data.prompts import load_prompts
from gym_rm.evaluation.scored import score_comparisons
from gym_rm.generation.chat import ChatReply
from gym_rm.scorer import try_score
from gym_rm.scorers.judge.styles import load_style, style_names
from gym_rm.scorers.judge.training_rows import judgement_rows
from tests import real_data

PAIR = {"prompt": "2 + 2?", "chosen": "It is 4.", "rejected": "It is 5."}
RANKED = {"prompt": "2 + 2?", "completions": [{"completion": "4", "rank": 0}, {"completion": "5", "rank": 1}]}
RANKED["completions"] += [{"completion": "6", "rank": 1}]
RATED = {"prompt": "2 + 2?", "completions": [{"completion": "5", "score": 2}, {"completion": "4", "score": 5}]}
SIGNED = {"context": "2 + 2?", "response1": "4", "response2": "5", "overall_preference": -2}
OPTIONS = {"selene": {"rubric": "Is it right?"}}


class Recorder:
    """Chat model that keeps what it is asked."""

    def __init__(self):
        self.asked = []

    def reply(self, conversations, *, seeds, deadline=math.inf):
        self.asked += [[dict(message) for message in each] for each in conversations]
        return [ChatReply("Hm.", finished=True) for _ in conversations]


def rows_of(*rows, style="genrm", **options):
    return list(judgement_rows(load_comparisons(list(rows)), style=style, **options))


@pytest.mark.parametrize("style", [each for each in style_names() if "pairwise" in load_style(each).modes])
def test_the_questions_are_those_of_the_judge(style):
    options, model = OPTIONS.get(style, {}), Recorder()
    pairs = load_comparisons([{**PAIR, "answer": "4", "principle": "Be right."}, RATED])
    asked = {"kind": "judge", "model": model, "style": style, "mode": "pairwise", "comparisons": "all_pairs"}
    score_comparisons(load_scorer({**asked, "max_retries": 0, **options}), pairs.comparisons)
    rows = list(judgement_rows(pairs, style=style, mode="pairwise", **options))
    assert [row["messages"] for row in rows] == model.asked
    assert len(rows) == 4


def test_every_two_replies_of_different_ranks_are_a_pair():
    rows = rows_of(RANKED)
    assert [row["messages"][-2:] for row in rows] == [
        [{"role": "response_1", "content": one}, {"role": "response_2", "content": other}]
        for one, other in ("45", "54", "46", "64")
    ]
    assert len({row["prompt_id"] for row in rows}) == 4


def test_both_orders_are_there_so_a_judge_of_the_place_gets_half():
    rows = rows_of(PAIR, {**PAIR, "prompt": "1 + 3?"}, RANKED, style="skywork-critic")
    prompts = load_prompts(rows)
    scorer = load_scorer(kind="verdict", style="skywork-critic")
    judged = [[*prompt.messages, {"role": "assistant", "content": "[[A]]"}] for prompt in prompts]
    assert scorer.score(judged, prompts).rewards.mean() == 0.5


def test_right_verdicts_with_the_mark_are_paid():
    prompts = load_prompts(rows_of(PAIR, style="fenced"))
    replies = [f"Verdict {each.metadata['judge_mark']}: {'AB'[each.metadata['preferred'] - 1]}" for each in prompts]
    judged = [
        [*each.messages, {"role": "assistant", "content": text}] for each, text in zip(prompts, replies, strict=True)
    ]
    assert try_score(load_scorer(kind="verdict"), judged, prompts).rewards.tolist() == [1.0, 1.0]


def test_labels_have_what_the_rows_say():
    assert [row.get("ground_truth_overall") for row in rows_of(PAIR)] == [None, None]
    assert [row["ground_truth_overall"] for row in rows_of(SIGNED)] == [{"ranking": 2}, {"ranking": 5}]
    assert [row["ground_truth_overall"] for row in rows_of({**SIGNED, "overall_preference": 3})] == [
        {"ranking": 6},
        {"ranking": 1},
    ]
    assert [row["ground_truth_overall"] for row in rows_of(RATED)] == [
        {"score_1": 2.0, "score_2": 5.0},
        {"score_1": 5.0, "score_2": 2.0},
    ]
    assert [row["preferred"] for row in rows_of(RATED)] == [2, 1]


def test_a_label_never_prefers_the_other_reply():
    weak = [row["ground_truth_overall"] for row in rows_of({**SIGNED, "overall_preference": -0.25})]
    assert weak == [{"ranking": 3.375}, {"ranking": 3.625}]
    ranked = [{"completion": "5", "score": 5, "rank": 1}, {"completion": "4", "score": 2, "rank": 0}]
    assert not any("ground_truth_overall" in row for row in rows_of({**RATED, "completions": ranked}))


def test_ties_have_no_row():
    assert rows_of({**SIGNED, "overall_preference": 0}, PAIR) == [
        {**row, "prompt_id": row["prompt_id"].replace("0.", "1.")} for row in rows_of(PAIR)
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"style": "rewardanything"}, "has no mode 'pairwise'"),
        ({"style": "fenced", "verdict": "probabilities"}, "leave out verdict='probabilities'"),
        ({"style": "selene"}, "the judge needs a rubric"),
        ({"style": "genrm", "rubric": "Is it polite?"}, "rubric has no effect"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_an_error(options, message):
    with pytest.raises(ConfigError, match=message):
        rows_of(PAIR, **options)


def test_replies_are_shown_as_the_judge_sees_them_without_thinking():
    pair = {**PAIR, "chosen": "<think>Easy.</think>It is 4."}
    assert [row["messages"] for row in rows_of(pair)] == [row["messages"] for row in rows_of(PAIR)]
    assert rows_of(pair, judged="all")[0]["messages"][-2]["content"].startswith("<think>")
    with pytest.raises(ConfigError, match=r"comparisons\[0\]: the thinking of a reply has not ended"):
        rows_of({**PAIR, "rejected": "<think>Hm"})


def test_both_orders_are_asked_also_for_a_judge_that_will_compare_in_a_circle():
    assert len(rows_of(PAIR, comparisons="circular")) == 2


@pytest.mark.data
@pytest.mark.parametrize("name", ["hh_harmless", "rewardbench_slice", "gsm8k_graded"])
def test_real_pairs_become_rows_with_as_many_better_replies_in_each_place(name):
    pairs = load_comparisons(real_data.FOLDER / f"{name}.jsonl.gz", on_error="drop")
    rows = list(judgement_rows(replace(pairs, comparisons=pairs.comparisons[:100]), style="fenced"))
    assert len(rows) >= 200
    assert sum(row["preferred"] for row in rows) == 1.5 * len(rows)
    load_prompts(rows)
