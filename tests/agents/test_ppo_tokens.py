import numpy as np
import pytest
import torch

from agents.ppo_tokens import Args, advantages_and_returns, best_return, train
from gym_rm import load_scorer


class Counting:
    """Scorer that counts the conversations of its calls."""

    def __init__(self):
        self.scorer = load_scorer()
        self.num_conversations = 0

    def __deepcopy__(self, memo):
        return self

    def score(self, conversations, prompts=None):
        self.num_conversations += len(conversations)
        return self.scorer.score(conversations)


@pytest.fixture(scope="module")
def scorer():
    return Counting()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_the_agent_learns_the_best_replies(mode, scorer):
    args = Args(num_prompts=2, total_timesteps=30_000, autoreset_mode=mode, seed=1)
    assert train(args, scorer) >= 0.9 * best_return(args, scorer)


def test_each_reply_is_scored_once(scorer, capsys):
    scorer.num_conversations = 0
    args = Args(num_prompts=2, max_new_tokens=1, total_timesteps=2048, autoreset_mode="NextStep")
    train(args, scorer)
    assert scorer.num_conversations == 2048 // 2 + 2  # every second step only resets; 2 replies in the evaluation


def test_returns_are_sums_of_the_later_rewards_of_the_episode():
    rewards = torch.tensor([[0.0], [1.0], [0.0], [2.0]])
    dones = torch.tensor([[0.0], [1.0], [0.0], [0.0]])
    values = torch.tensor([[0.5], [0.5], [0.5], [0.5]])
    advantages, returns = advantages_and_returns(rewards, values, dones, torch.tensor([3.0]), gamma=1.0, gae_lambda=1.0)
    np.testing.assert_allclose(returns[:, 0], [1.0, 1.0, 5.0, 5.0])
    np.testing.assert_allclose(advantages[:, 0], [0.5, 0.5, 4.5, 4.5])
