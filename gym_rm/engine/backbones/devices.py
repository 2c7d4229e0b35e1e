"""Devices of models and arrays."""

from __future__ import annotations

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
