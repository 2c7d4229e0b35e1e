"""AReaL calls the reward function of its page in its pool of processes."""

import asyncio
import logging

import pytest

pytest.importorskip("areal.api.reward_api")
import torch
from areal.api.reward_api import AsyncRewardWrapper
from areal.infra.remote_inf_engine import GroupedRolloutWorkflow

import gym_rm
from tests.trainers.pages import QUESTION, REPLIES, fails, module_of_page, said


@pytest.fixture
def page(tmp_path):
    return module_of_page("areal", tmp_path)


def with_model(page, monkeypatch, reward_model):
    """Return AReaL's wrapper around the page's function, with a pool that is forked for it."""
    monkeypatch.setattr(page, "scorer", lambda: gym_rm.load_scorer(reward_model))
    monkeypatch.setattr(AsyncRewardWrapper, "_executors", {})
    return AsyncRewardWrapper(page.reward_fn, max_workers=1)


def rewarded_group(wrapper, replies):
    """Return the rewards of AReaL's group of the replies, each as its policy ends it."""
    texts = iter([f"{reply}<|im_end|>" for reply in replies])

    class Workflow:
        async def arun_episode(self, engine, data):
            reward = await wrapper("", next(texts), [], [], messages=[QUESTION], answer="71")
            return {"rewards": torch.tensor([reward]), "attention_mask": torch.ones(1, 1, dtype=torch.bool)}

    grouped = GroupedRolloutWorkflow(Workflow(), len(replies), logging.getLogger("areal"))
    return asyncio.run(grouped.arun_episode(None, {}))["rewards"].tolist()


def test_the_rewards_are_those_of_the_scorer(page, monkeypatch):
    rewards = rewarded_group(with_model(page, monkeypatch, {"kind": "math"}), ("It is 12.", "It is 71."))
    assert rewards == [0.0, 1.0]
    rest = [reply for reply in REPLIES if reply != "FAIL"]
    assert rewarded_group(with_model(page, monkeypatch, fails), rest) == fails(said(*rest))


def test_a_missing_score_fails_the_episode_of_the_whole_group(page, monkeypatch):
    with pytest.raises(gym_rm.ScoringError, match="returned None"):
        rewarded_group(with_model(page, monkeypatch, fails), REPLIES)


def test_a_prompt_that_is_known_as_text_only_is_parsed(page):
    texts = [f"<|im_start|>user\n{QUESTION['content']}<|im_end|>\n<|im_start|>assistant\n", "It is 71.<|im_end|>"]
    assert page.reward_fn(*texts, [], [], answer="71") == 1.0
