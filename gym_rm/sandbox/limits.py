"""What may a run use?"""

from __future__ import annotations

import pydantic

from gym_rm.config import Config, Finite, PositiveInt

MEBIBYTE = 1 << 20


class SandboxLimits(Config):
    """Limits of one sandboxed interpreter, from its start to its end. No run may start processes or write files.

    >>> SandboxLimits(wall_seconds=2.0).memory_bytes
    536870912
    """

    wall_seconds: Finite = pydantic.Field(default=5.0, ge=0.001)
    """Default time of one `execute` or `call`; the other limits hold for the whole session."""
    cpu_seconds: PositiveInt = 5
    """Processor time of the session."""
    memory_bytes: PositiveInt = pydantic.Field(default=512 * MEBIBYTE, ge=64 * MEBIBYTE)
    """Address space."""
    open_files: PositiveInt = pydantic.Field(default=64, ge=16)
    """Most file descriptors."""
    output_bytes: PositiveInt = 64 * 1024
    """What one request may print."""
    reply_bytes: PositiveInt = 4 * MEBIBYTE
    """One encoded value in either direction."""
