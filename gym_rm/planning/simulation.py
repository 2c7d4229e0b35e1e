"""A job of many steps with the phases of a plan, event by event: slow GPUs, GPUs that fail, restarts, checkpoints.

Each replica works on one batch at a time. If one of its GPUs fails, the batch goes to the next free replica, and the
replica works again after the failure was noticed and its weights were loaded. If a GPU of a model that trains fails,
the job returns to its last checkpoint. Not simulated: the network, replicas that hang instead of dying, and how the
lengths of replies differ from step to step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pydantic import Field

from gym_rm.config import Config, Finite, NonNegativeInt, PositiveInt
from gym_rm.errors import ConfigError
from gym_rm.planning.plan import Phase, PhaseTime, Plan, PoolPlan

LLAMA_3_HOURS = 54 * 24 * 16_384 / 419
"""GPU hours per unexpected interruption in Meta's training of Llama 3 405B: 419 in 54 days on 16,384 H100 GPUs
(arXiv 2407.21783, section 3.3.4)."""
MOST_TRIES = 10_000  # failures from one checkpoint to the next before the simulation gives up


class SimulationSettings(Config):
    """How a job is simulated."""

    num_steps: PositiveInt = 1000
    """Steps of the job."""
    gpu_hours: Finite | None = Field(default=LLAMA_3_HOURS, gt=0)
    """Mean hours between failures of one GPU, which come at random (exponential), by default as in Meta's training of
    Llama 3; null for no failures."""
    detection_seconds: Finite = Field(default=30.0, ge=0)
    """Time until a failure is noticed."""
    load_seconds: Finite | None = Field(default=None, ge=0)
    """Time from then until the replica, or the training, works again; null for the plan's."""
    checkpoint_seconds: Finite = Field(default=10.0, ge=0)
    """Time for which a checkpoint stops training."""
    checkpoint_every: PositiveInt | None = None
    """Steps between checkpoints; null for the number that loses the least, by Young's formula."""
    slow_share: Finite = Field(default=0.0, ge=0, le=1)
    """Share of the GPUs that are slow for the whole job. A replica is as slow as its slowest GPU."""
    slow_factor: Finite = Field(default=1.2, ge=1)
    """Times as long as usual that a slow GPU takes."""
    spread: Finite = Field(default=0.05, ge=0)
    """Standard deviation of the logarithm of a factor, of mean 1, that is drawn for each batch."""
    seed: NonNegativeInt = 0
    """All draws depend on it."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What came of a job.

    Attributes:
        step_seconds: time between the ends of steps, with repetitions and waits.
        conversations: conversations of all steps, each once.
        idle_share: share of the time of the plan's GPUs in which they neither compute nor are down.
        redone_share: share of the GPUs' time that computed what was lost with a replica.
        down_share: share of the GPUs' time from a failure to the end of its restart.
        checkpoint_share: share of the time in which training writes checkpoints.
        failures: failures that met the job.
        repeated_steps: steps that were done again from a checkpoint.
        checkpoint_every: steps between checkpoints.
    """

    step_seconds: tuple[float, ...]
    conversations: int
    idle_share: float
    redone_share: float
    down_share: float
    checkpoint_share: float
    failures: int
    repeated_steps: int
    checkpoint_every: int

    @property
    def seconds(self) -> float:
        """Time of all steps."""
        return sum(self.step_seconds)

    @property
    def conversations_per_second(self) -> float:
        """Conversations per second."""
        return self.conversations / self.seconds

    def step_quantile(self, share: float) -> float:
        """Return the time that this share of the steps does not exceed."""
        return float(np.quantile(self.step_seconds, share))


def simulate(plan: Plan, settings: SimulationSettings | None = None) -> SimulationResult:
    """Simulate a job of the plan's steps. The same settings give the same result.

    Raises:
        ConfigError: training fails faster than it comes from one checkpoint to the next.
    """
    return _Job(plan, settings or SimulationSettings()).run()


class _Pool:
    """GPUs that work together: their replicas' events, and the failures of the GPUs in the order of time."""

    def __init__(self, pool: PoolPlan, settings: SimulationSettings, restart_seconds: float, number: int) -> None:
        self.size = len(pool.gpus)
        self.trains = any(component.role.trains for component in pool.components)
        self.free = 0.0  # time at which the last stage ended
        self.busy = self.redone = self.down = 0.0  # GPU seconds
        self.failures = 0
        self._restart_seconds = restart_seconds
        self._ready = np.zeros(self.size)  # time at which each GPU works again
        random = np.random.default_rng([settings.seed, number])
        self.factors = np.where(random.random(self.size) < settings.slow_share, settings.slow_factor, 1.0)
        self._failures = _failure_times(settings.gpu_hours, self.size, random)
        self.next_failure, self._failed = next(self._failures)

    def fail(self, waiting: int) -> float:
        """Take the next failure, for which so many GPUs wait; return when its GPU works again."""
        failed = self.next_failure
        ready = failed + self._restart_seconds
        self.down += waiting * (ready - max(failed, self._ready[self._failed]))
        self.failures += 1
        self._ready[self._failed] = ready
        self.next_failure, self._failed = next(self._failures)
        return ready

    def run(self, batches: list[float], gpus: int, start: float, until: float) -> bool:
        """Run batches on replicas of so many GPUs from `start` on; return False if they do not end before `until`.

        Args:
            batches: seconds of each at the usual speed.
            gpus: GPUs of a replica.
            start: time at which the first batch may begin.
            until: time at which everything is abandoned.
        """
        while not self.trains and self.next_failure <= start:
            self.fail(gpus)
        count = self.size // gpus
        ready = np.maximum(self._ready.reshape(count, gpus).max(axis=1), start).tolist()
        factors = self.factors.reshape(count, gpus).max(axis=1).tolist()
        events = [(at, replica, 0) for replica, at in enumerate(ready)]  # a replica is free; void after another life
        heapq.heapify(events)
        lives, left = [0] * count, len(batches)
        idle: list[int] = []
        waiting = batches[::-1]
        running: dict[int, tuple[float, float]] = {}  # when the replica began, and seconds of its batch
        now = start
        while left:
            failure = math.inf if self.trains else self.next_failure
            now = min(failure, events[0][0]) if events else failure
            if now >= until:
                self.busy += gpus * sum(max(0.0, until - began) for began, _ in running.values())
                self.free = until
                return False
            if failure <= now:
                replica = self._failed // gpus
                back = self.fail(gpus)
                lives[replica] += 1
                heapq.heappush(events, (back, replica, lives[replica]))
                if replica in idle:
                    idle.remove(replica)
                if replica in running:
                    began, seconds = running.pop(replica)
                    self.busy += gpus * (now - began)
                    self.redone += gpus * (now - began)
                    waiting.append(seconds)
            else:
                _, replica, life = heapq.heappop(events)
                if life != lives[replica]:
                    continue
                if replica in running:
                    self.busy += gpus * (now - running.pop(replica)[0])
                    left -= 1
                idle.append(replica)
            while waiting and idle:
                replica, seconds = idle.pop(), waiting.pop()
                running[replica] = now, seconds
                heapq.heappush(events, (now + seconds * factors[replica], replica, lives[replica]))
        self.free = now
        return True


def _failure_times(gpu_hours: float | None, num_gpus: int, random: np.random.Generator) -> Iterator[tuple[float, int]]:
    """Yield the time and the GPU of each failure: a Poisson process."""
    time = 0.0
    while gpu_hours is not None:
        pauses = random.exponential(gpu_hours * 3600 / num_gpus, 256).tolist()
        for pause, gpu in zip(pauses, random.integers(num_gpus, size=256).tolist(), strict=True):
            time += pause
            yield time, gpu
    while True:
        yield math.inf, 0


class _Job:
    """The stages of the steps in their order, and the returns to a checkpoint."""

    def __init__(self, plan: Plan, settings: SimulationSettings) -> None:
        self._plan, self._settings = plan, settings
        load_seconds = plan.load_seconds if settings.load_seconds is None else settings.load_seconds
        restart_seconds = settings.detection_seconds + load_seconds
        self._pools = {
            pool.name: _Pool(pool, settings, restart_seconds, number) for number, pool in enumerate(plan.pools)
        }
        self._trainers = [pool for pool in self._pools.values() if pool.trains]
        phases = dict(plan.phase_seconds)
        # A step begins after the update so many steps before it: where phases overlap, each pool works on its own.
        self._lag = len(plan.pools) if plan.overlaps else 1
        self._overhead = phases.get(Phase.WAKE, 0.0) + phases.get(Phase.SYNC, 0.0)
        self._every = self._checkpoint_every()
        self._checkpoints = 0

    def run(self) -> SimulationResult:
        """Run all steps."""
        ends: list[float] = []
        resume, saved, repeated, tries = 0.0, 0, 0, 0
        while (step := len(ends)) < self._settings.num_steps:
            start = max(resume, ends[step - self._lag] if step >= self._lag else 0.0)
            failing = min(self._trainers, key=lambda pool: pool.next_failure, default=None)
            until = math.inf if failing is None else failing.next_failure
            end = self._step(step, start, until)
            if end is not None:
                ends.append(end)
                if self._trainers and len(ends) % self._every == 0:
                    saved, tries = len(ends), 0
                continue
            assert failing is not None, "only a failure of training abandons a step"
            resume, tries = failing.fail(failing.size), tries + 1
            repeated += step - saved
            del ends[saved:]
            if tries > MOST_TRIES:
                raise ConfigError(
                    f"training failed {MOST_TRIES} times without coming from one checkpoint to the next; make "
                    "checkpoint_every smaller, or gpu_hours larger."
                )
        return self._result(ends, repeated)

    def _step(self, step: int, start: float, until: float) -> float | None:
        """Run a step; return its end, or None if training fails before."""
        now = start + self._overhead
        for phase in (Phase.GENERATE, Phase.SCORE, Phase.UPDATE):
            end = now
            for number, time in enumerate(self._plan.times):
                if time.phase is phase and time.seconds > 0:
                    pool = self._pools[time.pool]
                    random = np.random.default_rng([self._settings.seed, step, number])
                    batches, gpus = self._batches(time, pool, random)
                    if not pool.run(batches, gpus, max(now, pool.free), until):
                        return None
                    end = max(end, pool.free)
            now = end
        if self._trainers and (step + 1) % self._every == 0:
            now += self._settings.checkpoint_seconds
            if now > until:
                return None
            self._checkpoints += 1
            for pool in self._trainers:
                pool.free = now
        return now

    def _batches(self, time: PhaseTime, pool: _Pool, random: np.random.Generator) -> tuple[list[float], int]:
        """Return the seconds of the batches of a stage, and the GPUs that work on each.

        A replica generates its share of the conversations at once, and scores as many batches as the token budget
        makes. Everything that trains waits for its slowest GPU.
        """
        component = self._plan.component(time.component)
        if time.phase is Phase.UPDATE:
            slowest = self._factors(pool.size, random).max() if self._settings.spread else 1.0
            return [time.seconds * float(slowest)], pool.size
        replicas, each = component.num_replicas, 1
        if time.phase is Phase.SCORE:
            each = max(1, math.ceil(self._plan.unique_tokens / replicas / component.max_num_batched_tokens))
        factors = self._factors(replicas * each, random)
        return (time.seconds / each * factors).tolist(), pool.size // replicas

    def _factors(self, count: int, random: np.random.Generator) -> npt.NDArray[np.float64]:
        spread = self._settings.spread
        return np.exp(spread * random.standard_normal(count) - spread**2 / 2)

    def _checkpoint_every(self) -> int:
        """Return the steps between checkpoints, by default by Young's formula (1974); Daly's (2006) agrees."""
        settings, gpus = self._settings, sum(pool.size for pool in self._trainers)
        if settings.checkpoint_every is not None:
            return settings.checkpoint_every
        if not gpus or settings.gpu_hours is None:
            return settings.num_steps + 1  # never
        interval = math.sqrt(2 * settings.checkpoint_seconds * settings.gpu_hours * 3600 / gpus)
        return max(1, round(interval / self._plan.step_seconds))

    def _result(self, ends: list[float], repeated: int) -> SimulationResult:
        seconds, gpus = ends[-1], self._plan.used_gpus
        pools, stored = self._pools.values(), self._checkpoints * self._settings.checkpoint_seconds
        down = sum(min(pool.down, seconds * pool.size) for pool in pools)
        used = sum(pool.busy for pool in pools) + down + stored * sum(pool.size for pool in self._trainers)
        return SimulationResult(
            step_seconds=tuple(np.diff([0.0, *ends]).tolist()),
            conversations=len(ends) * self._plan.conversations,
            idle_share=max(0.0, 1.0 - used / (seconds * gpus)),
            redone_share=sum(pool.redone for pool in pools) / (seconds * gpus),
            down_share=down / (seconds * gpus),
            checkpoint_share=stored / seconds,
            failures=sum(pool.failures for pool in self._pools.values()),
            repeated_steps=repeated,
            checkpoint_every=self._every,
        )
