"""What `load_scorer` makes of what a user has, and a function as a scorer."""

import copy

import numpy as np
import pytest

import gym_rm
from gym_rm import ConfigError, ScoringError
from gym_rm.engine.kinds import KINDS
from gym_rm.engine.kinds.make import MAKERS
from gym_rm.scorer import REWARD_MODEL_KINDS, SCORER_KINDS, FunctionScorer, Scorer, _entry_point, load_scorer
from gym_rm.testing import check_scorer
from tests import tiny_models

SAID = [[{"role": "user", "content": "say"}, {"role": "assistant", "content": text}] for text in ("one", "three", "")]


def length(conversations):
    return [len(conversation[-1]["content"]) for conversation in conversations]


def test_a_function_is_a_scorer():
    scorer = load_scorer(length)
    check_scorer(scorer)
    assert scorer.score(SAID).rewards.tolist() == [3, 5, 0]
    assert scorer.score([]).rewards.shape == (0,)
    assert copy.deepcopy(scorer) is scorer


def test_a_scorer_stays_itself_and_takes_no_options():
    scorer = load_scorer(length)
    assert load_scorer(scorer) is scorer
    with pytest.raises(ConfigError, match=r"options \['dtype'\] came with a ready-made scorer FunctionScorer"):
        load_scorer(scorer, dtype="float32")


def test_none_and_not_a_number_are_errors_of_their_rows():
    with pytest.raises(ScoringError) as caught:
        load_scorer(lambda conversations: [1.0, None, float("inf")]).score(SAID)
    scores = caught.value.scores
    assert scores.rewards[0] == 1.0
    assert np.isnan(scores.rewards[1:]).all()
    assert scores.errors == (None, "the reward function returned None", "the reward is inf")


def test_reasons_that_are_sentences_make_one_sentence():
    error = ScoringError(gym_rm.Scores.from_rewards([1, 2, 3], errors=["too long.", None, "too bad."]))
    assert "scored: row 0: too long; row 2: too bad. The other scores are in" in str(error)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "returned 1 values for 3 conversations"),
        (0.5, "returned float 0.5 for 3 conversations; it must return a list with one number"),
        (np.float32(0.5), r"returned float32 np.float32\(0.5\) for 3 conversations"),
        (None, "returned NoneType None for 3 conversations"),
        ("123", "returned str '123' for 3 conversations"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, "returned dict {0: 1.0, 1: 1.0, 2: 1.0} for 3 conversations"),
        ([1.0, [2.0], 3.0], r"returned list \[2.0\] for conversation 1; it must return a number, or None"),
        ([1.0, 2.0, "good"], "returned str 'good' for conversation 2"),
    ],
)
def test_a_function_must_answer_every_conversation_with_a_number(returned, message):
    with pytest.raises(ConfigError, match=message):
        load_scorer(lambda conversations: returned).score(SAID)


def test_an_error_inside_a_function_stays_what_it_is():
    def broken(conversations):
        yield from (len(None) for _ in conversations)

    with pytest.raises(TypeError, match="has no len"):
        load_scorer(broken).score(SAID)


@pytest.mark.parametrize("thing", [None, 3, (one for one in SAID), SAID[0], "text"])
def test_what_is_no_list_of_conversations_is_refused(thing):
    with pytest.raises(ConfigError, match="score takes a list of conversations, each a list of"):
        load_scorer(length).score(thing)


def test_a_function_may_edit_what_it_is_given():
    def strip(conversations):
        for conversation in conversations:
            conversation[-1]["content"] = conversation[-1]["content"].strip()
            del conversation[0]
        return length(conversations)

    said = [[{"role": "user", "content": "say"}, {"role": "assistant", "content": " one "}]]
    before = copy.deepcopy(said)
    assert load_scorer(strip).score(said).rewards.tolist() == [3]
    assert said == before


@pytest.mark.parametrize("thing", [3, 1.5, b"path"])
def test_what_is_no_scorer_is_refused(thing):
    with pytest.raises(ConfigError, match="must be None, a folder, a hub id, a dict, a Scorer or a function"):
        load_scorer(thing)


def test_unknown_kinds_offer_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'weighted'"):
        load_scorer({"kind": "weigthed"})
    with pytest.raises(ConfigError, match="Did you mean 'process'"):
        load_scorer({"kind": "proces", "path": "x"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": 3}, "path must be a folder or a hub id, got int 3"),
        ({"kind": ["x"]}, r"the kind of a scorer must be a text, got list \['x'\]"),
        ({"kind": None}, "the kind of a scorer must be a text, got NoneType None"),
        ({"kind": "decoder", "max_length": "abc"}, "max_length must be an integer, got str 'abc'"),
        ({"cache_size": "abc"}, "cache_size must be an integer, got str 'abc'"),
        ({"cache_size": True}, "cache_size must be an integer, got bool True"),
        ({"batch_invariant": "maybe"}, "batch_invariant must be true or false, got str 'maybe'"),
        ({"path": "x", "trust_remote_code": "no"}, "trust_remote_code must be true or false, got str 'no'"),
        (
            {"kind": "weighted", "scorers": [length], "weights": {"member_0": "x"}},
            "weights={'member_0': 'x'}: could not",
        ),
        ({"kind": "weighted", "scorrs": [length]}, "no scorer can be made of the options kind='weighted', scorrs="),
    ],
)
def test_options_that_cannot_be_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        load_scorer(options)


def test_every_kind_can_be_imported():
    for kind in SCORER_KINDS:
        assert callable(_entry_point(kind))
    assert frozenset(KINDS) == REWARD_MODEL_KINDS == frozenset(MAKERS)


def test_path_and_kind_mean_the_same_in_a_dict_and_as_options(tmp_path):
    folder = str(tiny_models.save_reward_model(tmp_path, num_labels=2, id2label={0: "a", 1: "b"}))
    options = {"kind": "multi_head", "weights": {"a": 1.0, "b": 2.0}}
    as_dict = gym_rm.load_scorer({"path": folder, **options}).score(SAID)
    as_options = gym_rm.load_scorer(folder, **options).score(SAID)
    np.testing.assert_array_equal(as_dict.rewards, as_options.rewards)


def test_the_protocol_is_structural():
    class Mine:
        def score(self, conversations, prompts=None):
            raise NotImplementedError

    assert isinstance(Mine(), Scorer)
    assert isinstance(FunctionScorer(length), Scorer)
    assert not isinstance(length, Scorer)
