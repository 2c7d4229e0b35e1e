"""Small tasks for generic RL libraries, and the best possible return of each task."""

from itertools import product

import gymnasium as gym
import numpy as np

from gym_rm.assets.number_task import candidates as number_candidates
from gym_rm.data.prompts import load_prompts

CANDIDATES, TOKENS = "RewardModelCandidates-v0", "RewardModelTokens-v0"
PROMPTS = {CANDIDATES: (0, 1, 2, 3), TOKENS: (1, 5, 15)}  # indices of embedded prompts; an agent memorises them
VOCABULARY = [".", *(f" {number}" for number in range(10, 100))]
SETTINGS = {CANDIDATES: {}, TOKENS: {"prefill": "It is", "vocabulary": VOCABULARY, "max_new_tokens": 2}}
WINDOW = 12  # tokens; enough to distinguish the prompts


def task_prompts(env_id):
    prompts = load_prompts()
    return [prompts[index] for index in PROMPTS[env_id]]


def make_task(env_id, scorer, num_envs, **settings):
    """Make a vector environment of a numeric view with few prompts."""
    settings = {"prompts": task_prompts(env_id), "window": WINDOW, **SETTINGS[env_id], **settings}
    return gym.make_vec(env_id, num_envs=num_envs, reward_model=scorer, **settings)


def best_return(env_id, scorer, prompts=None):
    """Mean over the prompts of the highest reward among all replies that the agent can give."""
    best = []
    for prompt in prompts or task_prompts(env_id):
        replies = ["It is" + "".join(tokens) for length in range(3) for tokens in product(VOCABULARY, repeat=length)]
        if env_id == CANDIDATES:
            replies = number_candidates(prompt.messages)
        conversations = [[*prompt.messages, {"role": "assistant", "content": reply}] for reply in replies]
        best.append(scorer.score(conversations).rewards.max())
    return float(np.mean(best))
