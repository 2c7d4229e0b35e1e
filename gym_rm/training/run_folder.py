"""The folder of a training run: what it resumes from, its best model, and when it saves and stops."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gym_rm.reports.runs import flat
from gym_rm.training.checkpoints import checkpoint_to_resume, lock_folder, release_folder, save_checkpoint
from gym_rm.training.parallel_model import ParallelModel

NOTICE = b"\nThe run saves and stops after this step; a second Ctrl-C stops it at once.\n"


class RunFolder:
    """The folder of a run. All ranks make one and call its methods; the main process writes.

    Args:
        settings: plain settings of the run, with its `output`.
        learner: what is trained, which gets the state of the last checkpoint.
        name: name of the project, for trackers.
        identity: what must be the same to resume the run, by name.
        num_steps: number of steps of the run.
        higher_is_better: whether a higher value of the metric of the best model is better.

    Attributes:
        step: number of steps that are done.
        best_value: metric of the model in `best/`; None if there is none yet.
        restored, restored_tensors: other values of the checkpoint that the run resumes from; empty for a new run.

    Raises:
        ConfigError: the folder is used by another process, or has a run with other settings.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        learner: ParallelModel,
        *,
        name: str,
        identity: Mapping[str, Any],
        num_steps: int,
        higher_is_better: bool = True,
    ) -> None:
        self.folder, self.learner, self.num_steps = Path(settings["output"]), learner, num_steps
        self.step = 0
        self.restored: Mapping[str, Any] = {}
        self.restored_tensors: Mapping[str, Tensor] = {}
        self._identity, self._higher_is_better = identity, higher_is_better
        if learner.is_main:
            lock_folder(self.folder, {key: value for key, value in settings.items() if key != "output"})
        checkpoint = checkpoint_to_resume(self.folder, identity, num_steps=num_steps)
        if checkpoint is not None:
            learner.restore(checkpoint)
            self.step, self.restored, self.restored_tensors = checkpoint.step, checkpoint.state, checkpoint.tensors
        self.best_value: float | None = self.restored.get("best")
        learner.start_trackers(name, settings)
        learner.accelerator.wait_for_everyone()

    def is_due(self, every: int) -> bool:
        """Return whether something that happens every so many steps happens now; it does after the last step."""
        return self.step % every == 0 or self.step == self.num_steps

    def track(self, phase: str, metrics: Mapping[str, Any]) -> None:
        """Send the numbers among metrics to the trackers, if there are any."""
        numbers = {f"{phase}/{name}": value for name, value in flat(metrics, "/") if isinstance(value, int | float)}
        self.learner.accelerator.log(numbers, step=self.step)

    def keep_if_best(self, value: float, export: Callable[[Path], None]) -> None:
        """Write the model to `best/` if its metric is better than that of the model there; NaN never is.

        Args:
            value: its metric.
            export: writes the model to a folder; all ranks must call this.
        """
        sign = 1 if self._higher_is_better else -1
        if sign * value > (-math.inf if self.best_value is None else sign * self.best_value):
            export(self.folder / "best")
            self.best_value = value

    def state(self) -> dict[str, Any]:
        """Return plain values that a checkpoint keeps, see `restored`."""
        return {"best": self.best_value}

    def tensors(self) -> dict[str, Tensor]:
        """Return other tensors that a checkpoint keeps, see `restored_tensors`; all ranks must call this."""
        return {}

    def save(self) -> None:
        """Write a checkpoint to resume from; the lines of its step are written before."""
        checkpoint = self.learner.checkpoint(self.step, settings=self._identity, state=self.state())
        checkpoint = replace(checkpoint, tensors=self.tensors())
        if self.learner.is_main:
            save_checkpoint(self.folder, checkpoint)
        self.learner.accelerator.wait_for_everyone()

    def stop_for(self, heard: signal.Signals | None) -> signal.Signals | None:
        """Return the signal for which the run stops now, if a rank was sent one; all ranks must call this."""
        signals = [each for each in self.learner.gathered([heard]) if each is not None]
        return signals[0] if signals and self.step < self.num_steps else None

    def close(self) -> None:
        """Close the trackers, and let other processes use the folder."""
        self.learner.end_training()
        release_folder(self.folder)


@contextlib.contextmanager
def heard_signals() -> Iterator[Callable[[], signal.Signals | None]]:
    """Yield a function that returns which signal came, SIGTERM or SIGINT (Ctrl-C), or None.

    After the first signal, the next one ends the process at once, as SIGKILL does. Only the main thread hears signals.
    """
    heard: list[signal.Signals] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {number: signal.getsignal(number) for number in numbers}

    def hear(number: int, frame: Any) -> None:
        heard.append(signal.Signals(number))
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            os.write(2, NOTICE)  # a handler must not use buffered streams

    for number in numbers:
        signal.signal(number, hear)
    try:
        yield lambda: heard[0] if heard else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
