"""What may a run use?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gym_rm.errors import ConfigError, nearest

MEBIBYTE = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of one sandboxed interpreter, from its start to its end.

    `wall_seconds` is the default time of one `execute` or `call`; the other limits hold for the whole session.
    `memory_bytes` is address space. `output_bytes` bounds what one request may print, `reply_bytes` one encoded value
    in either direction. No run may start processes or write files. Raises ConfigError for values that are too small.

    >>> SandboxLimits(wall_seconds=2.0).memory_bytes
    536870912
    """

    wall_seconds: float = 5.0
    cpu_seconds: int = 5
    memory_bytes: int = 512 * MEBIBYTE
    open_files: int = 64
    output_bytes: int = 64 * 1024
    reply_bytes: int = 4 * MEBIBYTE

    def __post_init__(self) -> None:
        lowest = {"wall_seconds": 0.001, "memory_bytes": 64 * MEBIBYTE, "open_files": 16}
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), lowest.get(field.name, 1)
            whole = field.name != "wall_seconds"
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not value >= least:
                kind = "a whole number" if whole else "a number"
                raise ConfigError(f"{field.name} of the sandbox must be {kind} of at least {least}, not {value!r}.")

    @classmethod
    def parse(cls, value: Mapping[str, Any] | SandboxLimits | None, **defaults: Any) -> SandboxLimits:
        """Return limits from some of their fields; the others have these defaults."""
        if isinstance(value, SandboxLimits):
            return value
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(value, Mapping | None):
            raise ConfigError(f"limits must be a dict with some of the fields {known}, got {value!r:.80}.")
        for name in value or {}:
            if name not in known:
                raise ConfigError(f"limits has no field {name!r}; expected some of {known}.{nearest(str(name), known)}")
        return cls(**{**defaults, **(value or {})})
