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
import os
import time
import warnings
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
from transformers.utils import logging as transformers_logging

import gym_rm
from gym_rm.config import load_config, settings_file
from gym_rm.data.prompts import load_prompts
from gym_rm.errors import ConfigError, GymRMError, RemoteError
from gym_rm.generation.completions import Sampler
from gym_rm.policy.estimate import estimate, zero_variance_groups
from gym_rm.policy.grpo_settings import GRPOSettings, settings_help
from gym_rm.policy.learner import Learner
from gym_rm.policy.losses import policy_loss, update_metrics
from gym_rm.policy.rollout_batch import RolloutBatch
from gym_rm.policy.rollout_schedule import RolloutSchedule
from gym_rm.policy.rollouts import RolloutTable
from gym_rm.policy.rollouts_ahead import KeptCompletions, RolloutsAhead
from gym_rm.policy.run_folder import GRPORunFolder
from gym_rm.policy.run_notes import describe
from gym_rm.policy.samplers import make_sampler
from gym_rm.policy.trained_policy import EMBEDDED
from gym_rm.reports.live import LiveView, print_results
from gym_rm.scorer import Scorer, is_relative, max_concurrent_calls
from gym_rm.scorers.load import load_scorer
from gym_rm.training.phase_timer import PhaseTimer
from gym_rm.training.run_folder import heard_signals
from gym_rm.types import Prompt

SECONDS_BETWEEN_LOOKS = 0.02  # at replies that were scored, while others are written
SECONDS_BETWEEN_CALLS = 5.0  # of a server that was lost


# --- a step ----------------------------------------------------------------------------------------------------------


def play(envs: Any, sampler: Sampler, batch: RolloutBatch, timer: PhaseTimer) -> RolloutTable:
    """Sample replies, and step each as soon as it is written, until every episode of a batch has ended."""
    envs.cancel()  # what a call that failed left in flight
    in_threads, one_turn = max_concurrent_calls(envs.scorer) > 0, envs.settings.max_turns == 1
    batch.begin(*envs.reset(options={"prompt_indices": batch.prompt_indices}))
    with contextlib.closing(sampler.stream()) as stream:
        while batch.playing.any():
            flying = envs.in_flight.any()
            scoring = in_threads and flying
            with timer.measure("generate", hides="score" if scoring else None):
                if not stream.in_waves or not (flying or stream.num_open):  # a wave is the next turn of all
                    rows, prompts, seeds = batch.requests()
                    stream.add(rows, prompts, seeds=seeds)
                completions = stream.take(timeout=None if one_turn or not scoring else SECONDS_BETWEEN_LOOKS)
            with timer.measure("score"):
                if completions:
                    replies, written = batch.replies(completions)
                    envs.send(replies, rows=written)
                if not stream.num_open or (envs.ready.any() and not one_turn):  # there may be a next turn to ask for
                    step = envs.recv()
                    batch.add(step, rows=step[-1]["rows"])
    return batch.table()


def train_step(
    step: int,
    roll_out: Callable[[int], RolloutTable],
    learner: Learner,
    scorer: Scorer,
    settings: GRPOSettings,
    timer: PhaseTimer,
) -> tuple[RolloutTable, np.ndarray, dict[str, Any]]:
    """Run one step of GRPO; return the rollouts of all ranks, the advantage of each `[B]`, and metrics."""
    # Sample a group of replies to each prompt, and step the environments, which score them: see `play`.
    ours = roll_out(step)
    if settings.env.sleep:
        scorer.sleep()  # type: ignore[attr-defined]

    with timer.measure("update"):
        # Advantages: how much better each reply is than the others to its prompt; and which turns count in the loss.
        parts = learner.gathered([ours])
        table, first = RolloutTable.joined(parts), sum(len(part.turns) for part in parts[: learner.rank])
        advantages, mask = estimate(table, settings)

        # Log-probabilities of the sampled tokens before the updates, under the policy and the reference.
        measured = learner.measure(table, first + np.arange(len(ours.turns)))

        # Forward and backward over token trees, and an optimizer step, for the groups of each update.
        loss = functools.partial(policy_loss, settings=settings.loss)
        updates = [
            learner.update(table, advantages, mask, loss, measured=measured, groups=groups)
            for groups in groups_of_updates(settings, step)
        ]

    metrics = update_metrics(updates)
    metrics["flat_groups"] = len(zero_variance_groups(table, settings)) / settings.env.num_prompts
    if not learner.measures_kl:
        del metrics["kl"]
    of_turns = advantages[np.cumsum(table.lengths) - table.lengths]  # of the first token of each turn
    metrics["advantage_std"] = float(of_turns.std())
    return table, np.array([of_turns[table.owners == row].mean() for row in range(len(table.rollouts))]), metrics


def groups_of_updates(settings: GRPOSettings, step: int) -> Iterator[np.ndarray]:
    """Yield the groups of each update of a step, in another order for each epoch."""
    for epoch in range(settings.optimizer.epochs):
        order = np.random.default_rng([settings.seed, step, epoch]).permutation(settings.env.num_prompts)
        yield from np.array_split(order, settings.optimizer.updates_per_step)


# --- a run -----------------------------------------------------------------------------------------------------------


def read_prompts(settings: GRPOSettings) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to train on and those to measure on."""
    prompts, options = list(load_prompts(settings.env.prompts)), settings.eval
    if options.prompts is not None:
        return prompts, list(load_prompts(options.prompts))[: options.num_prompts]
    count = min(options.num_prompts, len(prompts) // 4)
    return prompts[: len(prompts) - count], prompts[len(prompts) - count :]


def open_scorer(settings: GRPOSettings, device: torch.device) -> Scorer:
    """Return the reward model, on the device of this process unless its options say where it is.

    Raises:
        ConfigError: it cannot be loaded, or cannot sleep.
    """
    options: dict[str, Any] = dict(settings.env.reward_model_kwargs)
    placed = {"device", "device_map", "num_replicas", "tensor_parallel_size", "fsdp_size", "executor"} & options.keys()
    # A URL and `module:function` have a colon.
    named = settings.env.reward_model
    local = named is None or (isinstance(named, str) and ":" not in named.removeprefix("embedded:"))
    if device.type == "cuda" and local and not placed:
        options["device"] = str(device)
    try:
        scorer: Scorer = load_scorer(settings.env.reward_model, **options)
    except ConfigError as error:
        raise ConfigError(f"env.reward_model={settings.env.reward_model!r:.200}: {error}") from error
    if settings.env.sleep and not hasattr(scorer, "sleep"):
        raise ConfigError(f"env.sleep=true needs a reward model that can sleep; {type(scorer).__name__} cannot.")
    return scorer


def fill_defaults(settings: GRPOSettings) -> GRPOSettings:
    """Return the settings with every `null` replaced that has a default."""
    embedded = settings.policy.model in (None, EMBEDDED)
    max_new_tokens = settings.sampling.max_new_tokens or (24 if embedded else 512)
    learning_rate = settings.optimizer.learning_rate or (5e-4 if embedded else 1e-6)
    return settings.model_copy(
        update={
            "output": settings.output or f"outputs/grpo-{time.strftime('%Y%m%d-%H%M%S')}",
            "threads": settings.threads or (1 if embedded else torch.get_num_threads()),
            "sampling": settings.sampling.model_copy(update={"max_new_tokens": max_new_tokens}),
            "optimizer": settings.optimizer.model_copy(update={"learning_rate": learning_rate}),
        }
    )


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
    (sampler, update_weights), timer = make_sampler(settings, learner), PhaseTimer()

    def patiently(call: Callable[[], RolloutTable | None], *, step: int | None = None) -> Any:
        """Return what a call returns. If it fails, save; if a server is lost, wait until it is back, and call again."""
        deadline = None
        while True:
            try:
                if step is None or not ahead.plays(step):  # the sampler may still write with the weights before
                    update_weights()
                return learner.agreed(call)
            except (GymRMError, OSError) as error:
                if deadline is None:
                    deadline = time.monotonic() + settings.sampling.timeout
                    if run.step:
                        run.save()
                    if isinstance(error, RemoteError):
                        words = f"step {run.step + 1} waits, {run.step} are saved: {escape(str(error))}"
                        console.print(f"[yellow]{words}[/]", highlight=False)
                ends = learner.gathered([time.monotonic() > deadline or signal_heard() is not None])
                if any(ends) or not isinstance(error, RemoteError):
                    raise
                time.sleep(SECONDS_BETWEEN_CALLS)

    def play_step(step: int, timer: PhaseTimer) -> RolloutTable:
        """Return this rank's rollouts of a step."""
        table = play(envs, writer, schedule.training(step), timer)
        for attempt in range(1, settings.advantage.dynamic_sampling + 1):
            if not (groups := zero_variance_groups(table, settings)).size:
                break
            others = play(envs, writer, schedule.replacing(groups, step=step, attempt=attempt), timer)
            table = RolloutTable.joined([table, others])
        return table

    def roll_out(step: int) -> RolloutTable:
        """Return the rollouts of a step, and begin those of the next one if they are written ahead."""
        table = patiently(lambda: ahead.take(timer) if ahead.plays(step) else play_step(step, timer), step=step)
        if settings.sampling.steps_ahead and step < settings.steps:
            patiently(lambda: ahead.begin(step + 1))
        else:
            kept.by_key.clear()
        return table.trained_at(learner.version)

    def measure() -> None:
        """Answer every held-out prompt once."""
        if held_out:
            learner.agreed(ahead.wait)  # a server that writes for another rank keeps its weights until it is done
            ours = patiently(lambda: play(held_out_envs, sampler, schedule.held_out(), PhaseTimer()))
            rollouts = RolloutTable.joined(learner.gathered([ours])).rollouts
            view.measured(run.step, run.log_held_out(rollouts), [rollout.reply for rollout in rollouts])

    kept = KeptCompletions(sampler)
    writer, ahead = kept if settings.sampling.steps_ahead else sampler, RolloutsAhead(play_step, kept)
    run = GRPORunFolder(settings, learner, scorer, (prompts, held_out), kept)
    describe(settings, learner, scorer, console, len(prompts), len(held_out), run.step)
    with contextlib.ExitStack() as stack:
        for part in (ahead, run, envs, sampler):
            stack.callback(part.close)
        if held_out:
            held_out_envs = make_envs(settings, held_out, scorer, schedule.num_held_out_envs, group_size=1)
            stack.callback(held_out_envs.close)
        view = stack.enter_context(LiveView(console, settings.steps, history=run.history()))
        signal_heard = stack.enter_context(heard_signals())
        stop = None
        try:
            if run.step == 0 or (run.is_due(settings.eval.every) and run.measured < run.step):
                measure()
            while stop is None and run.step < settings.steps:
                started = time.perf_counter()
                table, advantages, metrics = train_step(run.step + 1, roll_out, learner, scorer, settings, timer)
                run.step += 1
                metrics["phase_seconds"] = timer.take()
                seconds = time.perf_counter() - started
                view.update(run.step, run.log_step(table.rollouts, advantages.tolist(), metrics, seconds=seconds))
                if run.is_due(settings.eval.every):
                    measure()
                stop = run.stop_for(signal_heard())
                if stop is not None or run.is_due(settings.checkpoint.save_every or settings.eval.every):
                    ahead.wait()
                    run.save()
        except RemoteError:
            if (stop := run.stop_for(signal_heard())) is None:
                raise
        if stop is None:
            run.finish()
    return stop


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
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # of peft's calls
    try:
        file = arguments.config and settings_file(arguments.config, "grpo")
        settings = fill_defaults(load_config(GRPOSettings, file, arguments.overrides))
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
            if settings.sampling.server:
                words = f"{settings.sampling.server} keeps these weights under the name of the first ones; restart it"
                console.print(words, highlight=False)
        else:
            words = f"{stop.name} came; repeat the command with output={settings.output} to resume"
            console.print(words, highlight=False)
    raise SystemExit(0 if stop is None else 128 + stop)


if __name__ == "__main__":
    main()
