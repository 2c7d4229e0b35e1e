"""Tinker's cookbook rolls out the environment of its page."""

import asyncio

import pytest

pytest.importorskip("tinker_cookbook.rl.types")
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.renderers.role_colon import RoleColonRenderer
from tinker_cookbook.rl.data_processing import compute_advantages
from tinker_cookbook.rl.rollout_strategy import FailFast, RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import EnvGroupBuilder

import gym_rm
from gym_rm.data.prompts import load_prompts
from gym_rm.engine.text.tokenizers import load_tokenizer
from tests.trainers.pages import QUESTION, REPLIES, fails, module_of_page, said


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return module_of_page("tinker", tmp_path_factory.mktemp("page"))


def rolled_out(page, replies, reward_model, strategy, group_size=4):
    """Return the cookbook's group of rollouts of a policy that gives the replies in order."""
    renderer = RoleColonRenderer(load_tokenizer("embedded:policy"))
    (prompt,) = load_prompts([{"prompt": QUESTION["content"]}])
    texts = iter(replies)

    class Builder(EnvGroupBuilder):
        async def make_envs(self):
            return [page.RewardModelEnv(prompt, renderer, reward_model) for _ in range(group_size)]

    async def policy(observation, stop):
        text = f" {next(texts)}\n\nUser:"
        return TokensWithLogprobs(renderer.tokenizer.encode(text), maybe_logprobs=None)

    return asyncio.run(do_group_rollout(Builder(), policy, strategy))


def test_the_rewards_are_those_of_the_scorer(page):
    group = rolled_out(page, REPLIES, None, FailFast())
    assert group.get_total_rewards() == gym_rm.load_scorer().score(said(*REPLIES)).rewards.tolist()


def test_a_missing_score_raises_or_is_sampled_again(page):
    with pytest.raises(gym_rm.ScoringError, match="returned None"):
        rolled_out(page, REPLIES, fails, FailFast())
    rest = [reply for reply in REPLIES if reply != "FAIL"]
    again = rolled_out(page, [*REPLIES, "It is 33."], fails, RetryOnFailure(max_retries=1))
    without = rolled_out(page, [*rest, "It is 33."], fails, FailFast())
    (advantages,), (expected,) = compute_advantages([again]), compute_advantages([without])
    assert sorted(advantages.tolist()) == sorted(expected.tolist())
