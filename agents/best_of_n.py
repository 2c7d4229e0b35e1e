"""Best-of-n, the sanity check of a scorer before training: sample n replies and keep the one with the highest reward.

    gym-rm agent best_of_n                        # embedded policy, reward model and prompts; half a minute
    gym-rm agent best_of_n n=64 num_prompts=32    # change any setting (--help lists them)
    gym-rm agent best_of_n policy=Qwen/Qwen3-0.6B prompts=prompts.jsonl \\
        reward_model=Skywork/Skywork-Reward-V2-Qwen3-0.6B

Does the best of more replies have the right answer more often, checked without the reward model? Then a policy can
learn from this scorer. If only the reward rises, the scorer prefers something else, and a policy would learn that.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from pydantic import Field
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers.utils import logging as transformers_logging

import gym_rm
from gym_rm.config import Config, Finite, Flag, NonNegativeInt, PositiveInt, load_config
from gym_rm.data.prompts import load_prompts
from gym_rm.engine.text.policy_renderer import PolicyRenderer
from gym_rm.errors import ConfigError
from gym_rm.evaluation.best_of_n import curve_over_n
from gym_rm.generation.sampling import LocalSampler
from gym_rm.policy.grpo_settings import settings_help
from gym_rm.policy.rollout_batch import RolloutBatch
from gym_rm.policy.trained_policy import open_policy

REWARD_COLOR, ACCURACY_COLOR, FAINT = "#2f6fb7", "#1f8a4c", "#8a939c"


class BestOfNSettings(Config):
    """All settings."""

    n: PositiveInt = Field(default=16, ge=2)
    """Most replies to choose from, sampled for each prompt. Smaller numbers are subsets of these."""
    num_prompts: PositiveInt = 128
    """Number of prompts, the first ones."""
    prompts: str | None = None
    """File or data set name for `gym_rm.data.prompts.load_prompts`; null for the embedded prompts."""
    policy: str | None = None
    """Folder or hub id of a chat model; null for the embedded policy."""
    reward_model: str | dict[str, Any] | None = None
    """Folder, hub id, URL, `module:function` or dict for `gym_rm.load_scorer`; null for the embedded reward model."""
    reward_model_kwargs: dict[str, Any] = Field(default={})
    """Options of the reward model: dtype, device, max_num_batched_tokens, ..."""
    tools: list[str] | None = None
    """Tools that the policy may call: `calculator`, `python`, or `module:function`."""
    tool_options: dict[str, Any] = Field(default={})
    """Options of the tools: call_format, max_calls, timeout, max_result_length; see docs/tools.md."""
    tools_in_system: Flag | None = None
    """Write tools and calls as text into the messages, for a policy whose chat template does not write them. null for
    an error then, false to go without, for a policy that knows its tools."""
    max_turns: PositiveInt | None = None
    """Most replies in an episode; null for 1, or 4 with tools. The last one is scored."""
    max_new_tokens: PositiveInt = 256
    """Most tokens in a reply; longer ones are cut here and scored."""
    max_num_seqs: PositiveInt | None = None
    """Number of replies sampled at a time; null for all."""
    temperature: Finite = Field(default=1.0, gt=0)
    """Sampling temperature."""
    seed: NonNegativeInt = 1
    """Seed of sampling."""
    output: str | None = None
    """Folder of the table and the picture; null for outputs/best-of-n-<date>-<time>."""


def sample_and_score(settings: BestOfNSettings) -> tuple[np.ndarray, np.ndarray]:
    """Return rewards and whether the replies are right `[P, n]`: NaN if a score or the answer is missing."""
    prompts = load_prompts(settings.prompts)[: settings.num_prompts]
    envs = gym.make_vec(
        "RewardModel-v0",
        num_envs=len(prompts) * settings.n,
        prompts=prompts,
        group_size=settings.n,
        reward_model=gym_rm.load_scorer(settings.reward_model, **settings.reward_model_kwargs),
        fallback_reward=0.0,
        max_turns=settings.max_turns or (4 if settings.tools else 1),
        reward_on="end",
        tools=settings.tools,
        tool_options=settings.tool_options,
        autoreset_mode="Disabled",
    )
    start = open_policy(settings.policy)
    sampler = LocalSampler(
        start.model.to("cuda" if torch.cuda.is_available() else "cpu"),
        start.tokenizer,
        max_new_tokens=settings.max_new_tokens,
        max_num_seqs=settings.max_num_seqs,
        temperature=settings.temperature,
    )
    indices = np.repeat(np.arange(len(prompts)), settings.n)
    batch = RolloutBatch(
        PolicyRenderer(start.tokenizer, tools_in_system=settings.tools_in_system),
        indices,
        np.arange(len(indices)),
        group_size=settings.n,
        seed=(settings.seed,),
        rows=np.ones(len(indices), bool),
    )
    batch.begin(*envs.reset(options={"prompt_indices": indices}))
    while batch.playing.any():
        rows, seen, seeds = batch.requests()
        replies, playing = batch.replies(dict(zip(rows, sampler.sample(seen, seeds=seeds), strict=True)))
        batch.add(envs.step(replies, rows=playing), playing)
    envs.close()
    rollouts = batch.table().rollouts
    rewards = np.array([rollout.reward for rollout in rollouts])
    right = np.array([np.nan if rollout.right is None else rollout.right for rollout in rollouts])
    return rewards.reshape(-1, settings.n), right.reshape(-1, settings.n)


def curve(rewards: np.ndarray, right: np.ndarray) -> list[dict[str, float]]:
    """Return for n = 1, 2, 4, ..., N: the mean reward of the best of n, how often it is right, and how often any is.

    The means are over all subsets of n replies, without sampling, and over prompts (see
    `gym_rm.evaluation.best_of_n`); `low` and `high` are bootstrap intervals of 95 % over prompts, and `kl` bounds the
    divergence of choosing from the policy. Prompts without all scores are left out.

    Raises:
        ConfigError: no prompt has all scores.
    """
    scored = np.isfinite(rewards).all(axis=1)
    if not scored.any():
        raise ConfigError("no prompt has the scores of all its replies; the scorer must score them.")
    most = rewards.shape[1]
    ns = sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})
    curves = {"reward": curve_over_n([(each, each) for each in rewards[scored]], ns, gold="reward")}
    checked = scored & np.isfinite(right).all(axis=1)
    if checked.any():
        groups = list(zip(rewards[checked], right[checked], strict=True))
        curves["accuracy"] = curve_over_n(groups, ns, gold="accuracy")
    rows = []
    for k, n in enumerate(ns):
        row: dict[str, float] = {"n": n, "kl": curves["reward"].kl[k]}
        for name, found in curves.items():
            picked = found.picked[k]
            row |= {name: picked.value, f"{name}_low": picked.low, f"{name}_high": picked.high}
        if "accuracy" in curves:
            row["any_right"] = curves["accuracy"].oracle[k]
        rows.append(row)
    return rows


def table_of(rows: list[dict[str, float]]) -> Table:
    table = Table(title="The best of n replies by reward", title_justify="left")
    for name in ("n", "divergence at most", "reward", "right, checked without the reward model", "any reply right"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row['n']}", f"{row['kl']:.2f}", f"{row['reward']:.3g}"]
        if "accuracy" in row:
            interval = f"{row['accuracy_low']:.0%} to {row['accuracy_high']:.0%}"
            cells += [f"{row['accuracy']:.1%} ({interval})", f"{row['any_right']:.1%}"]
        table.add_row(*cells)
    return table


def plot(rows: list[dict[str, float]], path: Path) -> None:
    """Plot reward and accuracy over the divergence from the policy, with intervals."""
    from matplotlib.figure import Figure

    panels = [("reward", "Reward of the best of n", REWARD_COLOR)]
    if "accuracy" in rows[0]:
        panels.append(("accuracy", "Right answers, checked without the reward model", ACCURACY_COLOR))
    figure = Figure(figsize=(5.2 * len(panels), 3.9), dpi=150, layout="constrained")
    for position, (name, title, color) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), position)
        ns = [row["n"] for row in rows]
        axes.fill_between(
            ns, *([row[f"{name}_{end}"] for row in rows] for end in ("low", "high")), color=color, alpha=0.15
        )
        axes.plot(ns, [row[name] for row in rows], "o-", color=color, label="best of n by reward")
        if name == "accuracy":
            axes.plot(ns, [row["any_right"] for row in rows], "--", color=FAINT, label="any of n")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
            axes.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ns, [f"{n}" for n in ns])
        axes.set_xlabel("n (shaded: 95 % interval over prompts)", fontsize=9)
        axes.set_title(title, loc="left", fontsize=11, weight="bold", pad=26)
        axes.grid(axis="y", color=FAINT, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="gym-rm agent best_of_n",
        description=__doc__,
        epilog=settings_help(BestOfNSettings),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="name=value", help="settings to change, such as n=64 seed=2")
    parser.add_argument("--config", type=Path, help="YAML file of settings")
    arguments = parser.parse_args()
    console = Console()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        settings = load_config(BestOfNSettings, arguments.config, arguments.overrides)
        rewards, right = sample_and_score(settings)
        rows = curve(rewards, right)
    except gym_rm.GymRMError as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        raise SystemExit(2) from error
    folder = Path(settings.output or f"outputs/best-of-n-{time.strftime('%Y%m%d-%H%M%S')}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "best_of_n.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    plot(rows, folder / "best_of_n.png")
    console.print(table_of(rows))
    failed = int((~np.isfinite(rewards).all(axis=1)).sum())
    console.print(f"{len(rewards) - failed} prompts" + (f", {failed} left out for a missing score" if failed else ""))
    console.print(f"table: {folder / 'best_of_n.csv'}   picture: {folder / 'best_of_n.png'}", highlight=False)


if __name__ == "__main__":
    main()
