"""The ledger of a pool of replicas: which batches wait, who has leased which, and what came back. Starts no threads.

Scoring has no side effects, so a batch may run twice. A replica leases a batch; after the deadline of the lease the
batch is offered to the others too. The first result counts, a later one is compared with it. A replica that dies gives
its leases back.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from gym_rm.engine.executors.executor import BatchResult
from gym_rm.engine.token_tree import Batch
from gym_rm.errors import logger

MOST_DEATHS = 2  # replicas that may die with a batch before it gets an error
SLOW = 10.0  # a lease is this many times as long as the observed speed predicts, if that is longer than lease_seconds


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """What happened in a pool of replicas since it was loaded.

    Attributes:
        batches: batches that got values or an error from a replica.
        leases: batches given to a replica, repetitions included.
        expired: leases whose deadline passed without a result.
        duplicates: second results of a batch, which are compared with the first.
        mismatches: second results that had other bits than the first.
        deaths: replicas that died, hung or disagreed, and were ended.
        restarts: replicas that were started again.
        poisoned: batches that got an error because every replica that ran them died.
    """

    batches: int = 0
    leases: int = 0
    expired: int = 0
    duplicates: int = 0
    mismatches: int = 0
    deaths: int = 0
    restarts: int = 0
    poisoned: int = 0

    def __add__(self, other: ReplicaStats) -> ReplicaStats:
        """Return the sum of two records."""
        return ReplicaStats(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(slots=True)
class Lease:
    """One replica's turn at a batch: when it began, when it ends, and for which weights."""

    started: float
    seconds: float
    version: int
    expired: bool = False


@dataclass(slots=True, eq=False)
class Work:
    """One batch in the ledger.

    Attributes:
        batch: the batch.
        order: number of the `run` call, then the place in it; earlier calls come first, then larger batches.
        leases: leases that have not ended, by replica.
        deaths: the replicas that died with this batch.
        result: the first result.
        version: version of the weights that computed the result.
    """

    batch: Batch
    order: tuple[int, int]
    leases: dict[int, Lease] = field(default_factory=dict)
    deaths: list[int] = field(default_factory=list)
    result: BatchResult | None = None
    version: int = -1


class Ledger:
    """All batches that wait or run. Every method may be called from any thread; `changed` is notified of changes.

    Args:
        lease_seconds: shortest time of a lease.
    """

    def __init__(self, lease_seconds: float) -> None:
        self.changed = threading.Condition()
        self.stats = ReplicaStats()
        self.refusal: str | None = None  # error of every batch, once no replica is left
        self._lease_seconds = lease_seconds
        self._seconds_per_token = 0.0
        self._pending: list[Work] = []
        self._running: set[Work] = set()
        self._calls = itertools.count()

    def add(self, batches: Sequence[Batch]) -> list[Work]:
        """Add the batches of one `run` call, largest first, and return their entries in the order of the batches."""
        with self.changed:
            call = next(self._calls)
            largest_first = sorted(range(len(batches)), key=lambda i: -batches[i].num_tokens)
            place = {i: k for k, i in enumerate(largest_first)}
            works = [Work(batch, (call, place[i])) for i, batch in enumerate(batches)]
            if self.refusal is not None:
                for work in works:
                    work.result = BatchResult(error=self.refusal)
                return works
            for work in works:
                self._wait_again(work)
            self.changed.notify_all()
            return works

    def wait_for(self, works: Sequence[Work]) -> list[BatchResult]:
        """Wait for the results of all entries."""
        with self.changed:
            self.changed.wait_for(lambda: all(work.result is not None for work in works))
            return [work.result for work in works if work.result is not None]

    def abandon(self, works: Sequence[Work]) -> None:
        """Forget entries that nobody waits for any more; replicas finish what they have started."""
        with self.changed:
            for work in works:
                if work.result is None:
                    self._settle(work, BatchResult(error="abandoned"))

    def take(self, replica: int, *, version: int, scale: float = 1.0, smallest: bool = False) -> Work | None:
        """Lease the next batch to a replica: a waiting one, else one whose leases have all expired; None if none.

        Args:
            replica: index of the replica.
            version: version of the weights that it has.
            scale: factor of the lease's length.
            smallest: whether to take the smallest batch, to see soon whether the replica works.
        """
        with self.changed:
            now = time.monotonic()
            work = None
            if self._pending:
                work = self._pending.pop(self._smallest() if smallest else 0)
            else:
                for each in sorted(self._running, key=lambda work: work.order):
                    if each.result is None and replica not in each.leases and self._all_expired(each, now):
                        work = each
                        break
            if work is None:
                return None
            expected = SLOW * self._seconds_per_token * work.batch.num_tokens
            work.leases[replica] = Lease(now, scale * max(self._lease_seconds, expected), version)
            self._running.add(work)
            self._count(leases=1)
            self.changed.notify_all()  # others wait until this lease expires
            return work

    def seconds_to_next_expiry(self) -> float | None:
        """Return the seconds until a lease expires, at least 0; None if none runs."""
        with self.changed:
            now = time.monotonic()
            ends = [
                lease.started + lease.seconds
                for work in self._running
                if work.result is None
                for lease in work.leases.values()
                if not lease.expired
            ]
            return max(0.0, min(ends) - now) if ends else None

    def finish(self, work: Work, replica: int, result: BatchResult) -> None:
        """Record the result of a lease: the first counts, a later one is compared."""
        with self.changed:
            lease = work.leases.pop(replica)
            seconds = time.monotonic() - lease.started
            self._note_expiry(lease, lease.started + seconds)
            if result.values is not None and work.batch.num_tokens:
                observed = seconds / work.batch.num_tokens
                self._seconds_per_token = 0.8 * self._seconds_per_token + 0.2 * observed
            if work.result is None:
                work.version = lease.version
                self._count(batches=1)
                self._settle(work, result)
            elif work.version == lease.version and work.result.values is not None and result.values is not None:
                self._count(duplicates=1)
                if work.result.values.tobytes() != result.values.tobytes():
                    if not self.stats.mismatches:
                        logger.warning("two replicas returned different bits for the same batch; keeping the first")
                    self._count(mismatches=1)
            if not work.leases:
                self._running.discard(work)

    def give_back(self, work: Work, replica: int, why: str) -> bool:
        """Take a lease back from a replica that died, and why; return whether the batch is given up, as poisoned."""
        with self.changed:
            lease = work.leases.pop(replica)
            self._note_expiry(lease, time.monotonic())
            if not work.leases:
                self._running.discard(work)
            if work.result is not None:
                return False
            work.deaths.append(replica)
            if len(work.deaths) >= MOST_DEATHS:
                self._count(poisoned=1)
                reason = f"its replica died, {len(work.deaths)} times; the last time, {why}"
                self._settle(work, BatchResult(error=reason))
                return True
            if not work.leases:
                self._wait_again(work)
            self.changed.notify_all()
            return False

    def refuse_all(self, reason: str | None) -> None:
        """Give every batch this error, also those that come later; None accepts batches again."""
        with self.changed:
            self.refusal = reason
            if reason is None:
                return
            for work in [*self._pending, *self._running]:
                if work.result is None:
                    self._settle(work, BatchResult(error=reason))
            self.changed.notify_all()

    def count(self, **changes: int) -> None:
        """Add to the counters."""
        with self.changed:
            self._count(**changes)

    def _count(self, **changes: int) -> None:
        self.stats = self.stats + replace(ReplicaStats(), **changes)

    def _wait_again(self, work: Work) -> None:
        bisect.insort(self._pending, work, key=lambda each: each.order)

    def _smallest(self) -> int:
        return min(range(len(self._pending)), key=lambda i: self._pending[i].batch.num_tokens)

    def _settle(self, work: Work, result: BatchResult) -> None:
        work.result = result
        if work in self._pending:
            self._pending.remove(work)
        self.changed.notify_all()

    def _all_expired(self, work: Work, now: float) -> bool:
        for lease in work.leases.values():
            self._note_expiry(lease, now)
        return all(lease.expired for lease in work.leases.values())

    def _note_expiry(self, lease: Lease, now: float) -> None:
        if not lease.expired and now >= lease.started + lease.seconds:
            lease.expired = True
            self._count(expired=1)
