"""Checkpoints of a run: written whole or not at all, and read again after any interruption.

A folder is written under a name that begins with `.`, flushed to disk, and then renamed, which is atomic. What a
killed run leaves under such names is removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gym_rm.checks import keep_inputs
from gym_rm.errors import ConfigError, logger
from gym_rm.reports.runs import CHANGED_SETTINGS, CONVERSATIONS, HELD_OUT, METRICS, SETTINGS, VALIDATION

CHECKPOINTS, STATE = "checkpoints", "state.json"
MODEL, OPTIMIZER, OTHERS = "model.safetensors", "optimizer.safetensors", "others.safetensors"
WRITTEN = (METRICS, HELD_OUT, VALIDATION, CONVERSATIONS, SETTINGS, CHANGED_SETTINGS, CHECKPOINTS, "final", "best")


@dataclass(frozen=True)
class Checkpoint:
    """State of a run after a step.

    Attributes:
        step: number of steps that are done.
        model: the parameters that are trained, by name.
        optimizer: states of the optimizers, by `parameter name/state name`.
        version: number of updates that are done.
        settings: what a run must share to resume from here.
        state: other plain values, such as the metric of the best model.
        tensors: other tensors by name; a file of its own if there are some.
    """

    step: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    version: int
    settings: Mapping[str, Any]
    state: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into, which gets its name `folder` only when everything is on disk.

    Raises:
        OSError: it cannot be written, such as on a full disk; nothing of it is left.
    """
    unfinished = folder.with_name(f".{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for path in unfinished.rglob("*"):
            if path.is_file():
                path.chmod(0o644)
                _flush(path)
        _flush(unfinished)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)  # a full disk
        raise OSError(f"{str(folder)!r} cannot be written ({error}); what was written before it is kept.") from error
    before = folder.with_name(f".{folder.name}.before")
    shutil.rmtree(before, ignore_errors=True)
    if folder.exists():  # written by a run that was interrupted later; a rename leaves nothing half removed
        folder.rename(before)
    unfinished.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(before, ignore_errors=True)


_locks: dict[Path, int] = {}  # descriptors of the folders that this process has locked


def lock_folder(run: Path, inputs: Any) -> None:
    """Make the folder of a run, and keep other processes from writing into it until it is released.

    Raises:
        ConfigError: another process has locked it, it cannot be made, or the run would replace one of its `inputs`.
    """
    keep_inputs(inputs, [run / f"{dot}{name}" for name in WRITTEN for dot in ("", ".")])
    try:
        run.mkdir(parents=True, exist_ok=True)
        if run.resolve() in _locks:
            return
        descriptor = os.open(run, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"output={str(run)!r} cannot be written: {error.strerror}.") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(
            f"another process writes to output={str(run)!r}; wait for it, or use another output folder."
        ) from error
    except OSError:
        pass  # a file system without locks
    _locks[run.resolve()] = descriptor


def release_folder(run: Path) -> None:
    """Allow other processes to write into the folder again."""
    if (descriptor := _locks.pop(run.resolve(), None)) is not None:
        os.close(descriptor)


def save_checkpoint(run: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint, then remove those before it."""
    folder = run / CHECKPOINTS / f"step-{checkpoint.step:08d}"
    with atomic_folder(folder) as unfinished:
        save_file(dict(checkpoint.model), unfinished / MODEL)
        save_file(dict(checkpoint.optimizer), unfinished / OPTIMIZER)
        if checkpoint.tensors:
            save_file(dict(checkpoint.tensors), unfinished / OTHERS)
        state = {name: getattr(checkpoint, name) for name in ("step", "version", "settings", "state")}
        (unfinished / STATE).write_text(json.dumps({**state, "digests": _digests(unfinished)}), encoding="utf-8")
    for other in folder.parent.iterdir():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def _digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the tensors of a checkpoint, by file: their format has no checksum of its own."""
    digests = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def checkpoint_to_resume(run: Path, settings: Mapping[str, Any], *, num_steps: int) -> Checkpoint | None:
    """Return the last checkpoint of a run, or None; all ranks read the folder that the main process found.

    The run must not have more than `num_steps` already.

    Raises:
        ConfigError: a file is damaged, the run has other settings, or it is finished and has no checkpoint.
    """
    (folder,) = broadcast_object_list([max((run / CHECKPOINTS).glob("step-*"), default=None)])
    if folder is None:
        if (run / "final").exists():
            raise ConfigError(
                f"{str(run)!r} contains a finished run without a checkpoint to resume from; use another output folder, "
                "or remove it."
            )
        if (run / "metrics.csv").exists():
            logger.warning("%s has no checkpoint; the run begins again, with the settings of this command.", run)
        return None
    try:
        values = json.loads((folder / STATE).read_text(encoding="utf-8"))
        written = values.pop("digests")
        found = _digests(folder)
        if changed := [name for name in written if found.get(name) != written[name]]:
            raise ValueError(f"not as it was written: {', '.join(changed)}")
        tensors = {name: load_file(folder / name) for name in written}
        others = tensors.pop(OTHERS, {})
        checkpoint = Checkpoint(model=tensors[MODEL], optimizer=tensors[OPTIMIZER], tensors=others, **values)
    except Exception as error:  # safetensors has errors of its own
        raise ConfigError(
            f"the checkpoint {str(folder)!r} cannot be read ({type(error).__name__}: {error}); remove this folder "
            "to begin again."
        ) from error
    if different := sorted(_differences(settings, checkpoint.settings)):
        raise ConfigError(
            f"{str(run)!r} contains a run with other settings ({'; '.join(different[:5])}); use the same settings to "
            "resume it, or another output folder."
        )
    if checkpoint.step > num_steps:
        raise ConfigError(f"{str(run)!r} has {checkpoint.step} steps already, more than the {num_steps} of this run.")
    logger.info("resuming after step %d of %s", checkpoint.step, run)
    return checkpoint


def _differences(ours: Any, theirs: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for name in {*ours, *theirs}:
            yield from _differences(ours.get(name), theirs.get(name), f"{prefix}{name}.")
    elif json.dumps(ours) != json.dumps(theirs):
        yield f"{prefix[:-1]}: now {ours!r:.60}, before {theirs!r:.60}"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
