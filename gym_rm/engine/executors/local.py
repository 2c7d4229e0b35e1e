"""The forward in this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from gym_rm.engine.kinds import RewardModel
from gym_rm.engine.kinds.reward_model import Batch

# Running a tree switches the model's attention for a moment: scorers that share a model take turns.
_TURNS: WeakKeyDictionary[torch.nn.Module, threading.RLock] = WeakKeyDictionary()


class LocalExecutor:
    """Runs batches on the device that holds the model; nothing synchronises before the one copy back.

    Args:
        model: the reward model.
    """

    def __init__(self, model: RewardModel) -> None:
        self.model = model
        self._asleep: list[tuple[torch.nn.Parameter | torch.Tensor, torch.device]] | None = None
        self._host: dict[int, torch.Tensor] = {}

    @torch.inference_mode()
    def run(self, batches: Sequence[Batch]) -> NDArray[np.float32]:
        """Values of all batches stacked, float32 `[sum R, K]`."""
        if self._asleep is not None:
            self.wake()
        if not batches:
            return np.empty((0, self.model.num_values), dtype=np.float32)
        with contextlib.ExitStack() as stack:
            for module in sorted(self.model.modules, key=id):
                stack.enter_context(_TURNS.setdefault(module, threading.RLock()))
            stack.enter_context(self.model.evaluating())
            values = [self.model.forward(batch) for batch in batches]
        stacked: NDArray[np.float32] = torch.cat(values).cpu().numpy()
        return stacked

    def sleep(self) -> None:
        """Free the device's memory; the weights wait in host memory, allocated once and kept."""
        if self._asleep is not None:
            return
        self._asleep = []
        for tensor in (t for module in self.model.modules for t in (*module.parameters(), *module.buffers())):
            if tensor.device.type != "cuda":
                continue
            host = self._host.get(id(tensor))
            if host is None:
                host = self._host[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor.data)  # each time: the weights of a model in training change
            self._asleep.append((tensor, tensor.device))
            tensor.data = host
        if self._asleep:
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Bring the weights back to their devices."""
        for tensor, device in self._asleep or ():
            tensor.data = tensor.data.to(device, non_blocking=True)
        self._asleep = None
