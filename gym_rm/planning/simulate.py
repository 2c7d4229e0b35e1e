"""Simulation of a job at scale: generation, scoring and updates with stragglers, failures and restarts.

Event by event: every batch of every replica (its start, end, lease and repetition), every failure of a GPU, every
detection and restart, every update and checkpoint, and the barriers between phases.
By formula: what happens within a batch. A replica that generates runs rounds; each gives one token to every running
reply, and a reply that ends makes room for the next. In rounds this is list scheduling, whatever a round costs. So with
rounds that cost `round_seconds + token_seconds * running + context_seconds * tokens in the cache`, the seconds of a
batch are exactly `round_seconds * (rounds until the last reply ends) + token_seconds * (tokens) + context_seconds *
(sum over replies of prompt * length + length ** 2 / 2)`, without events for tokens. Batches of a phase that no failure
disturbs are not put in the queue of events one by one; their times are the same.
Not simulated: the network, replicas that hang instead of dying, and pauses before replicas that keep dying start again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gym_rm.planning.simulation.batches import Batches, Counts, FailureTimes
from gym_rm.planning.simulation.of_plan import simulation_of as simulation_of
from gym_rm.planning.simulation.records import (
    Failures,
    Generation,
    PoolResult,
    Scoring,
    SimulatedPool,
    Simulation,
    SimulationResult,
    Training,
    gpus_of,
    group_sizes,
)
from gym_rm.planning.simulation.replicas import ReplicaEvents
from gym_rm.planning.simulation.training import TrainingEvents
from gym_rm.planning.simulation.work import (
    StepLengths,
    generation_batches,
    lengths_of,
    scoring_batches,
    slowness,
)

MOST_DEATHS = 2  # deaths after which the rows of a scored batch run alone, as in the real pool
NONE_FAIL = Failures()


@dataclass(frozen=True, slots=True)
class BatchesResult:
    """What came of single batches.

    Attributes:
        seconds: time until the last result.
        counts: what happened.
        results: time and rows of each result.
    """

    seconds: float
    counts: Counts
    results: tuple[tuple[float, tuple[int, ...]], ...] = field(repr=False)


def simulate(simulation: Simulation) -> SimulationResult:
    """Simulate a job. The same inputs give the same result.

    Raises:
        ConfigError: training fails faster than it comes from one checkpoint to the next.

    Example:
        >>> from gym_rm.planning.workload.lengths import constant
        >>> pool = SimulatedPool("rm", Scoring(token_seconds=1e-4, max_num_batched_tokens=1000), num_replicas=4)
        >>> job = Simulation((pool,), 800, 80, replies=constant(90), prompts=constant(10))
        >>> round(simulate(job).seconds, 6)
        2.0
    """
    return _Job(simulation).run()


def simulate_batches(
    pool: SimulatedPool,
    batches: Sequence[tuple[int, float]],
    *,
    kills: Sequence[tuple[float, int]] = (),
    failures: Failures = NONE_FAIL,
    seed: int = 0,
) -> BatchesResult:
    """Simulate one call of a pool that scores.

    Args:
        pool: the pool; the seconds of its `work` are not used.
        batches: rows and seconds of each batch, alone on a replica of usual speed.
        kills: seconds after the start, and the replica that dies then.
        failures: further failures, and the time until a death is noticed.
        seed: of the draws.
    """
    random = np.random.default_rng([seed, 0])
    times = FailureTimes(failures.gpu_hours * 3600, pool.num_gpus, np.random.default_rng([seed, 1]))
    events = events_of(pool, failures, times, random, kills=kills, keep_history=True)
    factors = slowness(pool.stragglers, len(batches), random)
    first = np.cumsum([0] + [rows for rows, _ in batches])
    events.run(Batches(first, factors * [seconds for _, seconds in batches]))
    history = tuple((at, tuple(int(row) for row in rows)) for at, rows in events.history or ())
    return BatchesResult(events.now, events.counts, history)


def checkpoint_interval(checkpoint_seconds: float, failure_seconds: float) -> float:
    """Return the seconds of training between checkpoints that lose the least: sqrt(2 C M).

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974. The share of time that
    is then lost is about `C / interval + (interval / 2 + restart) / M`.

    Args:
        checkpoint_seconds: C, time of a checkpoint.
        failure_seconds: M, mean time between failures of the job: `gpu_hours * 3600 / GPUs`.
    """
    return math.sqrt(2 * checkpoint_seconds * failure_seconds)


def events_of(
    pool: SimulatedPool,
    failures: Failures,
    times: FailureTimes,
    random: np.random.Generator,
    *,
    kills: Sequence[tuple[float, int]] = (),
    keep_history: bool = False,
) -> ReplicaEvents:
    """Return the replicas of a pool; draws which of them are slow."""
    slow = random.random(pool.num_replicas) < pool.stragglers.share
    return ReplicaEvents(
        speeds=np.where(slow, pool.stragglers.factor, 1.0).tolist(),
        gpus_per_replica=pool.gpus_per_replica,
        failures=times,
        kills=kills,
        detection_seconds=failures.detection_seconds,
        load_seconds=pool.load_seconds,
        cores=pool.cores,
        others=pool.others,
        load_computes=pool.load_computes,
        lease_seconds=pool.lease_seconds,
        max_restarts=pool.max_restarts,
        most_deaths=None if isinstance(pool.work, Generation) else MOST_DEATHS,
        keep_history=keep_history,
    )


class _Job:
    """The pools of a job and the barriers between its phases."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        seed, failures = simulation.seed, simulation.failures
        times = {
            name: FailureTimes(failures.gpu_hours * 3600, size, np.random.default_rng([seed, 1, i]))
            for i, (name, size) in enumerate(group_sizes(simulation).items())
        }
        self._training: TrainingEvents | None = None
        self._stages: list[tuple[int, SimulatedPool, ReplicaEvents]] = []
        for i, pool in enumerate(simulation.pools):
            if isinstance(pool.work, Training):
                self._training = TrainingEvents(pool, failures, times[gpus_of(pool)], [seed, 3, i])
            else:
                random = np.random.default_rng([seed, 3, i])
                self._stages.append((i, pool, events_of(pool, failures, times[gpus_of(pool)], random)))

    def run(self) -> SimulationResult:
        """Run all steps."""
        simulation, training = self._simulation, self._training
        lag = 2 if simulation.asynchronous else 1  # steps between a generation and the update that it waits for
        ends: list[float] = []
        resume, repeated = 0.0, 0
        while (step := len(ends)) < simulation.num_steps:
            start = max(resume, ends[step - lag] if step >= lag else 0.0)
            until = math.inf if training is None else training.deadline(step)
            end = self._step(step, start, until)
            if end is not None:
                ends.append(end)
            else:
                assert training is not None
                repeated += step - training.saved
                resume = training.roll_back()
                del ends[training.saved :]
        return self._result(ends, repeated)

    def _step(self, step: int, start: float, until: float) -> float | None:
        """Run a step; return its end, or None if training fails before, which then loses steps."""
        training = self._training
        by_length = self._stages or (training is not None and training.work.token_seconds)
        lengths = lengths_of(self._simulation, step) if by_length else None
        end: float | None = start
        if lengths is not None:
            end = self._phases(step, start, until, lengths)
        if end is not None and training is not None:
            tokens = 0.0 if lengths is None else float(lengths.replies.sum() + lengths.prompts.sum())
            end = training.update(step, end, tokens, until)
        return end

    def _phases(self, step: int, start: float, until: float, lengths: StepLengths) -> float | None:
        """Generate and score; return the end, or None if it is not before `until`."""
        end = self._phase(Generation, step, start + self._simulation.overhead_seconds, until, lengths)
        if end is not None:
            end = self._phase(Scoring, step, end, until, lengths)
        return end

    def _phase(self, kind: type, step: int, start: float, until: float, lengths: StepLengths) -> float | None:
        """Run the pools of one kind, those that share GPUs one after the other; return the end."""
        free: dict[str, float] = {}
        for i, pool, events in self._stages:
            if not isinstance(pool.work, kind):
                continue
            begin = max(free.get(gpus_of(pool), start), events.now)
            if begin >= until or not events.run(self._batches(i, pool, step, lengths), begin, until):
                return None
            free[gpus_of(pool)] = events.now
        return max([start, *free.values()])

    def _batches(self, number: int, pool: SimulatedPool, step: int, lengths: StepLengths) -> Batches:
        random = np.random.default_rng([self._simulation.seed, 4, number, step])
        if isinstance(pool.work, Generation):
            factors = slowness(pool.stragglers, pool.num_replicas, random)
            return generation_batches(pool.work, lengths, pool.num_replicas, factors)
        assert isinstance(pool.work, Scoring)
        return scoring_batches(pool.work, lengths, pool.num_replicas, pool.stragglers, random)

    def _result(self, ends: list[float], repeated: int) -> SimulationResult:
        simulation, training, seconds = self._simulation, self._training, ends[-1]
        pools: list[PoolResult] = []
        lost: list[tuple[str, float]] = []
        events = 0
        used: dict[str, list[tuple[float, float]]] = {}  # busy and down GPUs of each pool, by the name of its GPUs
        for _, pool, each in self._stages:
            counts, total = each.counts, seconds * pool.num_replicas
            busy, down, redone = counts.busy / total, counts.down / total, counts.redone / total
            scored, errors, restarts = counts.scored, counts.errors, counts.restarts
            pools.append(PoolResult(pool.name, busy, down, redone, scored, errors, restarts))
            part = pool.num_gpus / simulation.num_gpus
            lost += [(f"{pool.name}: replicas down", down * part), (f"{pool.name}: work done again", redone * part)]
            used.setdefault(gpus_of(pool), []).append((busy * pool.num_gpus, down * pool.num_gpus))
            events += each.num_events
        if training is not None:
            pool = training.pool
            busy, down, redone = training.busy / seconds, training.down / seconds, training.redone / seconds
            pools.append(PoolResult(pool.name, busy, down, redone, 0, 0, training.restarts))
            lost += [(f"{pool.name}: restarts", down), (f"{pool.name}: work done again", redone)]
            lost += [(f"{pool.name}: checkpoints", training.checkpoints / seconds)]
            lost += [("steps done again", training.repeated / seconds)]
            busy += training.checkpoints / seconds
            used.setdefault(gpus_of(pool), []).append((busy * pool.num_gpus, down * pool.num_gpus))
            events += len(ends) + repeated + training.restarts
        taken = sum(sum(busy for busy, _ in group) + max(down for _, down in group) for group in used.values())
        return SimulationResult(
            seconds=seconds,
            conversations=len(ends) * simulation.conversations_per_step,
            step_seconds=tuple(np.diff([0.0, *ends]).tolist()),
            pools=tuple(pools),
            idle_share=max(0.0, 1.0 - taken / simulation.num_gpus),
            lost=tuple(lost),
            repeated_steps=repeated,
            events=events,
        )
