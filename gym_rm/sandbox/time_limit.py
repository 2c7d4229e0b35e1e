"""How long may a run take?"""

from __future__ import annotations

import random
import time

from gym_rm.sandbox.child import Child

PATIENCE = 60.0
SAMPLES = 100


class TimeLimit:
    """Time of one request or of several: what their processes use of a processor, and how long they sleep.

    A process that waits for a processor of a busy machine, for a disk, or that is stopped uses no time: it is given up
    only after a minute and five times the limit, which says nothing about its code.

    Sleep is measured by samples at random moments, about 100 until the limit, in which no thread was running. Code can
    choose its sleep, but not the moments.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.used = 0.0
        self.given_up_at = time.monotonic() + PATIENCE + 5 * seconds
        self._interval = seconds / SAMPLES
        self._random = random.Random()
        self._phase = self._random.random()
        self.until_sample = self._interval * self._phase

    @property
    def is_over(self) -> bool:
        """Whether the processes have used all of it."""
        return self.used >= self.seconds

    @property
    def is_given_up(self) -> bool:
        """Whether the machine did not give the processes this time."""
        return time.monotonic() >= self.given_up_at

    def waited(self, seconds: float, child: Child) -> None:
        """Count seconds of waiting for a process, and look at it when a sample is due."""
        self.until_sample -= min(seconds, self.until_sample)  # more if this process was stopped itself
        if self.until_sample <= 0:
            self.used += self._interval if child.is_asleep() else 0.0
            before, self._phase = self._phase, self._random.random()
            self.until_sample = self._interval * (1 - before + self._phase)
