"""Where the time of a step goes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class PhaseTimer:
    """Seconds of the phases of a step, which add up to its time, and of what ran meanwhile and cost nothing.

    Example:
        >>> timer = PhaseTimer()
        >>> with timer.measure("generate", hides="score"):
        ...     pass
        >>> sorted(timer.take())
        ['generate', 'score_hidden']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, phase: str, *, hides: str | None = None) -> Iterator[None]:
        """Add the seconds of a block to a phase, and to what it hides, which runs at the same time."""
        started = time.perf_counter()
        yield
        self.add(time.perf_counter() - started, phase, *([f"{hides}_hidden"] if hides else []))

    def add(self, seconds: float, *phases: str) -> None:
        """Add seconds to phases."""
        for phase in phases:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds
