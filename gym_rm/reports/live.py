"""A run in the console: live, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from gym_rm.reports.monitor import Monitor, Sign, replay, signs
from gym_rm.reports.run_page import write_run_page
from gym_rm.reports.runs import Run, read_run
from gym_rm.reports.tables import conversations_table, results_table, signed
from gym_rm.reports.transcripts import visible

WATCHED = {
    "accuracy": ("right", "{:.0%}"),
    "kl": ("kl", "{:.3g}"),
    "entropy": ("entropy", "{:.3g}"),
    "completion_tokens": ("tokens", "{:.0f}"),
    "thinking_tokens": ("thinking", "{:.0f}"),
    "steps_per_reply": ("steps", "{:.2f}"),
    "tool_calls": ("calls", "{:.2f}"),
    "tool_errors": ("failed calls", "{:.0%}"),
    "finished": ("finished", "{:.0%}"),
    "failed": ("failed", "{:.0%}"),
    "flat_groups": ("flat groups", "{:.0%}"),
    "clipped": ("clipped", "{:.1%}"),
    "grad_norm": ("gradient", "{:.2g}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
}
IF_ANY = ("failed", "flat_groups", "clipped", "tool_errors")  # not shown if 0


class LiveView:
    """Progress, reward, the numbers to watch and the signs of the monitor: a bar on a terminal, else lines.

    Args:
        console: where to write.
        steps: number of steps of the run.
        history: what a resumed run has so far, for the monitor.

    Example:
        >>> import io
        >>> with LiveView(Console(file=io.StringIO()), steps=2) as view:
        ...     view.update(1, {"reward_mean": 0.5})
    """

    def __init__(self, console: Console, steps: int, *, history: Run | None = None) -> None:
        self.monitor, self.signs = Monitor(), list[Sign]()
        self._console, self._steps = console, steps
        step = 0
        if history is not None:
            self.signs += replay(history, self.monitor)
            step = max((row["step"] for row in history.training), default=0)
        self._terminal = console.is_terminal and not console.quiet
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(
            *columns, TextColumn("{task.fields[numbers]}"), console=console, disable=not self._terminal
        )
        self._task = self._bar.add_task("training", total=steps, completed=step, numbers="")

    def __enter__(self) -> LiveView:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of a training step."""
        shown = "   ".join([_reward(metrics), *_numbers(metrics)])
        self._bar.update(self._task, completed=step, numbers=shown)
        if not self._terminal and (step % max(1, self._steps // 20) == 0 or step == self._steps):
            self._print(f"step {step:4d}/{self._steps}   {shown}")
        self._warn(self.monitor.add(step, metrics))

    def measured(self, step: int, metrics: Mapping[str, Any], replies: Sequence[str] = ()) -> None:
        """Show a measurement on held-out prompts; `replies` are what the monitor reads."""
        right = f", {metrics['accuracy']:.1%} right" if metrics.get("accuracy") is not None else ""
        self._print(f"step {step:4d}   held-out prompts   {_reward(metrics)}{right}")
        self._warn(self.monitor.add(step, metrics, replies))

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(visible(text), style), soft_wrap=not self._terminal)

    def _warn(self, found: Sequence[Sign]) -> None:
        self.signs += found
        for sign in found:
            self._print(f"{sign.severity}: step {sign.step}: {sign.message} {sign.what_to_turn}", "yellow")


def _reward(metrics: Mapping[str, Any]) -> str:
    reward = metrics.get("reward_mean")
    return "no reward" if reward is None else f"reward {signed(reward)}"


def _numbers(metrics: Mapping[str, Any]) -> list[str]:
    found = {name: metrics.get(name) for name in WATCHED}
    shown = {name: value for name, value in found.items() if value or (value is not None and name not in IF_ANY)}
    return [f"{WATCHED[name][0]} {WATCHED[name][1].format(value)}" for name, value in shown.items()]


def print_results(folder: Path, console: Console) -> None:
    """Print what came of a run, conversations and numbers before and after, and write the page about it."""
    run = read_run(folder)
    if run.before_and_after():
        console.print(conversations_table(run))
    if run.training:
        console.print(results_table(run))
        for sign in signs(run):
            console.print(Text(f"{sign.message} {sign.what_to_turn}", "yellow"))
        console.print(f"page:    {write_run_page(run, folder / 'report.html')}", highlight=False)
