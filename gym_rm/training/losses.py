"""Losses for training reward models."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: Tensor | float | None = None) -> Tensor:
    """Return the mean of `-log sigmoid(chosen - rejected - margin)`.

    Sources: Bradley and Terry (1952); the margin is from Llama 2 (arXiv 2307.09288). The loss uses `logsigmoid` in
    float32 or float64, so that loss and gradient are finite for every finite difference.

    Args:
        chosen: rewards of the preferred replies `[P]`.
        rejected: rewards of the rejected replies `[P]`.
        margin: minimum difference between the rewards of a pair, `[P]` or one number for all pairs.

    Returns:
        The loss, a scalar.

    Example:
        >>> import torch
        >>> loss = bradley_terry(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 0.0]))
        >>> round(loss.item(), 4)
        0.41
    """
    difference = _at_least_float32(chosen) - _at_least_float32(rejected)
    if margin is not None:
        difference = difference - margin
    return -F.logsigmoid(difference).mean()


def _at_least_float32(values: Tensor) -> Tensor:
    return values.float() if values.element_size() < 4 else values
