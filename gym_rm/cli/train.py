"""`gym-rm train`: train a reward model on comparisons of replies."""

from __future__ import annotations

import contextlib
import runpy
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from gym_rm.cli.console import fail, quiet_loading, stderr, warn
from gym_rm.config import load_config, settings_file, shipped_folder
from gym_rm.errors import ConfigError

EXAMPLE = """\
Nothing to learn from. Pass a file of comparisons, and a model to start from:
  gym-rm data inspect pairs.jsonl                                   # what is in the file?
  gym-rm train data.train=pairs.jsonl data.validation_share=0.1 \\
      model.path=Qwen/Qwen3-0.6B model.new_head=true output=my-reward-model
gym-rm settings train lists the settings."""


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG.yaml NAME=VALUE",
            help="File of settings, or the name of one of the package's (qwen3_0.6b), and settings that change it.",
        ),
    ] = None,
) -> None:
    """Train a reward model on comparisons of replies, and write a Hugging Face folder.

    The output folder has final/ (the last model) and best/ (the best ones by checkpoint.metric), each with a model
    card; metrics.csv and validation.csv, which gym-rm report draws; and checkpoints/. A run that was stopped, or
    killed, goes on if the command is repeated with the same output=; so does a finished one with a larger max_steps=.

    Several processes: torchrun --nproc-per-node 8 -m gym_rm train CONFIG.yaml, or accelerate launch.

    Exit codes: 0 finished; 1 error; 2 invalid arguments; 130 stopped by Ctrl-C, 143 by SIGTERM: the step is finished
    and a checkpoint is written, repeat the command to resume (a second Ctrl-C stops at once, without one).
    """
    arguments = arguments or []
    files = [each for each in arguments if "=" not in each]
    if len(files) > 1:
        fail(ConfigError(f"expected one file of settings, got {files}."), 2)
    if not arguments:
        stderr.print(EXAMPLE, markup=False)
        raise typer.Exit(2)
    from gym_rm.training.reward_model_settings import RewardModelTraining

    try:
        file = settings_file(files[0], "rm") if files else None
        settings = load_config(RewardModelTraining, file, [each for each in arguments if "=" in each])
    except ConfigError as error:
        fail(error, 2)
    quiet_loading()
    from gym_rm.training.reward_learner import RewardLearner  # imported here because importing torch is slow
    from gym_rm.training.reward_run_folder import RewardRunFolder

    settings = settings.with_output()
    learner = RewardLearner(settings)
    run, main = RewardRunFolder(settings, learner), learner.is_main
    if settings.model.path is None and main:
        warn(
            "training goes on from the small reward model that is part of the package, because model.path is "
            "missing; pass a folder or hub id, with model.new_head=true if the model has no head."
        )
    if run.step and main:
        stderr.print(f"resuming after step {run.step} of {run.num_steps}")
    agent = runpy.run_path(str(shipped_folder("agents") / "train_reward_model.py"))
    with _progress(run.step, run.num_steps, shown=main) as report:
        agent["train"](run, report)
    if main:
        _print_result(run)


@contextlib.contextmanager
def _progress(done: int, total: int, *, shown: bool) -> Iterator[Callable[[int, Mapping[str, float]], None] | None]:
    """Show the progress of the steps on stderr: a bar on a terminal, else a line every tenth of the steps."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    words = TextColumn("{task.fields[shown]}")
    with Progress(*columns, words, console=stderr, disable=not (shown and stderr.is_terminal)) as bar:
        task = bar.add_task("training", total=total, completed=done, shown="")

        def report(step: int, metrics: Mapping[str, float]) -> None:
            bar.update(task, completed=step, shown=_short(metrics))
            if not stderr.is_terminal and (step % max(1, total // 10) == 0 or step == total):
                stderr.print(f"step {step}/{total}: {_short(metrics)}", markup=False)

        yield report if shown else None


def _short(metrics: Mapping[str, float]) -> str:
    names = ("loss", "accuracy", "margin_mean", "grad_norm", "comparisons_per_second")
    shown = {"comparisons_per_second": "comparisons/s"}
    return "  ".join(f"{shown.get(name, name)} {metrics[name]:.3g}" for name in names if name in metrics)


def _print_result(run: Any) -> None:
    if run.measured:
        names = ("loss", "accuracy", "ties", "margin_mean", "calibration_error", "length_correlation", "step_accuracy")
        kept = [name for name in names if any(name in each for each in run.measured.values())]
        table = Table("set", *kept, title=f"after {run.step} steps")
        for name, metrics in run.measured.items():
            table.add_row(name, *(f"{metrics[key]:.4f}" if key in metrics else "" for key in kept))
        stderr.print(table)
    best = f", best model: {run.folder / 'best'}" if run.best_value is not None else ""
    typer.echo(f"last model: {run.folder / 'final'}{best}")
