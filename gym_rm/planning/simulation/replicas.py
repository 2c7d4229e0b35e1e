"""Replicas of one pool, event by event: batches, leases, failures and restarts, by the rules of the real pool.

A batch is one event however many conversations it has. Replicas that compute at the same time share the capacity of
the machine: all of them advance on one clock of work, which runs at `min(1, cores / computing)` of real time.
"""

from __future__ import annotations

import bisect
import enum
import heapq
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from gym_rm.planning.simulation.batches import Batch, Batches, Counts, FailureTimes

GOOD_BATCHES = 16  # batches that restore one restart, as in the real pool
SLOW = 10.0  # a lease is at least this many times as long as the batch is expected to take, as in the real pool


class _State(enum.IntEnum):
    IDLE = 0
    WORKING = 1
    DEAD = 2  # until somebody notices
    LOADING = 3
    RESTING = 4  # no restart is left


class _Timer(enum.IntEnum):
    KILL = 0
    NOTICED = 1
    LOADED = 2
    EXPIRED = 3


class ReplicaEvents:
    """The replicas of a pool and their clock, which goes on from one `run` to the next.

    Args:
        speeds: seconds of a replica for one second of work at the usual speed: 1, more for stragglers.
        gpus_per_replica: GPU g of `failures` belongs to replica `g // gpus_per_replica`.
        failures: failures of the GPUs.
        kills: further deaths: time and replica.
        detection_seconds: time until a death is noticed.
        load_seconds: time from then until the replica works again.
        cores: replicas that can compute at the same time without slowing each other; None for all.
        others: other programs that take equal shares of the cores.
        load_computes: whether a replica that loads takes a share of the cores.
        lease_seconds: as `ParallelOptions.lease_seconds`; None without leases.
        max_restarts: as `ParallelOptions.max_restarts`; None for any number.
        most_deaths: deaths after which the rows of a batch run alone, and a single row gets an error; None for never.
        keep_history: whether `history` records when each batch got its result.
    """

    def __init__(
        self,
        *,
        speeds: Sequence[float],
        gpus_per_replica: int,
        failures: FailureTimes,
        kills: Iterable[tuple[float, int]] = (),
        detection_seconds: float,
        load_seconds: float,
        cores: float | None,
        others: float = 0.0,
        load_computes: bool,
        lease_seconds: float | None,
        max_restarts: int | None,
        most_deaths: int | None,
        keep_history: bool = False,
    ) -> None:
        count = len(speeds)
        self.now = 0.0
        self.counts = Counts()
        self.num_events = 0
        self.quick = True  # whether a run that nothing disturbs is computed at once
        self.history: list[tuple[float, Sequence[int]]] | None = [] if keep_history else None
        self._speeds = list(speeds)
        self._gpus_per_replica = gpus_per_replica
        self._failures, self._next_failure = failures, 0
        self._detection_seconds, self._load_seconds = detection_seconds, load_seconds
        self._cores, self._others, self._load_computes = cores, others, load_computes
        self._lease_seconds, self._most_deaths = lease_seconds, most_deaths
        self._most_restarts = self._restarts = math.inf if max_restarts is None else max_restarts * count
        self._clock = 0.0
        self._numbers = itertools.count()
        self._ends: list[tuple[float, int, int, int]] = []  # clock of work, number, replica, life
        self._timers: list[tuple[float, int, _Timer, int, int]] = []  # time, number, kind, replica, life
        self._watched: dict[int, Batch] = {}
        self._state = [_State.IDLE] * count
        self._life = [0] * count  # events of an earlier life of a replica are void
        self._probe = [False] * count
        self._task: list[Batch | None] = [None] * count
        self._began = [0.0] * count  # time, then clock of work, at the start of the batch
        self._began_clock = [0.0] * count
        self._done = [0.0] * count  # seconds of work on the batch of a replica that died
        self._idle = list(range(count))[::-1]
        self._pending: list[Batch] = []  # the largest last
        self._running: dict[int, Batch] = {}
        self._overdue: list[Batch] = []
        self._left = self._good = 0
        self._computing = self._working = self._down = 0
        self._rate = 1.0
        self._compute(0)
        for at, replica in kills:
            self._set_timer(at, _Timer.KILL, replica)

    def run(self, batches: Batches, start: float = 0.0, until: float = math.inf) -> bool:
        """Run batches from `start` on; return False if they were not finished before `until`, and are abandoned.

        `now` is then the end.
        """
        self.wait(start)
        if self.quick and self._run_undisturbed(batches, until):
            return True
        self._pending = sorted(batches.each(), key=_seconds)
        self._left = len(self._pending)
        self._overdue = []
        self._hand_out()
        if all(state is _State.RESTING for state in self._state):
            self._refuse()
        while self._left:
            if not self._step(until):
                self._abandon(until)
                return False
        return True

    def wait(self, until: float) -> None:
        """Let time pass without work; replicas fail and return."""
        while self._step(until):
            pass
        self._advance(max(until, self.now))

    def _run_undisturbed(self, batches: Batches, until: float) -> bool:
        """Run batches at once, as the events would, if nothing comes in between; else do nothing and return False."""
        count, replicas = len(batches.seconds), len(self._state)
        if len(self._idle) < replicas or any(self._probe) or self._cores or self._lease_seconds is not None:
            return False
        if self.history is not None or not math.isinf(self._most_restarts):
            return False
        largest_first = np.sort(batches.seconds)[::-1]
        order = np.asarray(self._idle[::-1][:count])
        speeds = np.asarray(self._speeds)
        first = self.now + largest_first[: len(order)] * speeds[order]
        busy = float((first - self.now).sum())
        running = list(zip(first.tolist(), range(len(order)), order.tolist(), strict=True))
        heapq.heapify(running)
        for number, seconds in enumerate(largest_first[len(order) :].tolist(), len(order)):
            end, _, replica = running[0]
            busy += seconds * self._speeds[replica]
            heapq.heapreplace(running, (end + seconds * self._speeds[replica], number, replica))
        running.sort()
        end = running[-1][0] if running else self.now
        timer = self._timers[0][0] if self._timers else math.inf
        if end >= min(until, timer, self._failures[self._next_failure][0]):
            return False
        self._idle = self._idle[: replicas - len(order)] + [replica for _, _, replica in running]
        self.counts.busy += busy
        self.counts.scored += int(batches.cuts[-1])
        self.num_events += count
        self._clock += end - self.now
        self.now = end
        return True

    # --- time ----------------------------------------------------------------------------------------------------

    def _step(self, until: float) -> bool:
        """Handle the next event, if it comes before `until`."""
        ends, timers = self._ends, self._timers
        while ends and self._life[ends[0][2]] != ends[0][3]:
            heapq.heappop(ends)
        end = self.now + max(0.0, ends[0][0] - self._clock) / self._rate if ends else math.inf
        timer = timers[0][0] if timers else math.inf
        failure, gpu = self._failures[self._next_failure]
        at = max(min(end, timer, failure), self.now)
        if at >= until or math.isinf(at):
            return False
        self._advance(at)
        self.num_events += 1
        if failure <= at:
            self._next_failure += 1
            replica = gpu // self._gpus_per_replica
            if replica < len(self._state):
                self._die(replica)
        elif timer <= at:
            _, number, kind, replica, life = heapq.heappop(timers)
            self._ring(kind, number, replica, life)
        else:
            self._clock, _, replica, _ = heapq.heappop(ends)
            if self._state[replica] is _State.LOADING:
                self._loaded(replica)
            else:
                self._finish(replica)
        return True

    def _advance(self, to: float) -> None:
        elapsed = to - self.now
        self.counts.busy += elapsed * self._working
        self.counts.down += elapsed * self._down
        self._clock += elapsed * self._rate
        self.now = to

    def _compute(self, more: int) -> None:
        self._computing += more
        if self._cores is not None:
            self._rate = min(1.0, self._cores / (max(self._computing, 1) + self._others))

    def _set_timer(self, at: float, kind: _Timer, replica: int, batch: Batch | None = None) -> None:
        number = next(self._numbers)
        if batch is not None:
            self._watched[number] = batch
        heapq.heappush(self._timers, (at, number, kind, replica, self._life[replica]))

    def _ring(self, kind: _Timer, number: int, replica: int, life: int) -> None:
        if kind is _Timer.KILL:
            self._die(replica)
        elif kind is _Timer.EXPIRED:
            self._expire(self._watched.pop(number))
        elif life == self._life[replica]:
            (self._notice if kind is _Timer.NOTICED else self._loaded)(replica)

    # --- batches -------------------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Give waiting batches to idle replicas: the largest first, the smallest to one that has just died."""
        while self._idle:
            replica = self._idle[-1]
            if self._pending:
                batch = self._pending.pop(0 if self._probe[replica] else -1)
            else:
                found = next((each for each in self._overdue if not each.done), None)
                if found is None:
                    break
                batch = found
                self._overdue.remove(batch)
            self._idle.pop()
            self._lease(batch, replica)
        if self._idle and not self._pending and self._lease_seconds is not None:
            for batch in self._running.values():
                if not batch.watched:
                    batch.watched = True
                    self._set_timer(max(batch.lease_ends, self.now), _Timer.EXPIRED, 0, batch)

    def _lease(self, batch: Batch, replica: int) -> None:
        self._state[replica] = _State.WORKING
        self._task[replica] = batch
        self._began[replica], self._began_clock[replica] = self.now, self._clock
        self._working += 1
        self._compute(1)
        end = self._clock + batch.seconds * self._speeds[replica]
        heapq.heappush(self._ends, (end, next(self._numbers), replica, self._life[replica]))
        batch.leases.append(replica)
        batch.lease_ends = self.now + max(self._lease_seconds or 0.0, SLOW * batch.seconds)
        batch.watched = False
        self._running[id(batch)] = batch

    def _expire(self, batch: Batch) -> None:
        """Offer a batch to other replicas, if all its leases are over."""
        batch.watched = False
        if not batch.done and id(batch) in self._running:
            if self.now >= batch.lease_ends:
                batch.watched = True
                self._overdue.append(batch)
            self._hand_out()

    def _finish(self, replica: int) -> None:
        batch = self._release(replica)
        if batch.done:
            self.counts.duplicates += 1
            self.counts.redone += self.now - self._began[replica]
        else:
            self._record(batch.rows)
            self._settle(batch)
        self._life[replica] += 1
        self._state[replica] = _State.IDLE
        self._probe[replica] = False
        self._idle.append(replica)
        self._good += 1
        if self._good % GOOD_BATCHES == 0 and self._restarts < self._most_restarts:
            self._restarts += 1
            self._wake_one()
        self._hand_out()

    def _release(self, replica: int) -> Batch:
        """Take a batch from a replica that computed it."""
        batch = self._task[replica]
        assert batch is not None
        self._task[replica] = None
        self._working -= 1
        self._compute(-1)
        self._drop_lease(batch, replica)
        return batch

    def _drop_lease(self, batch: Batch, replica: int) -> None:
        batch.leases.remove(replica)
        if not batch.leases:
            self._running.pop(id(batch), None)

    def _settle(self, batch: Batch) -> None:
        batch.done = True
        self._left -= 1

    def _record(self, rows: Sequence[int]) -> None:
        self.counts.scored += len(rows)
        if self.history is not None:
            self.history.append((self.now, rows))

    def _wait_again(self, batch: Batch) -> None:
        if batch in self._overdue:
            self._overdue.remove(batch)
        bisect.insort(self._pending, batch, key=_seconds)

    def _abandon(self, at: float) -> None:
        """Forget all batches; replicas that compute are idle at once."""
        self._advance(max(at, self.now))
        for replica, state in enumerate(self._state):
            if state is _State.WORKING:
                self.counts.redone += self.now - self._began[replica]
                self._release(replica).done = True
                self._life[replica] += 1
                self._state[replica] = _State.IDLE
                self._idle.append(replica)
            elif (batch := self._task[replica]) is not None:
                batch.done = True
        self._pending, self._overdue, self._left = [], [], 0

    # --- replicas ------------------------------------------------------------------------------------------------

    def _die(self, replica: int) -> None:
        state = self._state[replica]
        if state in (_State.DEAD, _State.RESTING):
            return
        self.counts.deaths += 1
        self._life[replica] += 1
        if state is _State.LOADING:
            self._compute(-self._load_computes)
        else:
            self._down += 1
        if state is _State.IDLE:
            self._idle.remove(replica)
        elif state is _State.WORKING:
            self._interrupt(replica)
        self._state[replica] = _State.DEAD
        self._set_timer(self.now + self._detection_seconds, _Timer.NOTICED, replica)

    def _interrupt(self, replica: int) -> None:
        """Stop the work of a replica that dies. Its lease stays until the death is noticed."""
        batch = self._task[replica]
        assert batch is not None
        self._working -= 1
        self._compute(-1)
        self.counts.redone += self.now - self._began[replica]
        self._done[replica] = (self._clock - self._began_clock[replica]) / self._speeds[replica]

    def _notice(self, replica: int) -> None:
        batch, self._task[replica] = self._task[replica], None
        if batch is not None:
            self._drop_lease(batch, replica)
            if not batch.done and batch.progress is not None:
                self._keep_finished(batch, self._done[replica])
            elif not batch.done:
                self._give_back(batch)
        self._probe[replica] = True
        if self._restarts > 0:
            self._load(replica)
        else:
            self._state[replica] = _State.RESTING
        if all(state is _State.RESTING for state in self._state):
            self._refuse()
        self._hand_out()

    def _keep_finished(self, batch: Batch, seconds: float) -> None:
        """Keep the replies that a dead replica has finished; the others begin again."""
        assert batch.progress is not None
        finished, rest, useful = batch.progress.split(seconds)
        self._record(finished)
        self.counts.redone -= useful * seconds
        self._settle(batch)
        if rest is not None:
            self._left += 1
            self._wait_again(rest)

    def _give_back(self, batch: Batch) -> None:
        batch.deaths += 1
        if self._most_deaths is None or batch.deaths < self._most_deaths:
            if not batch.leases:
                self._wait_again(batch)
            return
        self._settle(batch)
        if batch.alone:
            self.counts.errors += 1
            return
        self.counts.split += 1
        for row in batch.rows:
            self._wait_again(Batch([row], batch.seconds / len(batch.rows), alone=True))
        self._left += len(batch.rows)

    def _load(self, replica: int) -> None:
        self._restarts -= 1
        self._state[replica] = _State.LOADING
        if self._load_computes:
            self._compute(1)
            end = self._clock + self._load_seconds
            heapq.heappush(self._ends, (end, next(self._numbers), replica, self._life[replica]))
        else:
            self._set_timer(self.now + self._load_seconds, _Timer.LOADED, replica)

    def _loaded(self, replica: int) -> None:
        if self._load_computes:
            self._compute(-1)
        self._life[replica] += 1
        self._down -= 1
        self.counts.restarts += 1
        self._state[replica] = _State.IDLE
        self._idle.append(replica)
        self._hand_out()

    def _wake_one(self) -> None:
        for replica, state in enumerate(self._state):
            if state is _State.RESTING and self._restarts > 0:
                self._load(replica)
                return

    def _refuse(self) -> None:
        """Give every batch an error: no replica is left, and nothing can restore one."""
        for batch in [*self._pending, *self._running.values()]:
            if not batch.done:
                self.counts.errors += len(batch.rows)
                self._settle(batch)
        self._pending = []


def _seconds(batch: Batch) -> float:
    return batch.seconds
