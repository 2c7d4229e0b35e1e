"""A run in the console: live, and what came of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gym_rm.reports.monitor import Monitor, Sign, replay, signs
from gym_rm.reports.plots import plot_run
from gym_rm.reports.runs import Run, read_run
from gym_rm.reports.tables import conversations_table, results_table, signed
from gym_rm.reports.transcripts import visible

BARS = "▁▂▃▄▅▆▇█"
SHOWN_STEPS = 48  # of the sparkline
PHASE = "phase_seconds/"
WATCHED = {
    "accuracy": ("right", "{:.0%}"),
    "kl": ("kl", "{:.3g}"),
    "entropy": ("entropy", "{:.3g}"),
    "completion_tokens": ("tokens", "{:.0f}"),
    "finished": ("finished", "{:.0%}"),
    "failed": ("failed", "{:.0%}"),
    "flat_groups": ("flat groups", "{:.0%}"),
    "clipped": ("clipped", "{:.1%}"),
    "grad_norm": ("gradient", "{:.2g}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
}
IF_ANY = ("failed", "flat_groups", "clipped")  # not shown if 0


class LiveView:
    """Progress, reward, the numbers to watch and the signs of the monitor; plain lines if the output is no terminal.

    Args:
        console: where to draw.
        steps: number of steps of the run.
        history: what a resumed run has so far, for the sparkline and the monitor.
        every: number of steps between plain lines; None for a twentieth of the run.

    Example:
        >>> import io
        >>> with LiveView(Console(file=io.StringIO()), steps=2) as view:
        ...     view.update(1, {"reward_mean": 0.5})
    """

    def __init__(self, console: Console, steps: int, *, history: Run | None = None, every: int | None = None) -> None:
        self.monitor, self.signs = Monitor(), list[Sign]()
        self._console, self._steps, self._every = console, steps, every or max(1, steps // 20)
        self._rewards: deque[float] = deque(maxlen=SHOWN_STEPS)
        self._step, self._metrics, self._measured = 0, dict[str, Any](), ""
        if history is not None:
            self.signs += replay(history, self.monitor)
            self._rewards.extend(row["reward_mean"] for row in history.training if row.get("reward_mean") is not None)
            self._step = max((row["step"] for row in history.training), default=0)
        self._first, self._started = self._step, time.monotonic()
        terminal = console.is_terminal and not console.quiet
        self._live = Live(console=console, get_renderable=self._drawn, refresh_per_second=4) if terminal else None

    def __enter__(self) -> LiveView:
        self._started = time.monotonic()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of a training step."""
        self._step, self._metrics = step, flat_phases(metrics)
        if metrics.get("reward_mean") is not None:
            self._rewards.append(metrics["reward_mean"])
        if self._live is None and (step % self._every == 0 or step == self._steps):
            parts = [f"step {step:4d}/{self._steps}", self._reward(metrics), *self._numbers(), self._phases()]
            self._print("   ".join(part for part in parts if part))
        self._warn(self.monitor.add(step, metrics))

    def measured(self, step: int, metrics: Mapping[str, Any], replies: Sequence[str] = ()) -> None:
        """Show a measurement on held-out prompts; `replies` are what the monitor reads."""
        right = f", {metrics['accuracy']:.1%} right" if metrics.get("accuracy") is not None else ""
        self._measured = f"step {step:4d}   held-out prompts   {self._reward(metrics)}{right}"
        self._print(self._measured)
        self._warn(self.monitor.add(step, metrics, replies))

    def note(self, text: str) -> None:
        """Print a line above the view."""
        self._print(text)

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(visible(text), style), soft_wrap=self._live is None)

    def _warn(self, found: Sequence[Sign]) -> None:
        self.signs += found
        for sign in found:
            self._print(f"{sign.severity}: step {sign.step}: {sign.message} {sign.what_to_turn}", "yellow")

    def _reward(self, metrics: Mapping[str, Any]) -> str:
        reward = metrics.get("reward_mean")
        return "no reward" if reward is None else f"reward {signed(reward)}"

    def _numbers(self) -> list[str]:
        found = {name: self._metrics.get(name) for name in WATCHED}
        shown = {name: value for name, value in found.items() if value or (value is not None and name not in IF_ANY)}
        return [f"{WATCHED[name][0]} {WATCHED[name][1].format(value)}" for name, value in shown.items()]

    def _phases(self) -> str:
        phases = {name.removeprefix(PHASE): value for name, value in self._metrics.items() if name.startswith(PHASE)}
        total = sum(phases.values())
        shares = " ".join(f"{name} {value / total:.0%}" for name, value in phases.items()) if total else ""
        return f"{total:.2f} s: {shares}" if shares else ""

    def _drawn(self) -> Group:
        """Return the view for a terminal."""
        done = self._step - self._first
        seconds = time.monotonic() - self._started
        left = f", {_clock(seconds / done * (self._steps - self._step))} left" if done else ""
        filled = round(30 * self._step / max(1, self._steps))
        bar = Text("━" * filled, "green").append("━" * (30 - filled), "dim")
        table = Table.grid(padding=(0, 2))
        table.add_row(Text("step"), bar, Text(f"{self._step}/{self._steps}  {_clock(seconds)}{left}"))
        if rewards := list(self._rewards):  # a copy, since the view is drawn by a thread of its own
            table.add_row(Text("reward"), Text(sparkline(rewards), "cyan"), Text(signed(rewards[-1])))
        lines = [Text("   ".join(self._numbers())), Text(self._phases(), "dim")]
        lines += [Text(f"{sign.severity}: {visible(sign.message)}", "yellow") for sign in self.signs[-2:]]
        return Group(table, *(line for line in lines if line.plain))


def sparkline(values: Sequence[float]) -> str:
    """Return a bar of one of eight heights for each value.

    Example:
        >>> sparkline([0, 1, 2, 7])
        '▁▂▃█'
    """
    low, high = min(values), max(values)
    return "".join(BARS[round((value - low) / ((high - low) or 1) * (len(BARS) - 1))] for value in values)


def print_results(folder: Path, console: Console) -> None:
    """Print what came of a run: conversations and numbers before and after, signs of the monitor, and its picture."""
    run = read_run(folder)
    if run.before_and_after():
        console.print(conversations_table(run))
    if run.training:
        console.print(results_table(run))
        for sign in signs(run):
            console.print(Text(f"{sign.message} {sign.what_to_turn}", "yellow"))
        console.print(f"picture: {plot_run(run, folder / 'curve.png')}", highlight=False)
    console.print(f"report:  gym-rm report {folder}", highlight=False)


def flat_phases(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics with `phase_seconds` as `phase_seconds/<name>`."""
    phases = metrics.get("phase_seconds") or {}
    rest = {name: value for name, value in metrics.items() if name != "phase_seconds"}
    return rest | {f"{PHASE}{name}": value for name, value in phases.items()}


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
