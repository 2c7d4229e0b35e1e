"""Rotary embeddings of type `dynamic`, whose frequencies change once a text exceeds the original context.

transformers keeps the frequencies of the longest text in the module. Without a reset, a score depends on earlier texts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn


def dynamic_rotaries(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules whose frequencies depend on the longest text so far."""
    parts = (part for model in models for part in model.modules())
    return [part for part in parts if "dynamic" in str(getattr(part, "rope_type", ""))]


def forget_lengths(rotaries: Sequence[nn.Module]) -> None:
    """Reset the frequencies to those of the original context, so that each forward computes its own."""
    for module in rotaries:
        for name in [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]:
            prefix = name.removesuffix("inv_freq")
            if not prefix.endswith("original_"):
                original = getattr(module, f"{prefix}original_inv_freq")
                module.register_buffer(name, original.to(getattr(module, name).device), persistent=False)
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


@contextlib.contextmanager
def lengths_restored(rotaries: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the frequencies of the modules on exit: a model that was passed in is unchanged after a call."""
    buffers = [(part, name, buffer) for part in rotaries for name, buffer in part.named_buffers(recurse=False)]
    lengths = [(part, name, vars(part)[name]) for part in rotaries for name in vars(part) if name.endswith("_cached")]
    try:
        yield
    finally:
        for part, name, buffer in buffers:
            part.register_buffer(name, buffer, persistent=False)
        for part, name, length in lengths:
            setattr(part, name, length)
