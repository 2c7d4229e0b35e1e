"""Measure whether generic agents learn from a reward model, and whether every conversation is scored once.

    python benchmarks/adapters_learning.py [--only PPO] [--seeds 0 1 2] [--plot curves.png]

The agents are Stable-Baselines3 (extra `sb3`) on the candidate view and on the token view, and `agents/ppo_tokens.py`
in two autoreset modes. They train on a few embedded prompts with the embedded reward model. The best return is the mean
over the prompts of the highest reward among all replies that the agent can give.
"""

import argparse
import contextlib
import io
import platform
import sys
import time
from importlib.metadata import version
from itertools import product
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorWrapper

sys.path.insert(0, str(Path(__file__).parents[1]))

import results

from agents import ppo_tokens
from gym_rm import load_scorer
from gym_rm.assets.number_task import candidates as number_candidates
from gym_rm.data.prompts import load_prompts
from gym_rm.envs.numeric_views import CandidateAction, TokenLevel

VOCABULARY = ppo_tokens.VOCABULARY
CANDIDATE_PROMPTS, TOKEN_PROMPTS = (0, 1, 2, 3), (1, 5, 15)
SB3 = {  # algorithm, view: timesteps, environments, settings
    ("PPO", "candidates"): (
        8192, 32, {"n_steps": 16, "batch_size": 128, "n_epochs": 4, "learning_rate": 1e-3, "ent_coef": 0.02},
    ),
    ("A2C", "candidates"): (8192, 32, {"n_steps": 4, "learning_rate": 1e-3, "ent_coef": 0.02}),
    ("DQN", "candidates"): (
        8192, 32,
        {
            "learning_rate": 1e-3, "learning_starts": 256, "train_freq": 1, "gradient_steps": 2, "gamma": 0.0,
            "target_update_interval": 50, "exploration_fraction": 0.5, "batch_size": 64,
        },
    ),
    ("PPO", "tokens"): (
        40960, 128,
        {"n_steps": 8, "batch_size": 256, "n_epochs": 4, "learning_rate": 1e-3, "ent_coef": 0.1, "gamma": 1.0},
    ),
}  # fmt: skip


class Counting:
    """Scorer that counts the conversations of its calls."""

    def __init__(self, scorer):
        self.scorer = scorer
        self.count = 0

    def __deepcopy__(self, memo):
        return self

    def score(self, conversations, prompts=None):
        self.count += len(conversations)
        return self.scorer.score(conversations, prompts)


class Curve(VectorWrapper):
    """Records the return of every episode and the number of steps at its end."""

    def __init__(self, envs):
        super().__init__(envs)
        self.num_steps = 0
        self.returns = np.zeros(self.num_envs)
        self.finished = []
        CURVES.append(self)

    def step(self, actions):
        observations, rewards, terminations, truncations, infos = self.env.step(actions)
        done = terminations | truncations
        self.num_steps += self.num_envs
        self.returns += rewards
        self.finished += [(self.num_steps, float(value)) for value in self.returns[done]]
        self.returns[done] = 0.0
        return observations, rewards, terminations, truncations, infos


CURVES = []
gym.register(
    "CountedTokens-v0", vector_entry_point=lambda num_envs, **settings: Curve(TokenLevel(num_envs, **settings))
)


def best_candidates(scorer, prompts):
    replies = [number_candidates(prompt.messages) for prompt in prompts]
    return mean_of_best(scorer, prompts, replies)


def best_tokens(scorer, prompts):
    texts = ["It is" + "".join(tokens) for length in range(3) for tokens in product(VOCABULARY, repeat=length)]
    return mean_of_best(scorer, prompts, [texts] * len(prompts))


def mean_of_best(scorer, prompts, replies):
    best = [
        scorer.score([[*prompt.messages, {"role": "assistant", "content": text}] for text in texts]).rewards.max()
        for prompt, texts in zip(prompts, replies, strict=True)
    ]
    return float(np.mean(best))


def run_sb3(algorithm, view, seed, scorer, prompts):
    """Train a Stable-Baselines3 agent and return the mean return of its greedy policy over all prompts."""
    import stable_baselines3
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecMonitor

    from gym_rm.adapters.sb3 import VecEnvBridge

    timesteps, num_envs, settings = SB3[algorithm, view]

    def make(num_envs):
        common = {"reward_model": scorer, "prompts": prompts, "window": 12, "autoreset_mode": AutoresetMode.SAME_STEP}
        if view == "candidates":
            return VecEnvBridge(Curve(CandidateAction(num_envs, **common)))
        reply = {"prefill": "It is", "vocabulary": VOCABULARY, "max_new_tokens": 2}
        return VecEnvBridge(Curve(TokenLevel(num_envs, **reply, **common)))

    model = getattr(stable_baselines3, algorithm)("MlpPolicy", make(num_envs), seed=seed, **settings)
    model.learn(timesteps)
    fresh = VecMonitor(make(1))
    fresh.seed(0)
    return evaluate_policy(model, fresh, n_eval_episodes=len(prompts))[0]


def run_agent(mode, seed, scorer):
    args = ppo_tokens.Args(env_id="CountedTokens-v0", autoreset_mode=mode, seed=seed)
    with contextlib.redirect_stdout(io.StringIO()):
        return ppo_tokens.train(args, scorer)


def runs(scorer):
    """Yield the name of each agent, its best return, and a function that trains it with a seed."""
    prompts = load_prompts()
    few = {"candidates": CANDIDATE_PROMPTS, "tokens": TOKEN_PROMPTS}
    for algorithm, view in SB3:
        chosen = [prompts[index] for index in few[view]]
        best = (best_candidates if view == "candidates" else best_tokens)(scorer, chosen)
        yield (
            f"SB3 {algorithm}, {view}", best,
            lambda seed, counting, a=algorithm, v=view, p=chosen: run_sb3(a, v, seed, counting, p),
        )  # fmt: skip
    best = ppo_tokens.best_return(ppo_tokens.Args(), scorer)
    for mode in ("SameStep", "NextStep"):
        yield (
            f"agents/ppo_tokens.py, {mode}", best,
            lambda seed, counting, m=mode: run_agent(m, seed, counting),
        )  # fmt: skip


def plot(path, curves):
    """Plot the mean return divided by the best return, with one panel per agent."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for name, _ in curves))
    rows = -(-len(names) // 3)
    figure, axes = plt.subplots(rows, 3, figsize=(9, 2.6 * rows), sharey=True, squeeze=False, constrained_layout=True)
    for axis in axes.flat[len(names) :]:
        axis.remove()
    for (name, seed), (steps, values) in curves.items():
        axis = axes.flat[names.index(name)]
        axis.plot(steps, values, linewidth=1.5, label=f"seed {seed}")
        axis.axhline(1.0, color="grey", linewidth=0.5)
        axis.set(title=name.removeprefix("agents/"), xlabel="steps", ylim=(-1.5, 1.1))
    for axis in axes[:, 0]:
        axis.set_ylabel("return / best return")
    axes.flat[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only agents whose name contains this text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--plot", type=Path)
    results.add_argument(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    libraries = ("gymnasium", "stable_baselines3", "torch", "transformers")
    print(f"{platform.machine()}, one thread, Python {platform.python_version()},", end=" ")
    print(", ".join(f"{name} {version(name)}" for name in libraries))
    print("python", *sys.argv, end="\n\n")
    print("| agent | seed | greedy return | best return | share | steps | scored / needed | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    scorer = load_scorer()
    curves, values = {}, {}
    for name, best, train in runs(scorer):
        if args.only not in name:
            continue
        shares, scored, trained = [], [], []
        for seed in args.seeds:
            CURVES.clear()
            counting, begin = Counting(scorer), time.perf_counter()
            found = train(seed, counting)
            seconds = time.perf_counter() - begin
            needed = sum(len(curve.finished) for curve in CURVES)
            print(
                f"| {name} | {seed} | {found:.3f} | {best:.3f} | {found / best:.1%} | {CURVES[0].num_steps} "
                f"| {counting.count} / {needed} | {seconds:.0f} |",
                flush=True,
            )
            shares.append(found / best)
            scored.append(counting.count - needed)
            trained.append(seconds)
            steps, returns = np.array(CURVES[0].finished).T
            groups = np.array_split(np.arange(len(steps)), 40)
            curves[name, seed] = [steps[g].mean() for g in groups], [returns[g].mean() / best for g in groups]
        values[name.removeprefix("agents/")] = {
            "seeds": len(args.seeds),
            "steps": CURVES[0].num_steps,
            "lowest share": min(shares),
            "highest share": max(shares),
            "scored more than once": max(scored),
            "seconds": max(trained),
        }
    results.save(args.save, values)
    if args.plot:
        plot(args.plot, curves)


if __name__ == "__main__":
    main()
