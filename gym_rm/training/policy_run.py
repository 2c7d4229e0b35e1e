"""The folder of a GRPO run: what is written, kept and read again, and when the run stops."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from accelerate.utils import broadcast_object_list

from gym_rm.errors import ConfigError, logger
from gym_rm.reports.runs import HELD_OUT, METRICS, Run, RunWriter, read_run
from gym_rm.training.ahead import RolloutsAhead, read_pending
from gym_rm.training.checkpoints import (
    Checkpoint,
    hold,
    latest_checkpoint,
    let_go,
    read_checkpoint,
    require_same_settings,
    save_checkpoint,
    write_whole,
)
from gym_rm.training.kept import KeptModels
from gym_rm.training.learner import Learner
from gym_rm.training.policy_settings import GRPOSettings
from gym_rm.training.rollouts import Episode
from gym_rm.training.settings import flat_settings
from gym_rm.types import Prompt

IDENTITY, PROMPTS = "identity.json", "contents of prompts"


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a run ended before its last step.

    Attributes:
        reason: in words.
        exit_code: of the process.
        can_go_on: whether the run goes on if the command is repeated.
    """

    reason: str
    exit_code: int
    can_go_on: bool


class PolicyRun:
    """The folder of a run. All ranks make one and call its methods; the main process writes.

    Args:
        settings: settings of the run, without `null` where there is a default.
        learner: the policy, which gets the state of the last checkpoint.
        prompts: training and held-out prompts; a run goes on only with the same.

    Attributes:
        step: number of steps that are done.
        pending: rollouts of the next steps that were made before an interruption, by step.

    Raises:
        ConfigError: the folder is used by another process, or has a run with other settings.
    """

    def __init__(
        self, settings: GRPOSettings, learner: Learner, prompts: tuple[Sequence[Prompt], Sequence[Prompt]]
    ) -> None:
        assert settings.output is not None
        self.settings, self.learner, self.folder = settings, learner, Path(settings.output)
        self._identity = {**curve_settings(settings), PROMPTS: _digest(prompts)}
        answers = any(prompt.answer is not None for prompt in prompts[1])
        self.metric = settings.checkpoint.metric or ("accuracy" if answers else "reward_mean")
        if self.metric == "accuracy" and not answers:
            raise ConfigError("checkpoint.metric='accuracy': the held-out prompts have no answers; use reward_mean.")
        self._started = time.monotonic()
        if learner.is_main:
            hold(self.folder)
        self.kept = KeptModels(self.folder / "best", most=settings.checkpoint.keep_best, higher_is_better=True)
        checkpoint = self._latest()
        self.step = self._first = 0 if checkpoint is None else checkpoint.step
        self._values: list[float | None] = []  # of the metric
        self.pending: dict[int, list[Episode]] = {}
        if checkpoint is not None:
            learner.restore(checkpoint)
            state = checkpoint.state
            self._values = list(state["values"])
            self.pending = self._of_rank(read_pending(state["pending"]))
            self.kept.values = dict(checkpoint.kept)
            logger.info("going on after step %d of %s", self.step, self.folder)
        self.writer: RunWriter | None = None
        if learner.is_main:
            plain = settings.model_dump(mode="json")
            self.writer = RunWriter(self.folder, plain, after=self.step, again=checkpoint is None)
            write_whole(self.folder / IDENTITY, json.dumps(self._identity))
        if settings.report_to != "none":
            learner.accelerator.init_trackers("grpo", config=flat_settings(settings.model_dump(mode="json")))
        learner.accelerator.wait_for_everyone()

    def log(self, phase: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Send metrics to the trackers and write a line; those of a training step must come before its checkpoint."""
        if self.writer is not None:
            self.writer.add_metrics("train" if phase == "train" else "held_out", step, metrics)
        numbers = {f"{phase}/{name}": value for name, value in _numbers(metrics)}
        self.learner.accelerator.log(numbers, step=step)

    def history(self) -> Run | None:
        """Return what a run that goes on has written so far; None for a new run, and on other ranks."""
        return read_run(self.folder) if self.step and self.learner.is_main else None

    def is_due(self, every: int) -> bool:
        """Return whether something that happens every so many steps happens now; it does after the last step."""
        return self.step % every == 0 or self.step == self.settings.steps

    def measured(self, metrics: Mapping[str, Any]) -> None:
        """Take a measurement of the current policy, and keep the policy if it is among the best."""
        value = metrics.get(self.metric)
        self._values.append(value)
        if self.step and value is not None and self.settings.checkpoint.keep_best:
            self.kept.offer(self.step, value, self.learner.export, is_main=self.learner.is_main)

    def reason_to_stop(self, heard: int | None) -> Stop | None:
        """Return why the run should stop before its last step, or None; the ranks agree.

        Args:
            heard: the signal that this process was sent, or None.
        """
        if self.step == self.settings.steps:
            return None
        if (found := self._reached()) is not None:
            return Stop(found, 0, can_go_on=False)
        signals = [each for each in self.learner.gathered_objects([heard]) if each is not None]
        if signals:
            return Stop(f"{signal.Signals(signals[0]).name} came", 128 + signals[0], can_go_on=True)
        hours = self.settings.checkpoint.max_hours
        over = hours is not None and self.step > self._first and time.monotonic() - self._started > hours * 3600
        if any(self.learner.gathered_objects([over])):
            return Stop(f"{hours} hours are over (checkpoint.max_hours)", 0, can_go_on=True)
        return None

    def _reached(self) -> str | None:
        options = self.settings.checkpoint
        values = [value for value in self._values if value is not None]
        if options.stop_at is not None and len(values) > 1 and values[-1] >= options.stop_at:
            return f"{self.metric} of the held-out prompts reached {values[-1]:.4g} (checkpoint.stop_at)"
        if options.patience is not None and len(values) > options.patience:
            since = len(values) - 1 - values.index(max(values))
            if since >= options.patience:
                return f"{self.metric} has not risen for {since} measurements (checkpoint.patience)"
        return None

    @contextlib.contextmanager
    def saved_after_errors(self, ahead: RolloutsAhead) -> Iterator[None]:
        """Save a checkpoint if the block raises before it changed the policy, so that nothing is lost."""
        try:
            yield
        except Exception as error:
            if self.learner.world == 1 and self.step:  # other ranks would not take part
                self.save(ahead)
                error.add_note(f"The checkpoint after step {self.step} is saved; the same command goes on from there.")
            raise

    def add_conversations(
        self,
        phase: Literal["train", "held_out"],
        episodes: Sequence[Episode],
        *,
        right: Sequence[bool | None],
        advantages: Sequence[float] | None = None,
    ) -> None:
        """Write conversations with their rewards."""
        for number, (episode, correct) in enumerate(zip(episodes, right, strict=True)):
            if self.writer is not None:
                self.writer.add_conversation(
                    self.step,
                    episode.conversation,
                    prompt_id=episode.prompt_id,
                    reward=episode.reward,
                    right=correct,
                    phase=phase,
                    group=episode.group if phase == "train" else None,
                    advantage=None if advantages is None else advantages[number],
                    tokens=episode.num_tokens,
                    finished=episode.finished,
                    components=episode.components,
                    verdicts=episode.verdicts,
                )

    def save(self, ahead: RolloutsAhead) -> None:
        """Write a checkpoint to go on from."""
        learner = self.learner
        state = {"values": self._values, "pending": learner.gathered_objects([ahead.pending()])}
        made = learner.checkpoint(self.step, settings=self._identity, kept=self.kept.values, measured={}, state=state)
        if learner.is_main:
            save_checkpoint(self.folder, made)
        learner.accelerator.wait_for_everyone()

    def finish(self) -> None:
        """Write the last policy."""
        self.learner.export(self.folder / "final")

    def close(self) -> None:
        """Close the trackers, and let other processes use the folder."""
        self.learner.accelerator.end_training()
        let_go(self.folder)

    def _latest(self) -> Checkpoint | None:
        found = latest_checkpoint(self.folder) if self.learner.is_main else None
        (folder,) = broadcast_object_list([found])
        if folder is None:
            self._require_no_other_run()
            return None
        checkpoint = read_checkpoint(folder)
        require_same_settings(self._identity, checkpoint.settings, self.folder)
        if checkpoint.step > self.settings.steps:
            raise ConfigError(
                f"{str(self.folder)!r} has {checkpoint.step} steps already, more than steps={self.settings.steps}."
            )
        return checkpoint

    def _require_no_other_run(self) -> None:
        """Raise ConfigError if a run without a checkpoint is another one, or was finished."""
        identity, final = self.folder / IDENTITY, self.folder / "final"
        lines = any((self.folder / name).exists() for name in (METRICS, HELD_OUT))
        if lines and identity.exists():
            require_same_settings(self._identity, json.loads(identity.read_text(encoding="utf-8")), self.folder)
        if final.exists() or (lines and not identity.exists()):
            raise ConfigError(
                f"{str(self.folder)!r} contains a run without a checkpoint to go on from; use another output folder, "
                "or remove it."
            )

    def _of_rank(self, pending: Mapping[int, Sequence[Episode]]) -> dict[int, list[Episode]]:
        """Return this rank's share of episodes, also if they were made by another number of processes."""
        share = self.settings.env.num_prompts // self.learner.world
        first = self.learner.rank * share
        return {s: [e for e in made if first <= e.group < first + share] for s, made in pending.items()}


def curve_settings(settings: GRPOSettings) -> dict[str, Any]:
    """Return the settings that must be the same to go on with a run: all that change its curve."""
    values = settings.model_dump(mode="json")
    for name in ("output", "report_to", "threads", "checkpoint", "logged_groups", "plan"):
        values.pop(name)
    for name in ("server", "server_key", "weights_folder"):
        values["sampling"].pop(name)
    for name in ("max_num_batched_tokens", "fsdp"):
        values["optimizer"].pop(name)
    values["policy"].pop("gradient_checkpointing")
    if settings.optimizer.schedule == "constant":
        values.pop("steps")  # a finished run can go on with more steps
    return values


def _digest(prompts: tuple[Sequence[Prompt], Sequence[Prompt]]) -> str:
    contents = [[[each.prompt_id, list(each.messages), each.answer] for each in part] for part in prompts]
    return hashlib.sha256(json.dumps(contents, sort_keys=True, default=str).encode()).hexdigest()


def _numbers(metrics: Mapping[str, Any]) -> list[tuple[str, float]]:
    flat = flat_settings(metrics)
    return [(name.replace(".", "/"), value) for name, value in flat.items() if isinstance(value, int | float)]
