"""Where does the forward run? One file per answer.

An executor has `run(batches) -> values`: the values of all batches stacked, float32 `[sum R, K]`, or an exception.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.kinds.reward_model import Batch

__all__ = ["Executor", "LocalExecutor"]


class Executor(Protocol):
    """Anything that runs batches; `sleep` and `wake` give the device's memory away and take it back."""

    def run(self, batches: Sequence[Batch]) -> NDArray[np.float32]:
        """Values of all batches stacked, float32 `[sum R, K]`."""
        ...

    def sleep(self) -> None:
        """Free the device."""
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...
