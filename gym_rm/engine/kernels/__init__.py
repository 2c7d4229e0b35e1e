"""Kernels in Triton for CUDA: attention along the paths of a token tree, and a layer's elementwise operations.

Each adds the numbers of a row in an order that its size alone determines, so a row's bits do not depend on the others.
Launches are operations of torch, so that fake tensors, profilers and dispatch modes see them. Only files of this folder
import Triton.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

LIBRARY: Any = torch.library.Library("gym_rm", "DEF")  # type: ignore[no-untyped-call]


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels can run on a device, and are exact enough for a precision."""
    there = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return there and dtype in (torch.float32, torch.bfloat16, torch.float16)


def operation(signature: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a function, which writes into some of its arguments, an operation of torch."""
    name = LIBRARY.define(f"{signature} -> ()")

    def register(function: Callable[..., None]) -> Callable[..., None]:
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"gym_rm::{name}", lambda *args: None, lib=LIBRARY)
        launch: Callable[..., None] = getattr(torch.ops.gym_rm, name).default
        return launch

    return register
