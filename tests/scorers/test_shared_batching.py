"""One `MicroBatchingScorer` per process for equal settings or for one object."""

from pathlib import Path
from types import MappingProxyType

import pytest
from recording import RecordingScorer

from gym_rm.scorers import batching
from gym_rm.scorers.batching import MicroBatchingScorer, shared_batching_scorer


@pytest.fixture
def recorder():
    return RecordingScorer()


@pytest.fixture
def nothing_shared(monkeypatch):
    """Clear the shared scorers of the process."""
    monkeypatch.setattr(batching, "_batching", {})
    monkeypatch.setattr("gym_rm.scorers.load._shared", {})


def test_equal_settings_share_one_scorer(nothing_shared, saved_model):
    folder = saved_model("qwen3")
    shared = shared_batching_scorer(folder, {"max_length": 500})
    assert shared_batching_scorer(folder, {"max_length": 500}) is shared
    assert shared_batching_scorer(folder, {"max_length": 400}) is not shared
    assert shared.scorer.renderer.max_length == 500


def test_mappings_of_a_configuration_library_equal_dicts(nothing_shared, saved_model):
    plain = {"path": saved_model("qwen3"), "chat_template_kwargs": {"loud": True}}
    foreign = MappingProxyType({**plain, "chat_template_kwargs": MappingProxyType({"loud": True})})
    assert shared_batching_scorer(foreign, MappingProxyType({})) is shared_batching_scorer(plain, {})


def test_a_path_and_its_text_share_one_scorer(nothing_shared, saved_model):
    """Two batching scorers would call the same scorer from two threads."""
    folder = saved_model("qwen3")
    assert shared_batching_scorer(Path(folder), {}) is shared_batching_scorer(Path(folder), {})
    assert shared_batching_scorer(Path(folder), {}) is shared_batching_scorer(folder, {})


def test_the_same_object_shares_one_scorer(nothing_shared, recorder):
    assert shared_batching_scorer(recorder, {}) is shared_batching_scorer(recorder, {})
    assert shared_batching_scorer(recorder, {}).scorer is recorder
    assert shared_batching_scorer(RecordingScorer(), {}) is not shared_batching_scorer(recorder, {})


def test_a_batching_scorer_is_returned_unchanged(nothing_shared, recorder):
    scorer = MicroBatchingScorer(recorder)
    assert shared_batching_scorer(scorer, {}) is scorer
