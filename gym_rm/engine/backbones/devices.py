"""Devices of models and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device of a model's inputs."""
    device: torch.device = next(model.parameters()).device
    return device


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Copy an array to the device; for a GPU through pinned memory, so that the host does not wait for the copy."""
    tensor = torch.from_numpy(array).contiguous()
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def pinned_like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of the same shapes and types in few blocks of pinned memory.

    The sizes of the blocks are powers of two, to which torch rounds up every pinned allocation.
    """
    space, left = torch.empty(0, dtype=torch.uint8), sum(tensor.nbytes for tensor in tensors)
    pinned = {}
    for tensor in sorted(tensors, key=lambda tensor: -tensor.nbytes):
        aligned = -(-tensor.nbytes // 64) * 64
        if aligned > len(space):
            size = 1 << max((aligned - 1).bit_length(), left.bit_length() - 1)
            space = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        pinned[id(tensor)] = space[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        space, left = space[aligned:], left - tensor.nbytes
    return [pinned[id(tensor)] for tensor in tensors]
