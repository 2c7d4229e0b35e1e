"""Small tasks that every generic library is asked to learn, and the best return that there is."""

import gymnasium as gym
import numpy as np

from gym_rm.data import load_prompts
from gym_rm.wrappers import number_candidates

NUM_PROMPTS = {"RewardModelCandidates-v0": 4, "RewardModelTokens-v0": 2}
WINDOW = 12


def make_task(env_id, scorer, num_envs, **settings):
    """A view of the first embedded prompts, whose last tokens tell them apart."""
    prompts = load_prompts(limit=NUM_PROMPTS[env_id])
    return gym.make_vec(env_id, num_envs=num_envs, reward_model=scorer, prompts=prompts, window=WINDOW, **settings)


def best_return(env_id, scorer):
    """Mean over the prompts of the best reply: of the candidates, or of all sentences that state a number."""
    best = []
    for prompt in load_prompts(limit=NUM_PROMPTS[env_id]):
        replies = [f"It is {number}." for number in range(200)]
        if env_id == "RewardModelCandidates-v0":
            replies = number_candidates(prompt.messages)
        conversations = [[*prompt.messages, {"role": "assistant", "content": reply}] for reply in replies]
        best.append(scorer.score(conversations).rewards.max())
    return float(np.mean(best))
