"""Measure the cost of `env.step` without the scorer, in microseconds per conversation, in total and by part.

    python benchmarks/env_step.py [--num-envs 1024] [--user-turns 0] [--group-size 1] [--steps 100]

The scorer returns zeros. Its time is subtracted.
"""

import argparse
import os
import platform
import sys
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from statistics import median

import gymnasium as gym
import numpy as np
import results

import gym_rm
from gym_rm import Prompt, Scores
from gym_rm.envs.infos import EnvState

PARTS = {
    "check the replies": ["_check_replies"],
    "distribute the scores": ["_score"],
    "get the user's next messages": ["_next_turns"],
    "infos": ["add_final", "add_step", "add_tools", "add_episodes"],
    "start new episodes": ["_restart"],
    "copy the observations": ["observations"],
}
SCORING = "distribute the scores"


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


def cpu_name():
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def measure(envs, scorer, replies, steps):
    """Return microseconds per conversation, without the scorer: of every step, and the median of every part."""
    seconds, inside = defaultdict(float), []
    for part, methods in PARTS.items():
        for name in methods:
            owner = EnvState if hasattr(EnvState, name) else envs
            setattr(owner, name, timed(getattr(owner, name), part, seconds, inside))
    totals, parts = [], defaultdict(list)
    for _ in range(steps):
        seconds.clear()
        scorer.seconds = 0.0
        begin = time.perf_counter()
        envs.step(replies)
        total = time.perf_counter() - begin - scorer.seconds
        seconds[SCORING] -= scorer.seconds
        totals.append(total)
        for part in PARTS:
            parts[part].append(seconds[part])
        parts["other code"].append(total - sum(seconds[part] for part in PARTS))
    scale = 1e6 / envs.num_envs
    return np.array(totals) * scale, {part: median(values) * scale for part, values in parts.items()}


def timed(method, part, seconds, inside):
    def call(*args, **kwargs):
        if inside:  # called by another part, which already counts this time
            return method(*args, **kwargs)
        inside.append(part)
        begin = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            inside.pop()
            seconds[part] += time.perf_counter() - begin

    return call


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
        "RewardModel-v0",
        num_envs=options.num_envs,
        group_size=options.group_size,
        reward_model=scorer,
        prompts=prompts,
    )
    replies = ["r" * options.reply_length] * options.num_envs
    envs.reset(seed=0)
    for _ in range(5):
        envs.step(replies)
    totals, parts = measure(envs, scorer, replies, options.steps)

    print(f"python {' '.join([Path(__file__).name, *sys.argv[1:]])}")
    print(f"{cpu_name()}, {os.cpu_count()} cores; Python {platform.python_version()}, ", end="")
    print(f"gymnasium {version('gymnasium')}, numpy {np.__version__}, gym_rm {gym_rm.__version__}")
    print(f"{options.num_envs} environments, {options.steps} steps, microseconds per conversation without the scorer:")
    print(
        f"  {'whole step, median':40}{median(totals):8.2f}   (fastest {totals.min():.2f}, slowest {totals.max():.2f})"
    )
    for part, value in parts.items():
        print(f"  {part:40}{value:8.2f}")
    results.save(
        options.save,
        {"environments": options.num_envs, "whole step": median(totals), "parts": parts},
        peers=["gymnasium"],
    )


if __name__ == "__main__":
    main()
