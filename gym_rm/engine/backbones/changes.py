"""Detect that a model changed since values were computed from it, so that caches are not used with other weights."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

PLAIN = (int, float, str, bool, type(None))
NOT_SETTINGS = frozenset(vars(nn.Module())) | {"_attn_implementation_internal", "max_seq_len_cached"}


class ChangeCounter:
    """Counts changes of models between calls: of weights, modules and hooks.

    In-place operations on a tensor change its version, which torch counts. Torch does not count writes through
    `tensor.data`, as in some optimizers; they are noticed by one number of each tensor. So a write through `.data`
    to a part of a tensor can be missed. Of other attributes, plain values count, such as the scale of an adapter.

    Example:
        >>> model, counter = torch.nn.Linear(2, 1), ChangeCounter()
        >>> before = counter.count([model])
        >>> counter.count([model]) == before
        True
        >>> _ = model.weight.data.add_(1)
        >>> counter.count([model]) == before
        False
    """

    def __init__(self) -> None:
        self._count = 0
        self._tensors: list[weakref.ref[Tensor]] = []  # weak, because an id may be used again after a tensor is freed
        self._state: tuple[Any, ...] = ()

    def count(self, models: Sequence[nn.Module]) -> int:
        """Return the number of calls that found a change since the call before."""
        tensors = [tensor for model in models for tensor in itertools.chain(model.parameters(), model.buffers())]
        state = (
            [_code(module) for model in models for module in model.modules()],
            [_plain(vars(config)) for config in _configs(models)],
            [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors],
            _samples(tensors),
        )
        same = state == self._state and all(old() is tensor for old, tensor in zip(self._tensors, tensors, strict=True))
        if not same:
            self._count += 1
            self._tensors, self._state = [weakref.ref(tensor) for tensor in tensors], state
        return self._count


def _code(module: nn.Module) -> tuple[Any, ...]:
    """Return what the module runs: its forward, the numbers of its hooks, and its settings."""
    own = vars(module).get("forward", type(module).forward)
    return (own, *module._forward_hooks, None, *module._forward_pre_hooks, _plain(vars(module)))


def _configs(models: Sequence[nn.Module]) -> list[Any]:
    found = (vars(module).get("config") for model in models for module in model.modules())
    return list({id(config): config for config in found if hasattr(config, "__dict__")}.values())


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes with plain values, without those that torch and a forward change."""
    return {
        name: copy.copy(value)
        for name, value in attributes.items()
        if name not in NOT_SETTINGS
        and (
            isinstance(value, PLAIN)
            or (isinstance(value, list | tuple | set) and all(isinstance(each, PLAIN) for each in value))
            or (isinstance(value, dict) and all(isinstance(each, PLAIN) for each in value.values()))
        )
    }


def _samples(tensors: Sequence[Tensor]) -> list[bytes]:
    """Return the number in the middle of each tensor; one copy from each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            middle = local.detach().reshape(-1)[local.numel() // 2 :][:1]
            by_device.setdefault(tensor.device, []).append(middle.view(torch.uint8))
    return [torch.cat(samples).cpu().numpy().tobytes() for samples in by_device.values()]
