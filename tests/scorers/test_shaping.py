"""Rewards shaped inside groups: formulas, whole groups, missing answers, order of rows, environments."""

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gym_rm
from gym_rm import ConfigError, Scores, ScoringError
from gym_rm.scorer import try_score
from gym_rm.scorers import shaping
from gym_rm.scorers.shaping import TERMS, ShapedScorer
from gym_rm.testing import check_scorer
from gym_rm.types import Prompt

ALL_TERMS = dict.fromkeys(TERMS, 1.0)
UNFINISHED = "<think>Hm"


def said(reply, prompt="6 * 7?"):
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]


def goodness(conversations):
    """Reward a reply by the digits in it; no score with FAIL."""
    replies = [conversation[-1]["content"] for conversation in conversations]
    return [None if "FAIL" in reply else float(sum(map(str.isdigit, reply))) for reply in replies]


def scores_of(replies, **options):
    return try_score(ShapedScorer(goodness, **options), [said(reply) for reply in replies])


# --- formulas


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([10, 20, 40], [4 / 9, 1 / 9, -5 / 9]),
        ([10, 40, None, None], [3 / 4, -1 / 4, -1 / 4, -1 / 4]),
        ([7, 7, 7], [0, 0, 0]),
        ([7, None], [0.5, -0.5]),
        ([None, None], [0, 0]),
    ],
    ids=str,
)
def test_group_weights_are_centred(lengths, expected):
    assert shaping.group_weights(lengths) == pytest.approx(expected)


def test_the_length_reward_of_a_wrong_reply_is_never_positive():
    rewards = shaping.length_rewards([10, 10, 20, 30, 30, None], [True, False, True, True, False, False])
    assert rewards == [0.5, 0.0, 0.0, -0.5, -0.5, -0.5]
    assert shaping.length_rewards([8, 8], [True, False]) == [0, 0]


@pytest.mark.parametrize(
    ("lengths", "rewards", "top_share", "winners"),
    [
        ([9, 9, 5, 1, *[9] * 12], range(16, 0, -1), 0.2, [2]),  # of 16, the third reward is the last of the best
        ([9, 1, *[9] * 7], range(9, 0, -1), 0.2, [0]),
        ([9, 5, 7, 1], [3, 2, 2, 1], 0.5, [1]),
        ([5, 9, 5, 5], [2, 2, 2, 1], 0.25, [0, 2]),  # equal rewards and equal lengths
        ([None, 6, 1], [3, 2, 1], 0.7, [1]),
        ([None, 6, 1], [3, 2, 1], 0.4, []),
        ([3], [1], 0.2, []),
    ],
    ids=str,
)
def test_the_bonus_is_for_the_shortest_of_the_best(lengths, rewards, top_share, winners):
    bonus = shaping.shortest_of_the_best(lengths, list(rewards), top_share)
    assert np.flatnonzero(bonus).tolist() == winners
    assert set(bonus) <= {0.0, 1.0}


# --- the scorer


def test_the_reward_is_the_sum_of_the_components():
    replies = ["<think>12</think>It is 42", "<think>1234</think>\n**42**", "<think>1</think>It is 4, or so"]
    scores = scores_of(replies, thinking_length=0.3, answer_length=0.35, answer_bonus=0.5)
    expected = {
        "scorer": [4, 6, 2],  # digits
        "thinking_length": [0.3 * (weight - 5 / 9) for weight in (2 / 3, 0, 1)],  # 2, 4, 1 characters
        "answer_length": [0.35 * (weight - 7 / 12) for weight in (3 / 4, 1, 0)],  # 8, 6, 14 characters
        "answer_bonus": [0, 0.5, 0],
    }
    assert list(scores.components) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(scores.components[name], values, atol=1e-15)
    np.testing.assert_allclose(scores.rewards, np.sum(list(expected.values()), axis=0))
    assert scores.infos["answer_length/measured"].tolist() == [8, 6, 14]


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("bad", ["", " \n", UNFINISHED, "<think>7</think>"], ids=repr)
def test_a_reply_without_an_answer_never_wins(term, bad):
    replies = [bad, "<think>123456</think>12345678, or so", "<think>1234</think>**12345678**"]
    values = scores_of(replies, **{term: 1.0}, top_share=1.0, right_at_least=0.0).components[term]
    assert values[0] == values.min() < values.max()


def test_thinking_begins_at_once_where_the_template_opens_it():
    replies = ["12</think>42", "1234", "1234</think>42"]
    scores = scores_of(replies, thinking="opened", thinking_length=1.0)
    np.testing.assert_array_equal(scores.infos["thinking_length/measured"], [2, np.nan, 4])
    np.testing.assert_allclose(scores.rewards, [4 + 2 / 3, 4 - 1 / 3, 6 - 1 / 3])
    assert scores.provenance.settings["thinking"] == "opened"


def test_thinking_in_a_field_of_the_message_counts():
    chats = [said("42"), said("42")]
    chats[0][-1]["reasoning_content"], chats[1][-1]["reasoning_content"] = "six times seven", "six"
    scores = ShapedScorer(goodness, thinking_bonus=0.5).score(chats)
    assert scores.components["thinking_bonus"].tolist() == [0.0, 0.5]


THOUGHTS = [f"<think>{'x' * k}</think>{k}" for k in range(4)]
REPLIES = st.sampled_from(["", UNFINISHED, "FAIL", "4", "42", "It is 42.", "**42**", "# 42\n- 1\n- 2", *THOUGHTS])


@settings(max_examples=60, deadline=None)
@given(
    st.permutations(range(9)),
    st.lists(st.tuples(REPLIES, st.sampled_from("ab")), min_size=9, max_size=9),
)
def test_the_order_of_rows_changes_no_bit(order, rows):
    def tenths(conversations):
        return [None if reward is None else 0.1 * reward for reward in goodness(conversations)]

    def score(rows):
        scores = try_score(ShapedScorer(tenths, **ALL_TERMS), [said(*row) for row in rows])
        return np.array([scores.rewards, *scores.components.values()])

    np.testing.assert_array_equal(score([rows[k] for k in order]), score(rows)[:, order])


def test_a_failed_row_is_in_no_statistic_and_keeps_its_error():
    replies = ["1", "123, or more", "1234567"]
    scores = scores_of([*replies[:1], "FAIL", *replies[1:]], **ALL_TERMS)
    assert scores.errors == (None, "scorer: the reward function returned None", None, None)
    rest = scores.take([0, 2, 3])
    expected = scores_of(replies, **ALL_TERMS)
    assert rest.rewards.tolist() == expected.rewards.tolist()
    for name, values in expected.components.items():
        assert rest.components[name].tolist() == values.tolist()
        assert np.isnan(scores.components[name][1])


def test_a_conversation_without_a_reply_is_an_error_of_its_row():
    scorer = ShapedScorer(lambda conversations: [1.0] * len(conversations), answer_length=1.0)
    with pytest.raises(ScoringError, match="row 1: answer_length: the last message must be a reply") as caught:
        scorer.score([said("12"), said("1")[:1], said("1234")])
    assert caught.value.scores.rewards.tolist()[::2] == [1.5, 0.5]


def test_a_row_alone_in_its_group_gets_nothing_and_keeps_its_reward():
    scores = ShapedScorer(goodness, **ALL_TERMS).score([said("42", "a"), said("7", "b")])
    assert scores.rewards.tolist() == [2, 1]
    assert not any(scores.components[name].any() for name in TERMS)


def test_terms_without_a_bonus_pass_the_checks_of_scorers():
    check_scorer(ShapedScorer(goodness, **{**ALL_TERMS, "thinking_bonus": 0, "answer_bonus": 0}), atol=0.0)


def test_rows_of_one_data_row_are_a_group_whatever_was_said_since():
    rows = [Prompt(({"role": "user", "content": "6 * 7?"},), name) for name in ("a", "a", "b")]
    first = [*said("well"), {"role": "user", "content": "so?"}, {"role": "assistant", "content": "4"}]
    scores = ShapedScorer(goodness, answer_length=1.0).score([first, said("4321"), said("4")], rows)
    assert scores.components["answer_length"].tolist() == [0.5, -0.5, 0.0]


class Known:
    """Scorer with a component, an info, token counts and terminations."""

    def score(self, conversations, prompts=None):
        values = [float(len(chat[-1]["content"])) for chat in conversations]
        scores = Scores.from_rewards(
            values, components={"half": values}, infos={"verdict": values}, terminations=[value > 3 for value in values]
        )
        scores.num_tokens[:] = values
        return scores


def test_what_the_scorer_returned_is_passed_on():
    scores = ShapedScorer(Known(), answer_length=1.0).score([said("42"), said("4242")])
    assert scores.components["scorer/half"].tolist() == scores.infos["scorer/verdict"].tolist() == [2.0, 4.0]
    assert scores.num_tokens.tolist() == [2, 4]
    assert scores.terminations.tolist() == [False, True]


def test_no_conversations():
    scores = ShapedScorer(goodness, **ALL_TERMS).score([])
    assert len(scores) == 0
    assert scores.provenance.settings["answer_length"] == 1.0
    assert list(scores.provenance.settings["scorers"]) == ["scorer"]


def test_a_shaped_scorer_in_a_mixture():
    shaped = {"kind": "shaped", "scorer": goodness, "answer_length": 1.0}
    weights = {"quality/scorer": 1, "quality/answer_length": 2}
    mixture = gym_rm.load_scorer({"kind": "weighted", "scorers": {"quality": shaped}, "weights": weights})
    scores = mixture.score([said("1234"), said("42")])
    assert scores.rewards.tolist() == [4 - 1, 2 + 1]
    assert scores.components["quality"].tolist() == [3.5, 2.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer_lenght": 1}, "answer_lenght.*answer_length"),
        ({"answer_length": -0.1}, "answer_length: input should be greater than or equal to 0"),
        ({"top_share": 0}, "top_share"),
        ({"thinking": "<think>"}, "thinking must be None, 'opened'"),
    ],
    ids=str,
)
def test_an_invalid_option_raises_config_error(options, message):
    with pytest.raises(ConfigError, match=message):
        gym_rm.load_scorer({"kind": "shaped", "scorer": goodness, **options})
    with pytest.raises(ConfigError, match="scorer"):
        gym_rm.load_scorer({"kind": "shaped"})


# --- environments

SHAPED = {"kind": "shaped", "scorer": goodness, "answer_length": 1.0, "answer_bonus": 0.5}


def test_an_environment_scores_whole_groups():
    envs = gym.make_vec("RewardModel-v0", 6, reward_model=SHAPED, group_size=3, prompts=["a", "b"], fallback_reward=-9)
    envs.reset(options={"prompt_indices": [0, 0, 0, 1, 1, 1]})
    _, rewards, _, _, infos = envs.step(["1", "1 or 2", "", "FAIL", "123456", "12"])
    components = infos["final_info"]["components"]
    np.testing.assert_allclose(components["answer_length"], [2 / 3, -1 / 3, -1 / 3, 0, -1 / 2, 1 / 2])
    np.testing.assert_allclose(rewards, [1 + 2 / 3, 2 - 1 / 3 + 0.5, -1 / 3, -9, 6 - 1 / 2 + 0.5, 2 + 1 / 2])
    assert components["_answer_length"].tolist() == [True] * 3 + [False] + [True] * 2


def test_the_rows_of_a_step_are_the_group():
    prompts = [{"prompt": "a", "user_turns": ["And?"]}]
    envs = gym.make_vec("RewardModel-v0", 4, reward_model=SHAPED, group_size=4, prompts=prompts)
    envs.reset(seed=0)
    _, rewards, *_ = envs.step(["1", "12", "123", "1234"], rows=np.array([True, True, False, False]))
    assert rewards.tolist() == [1 + 1 / 2, 2 - 1 / 2 + 0.5, 0, 0]
    _, rewards, *_ = envs.step(["12345", "1", "12", "123"])  # two in their second turn, two in their first
    assert rewards.tolist() == [5 - 9 / 16 + 0.5, 1 + 7 / 16, 2 + 3 / 16, 3 - 1 / 16]
