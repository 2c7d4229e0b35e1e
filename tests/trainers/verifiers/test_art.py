"""ART gathers groups and computes advantages with the code of its page."""

import asyncio
import os

import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download while it is imported
masking_utils = pytest.importorskip("transformers.masking_utils")
ORIGINAL = masking_utils._preprocess_mask_arguments
art = pytest.importorskip("art")
from art.preprocessing.tokenize import tokenize_trajectory_groups

import gym_rm
from gym_rm.engine.text.tokenizers import load_tokenizer
from tests.trainers.pages import REPLIES, fails, module_of_page, said

PATCHED = masking_utils._preprocess_mask_arguments
masking_utils._preprocess_mask_arguments = ORIGINAL  # the other tests of this process run models


@pytest.fixture
def page(tmp_path, monkeypatch):
    page = module_of_page("art", tmp_path)
    monkeypatch.setattr(page, "REWARD_MODEL", fails)
    return page


def advantages(group):
    """Return the advantage of each reply, as ART's trainer computes it."""
    tokenizer = load_tokenizer("embedded:policy")
    results = tokenize_trajectory_groups(
        tokenizer, [group], allow_training_without_logprobs=True, scale_rewards=False, shuffle_group_trajectories=False
    )
    return {result.trajectory.messages()[-1]["content"]: result.advantage for result in results}


def test_the_advantages_are_those_of_the_group_without_the_trajectory_that_failed(page):
    rest = [reply for reply in REPLIES if reply != "FAIL"]
    group, without = asyncio.run(page.gather(REPLIES)), asyncio.run(page.gather(rest))
    assert sorted(trajectory.reward for trajectory in group) == sorted(fails(said(*rest)))
    assert ["returned None" in error.message for error in group.exceptions] == [True]
    assert advantages(group) == advantages(without)
    assert advantages(group).keys() == {*rest}


def test_a_model_in_the_process_of_art_raises(monkeypatch):
    monkeypatch.setattr(masking_utils, "_preprocess_mask_arguments", PATCHED)
    with pytest.raises(TypeError, match="_patched_preprocess_mask_arguments"):
        gym_rm.load_scorer().score(said("It is 71."))
