"""Scorers that several users in one process share."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gym_rm
from gym_rm import ConfigError
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.scorers.load import acquire_scorer, release_scorer
from gym_rm.scorers.weighted import WeightedScorer
from tests import test_scorer, tiny_models
from tests.test_scorer import SAID, Lengths, length

user_module = test_scorer.user_module


@pytest.fixture
def folder(saved_model, tmp_path):
    """A folder of a reward model that the test may change."""
    return shutil.copytree(saved_model("qwen3"), tmp_path / "model")


@pytest.fixture
def closed(monkeypatch):
    """List of the executors that were closed in this test."""
    executors = []
    close = LocalExecutor.close

    def remember(self):
        executors.append(self)
        close(self)

    monkeypatch.setattr(LocalExecutor, "close", remember)
    return executors


def test_the_same_folder_gives_the_same_scorer_until_all_users_released_it(folder, closed):
    first, second = acquire_scorer(str(folder), {}), acquire_scorer(str(folder), {})
    assert first is second
    release_scorer(first)
    assert not closed
    assert np.isfinite(second.score(SAID).rewards).all()
    release_scorer(second)
    assert closed == [first.executor]


def test_all_forms_of_a_folder_share_one_scorer(folder):
    scorers = [acquire_scorer(model, {}) for model in (str(folder), folder, {"path": str(folder)}, {"path": folder})]
    assert len(set(map(id, scorers))) == 1
    for scorer in scorers:
        release_scorer(scorer)


def test_different_options_give_different_scorers(folder):
    first, second = acquire_scorer(str(folder), {}), acquire_scorer(str(folder), {"max_length": 100})
    assert first is not second
    assert second.renderer.max_length == 100
    release_scorer(first)
    assert np.isfinite(second.score(SAID).rewards).all()
    release_scorer(second)


def test_a_folder_whose_files_have_changed_is_loaded_again(folder, closed):
    old = acquire_scorer(str(folder), {})
    before = old.score(SAID).rewards
    tiny_models.save_reward_model(folder, seed=1)
    new = acquire_scorer(str(folder), {})
    assert new is not old
    assert np.abs(new.score(SAID).rewards - before).max() > 1e-3
    np.testing.assert_array_equal(old.score(SAID).rewards, before)
    release_scorer(old)
    assert closed == [old.executor]
    release_scorer(new)
    assert closed == [old.executor, new.executor]


def test_concurrent_threads_share_one_scorer():
    with ThreadPoolExecutor(8) as pool:
        scorers = list(pool.map(lambda _: acquire_scorer("user_scorers:Lengths", {}), range(8)))
        assert Lengths.made == 1
        assert len(set(map(id, scorers))) == 1
        list(pool.map(release_scorer, scorers[1:]))
        assert scorers[0].closed == 0
        release_scorer(scorers[0])
    assert scorers[0].closed == 1


def test_loading_is_tried_again_after_an_error():
    with pytest.raises(OSError, match="not there yet"):
        acquire_scorer("user_scorers:FailsFirst", {})
    scorer = acquire_scorer("user_scorers:FailsFirst", {})
    assert scorer.score(SAID).rewards.tolist() == [3, 5, 0]
    release_scorer(scorer)
    assert scorer.closed == 1


def test_a_function_is_not_shared():
    assert acquire_scorer(length, {}) is not acquire_scorer(length, {})


def test_a_scorer_that_was_passed_in_is_never_closed():
    mine = Lengths()
    for _ in range(2):
        assert acquire_scorer(mine, {}) is mine
        release_scorer(mine)
    assert mine.closed == 0


def test_a_scorer_of_a_module_is_never_closed(user_module):
    """The module may still use it, and the next environment would get a closed scorer."""
    scorer = acquire_scorer("user_scorers:instance", {})
    assert scorer is user_module.instance
    release_scorer(scorer)
    assert scorer.closed == 0


def test_a_combined_scorer_closes_only_the_scorers_that_it_loaded(folder, closed):
    mine = Lengths()
    scorer = acquire_scorer({"kind": "weighted", "scorers": {"mine": mine, "model": str(folder)}}, {})
    assert isinstance(scorer, WeightedScorer)
    release_scorer(scorer)
    assert closed == [scorer.scorers["model"].executor]
    assert mine.closed == 0


def test_models_of_the_package_have_names():
    scorer, named = gym_rm.load_scorer(None), gym_rm.load_scorer("embedded:reward_model")
    assert named.provenance == scorer.provenance
    with pytest.raises(ConfigError, match="embedded:policy, embedded:reward_model, embedded:judge"):
        gym_rm.load_scorer("embedded:reward-model")


@pytest.mark.parametrize(
    "options",
    [
        *({"reward": "some"}, {"timeout": 0}, {"layer": "docker"}, {"num_workers": 0}, {"execute": "yes"}),
        *({"tolerance": -1}, {"limits": {"memory": 1}}, {"interpreter": "/nothing/here"}),
    ],
)
def test_invalid_options_of_code_are_refused(options):
    with pytest.raises(ConfigError):
        gym_rm.load_scorer({"kind": "code", "allow_unsafe": True, **options})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"style": 3}, "style must be a text, got 3"),
        ({"style": ["a"]}, "style must be a text, got list"),
        ({3: 4}, "must have texts as names, got 3"),
    ],
)
def test_names_that_are_no_texts_are_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        gym_rm.load_scorer(options)
