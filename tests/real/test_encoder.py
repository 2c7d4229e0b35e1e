"""MiniLM as a reward model: an encoder without a chat template, in padded batches."""

from tiny_models import plain_rewards

import gym_rm
from tests.real import plain


def test_rewards_are_those_of_transformers_with_the_same_bits_in_every_batch(minilm_reward_model, hh_pairs):
    conversations = plain.short(hh_pairs, 10)
    scorer = gym_rm.load_scorer(str(minilm_reward_model), device="cpu")
    assert scorer.layout == "padded"
    scores = scorer.score(conversations)
    plain.assert_near(scores.rewards, plain_rewards(minilm_reward_model, conversations))
    assert [scorer.score([each]).rewards[0] for each in conversations] == scores.rewards.tolist()
