"""Measure the private memory of a process. This is not a test file.

Private memory is not a part of a file: pages of a file that is mapped can leave memory at any time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock


@contextlib.contextmanager
def growth() -> Iterator[list[float]]:
    """Return a list that contains the largest growth of private memory so far, in MiB."""
    before, done = _private(), threading.Event()
    largest = [0.0]

    def watch() -> None:
        while not done.wait(0.001):
            largest[0] = max(largest[0], _private() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield largest
    finally:
        done.set()
        thread.join()


def of_loading(folder: str, device: str, dtype: str) -> float:
    """Return the growth while a checkpoint is loaded."""
    import torch

    from gym_rm.engine.loading.checkpoint import LoadOptions, load_model, open_checkpoint

    checkpoint = open_checkpoint(LoadOptions(path=folder, dtype=dtype))
    with growth() as largest:
        load_model(checkpoint, device=torch.device(device))
    return largest[0]


def of_update(folder: str, other: str) -> float:
    """Return the growth while the weights of another folder are taken over."""
    from gym_rm.engine.executors import loaded_model, local
    from gym_rm.engine.executors.executor import LoadSpec
    from gym_rm.engine.kinds.readouts import ModuleHead
    from gym_rm.engine.loading.checkpoint import LoadOptions, open_checkpoint
    from gym_rm.engine.loading.trial import PLAIN

    executor = local.LocalExecutor()
    with mock.patch.object(loaded_model, "verify", return_value=PLAIN):  # slow
        executor.load(LoadSpec(open_checkpoint(LoadOptions(path=folder)), ModuleHead("score")))
    with growth() as largest:
        executor.update_weights(other)
    return largest[0]


def _private() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024
