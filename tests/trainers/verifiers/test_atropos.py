"""Environments of Atropos send groups that are scored with the code of its page."""

import asyncio
import importlib.resources

import pytest

pytest.importorskip("atroposlib.envs.base")
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.reward_fns.reward_function import RewardFunction

import gym_rm
from tests.trainers.pages import QUESTION, REPLIES, fails, module_of_page, said

POLICY = str(importlib.resources.files("gym_rm") / "assets" / "policy")


@pytest.fixture
def page(tmp_path):
    return module_of_page("atropos", tmp_path, languages=("python", "py"))


def sent(page, replies):
    """Return the groups that an environment of Atropos sends to its server, and the marks of its success."""
    groups = []

    class Environment(BaseEnv):
        collect_trajectories = page.collect_trajectories
        get_next_item = evaluate = None

        async def sample(self, item):
            tokens = [[1, 2, 3]] * len(replies)
            return {"tokens": tokens, "masks": [[-100, 2, 3]] * len(replies), "messages": said(*replies)}

        async def _send_scored_data_to_api(self, group):
            groups.append(group)

    config = BaseEnvConfig(tokenizer_name=POLICY, group_size=len(replies), use_wandb=False)
    env = Environment(config, [APIServerConfig()], testing=True)
    env.running_items["one"] = {"item": {"question": QUESTION["content"], "answer": "71"}}
    asyncio.run(env.handle_env("one"))
    return groups, env.task_successful


def test_an_environment_sends_the_rewards_of_the_scorer(page):
    (group,), successful = sent(page, REPLIES)
    assert group["scores"] == gym_rm.load_scorer().score(said(*REPLIES)).rewards.tolist()
    assert successful == [1]


def crashes(conversations):
    raise OSError("the reward model is gone")


@pytest.mark.parametrize("reward_model", [fails, crashes])
def test_a_group_with_a_reply_without_a_score_is_not_sent(page, monkeypatch, reward_model):
    monkeypatch.setattr(page, "scorer", lambda: gym_rm.load_scorer(reward_model))
    assert sent(page, REPLIES) == ([], [0])


def test_a_reward_function_of_atropos_makes_zeros_of_a_missing_score():
    class RewardModel(RewardFunction):
        def compute(self, completions, **kwargs):
            return fails(completions)

    assert RewardModel()(said(*REPLIES)) == [0.0] * 4
