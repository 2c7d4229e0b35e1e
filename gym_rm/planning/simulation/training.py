"""The training of a simulated job: one group of ranks that fail and restart together, and its checkpoints."""

from __future__ import annotations

import math
import statistics

import numpy as np

from gym_rm.errors import ConfigError
from gym_rm.planning.simulation.batches import FailureTimes
from gym_rm.planning.simulation.records import Failures, SimulatedPool, Training

MOST_TRIES = 10_000  # failures from one checkpoint to the next before the simulation gives up


class TrainingEvents:
    """Updates, checkpoints and failures of training, in the order of time.

    Args:
        pool: the pool, whose work is `Training`.
        failures: time until a failure is noticed.
        times: failures of the GPUs.
        seed: of the draws.
    """

    def __init__(self, pool: SimulatedPool, failures: Failures, times: FailureTimes, seed: list[int]) -> None:
        assert isinstance(pool.work, Training)
        self.pool, self.work = pool, pool.work
        self.saved, self.saved_at = 0, 0.0  # steps in the last checkpoint, and its time
        self.busy = self.down = self.redone = self.checkpoints = self.repeated = 0.0
        self.restarts = 0
        self._restart_seconds = failures.detection_seconds + pool.load_seconds
        self._times, self._next = times, 0
        self._seed = seed
        slow = np.random.default_rng(seed).random(pool.num_replicas) < pool.stragglers.share
        self._speed = pool.stragglers.factor if slow.any() else 1.0
        self._ready = 0.0
        self._owed: list[float] = []  # updates since the last checkpoint
        self._tries = 0

    def deadline(self, step: int) -> float:
        """Return the time of the next failure if it takes finished steps with it, else infinity."""
        loses = self.saved < step and not self.work.keeps_rollouts
        return self._peek() if loses else math.inf

    def update(self, step: int, start: float, tokens: float, until: float) -> float | None:
        """Run the update of a step, and the checkpoint after it; return its end, or None if that is after `until`."""
        seconds = self._seconds(step, tokens)
        last = (step + 1) % self.work.checkpoint_every == 0
        total = seconds + (self.work.checkpoint_seconds if last else 0.0)
        now = max(start, self._ready)
        if now + total > until:
            return None
        again = 0.0
        while math.isinf(until) and self._peek() < now + again + total:
            began, now = now, max(start, self._fail())
            self.redone += max(0.0, self._ready - self._restart_seconds - began)
            self.busy += max(0.0, self._ready - self._restart_seconds - began)
            again = sum(self._owed)
        end = now + again + total
        self.redone += again
        self.busy += again + seconds
        self.checkpoints += total - seconds
        self._owed.append(seconds)
        if last:
            self.saved, self.saved_at, self._owed, self._tries = step + 1, end, [], 0
        return end

    def roll_back(self) -> float:
        """Lose all steps since the last checkpoint, and return the time when training is ready again."""
        self.repeated += max(0.0, self._peek() - max(self.saved_at, self._ready))
        self._owed = []
        return self._fail()

    def _peek(self) -> float:
        """Return the time of the next failure of a GPU of the pool."""
        while True:
            time, gpu = self._times[self._next]
            if gpu < self.pool.num_gpus:
                return time
            self._next += 1

    def _fail(self) -> float:
        """Take the next failure; return when training is ready again."""
        failed = self._peek()
        self.down += failed + self._restart_seconds - max(failed, self._ready)
        self._next += 1
        self.restarts += 1
        self._tries += 1
        self._ready = failed + self._restart_seconds
        if self._tries > MOST_TRIES:
            raise ConfigError(
                f"{self.pool.name}: training failed {MOST_TRIES} times without coming from one checkpoint to the next; "
                "make checkpoint_every smaller, or gpu_hours larger."
            )
        return self._ready

    def _seconds(self, step: int, tokens: float) -> float:
        """Return the seconds of an update: all ranks wait for the slowest of them."""
        spread = self.pool.stragglers.spread
        seconds = self._speed * (self.work.step_seconds + self.work.token_seconds * tokens)
        if spread == 0:
            return seconds
        largest = np.random.default_rng([*self._seed, step]).random() ** (1 / self.pool.num_replicas)
        return seconds * math.exp(spread * statistics.NormalDist().inv_cdf(largest) - spread**2 / 2)
