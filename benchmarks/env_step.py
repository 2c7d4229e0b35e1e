"""Measure the cost of `env.step` without the scorer, in microseconds per conversation, beside gymnasium's own measure.

    python benchmarks/env_step.py [--num-envs 1024] [--user-turns 0] [--group-size 1] [--steps 100]

The scorer returns zeros. Its time is subtracted. `benchmark_vector_step` of gymnasium also counts the scorer, and the
time in which the action space draws random replies; the draws alone are timed after it.
"""

import argparse
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import gymnasium as gym
import numpy as np
import results
from gymnasium.utils.performance import benchmark_vector_step

import gym_rm
from gym_rm import Prompt, Scores


class NullScorer:
    """Scorer that returns zeros with one component and adds up its own time in `seconds`."""

    def __init__(self):
        self.seconds = 0.0

    def score(self, conversations, prompts=None):
        begin = time.perf_counter()
        size = len(conversations)
        zeros = np.zeros(size, dtype=np.float32)
        scores = Scores.from_rewards(zeros, components={"length": zeros})
        self.seconds += time.perf_counter() - begin
        return scores


def measure(envs, scorer, replies, steps):
    """Return microseconds per conversation of every step, without the scorer."""
    envs.reset(seed=0)
    totals = []
    for step in range(5 + steps):
        scorer.seconds = 0.0
        begin = time.perf_counter()
        envs.step(replies)
        if step >= 5:
            totals.append(time.perf_counter() - begin - scorer.seconds)
    return np.array(totals) * 1e6 / envs.num_envs


def gymnasium_measure(envs):
    """Return microseconds per conversation of `benchmark_vector_step`, and of the random replies alone."""
    whole = 1e6 / benchmark_vector_step(envs, seed=0)
    begin = time.perf_counter()
    for _ in range(20):
        envs.action_space.sample()
    return {"whole step": whole, "draws": (time.perf_counter() - begin) / 20 / envs.num_envs * 1e6}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--user-turns", type=int, default=0, help="scripted user turns after the first reply")
    parser.add_argument("--group-size", type=int, default=1)
    parser.add_argument("--reply-length", type=int, default=500, help="characters")
    parser.add_argument("--steps", type=int, default=100)
    results.add_argument(parser)
    options = parser.parse_args()
    messages = ({"role": "system", "content": "s" * 200}, {"role": "user", "content": "q" * 500})
    turns = ("And then? " * 10,) * options.user_turns
    prompts = [Prompt(messages, f"prompt {index}", turns, str(index)) for index in range(1000)]
    scorer = NullScorer()
    envs = gym.make_vec(
        "gym_rm:RewardModel-v0",
        num_envs=options.num_envs,
        group_size=options.group_size,
        reward_model=scorer,
        prompts=prompts,
    )
    totals = measure(envs, scorer, ["r" * options.reply_length] * options.num_envs, options.steps)
    generic = gymnasium_measure(envs)

    print(f"python {' '.join([Path(__file__).name, *sys.argv[1:]])}")
    print(f"{results.hardware()['CPU']}, {os.cpu_count()} cores; Python {platform.python_version()}, ", end="")
    print(f"gymnasium {version('gymnasium')}, numpy {np.__version__}, gym_rm {gym_rm.__version__}")
    print(f"{options.num_envs} environments, {options.steps} steps, microseconds per conversation without the scorer:")
    print(f"  median {median(totals):.2f}, fastest {totals.min():.2f}, slowest {totals.max():.2f}")
    print(f"  benchmark_vector_step {generic['whole step']:.2f}, of which {generic['draws']:.2f} draw replies")
    values = {"environments": options.num_envs, "whole step": median(totals), "benchmark_vector_step": generic}
    results.save(options.save, values, peers=["gymnasium"])


if __name__ == "__main__":
    main()
