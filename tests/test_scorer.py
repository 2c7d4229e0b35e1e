"""What `load_scorer` makes of what a user has, and a function as a scorer."""

import copy

import numpy as np
import pytest

import gym_rm
from gym_rm import ConfigError, ScoringError
from gym_rm.models import KINDS
from gym_rm.models.kinds import MAKERS
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


def test_a_function_must_answer_every_conversation():
    with pytest.raises(ConfigError, match="returned 1 values for 3 conversations"):
        load_scorer(lambda conversations: [1.0]).score(SAID)


@pytest.mark.parametrize("thing", [3, 1.5, b"path"])
def test_what_is_no_scorer_is_refused(thing):
    with pytest.raises(ConfigError, match="must be None, a folder, a hub id, a dict, a Scorer or a function"):
        load_scorer(thing)


def test_unknown_kinds_offer_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'weighted'"):
        load_scorer({"kind": "weigthed"})
    with pytest.raises(ConfigError, match="Did you mean 'process'"):
        load_scorer({"kind": "proces", "path": "x"})


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
        def score(self, conversations):
            raise NotImplementedError

    assert isinstance(Mine(), Scorer)
    assert isinstance(FunctionScorer(length), Scorer)
    assert not isinstance(length, Scorer)
