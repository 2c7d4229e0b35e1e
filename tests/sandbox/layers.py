"""Layers of the sandbox that this machine has."""

from __future__ import annotations

import functools

from gym_rm.errors import ConfigError
from gym_rm.sandbox import Sandbox

LAYERS = ("bubblewrap", "landlock")


@functools.cache
def available() -> tuple[str, ...]:
    """Return the layers that work here."""
    found = []
    for layer in LAYERS:
        try:
            with Sandbox(layer=layer, num_workers=1) as sandbox:
                found.append(sandbox.layer)
        except ConfigError:
            continue
    return tuple(found)
