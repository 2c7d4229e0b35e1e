"""Run models for evaluation, and leave them and torch as they were, at whatever moment an exception comes.

Ctrl-C can raise while a context manager begins or ends, so that it is half open for ever. So what a forward changes is
undone by a function that can be repeated.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from gym_rm.engine.backbones.batch_invariance import WITHOUT_SPLIT_K, Blas, blas_settings, set_blas
from gym_rm.engine.backbones.devices import device_of
from gym_rm.errors import ConfigError

# A forward changes its model for a while, so executors of one model must not run at the same time.
_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOST: WeakSet[nn.Module] = WeakSet()  # models that another thread was using when this process was forked


def locks_of(models: Sequence[PreTrainedModel]) -> tuple[threading.RLock, threading.RLock]:
    """Return the locks of one or two models, in the order in which all threads take them; of one model, twice the same.

    Raises:
        ConfigError: this process is a fork, and has the models in the middle of another thread's forward.
    """
    if any(model in _LOST for model in models):
        raise ConfigError(
            "this process was forked while another thread was scoring with the model, whose state is unknown here; "
            "load another scorer with gym_rm.load_scorer, fork while nothing is scored, or start processes with "
            "context='spawn' or 'forkserver'."
        )
    locks = [_LOCKS.setdefault(model, threading.RLock()) for model in sorted(models, key=id)]
    return locks[0], locks[-1]


class Evaluation:
    """Run models without dropout and autocast, from `begin` to the end of the context, which restores them and torch.

    The exit can be repeated: `with first, second, evaluation, evaluation` runs it again if an interrupt ends it. The
    locks come first, because they are written in C: no interrupt comes between a lock and its release.

    Args:
        models: the models that are called.
        rows: mode of torch's functions, such as `BatchInvariant`.
        inference: whether torch is in inference mode.
    """

    def __init__(
        self, models: Sequence[PreTrainedModel], *, rows: TorchFunctionMode | None = None, inference: bool = True
    ) -> None:
        self._models = models
        self._rows = rows
        self._inference = inference
        self._before: _Before | None = None

    def __enter__(self) -> None:
        pass

    def begin(self) -> None:
        """Note how the models and torch are, and change them."""
        parts = list[nn.Module](self._models)
        for part in parts:  # it grows; `modules` takes longer, before every call
            parts += [each for each in part._modules.values() if each is not None] if part._modules else ()
        device = device_of(self._models[0]).type
        tables = [each for part in parts for each in (part._parameters, part._forward_hooks, part._forward_pre_hooks)]
        found = {id(config): config for part in parts if (config := vars(part).get("config")) is not None}
        configs = [config for config in found.values() if isinstance(config, PreTrainedConfig)]
        self._before = before = _Before(
            training=[part for part in parts if part.training],
            attention=[(config, config._attn_implementation) for config in configs],
            tables=[(table, dict(table) if table else {}) for table in tables],
            modes=[torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())],
            blas=blas_settings(),
            device=device,
            autocast=torch.is_autocast_enabled(device),
            inference=torch.inference_mode() if self._inference and not torch.is_inference_mode_enabled() else None,
        )
        for part in before.training:
            part.training = False
        torch.set_autocast_enabled(device, False)
        if before.inference is not None:
            before.inference.__enter__()
        if self._rows is not None:
            if device == "cuda":
                set_blas(WITHOUT_SPLIT_K)
            torch._C._push_on_torch_function_stack(self._rows)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        before = self._before
        if before is None:
            return
        if error is not None and not isinstance(error, Exception):
            traceback.clear_frames(error.__traceback__)  # ends what torch left half open, which else ends later
        while torch._C._len_torch_function_stack():  # torch itself can lose some when it is interrupted
            torch._C._pop_torch_function_stack()
        for mode in before.modes:
            torch._C._push_on_torch_function_stack(mode)
        if before.inference is not None and torch.is_inference_mode_enabled():
            before.inference.__exit__(None, None, None)
        torch.set_autocast_enabled(before.device, before.autocast)
        if blas_settings() != before.blas:
            set_blas(before.blas)
        for part in before.training:
            part.training = True
        for config, implementation in before.attention:
            if config._attn_implementation != implementation:  # of trees
                config._attn_implementation = implementation
        for table, contents in before.tables if error is not None else ():
            table.update(contents)
            for key in table.keys() - contents.keys():
                table.pop(key, None)
        self._before = None


@dataclass(frozen=True, slots=True)
class _Before:
    """What a forward changes."""

    training: list[nn.Module]
    attention: list[tuple[PreTrainedConfig, str | None]]
    tables: list[tuple[dict[Any, Any], dict[Any, Any]]]
    modes: list[TorchFunctionMode]
    blas: Blas
    device: str
    autocast: bool
    inference: torch.inference_mode | None


def _after_fork() -> None:
    """Note the models that another thread was using: in this process, it never ends."""
    for model, lock in list(_LOCKS.items()):
        if lock.acquire(blocking=False):
            lock.release()
        else:
            _LOST.add(model)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
