"""Groups of replies: which comparisons are asked for, and the rewards that they give."""

import json
import math
import re

import numpy as np
import pytest
from conftest import assistant, user
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm import Prompt
from gym_rm.generation.chat import ChatReply
from gym_rm.scorer import try_score
from gym_rm.scorers.batching import MicroBatchingScorer
from gym_rm.scorers.judge.scorer import JudgeScorer
from tests.scorers.judge.test_scorer import ask

FENCE = re.compile(r"\[(\w{6}) reply (\d+)\]\n(.*?)\n\[\1 end\]", re.DOTALL)


class GenRM:
    """Chat model that reads the roles of NVIDIA's models, and scores replies with a function of the two texts."""

    def __init__(self, scores=None):
        self.scores = scores or (lambda a, b: {"score_1": len(a), "score_2": len(b), "ranking": 3})
        self.conversations = []

    def reply(self, conversations, *, seeds, deadline=math.inf):
        self.conversations += conversations
        return [self.one(conversation) for conversation in conversations]

    def one(self, conversation):
        shown = {message["role"]: message["content"] for message in conversation}
        said = self.scores(shown["response_1"], shown["response_2"])
        return ChatReply(said if isinstance(said, str) else json.dumps(said), finished=True, num_tokens=10)

    @property
    def pairs(self):
        return [tuple(message["content"] for message in each[-2:]) for each in self.conversations]


class Lister(GenRM):
    """Chat model that scores each reply of a list by its length, on a scale that moves with the list."""

    def one(self, conversation):
        mark, found = FENCE.findall(conversation[-1]["content"])[0][0], FENCE.findall(conversation[-1]["content"])
        base = min(len(text) for _, _, text in found)
        scores = {number: len(text) - base + 1 for _, number, text in found}
        return ChatReply(f"Scores {mark}: {json.dumps(scores)}", finished=True)


def judge(model, **options):
    return JudgeScorer(model, **({"style": "genrm"} | options))


@pytest.mark.parametrize(
    ("how", "pairs", "reward"),
    [
        ("all_pairs", ["ab", "ba", "ac", "ca", "bc", "cb"], 1.0),
        ("circular", ["ab", "bc", "ca"], 1.0),
        ("reference", ["ar", "ra", "br", "rb", "cr", "rc"], 1.0),  # the first of two with equal scores, by the ranking
    ],
)
def test_each_way_to_compare_asks_for_its_pairs(how, pairs, reward):
    model = GenRM()
    prompts = [Prompt((user("2 + 2?"),), "p", metadata={"reference_reply": "r"})] * 3
    scores = judge(model, comparisons=how).score(ask("a", "b", "c"), prompts)
    assert sorted(map("".join, model.pairs)) == sorted(pairs)
    assert scores.rewards.tolist() == [reward] * 3


def test_the_ranking_breaks_ties_as_in_nemo_gym():
    model = GenRM(lambda a, b: {"score_1": 3, "score_2": 3, "ranking": 1 if a == "good" else 6})
    assert judge(model, comparisons="circular").score(ask("good", "bad")).rewards.tolist() == [5.5, 0.5]


def test_a_failed_comparison_of_a_circle_leaves_its_two_replies_without_a_score():
    def some(a, b):
        return "I cannot say." if (a, b) == ("bb", "ccc") else {"score_1": len(a), "score_2": len(b)}

    model = GenRM(some)
    scores = try_score(judge(model, comparisons="circular", max_retries=1), ask("a", "bb", "ccc", "dddd"))
    assert scores.failed_rows == (1, 2)
    assert scores.rewards[[0, 3]].tolist() == [1.0, 4.0]
    assert scores.infos["judge_unread"].tolist() == [0.0, 0.5, 0.5, 0.0]
    assert scores.infos["judge_answers"].sum() == 5
    assert "1 of 2 comparisons have a verdict, but 100% of them" in scores.errors[1]
    lost = try_score(judge(GenRM(lambda a, b: some("bb", "ccc")), comparisons="circular"), ask("a", "bb"))
    assert lost.failed_rows == (0, 1)
    assert "of 2 comparisons have a verdict" in lost.errors[0]


@settings(max_examples=25)
@given(
    st.sampled_from(["circular", "all_pairs"]),
    st.integers(2, 6),
    st.sets(st.tuples(st.sampled_from("abcdef"), st.sampled_from("abcdef"), st.integers(0, 2))),
    st.integers(1, 3),
    st.sampled_from([{"score_1": 4, "score_2": 2}, {"score_1": 3, "score_2": 3, "ranking": 1}]),
)
def test_a_judge_that_prefers_a_place_gives_equal_replies_equal_scores(how, size, failed, samples, said):
    class PrefersFirst(GenRM):
        def reply(self, conversations, *, seeds, deadline=math.inf):
            asked = [
                (each[-2]["content"], each[-1]["content"], seed % 3)
                for each, seed in zip(conversations, seeds, strict=True)
            ]
            return [ChatReply("?" if each in failed else json.dumps(said), finished=True) for each in asked]

    model = judge(PrefersFirst(), max_retries=0, comparisons=how, samples=samples)
    scores = try_score(model, ask(*"abcdef"[:size]))
    assert set(np.round(scores.rewards[np.isfinite(scores.rewards)], 9)) <= {3.0}
    assert bool(failed) or not scores.failed_rows


def test_the_lead_of_a_reply_counts_the_verdicts_of_both_places_also_if_one_is_missing():
    model = GenRM(lambda a, b: "I cannot say." if a == "b" else {"score_1": 4, "score_2": 2})
    scores = try_score(judge(model, comparisons="all_pairs", max_retries=0), ask("a", "b"))
    assert (scores.failed_rows, scores.infos["judge_lead"].tolist()) == ((0, 1), [1.0, -1.0])
    first = judge(GenRM(lambda a, b: {"score_1": 4, "score_2": 2}), comparisons="all_pairs").score(ask("a", "b"))
    assert first.infos["judge_lead"].tolist() == [0.0, 0.0]
    prompts = [Prompt((user("2 + 2?"),), "p", metadata={"reference_reply": "r"})] * 2
    beside = judge(GenRM(), comparisons="reference").score(ask("a", "b"), prompts)
    assert "judge_lead" not in beside.infos


def test_several_judgements_of_a_comparison_are_averaged_and_a_failed_one_is_left_out():
    class Moody(GenRM):
        def reply(self, conversations, *, seeds, deadline=math.inf):
            said = {"score_1": 4, "score_2": 2}, {"score_1": 2, "score_2": 2}, "I cannot say."
            return [ChatReply(json.dumps(said[seed % 3]), finished=True) for seed in seeds]

    scores = judge(Moody(), comparisons="circular", samples=12, max_retries=0).score(ask("a", "b"))
    assert 2 < scores.rewards[0] < 4
    assert scores.infos["disagreement"].max() > 0
    assert 0 < scores.infos["judge_unread"].sum() < 24


def test_equal_replies_are_judged_once_and_alone_with_themselves():
    model = GenRM()
    scores = judge(model, comparisons="circular").score(ask("a", "bb", "a", "ccc", "bb"))
    assert len(model.pairs) == 3
    assert scores.rewards.tolist() == [1.0, 2.0, 1.0, 3.0, 2.0]
    model = GenRM()
    assert judge(model, comparisons="circular").score(ask("a", "a", "a")).rewards.tolist() == [1.0] * 3
    assert model.pairs == [("a", "a")]


def test_two_groups_with_one_question_are_kept_apart_by_their_rows():
    model = GenRM()
    prompts = [Prompt((user("2 + 2?"),), name) for name in "ppqq"]
    judge(model, comparisons="circular").score(ask("a", "b", "c", "d"), prompts)
    assert sorted(map("".join, model.pairs)) == ["ab", "ba", "cd", "dc"]


def test_replies_of_several_turns_are_compared_from_where_their_data_row_ends():
    model = GenRM()
    rows = [[user("2 + 2?"), assistant(first), user("Sure?"), assistant("Yes.")] for first in ("4", "5")]
    try_score(judge(model, comparisons="circular"), rows, [Prompt((user("2 + 2?"),), "p")] * 2)
    assert [message["role"] for message in model.conversations[0]] == ["user", "response_1", "response_2"]
    assert model.conversations[0][1]["content"] == "[assistant]\n4\n\n[user]\nSure?\n\n[assistant]\nYes."


def test_a_principle_of_a_row_comes_before_that_of_the_option():
    model = GenRM()
    prompts = [Prompt((user("2 + 2?"),), "p", metadata={"principle": "Be short."})] * 2
    judge(model, principle="Be kind.").score(ask("a", "b"), prompts)
    judge(model, principle="Be kind.").score(ask("c", "d"))
    principles = [each[1] for each in model.conversations]
    assert principles[0] == {"role": "principle", "content": "Be short."}
    assert principles[-1] == {"role": "principle", "content": "Be kind."}


def test_the_tokens_and_answers_of_questions_are_shared_among_their_rows():
    scores = judge(GenRM(), comparisons="circular").score(ask("a", "b", "c"))
    assert scores.infos["judge_questions"].tolist() == [1.0, 1.0, 1.0]
    assert scores.infos["judge_tokens"].sum() == 30.0


def test_a_list_is_graded_in_one_question_in_an_order_of_its_own():
    model = Lister()
    scores = JudgeScorer(model, mode="listwise").score(ask("a", "bbb", "cc", "a"))
    assert len(model.conversations) == 1
    assert scores.rewards.tolist() == [1.0, 3.0, 2.0, 1.0]


def test_a_group_with_too_many_different_replies_is_an_error():
    many = ask(*("a" * size for size in range(1, 18)))
    scores = try_score(JudgeScorer(Lister(), mode="listwise"), many + ask("a", "a", "bb", question="3 + 3?"))
    assert scores.failed_rows == tuple(range(17))
    assert "17 different replies, a list at most 16" in scores.errors[0]
    assert scores.rewards[17:].tolist() == [1.0, 1.0, 2.0]


def test_what_all_replies_share_is_shown_once():
    model = GenRM()
    rows = [[user("2 + 2?"), assistant("4"), user("Sure?"), assistant(last)] for last in ("Yes", "No")]
    judge(model, comparisons="circular").score(rows, [Prompt((user("2 + 2?"),), "p")] * 2)
    assert model.conversations[0][:3] == rows[0][:3]
    assert set(model.pairs) == {("Yes", "No"), ("No", "Yes")}


def test_groups_of_several_callers_are_never_merged():
    batching = MicroBatchingScorer(judge(GenRM(), comparisons="circular"), max_wait=0.3)
    first, second = batching.submit(ask("a", "bb")), batching.submit(ask("ccc", "dddd"))
    assert first.result().rewards.tolist() == [1.0, 2.0]
    assert second.result().rewards.tolist() == [3.0, 4.0]
    batching.close()


def test_replies_that_are_tool_calls_are_shown():
    model = GenRM()
    calls = [[user("2 + 2?"), {**assistant(""), "tool_calls": [{"name": name}]}] for name in ("add", "sub")]
    try_score(judge(model), calls)
    assert '"add"' in model.pairs[0][0]


def test_a_reference_without_text_is_no_opponent():
    prompts = [Prompt((user("2 + 2?"),), "p", metadata={"reference_reply": text}) for text in (" ", "<think>4", None)]
    scores = try_score(judge(GenRM(), comparisons="reference"), ask("a", "b", "c"), prompts)
    assert scores.failed_rows == (0, 1, 2)


def test_the_only_answer_of_a_group_that_thinks_is_compared_with_itself():
    thinks = judge(GenRM(), comparisons="circular", unfinished=-1.0)
    rewards = thinks.score(ask("<think>a</think>four", "<think>a", "<think>b")).rewards
    assert rewards.tolist() == [4.0, -1.0, -1.0]
