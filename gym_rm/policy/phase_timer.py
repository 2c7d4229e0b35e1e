"""How long the phases of a step take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class PhaseTimer:
    """Seconds of each phase since they were read.

    Example:
        >>> timer = PhaseTimer()
        >>> with timer.measure("update"):
        ...     pass
        >>> list(timer.take())
        ['update']
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the seconds of a block to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds
