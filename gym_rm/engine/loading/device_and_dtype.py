"""Devices and precisions by name."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from gym_rm.errors import ConfigError, nearest

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_device(device: str | torch.device) -> torch.device:
    """Return a device by name; `"auto"` is the GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N'; got {device!r}.") from error
    if resolved.type == "meta":
        raise ConfigError("device must be 'auto', 'cpu', 'cuda' or 'cuda:N'; got 'meta', which holds no weights.")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r} needs a GPU, but torch finds none; pass device='cpu' or 'auto'.")
    return resolved


def resolve_dtype(dtype: str | torch.dtype, device: torch.device, config: PreTrainedConfig) -> torch.dtype:
    """Return a precision by name; `"auto"` is the checkpoint's own on a GPU, and float32 on other devices."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        own = getattr(config, "dtype", None) or torch.float32
        return own if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        hint = nearest(str(dtype), DTYPES)
        raise ConfigError(f"dtype must be 'auto' or one of {sorted(DTYPES)}; got {dtype!r}.{hint}")
    return DTYPES[dtype]
