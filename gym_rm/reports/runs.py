"""Write the folder of a training run line by line, and read it.

`settings.yaml` contains the settings. `metrics.jsonl` has one line per training step (`"phase": "train"`) and one per
measurement on held-out prompts (`"phase": "held_out"`). `conversations.jsonl` has the replies to the held-out prompts,
with their step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from gym_rm.data.rows import read_rows
from gym_rm.errors import ConfigError
from gym_rm.types import Conversation

METRICS, CONVERSATIONS, SETTINGS = "metrics.jsonl", "conversations.jsonl", "settings.yaml"


class RunWriter:
    """Writer of the folder of a run; every line is on disk when the call returns.

    Args:
        folder: folder of the run; created if it does not exist.
        settings: plain values, written once as YAML.

    Raises:
        ConfigError: the folder already contains a run.

    Example:
        >>> import tempfile
        >>> run = RunWriter(tempfile.mkdtemp(), {"seed": 1})
        >>> run.add_metrics("train", 1, {"reward_mean": 0.5})
        >>> read_run(run.folder).training[0]["reward_mean"]
        0.5
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        if (self.folder / METRICS).exists():
            raise ConfigError(
                f"folder {str(self.folder)!r} already contains a run; choose another folder or remove it."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / SETTINGS).write_text(yaml.safe_dump(dict(settings), sort_keys=False), encoding="utf-8")
        self._started = time.perf_counter()

    def add_metrics(self, phase: Literal["train", "held_out"], step: int, values: Mapping[str, Any]) -> None:
        """Append a line to `metrics.jsonl`, with the seconds since the writer was created."""
        seconds = round(time.perf_counter() - self._started, 3)
        self._append(METRICS, {"phase": phase, "step": step, "seconds": seconds, **values})

    def add_conversation(
        self, step: int, conversation: Conversation, *, prompt_id: str, reward: float, right: bool | None = None
    ) -> None:
        """Append a line to `conversations.jsonl`."""
        row = {"step": step, "prompt_id": prompt_id, "reward": reward, "right": right, "messages": list(conversation)}
        self._append(CONVERSATIONS, row)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")


@dataclass(frozen=True, slots=True)
class Run:
    """Contents of the folder of a run.

    Attributes:
        folder: folder that the run was read from.
        settings: settings of the run.
        training: lines of `metrics.jsonl` for the training steps, in order.
        held_out: lines of `metrics.jsonl` for the measurements on held-out prompts, in order.
        conversations: lines of `conversations.jsonl`, in order.
    """

    folder: Path
    settings: Mapping[str, Any]
    training: tuple[Mapping[str, Any], ...]
    held_out: tuple[Mapping[str, Any], ...]
    conversations: tuple[Mapping[str, Any], ...]

    @property
    def caption(self) -> str:
        """One line with the number of steps, seconds, seed, policy and reward model."""
        if not self.training:
            return "no training step"
        parts = [f"{self.training[-1]['step']} steps in {self.training[-1]['seconds']:.0f} s"]
        parts += [f"seed {self.settings['seed']}"] if "seed" in self.settings else []
        for group, name, what in (("policy", "model", "policy"), ("env", "reward_model", "reward model")):
            if isinstance(self.settings.get(group), Mapping):
                parts.append(f"{what} {self.settings[group].get(name) or 'embedded'}")
        return ", ".join(parts)

    def before_and_after(self) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """Return pairs of conversations with the same prompt, from the first and the last measurement."""
        if not self.conversations or self.conversations[0]["step"] == self.conversations[-1]["step"]:
            return []
        steps = self.conversations[0]["step"], self.conversations[-1]["step"]
        # If a prompt occurs several times, use its first reply.
        before, after = (
            {row["prompt_id"]: row for row in reversed(self.conversations) if row["step"] == step} for step in steps
        )
        return [(before[name], after[name]) for name in reversed(before) if name in after]


def read_run(folder: str | Path) -> Run:
    """Read the folder of a run, finished or not.

    Raises:
        ConfigError: the folder does not exist or contains no run.
    """
    folder = Path(folder)
    if not (folder / METRICS).is_file():
        raise ConfigError(f"folder {str(folder)!r} must contain a run, but {METRICS} is missing.")
    rows = [row for _, row in read_rows(folder / METRICS)]
    settings = yaml.safe_load((folder / SETTINGS).read_text(encoding="utf-8")) if (folder / SETTINGS).exists() else {}
    has_conversations = (folder / CONVERSATIONS).exists()
    return Run(
        folder,
        settings,
        tuple(row for row in rows if row["phase"] == "train"),
        tuple(row for row in rows if row["phase"] == "held_out"),
        tuple(row for _, row in read_rows(folder / CONVERSATIONS)) if has_conversations else (),
    )
