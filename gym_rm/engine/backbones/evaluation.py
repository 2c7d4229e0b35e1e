"""Run models for evaluation, and leave them and torch as they were, at whatever moment an exception comes.

Ctrl-C can raise while a context manager begins or ends, so that it is half open for ever. So what a forward changes is
undone by functions that can be repeated.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from gym_rm.engine.backbones.devices import device_of
from gym_rm.errors import ConfigError

Value = TypeVar("Value")

# A forward changes its model for a while, so executors of one model must not run at the same time.
_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOST: WeakSet[nn.Module] = WeakSet()  # models that another thread was using when this process was forked


def call_then_undo(call: Callable[[], Value], undo: Callable[[], None]) -> Value:
    """Return `call()`, and call `undo` after it; twice if an exception comes, which may have ended the first `undo`."""
    try:
        try:
            return call()
        finally:
            undo()
    except BaseException as error:
        if not isinstance(error, Exception):
            traceback.clear_frames(error.__traceback__)  # ends what torch left half open, which else ends after `undo`
        undo()
        raise


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


def evaluate(
    models: Sequence[PreTrainedModel],
    call: Callable[[], Value],
    *,
    rows: TorchFunctionMode | None = None,
    inference: bool = True,
) -> Value:
    """Return `call()`, with the models locked, and without dropout and autocast.

    Args:
        models: the models that are called.
        call: function that runs them.
        rows: mode of torch's functions, such as `BatchInvariant`.
        inference: whether torch is in inference mode.
    """
    parts = [part for model in models for part in model.modules()]
    device = device_of(models[0]).type
    first, second = locks_of(models)
    with first, second:  # written in C, so that no interrupt comes between the lock and its release
        training = [part for part in parts if part.training]
        configs = {
            id(config): config for part in parts if isinstance(config := vars(part).get("config"), PreTrainedConfig)
        }
        attention = [(config, config._attn_implementation) for config in configs.values()]
        autocast = torch.is_autocast_enabled(device)
        modes = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
        tables = [each for part in parts for each in (part._parameters, part._forward_hooks, part._forward_pre_hooks)]
        contents = [dict(each) for each in tables]
        without_gradients = torch.inference_mode()
        finished = []
        enters = inference and not torch.is_inference_mode_enabled()

        def changed() -> Value:
            for part in training:
                part.training = False
            torch.set_autocast_enabled(device, False)
            if enters:
                without_gradients.__enter__()
            if rows is not None:
                torch._C._push_on_torch_function_stack(rows)
            value = call()
            finished.append(True)
            return value

        def restore() -> None:
            while torch._C._len_torch_function_stack():  # torch itself can lose some when it is interrupted
                torch._C._pop_torch_function_stack()
            for mode in modes:
                torch._C._push_on_torch_function_stack(mode)
            if enters and torch.is_inference_mode_enabled():
                without_gradients.__exit__(None, None, None)
            torch.set_autocast_enabled(device, autocast)
            for part in training:
                part.training = True
            for config, implementation in attention:
                if config._attn_implementation != implementation:  # of trees
                    config._attn_implementation = implementation
            for table, before in zip(tables, contents, strict=True) if not finished else ():
                table.update(before)
                for key in table.keys() - before.keys():
                    table.pop(key, None)

        return call_then_undo(changed, restore)


def _after_fork() -> None:
    """Note the models that another thread was using: in this process, it never ends."""
    for model, lock in list(_LOCKS.items()):
        if lock.acquire(blocking=False):
            lock.release()
        else:
            _LOST.add(model)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
