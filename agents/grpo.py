"""GRPO (arXiv 2402.03300) on `RewardModel-v0`, in one file: train a policy against a reward model.

    gym-rm grpo                             # embedded policy, reward model and prompts; needs no GPU
    gym-rm grpo seed=2 steps=50             # change any setting (--help lists them)
    gym-rm grpo --config run.yaml steps=50  # read settings from a file, or by name (math), then change some
    gym-rm grpo policy.model=Qwen/Qwen3-0.6B env.reward_model=Skywork/Skywork-Reward-V2-Qwen3-0.6B \\
        env.prompts=prompts.jsonl           # use your own models (folders, hub ids) and prompts
    torchrun --nproc-per-node 8 -m gym_rm grpo --config run.yaml optimizer.fsdp=true

The command runs this file, as does python agents/grpo.py with a copy of your own.

Read `play` and `train_step` first: sample, step, advantages, loss, backward, update. The estimators and the loss, with
their papers, are in `gym_rm/policy/advantages.py` and `gym_rm/policy/losses.py`. A run that was stopped or killed
resumes if the same command is repeated with the same `output`.

Shapes: B rollouts of a step, M turns in them, N sampled tokens, one after the other; arrays are never padded.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from signal import Signals
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor
from transformers.utils import logging as transformers_logging

import gym_rm
from gym_rm.config import load_config, settings_file
from gym_rm.errors import ConfigError
from gym_rm.evaluation.audit import audit_warning
from gym_rm.generation.completions import Sampler
from gym_rm.policy import advantages as estimators
from gym_rm.policy.defaults import complete, open_scorer, read_prompts
from gym_rm.policy.grpo_settings import GRPOSettings, settings_help
from gym_rm.policy.learner import Learner
from gym_rm.policy.losses import LossInputs, loss_metrics, policy_loss, token_weights
from gym_rm.policy.phase_timer import PhaseTimer
from gym_rm.policy.rollout_schedule import RolloutSchedule, replaced
from gym_rm.policy.rollouts import Rollout, RolloutBatch, Samples
from gym_rm.policy.run_folder import RunFolder
from gym_rm.policy.samplers import make_sampler
from gym_rm.reports.live import LiveView, print_results
from gym_rm.scorer import Scorer, is_relative
from gym_rm.training.stop_signals import heard_signals
from gym_rm.types import Prompt

SUM_WARNING = (
    "advantage.steps=sum pays for more steps: policies then split or pad their replies (PURE, arXiv 2504.15275). Watch "
    "steps_per_reply, or use advantage.steps=min."
)

# --- a step ----------------------------------------------------------------------------------------------------------


def play(envs: Any, sampler: Sampler, batch: RolloutBatch, timer: PhaseTimer) -> list[Rollout]:
    """Sample replies and step the environments until every episode of a batch has ended."""
    observations, infos = envs.reset(options={"prompt_indices": batch.prompt_indices})
    batch.begin(observations, infos)
    while batch.playing.any():
        prompts = batch.prompts()
        with timer.measure("generate"):
            completions = sampler.sample(prompts, seeds=batch.seeds())
        with timer.measure("score"):
            step = envs.step(batch.replies(completions), rows=batch.playing)
        batch.add(prompts, completions, step)
    return batch.rollouts()


def train_step(
    step: int,
    roll_out: Callable[[int], list[Rollout]],
    learner: Learner,
    scorer: Scorer,
    settings: GRPOSettings,
    timer: PhaseTimer,
) -> tuple[list[Rollout], np.ndarray, dict[str, Any]]:
    """Run one step of GRPO; return this rank's rollouts, the advantage of each `[B]`, and metrics of all ranks."""
    # Sample a group of replies to each prompt, and step the environments, which score them: see `play`.
    rollouts = roll_out(step)
    if settings.env.sleep:
        scorer.sleep()  # type: ignore[attr-defined]

    with timer.measure("update"):
        # Log-probabilities of the sampled tokens. With a single update the old ones are those of its own forward.
        samples, once = Samples(rollouts), settings.optimizer.updates_per_step * settings.optimizer.epochs == 1
        batches = learner.batches(samples.turns, samples.groups)
        spare = min(batches, key=lambda batch: batch.num_tokens)
        old = None if once else samples.in_order(learner.log_probs(batches))
        reference = samples.in_order(learner.log_probs(batches, reference=True)) if learner.measures_kl else None

        # Advantages: how much better each reply is than the others to its prompt.
        rewards = shaped_rewards(samples, settings)
        advantages, kept = advantages_of(learner, samples, rewards, settings)

        sums: dict[str, Tensor | float] = {}
        for groups in groups_of_updates(settings, step):
            members = np.isin(samples.groups, groups)
            if not once:
                batches = learner.batches(samples.turns, samples.groups, chosen=np.flatnonzero(members))
            lengths, ours = learner.shared(samples.lengths)
            counted, _ = learner.shared(kept & members)
            weights = token_weights(
                lengths,
                counted,
                normalisation=settings.loss.normalisation,
                max_new_tokens=settings.sampling.max_new_tokens,
            )[ours]
            for batch, counts in learner.passes(batches, spare=spare):
                log_probs, entropy = learner.forward(batch)
                tokens, rows = samples.tokens_of(batch.turns), batch.rows
                tensor = functools.partial(torch.as_tensor, dtype=torch.float32, device=log_probs.device)
                inputs = LossInputs(
                    old_log_probs=log_probs.detach() if old is None else tensor(old[tokens]),
                    sampler_log_probs=tensor(samples.log_probs[tokens]),
                    reference_log_probs=None if reference is None else tensor(reference[tokens]),
                    advantages=tensor(advantages[tokens]),
                    weights=tensor(weights[rows] * counts),
                )
                terms = policy_loss(log_probs, entropy, inputs, settings.loss)
                learner.backward(terms.loss)
                for name, value in vars(terms).items():
                    sums[name] = sums.get(name, 0.0) + value.detach()
            update = learner.update() if counted.any() else learner.skip_update()

    sums["flat_groups"] = len(groups_without_signal(rollouts, settings)) / settings.env.num_prompts
    sums["unique_tokens"] = sum(each.num_tokens for batch in batches for each in batch.batches)
    totals = learner.summed({name: float(value) for name, value in sums.items()})
    metrics = loss_metrics(totals, num_updates=settings.optimizer.updates_per_step * settings.optimizer.epochs)
    if not learner.measures_kl:
        del metrics["kl"]
    advantages = advantages[np.cumsum(samples.lengths) - samples.lengths]  # of the first token of each turn
    metrics |= {"advantage_std": float(learner.shared(advantages)[0].std()), **update}
    return rollouts, np.array([advantages[samples.owners == row].mean() for row in range(len(rollouts))]), metrics


def groups_of_updates(settings: GRPOSettings, step: int) -> Iterator[np.ndarray]:
    """Yield the groups of each update of a step, in another order for each epoch."""
    for epoch in range(settings.optimizer.epochs):
        order = np.random.default_rng([settings.seed, step, epoch]).permutation(settings.env.num_prompts)
        yield from np.array_split(order, settings.optimizer.updates_per_step)


def shaped_rewards(samples: Samples, settings: GRPOSettings) -> np.ndarray:
    """Return the rewards of the rollouts `[B]`, less the penalty for length that the settings ask for."""
    return estimators.overlong_penalty(
        samples.column("reward"),
        samples.column("num_tokens"),
        samples.column("finished"),
        max_new_tokens=settings.sampling.max_new_tokens,
        buffer=settings.advantage.overlong_buffer,
        penalty=settings.advantage.overlong_penalty,
    )


def advantages_of(
    learner: Learner, samples: Samples, rewards: np.ndarray, settings: GRPOSettings
) -> tuple[np.ndarray, np.ndarray]:
    """Return the advantages of the tokens `[N]`, and which turns count in the loss `[M]`.

    Rewards are compared with those of all ranks.
    """
    options, groups, owners = settings.advantage, samples.column("group"), samples.owners
    compared, kept = rewards, np.isfinite(rewards)
    if options.per_turn:
        turn_rewards = [rollout.rewards_with(reward) for rollout, reward in zip(samples.rollouts, rewards, strict=True)]
        compared = np.concatenate([estimators.rewards_to_go(each) for each in turn_rewards])
        numbers = np.concatenate([np.arange(len(each)) for each in turn_rewards])
        groups, owners = samples.groups * settings.env.max_turns + numbers, np.arange(len(samples.turns))
    every, ours = learner.shared(compared)
    components = None
    if options.estimator == "gdpo":
        names = sorted(set(learner.gathered(samples.component_names)))  # other ranks may have other components
        components = {name: learner.shared(samples.component(name))[0] for name in names}
    groups = learner.shared(groups)[0]
    estimate: dict[str, Any] = {"estimator": options.estimator, "std_floor": options.std_floor}
    parts = {"components": components, "component_weights": options.component_weights}
    of_turns = estimators.estimate_advantages(every, groups, **estimate, **parts)[ours][owners]
    advantages = of_turns.repeat(samples.lengths)
    if options.steps is not None:
        steps = learner.gathered(samples.steps)
        if not any(map(len, steps)) and np.isfinite(every).any():
            raise ConfigError(f"advantage.steps={options.steps!r} needs a process reward model; no reply has steps.")
        of_steps = estimators.step_advantages(steps, groups, credit=options.steps, **estimate)[ours]
        advantages = options.reward_weight * advantages + samples.of_steps(of_steps)
        if not options.reward_weight:
            kept &= np.array([len(each) > 0 for each in samples.steps])
    if options.overlong == "filter":
        kept &= samples.column("finished")
    if options.dynamic_sampling:
        kept &= ~np.isin(samples.column("group"), groups_without_signal(samples.rollouts, settings))
    return advantages, kept[samples.owners]


def groups_without_signal(rollouts: Sequence[Rollout], settings: GRPOSettings) -> np.ndarray:
    """Return the groups whose rewards, or all components for GDPO, are equal: they teach nothing."""
    samples = Samples(rollouts)
    rewards = samples.column("reward")
    if settings.advantage.steps is not None:
        of_steps = estimators.step_values(samples.steps, settings.advantage.steps)
        rewards = np.stack([of_steps, rewards], axis=1) if settings.advantage.reward_weight else of_steps
    if settings.advantage.estimator == "gdpo":
        parts = np.array([samples.component(name) for name in samples.component_names])
        rewards = np.where(np.isfinite(rewards)[:, None], parts.T, math.nan)
    return estimators.flat_groups(rewards, samples.column("group"))


# --- a run -----------------------------------------------------------------------------------------------------------


def make_envs(settings: GRPOSettings, prompts: Sequence[Prompt], scorer: Scorer, num_envs: int, group_size: int) -> Any:
    """Return environments that share a reward model, and end episodes without starting new ones."""
    return gym.make_vec(
        "RewardModel-v0",
        num_envs,
        reward_model=scorer,
        prompts=prompts,
        group_size=group_size,
        max_turns=settings.env.max_turns,
        respond=settings.env.respond,
        reward_on=settings.env.reward_on,
        tools=settings.env.tools,
        tool_options=settings.env.tool_options,
        # A reply alone cannot be compared with others: its score is then missing, which metrics leave out.
        fallback_reward=0.0 if group_size == 1 and is_relative(scorer) else settings.env.fallback_reward,
        autoreset_mode="Disabled",
    )


def train(settings: GRPOSettings, console: Console) -> Signals | None:
    """Train a policy, or resume a run; return the signal for which it stopped before its last step, or None."""
    torch.set_num_threads(settings.threads)
    learner = Learner(settings)
    console = console if learner.is_main else Console(quiet=True)
    prompts, held_out = read_prompts(settings)
    schedule = RolloutSchedule(settings, learner, num_prompts=len(prompts), num_held_out=len(held_out))
    scorer = open_scorer(settings, learner.device)
    envs = make_envs(settings, prompts, scorer, schedule.num_envs, settings.env.group_size)
    sampler, timer = make_sampler(settings, learner), PhaseTimer()

    def roll_out(step: int) -> list[Rollout]:
        """Return this rank's rollouts of a step."""
        sampler.update_weights()
        rollouts = play(envs, sampler, schedule.training(step), timer)
        for attempt in range(1, settings.advantage.dynamic_sampling + 1):
            if not (groups := groups_without_signal(rollouts, settings)).size:
                break
            others = play(envs, sampler, schedule.replacing(groups, step=step, attempt=attempt), timer)
            rollouts = replaced(rollouts, others)
        return rollouts

    def measure() -> None:
        """Answer every held-out prompt once."""
        if held_out:
            sampler.update_weights()
            rollouts = play(held_out_envs, sampler, schedule.held_out(), PhaseTimer())
            rollouts = sorted(learner.gathered(rollouts), key=lambda rollout: rollout.row)
            view.measured(run.step, run.log_held_out(rollouts), [rollout.reply for rollout in rollouts])

    run = RunFolder(settings, learner, scorer, (prompts, held_out))
    describe(settings, learner, scorer, console, len(prompts), len(held_out), run.step)
    with contextlib.ExitStack() as stack:
        for part in (run, envs, sampler):
            stack.callback(part.close)
        if held_out:
            held_out_envs = make_envs(settings, held_out, scorer, schedule.num_held_out_envs, group_size=1)
            stack.callback(held_out_envs.close)
        view = stack.enter_context(LiveView(console, settings.steps, history=run.history()))
        signal_heard = stack.enter_context(heard_signals())
        stop = None
        if run.step == 0:
            measure()
        while stop is None and run.step < settings.steps:
            started = time.perf_counter()
            rollouts, advantages, metrics = train_step(run.step + 1, roll_out, learner, scorer, settings, timer)
            run.step += 1
            metrics["phase_seconds"] = timer.take()
            seconds = time.perf_counter() - started
            view.update(run.step, run.log_step(rollouts, advantages.tolist(), metrics, seconds=seconds))
            if run.is_due(settings.eval.every):
                measure()
            stop = run.stop_for(signal_heard())
            if stop is not None or run.is_due(settings.checkpoint.save_every or settings.eval.every):
                run.save()
        if stop is None:
            run.finish()
    return stop


def describe(
    settings: GRPOSettings, learner: Learner, scorer: Scorer, console: Console, prompts: int, held_out: int, step: int
) -> None:
    """Print what is trained on what, and the warning of the reward model's audit."""
    if (warning := audit_warning(scorer, settings.env.audit)) is not None:
        console.print(f"[yellow]{escape(warning)}[/]", highlight=False)
    if settings.advantage.steps == "sum":
        console.print(f"[yellow]{escape(SUM_WARNING)}[/]", highlight=False)
    console.print(
        f"policy {learner.start.name} ({learner.start.model.num_parameters():,} parameters) on {learner.device}, "
        f"reward model {settings.env.reward_model or 'embedded'}, {prompts} prompts, {held_out} held out, "
        f"seed {settings.seed}" + (f", resuming after step {step}" if step else ""),
        highlight=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="gym-rm grpo",
        description=__doc__,
        epilog=settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="name=value", help="settings to change, such as policy.model=folder seed=2"
    )
    parser.add_argument("--config", help="YAML file of settings, or the name of one of the package's, such as math")
    arguments = parser.parse_args()
    console = Console()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        file = arguments.config and settings_file(arguments.config, "grpo")
        settings = complete(load_config(GRPOSettings, file, arguments.overrides))
        stop = train(settings, console)
    except (gym_rm.GymRMError, FloatingPointError, OSError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        if arguments.config and "does not exist" in str(error):  # the first lines of a file say what it needs
            lines = Path(settings_file(arguments.config, "grpo")).read_text(encoding="utf-8").splitlines()
            console.print("\n".join(takewhile(lambda line: line.startswith("#"), lines)), markup=False)
        raise SystemExit(2) from error
    except KeyboardInterrupt as error:  # while models are loaded
        console.print("interrupted", highlight=False)
        raise SystemExit(130) from error
    if int(os.environ.get("RANK", 0)) == 0:
        print_results(Path(settings.output), console)
        if stop is None:
            console.print(f"policy:  {settings.output}/final", highlight=False)
        else:
            words = f"{stop.name} came; repeat the command with output={settings.output} to resume"
            console.print(words, highlight=False)
    raise SystemExit(0 if stop is None else 128 + stop)


if __name__ == "__main__":
    main()
