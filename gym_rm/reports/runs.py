"""Write the folder of a training run line by line, go on with it after a checkpoint, and read it.

`settings.yaml` contains the settings, `changed_settings.yaml` those that differ from their defaults. `metrics.csv` has
one line per training step and `held_out.csv` one per measurement on held-out prompts. `conversations.jsonl` has the
replies to the held-out prompts and a sample of those in training.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from gym_rm.documents import parse_json, read_mapping, to_yaml
from gym_rm.errors import ConfigError
from gym_rm.plain_values import Count, Number, to_plain
from gym_rm.reports.curves import Curve, read_curve
from gym_rm.types import Conversation

METRICS, HELD_OUT, CONVERSATIONS, SETTINGS = "metrics.csv", "held_out.csv", "conversations.jsonl", "settings.yaml"
CHANGED_SETTINGS = "changed_settings.yaml"
VALIDATION = "validation.csv"  # of a run of `gym-rm train`, instead of held_out.csv

LARGEST = 1e100  # number that a chart can show

Phase = Literal["train", "held_out"]
Row = Mapping[str, Any]


Known = Annotated[Number, pydantic.BeforeValidator(to_plain)]  # None for NaN


class ConversationLine(pydantic.BaseModel):
    """A line of `conversations.jsonl`.

    Attributes:
        messages: messages, the last one a reply.
        reward: reward; None or NaN if the conversation could not be scored.
        group: number of the group within the step.
        right: whether the answer is right, checked without the reward model; None if the prompt has no answer.
        tokens: number of tokens of the replies.
        finished: whether the reply ended within the maximum number of tokens.
        lag: number of updates between the weights that wrote it and those that learn from it.
        components, verdicts: parts of the reward, and verdicts of verifiers, by name.
        step_rewards, step_ends: for each reply (the last assistant messages), the rewards of its steps and where they
            end in its content, see `gym_rm.Scores`.
    """

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")

    step: Count
    prompt_id: Any
    messages: Annotated[list[dict[str, Any]], pydantic.Field(min_length=1)]
    reward: Known
    phase: Phase = "held_out"
    group: Count | None = None
    advantage: Known = None
    right: bool | None = None
    tokens: Count | None = None
    finished: bool | None = None
    lag: Count | None = None
    components: dict[str, Known] | None = None
    verdicts: dict[str, Any] | None = None
    step_rewards: list[list[Known]] | None = None
    step_ends: list[list[Count]] | None = None


class RunWriter:
    """Writer of the folder of a run; every line is on disk when the call returns.

    Args:
        folder: folder of the run; created if it does not exist.
        settings: plain values, written as YAML.
        changed: those of the settings that differ from their defaults.
        resume_after: step of the checkpoint that the run resumes from: lines of later steps are removed from all files.
            Write the lines of a step before its checkpoint. 0 for a new run.
        replace: with `resume_after` 0, remove a run in this folder instead of refusing it, as it has no checkpoint yet.

    Raises:
        ConfigError: the folder already contains a run, and `resume_after` is 0.

    Example:
        >>> import tempfile
        >>> run = RunWriter(tempfile.mkdtemp(), {"seed": 1})
        >>> run.add_metrics("train", 1, {"reward_mean": 0.5, "phase_seconds": {"update": 2.0}})
        >>> read_run(run.folder).training[0]["phase_seconds/update"]
        2.0
    """

    def __init__(
        self,
        folder: str | Path,
        settings: Mapping[str, Any],
        *,
        changed: Mapping[str, Any] | None = None,
        resume_after: int = 0,
        replace: bool = False,
    ) -> None:
        self.folder = Path(folder)
        if not (resume_after or replace) and any((self.folder / name).exists() for name in (METRICS, HELD_OUT)):
            raise ConfigError(
                f"folder {str(self.folder)!r} already contains a run; choose another folder or remove it."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_settings(self.folder, settings, changed or {})
        self._curves = {
            "train": Curve(self.folder / METRICS, after=resume_after),
            "held_out": Curve(self.folder / HELD_OUT, after=resume_after),
        }
        _remove_later_lines(self.folder / CONVERSATIONS, resume_after)
        earlier = [row["seconds"] for name in (METRICS, HELD_OUT) for row in _read(self.folder / name)[-1:]]
        self._started = time.perf_counter() - max(earlier, default=0.0)

    def add_metrics(self, phase: Phase, step: int, values: Mapping[str, Any]) -> None:
        """Append a line to `metrics.csv` or `held_out.csv`, with the seconds of the run so far.

        Args:
            phase, step: which line it is.
            values: finite numbers, booleans and None by name; a mapping gives a column `name/key` per value.

        Raises:
            FloatingPointError: a number is not finite.
        """
        metrics = {name: value for name, value in flat(values, "/") if value != {}}
        for name, value in metrics.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise FloatingPointError(f"metric {name!r} of step {step} must be finite, got {value}.")
        seconds = round(time.perf_counter() - self._started, 3)
        self._curves[phase].add({"step": step, "seconds": seconds, **metrics})

    def add_conversation(self, step: int, conversation: Conversation, **known: Any) -> None:
        """Append a line to `conversations.jsonl`.

        Args:
            step, conversation: number of the step, and messages, the last one a reply.
            **known: other fields of `ConversationLine`.
        """
        line = ConversationLine(step=step, messages=[{**message} for message in conversation], **known)
        with (self.folder / CONVERSATIONS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line.model_dump(), allow_nan=False) + "\n")


def write_settings(folder: Path, settings: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
    """Write the settings of a run, and those that differ from their defaults, each file whole or not at all."""
    for name, values in ((SETTINGS, settings), (CHANGED_SETTINGS, changed)):
        unfinished = folder / f".{name}"
        unfinished.write_text(to_yaml(dict(values)), encoding="utf-8")
        unfinished.replace(folder / name)


@dataclass(frozen=True, slots=True)
class Run:
    """Contents of the folder of a run.

    Attributes:
        changed_settings: settings that differ from their defaults.
        training: lines of `metrics.csv`, in order; an empty value is None.
        held_out: lines of `held_out.csv`, in order; of a reward model, of the first set in `validation.csv`.
        conversations: lines of `conversations.jsonl`, in order.
    """

    folder: Path
    settings: Mapping[str, Any]
    changed_settings: Mapping[str, Any]
    training: tuple[Row, ...]
    held_out: tuple[Row, ...]
    conversations: tuple[Row, ...]

    @property
    def caption(self) -> str:
        """One line with the number of steps, seconds, seed, policy and reward model."""
        if not self.training:
            return "no training step"
        last = self.training[-1]
        parts = [f"{last['step']} steps" + (f" in {last['seconds']:.0f} s" if last.get("seconds") is not None else "")]
        parts += [f"seed {self.settings['seed']}"] if "seed" in self.settings else []
        for group, name, what in (("policy", "model", "policy"), ("env", "reward_model", "reward model")):
            if isinstance(self.settings.get(group), Mapping):
                parts.append(f"{what} {self.settings[group].get(name) or 'embedded'}")
        return ", ".join(parts)

    @property
    def trains_reward_model(self) -> bool:
        """Whether the run is one of `gym-rm train`."""
        return (self.folder / VALIDATION).exists() or isinstance(self.settings.get("data"), Mapping)

    def measured(self) -> list[Row]:
        """Return the conversations with held-out prompts."""
        return [row for row in self.conversations if row["phase"] == "held_out"]

    def before_and_after(self) -> list[tuple[Row, Row]]:
        """Return pairs of conversations with the same held-out prompt, from the first and the last measurement."""
        rows = self.measured()
        if not rows or rows[0]["step"] == rows[-1]["step"]:
            return []
        steps = rows[0]["step"], rows[-1]["step"]
        # If a prompt occurs several times, use its first reply.
        before, after = ({row["prompt_id"]: row for row in reversed(rows) if row["step"] == step} for step in steps)
        return [(before[name], after[name]) for name in reversed(before) if name in after]


def read_run(folder: str | Path) -> Run:
    """Read the folder of a run, finished or not; a last line that was not written to its end is left out.

    Raises:
        ConfigError: the folder does not exist, contains no run, or a file in it is broken.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in (METRICS, HELD_OUT)):
        raise ConfigError(f"folder {str(folder)!r} must contain a run, but {METRICS} is missing.")
    try:
        settings, changed = _settings(folder / SETTINGS), _settings(folder / CHANGED_SETTINGS)
        training, held_out = _read(folder / METRICS), _read(folder / HELD_OUT) or _first_set(folder / VALIDATION)
        conversations = tuple(_conversations(folder / CONVERSATIONS))
    except ValueError as error:
        raise ConfigError(f"run {str(folder)!r} cannot be read: {' '.join(str(error).split())}") from error
    return Run(folder, settings, changed, training, held_out, conversations)


# --- helpers -----------------------------------------------------------------------------------------------------


def _settings(path: Path) -> Mapping[str, Any]:
    return read_mapping(path, "settings") if path.exists() else {}


def _read(path: Path) -> tuple[dict[str, Any], ...]:
    if not path.exists():
        return ()
    rows = read_curve(path)
    if rows and "step" not in rows[0]:
        raise ValueError(f"{path.name} has no column 'step', only {list(rows[0])}")
    return tuple({name: _typed(path, name, text) for name, text in row.items()} for row in rows)


def _first_set(path: Path) -> tuple[dict[str, Any], ...]:
    rows = _read(path)
    return tuple(row for row in rows if row.get("set") == rows[0].get("set"))


def _conversations(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_whole_lines(path), start=1):
        try:
            row = parse_json(line)
            for message in ConversationLine.model_validate(row).messages:
                if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str | None):
                    raise ValueError(f"a message needs a role and a text, got {message!r:.80}")
        except ValueError as error:
            raise ValueError(f"line {number} of {path.name} is no conversation: {error}") from error
        yield row


def _typed(path: Path, name: str, text: str) -> float | bool | str | None:
    """Return a value of a curve; only the name of a validation set is a text."""
    if text in ("", "True", "False"):
        return None if not text else text == "True"
    if name == "set":
        return text
    try:
        number = int(text) if text.isdecimal() else float(text)
    except ValueError:
        number = math.inf
    if not abs(number) <= LARGEST:
        raise ValueError(f"{path.name}: the column {name!r} must have finite numbers, got {text!r:.40}")
    return number


def flat(values: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested mappings, empty ones among them, with their names joined by a separator."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, separator, f"{prefix}{name}{separator}")
        else:
            yield prefix + name, value


def _whole_lines(path: Path) -> Iterator[str]:
    if path.exists():
        with path.open(encoding="utf-8") as file:
            yield from (line for line in file if line.endswith("\n"))


def _remove_later_lines(path: Path, after: int) -> None:
    """Keep the whole lines of steps up to `after`; replaces the file at once."""
    if not path.exists():
        return
    unfinished = path.with_name(f".{path.name}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            if after:
                rows = zip(_whole_lines(path), _conversations(path), strict=True)
                file.writelines(line for line, row in rows if row["step"] <= after)
    except ValueError as error:
        unfinished.unlink()
        raise ConfigError(f"run {str(path.parent)!r} cannot go on: {error}; repair or remove the line.") from error
    unfinished.replace(path)
