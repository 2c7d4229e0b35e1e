"""Train a reward model on comparisons of replies, in one file: what `gym-rm train` does, step by step.

    gym-rm agent train_reward_model data.train=pairs.jsonl data.validation_share=0.1 \\
        model.path=Qwen/Qwen3-0.6B model.new_head=true
    torchrun --nproc-per-node 8 -m gym_rm agent train_reward_model qwen3_0.6b data.train=pairs.jsonl batch.fsdp=true

A step learns from `batch.batch_size` comparisons. Each one is a prompt with its replies, and all of them run as token
trees, in which a prompt is computed once for all of its replies: once forward and once backward. The loss of a step is
divided by the number of its terms over all passes and ranks, so that it does not depend on how they are divided. All
randomness of a step depends on the seed and its number alone: a run that is resumed repeats nothing.

`RewardLearner` owns the model, the comparisons and the optimizer, `RewardRunFolder` what is written;
`gym_rm.training.losses` are the losses; the rest is here.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from gym_rm.config import load_config, settings_file
from gym_rm.errors import ConfigError, logger
from gym_rm.training.objectives import Outcomes
from gym_rm.training.reward_learner import RewardLearner
from gym_rm.training.reward_model_settings import RewardModelTraining
from gym_rm.training.reward_run_folder import RewardRunFolder
from gym_rm.training.run_folder import heard_signals


def train_step(step: int, learner: RewardLearner) -> dict[str, float]:
    """Run a step, counted from 1, and return its metrics."""
    started = time.perf_counter()
    examples = learner.examples_of(step)
    numbers = np.random.SeedSequence([learner.run.seed, step, learner.rank])
    torch.manual_seed(int(numbers.generate_state(1, np.uint64)[0] >> 1))  # of dropout
    weight, outcomes = learner.objective.weight(examples), []
    for loss, of_pass in learner.losses(examples):
        learner.backward(loss / weight)
        outcomes.append(of_pass)
    update = learner.optimizer_step()  # clips the gradient
    seconds = time.perf_counter() - started
    return {
        **Outcomes.joined(learner.gathered(outcomes)).metrics(),
        "epoch": learner.steps[step - 1][0],
        **update,
        "seconds": seconds,
        "comparisons_per_second": len(examples) / seconds,
        "tokens_per_second": sum(sum(each.num_tokens) for each in examples) / seconds,
        "unique_tokens": sum(each.unique_tokens for each in examples),
    }


@torch.no_grad()
def measure(learner: RewardLearner) -> dict[str, dict[str, float]]:
    """Return the metrics of each validation set."""
    measured = {}
    for each in learner.validation:
        outcomes = [of_pass for _, of_pass in learner.losses(each.examples, learn=False)]
        measured[each.name] = Outcomes.joined(learner.gathered(outcomes)).metrics()
    return measured


def train(run: RewardRunFolder, report: Callable[[int, Mapping[str, float]], None] | None = None) -> None:
    """Train until the last step, and write the model.

    On SIGTERM or SIGINT (Ctrl-C), the run saves a checkpoint after the current step and raises SystemExit.

    Args:
        run: the folder of a run; a run that was stopped resumes.
        report: called with the step and its metrics after every step.
    """
    learner, settings, stop = run.learner, run.learner.run, None
    with contextlib.closing(run), heard_signals() as signal_heard:
        if run.step == 0:
            run.log_measured(measure(learner))
        while stop is None and run.step < run.num_steps:
            metrics = train_step(run.step + 1, learner)
            run.step += 1
            run.log_step(metrics)
            if report is not None:
                report(run.step, metrics)
            if run.is_due(settings.evaluate_every):
                run.log_measured(measure(learner))
            stop = run.stop_for(signal_heard())
            if stop is not None or run.is_due(settings.checkpoint.save_every or settings.evaluate_every):
                run.save()
        if stop is None:
            run.finish()
    if stop is not None:
        if learner.is_main:
            message = "stopped after step %d; repeat the command to resume (with output=%s)."
            logger.warning(message, run.step, run.folder)
        raise SystemExit(128 + stop)


def main(arguments: list[str]) -> None:
    files = [each for each in arguments if "=" not in each]
    file = settings_file(files[0], "rm") if files else None
    settings = load_config(RewardModelTraining, file, [each for each in arguments if "=" in each]).with_output()
    # Reads the model and the comparisons, and checks that trees give the gradients of the plain forward.
    learner = RewardLearner(settings)
    run = RewardRunFolder(settings, learner)
    show = print if learner.is_main else lambda *text: None

    def report(step: int, metrics: Mapping[str, float]) -> None:
        show(f"step {step}/{run.num_steps}: loss {metrics['loss']:.4f}, {metrics['seconds']:.2f} s")

    train(run, report)
    for name, measured in run.measured.items():
        show(f"  {name}: " + ", ".join(f"{key} {value:.3g}" for key, value in measured.items()))
    show(f"{run.folder / 'final'}: a Hugging Face folder with a model card")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"error: {error}")
