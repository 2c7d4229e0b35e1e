"""The threads of a pool of replicas: one per replica takes batches from the ledger and starts its replica again."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from gym_rm.engine.executors.answers import differences
from gym_rm.engine.executors.executor import BatchResult, LoadSpec, ModelInfo, Weights
from gym_rm.engine.executors.ledger import Ledger, Work
from gym_rm.engine.executors.replica import ParallelOptions, Replica, ReplicaFailed
from gym_rm.engine.token_tree import Batch
from gym_rm.errors import ConfigError, RemoteError, brief, logger

CHECK_SECONDS = 1.0  # between checks whether an idle replica is alive
GOOD_BATCHES = 16  # batches that restore one restart
MOST_PAUSE = 30.0  # seconds before a replica that keeps dying is started again; the first pauses are shorter
POISONS_IN_A_ROW = 4  # batches given up without a good one in between whose deaths do not count against the restarts
FIRST_ON_GPU = 10.0  # a replica's first batch on a GPU may compile kernels, so its lease is this many times as long
CALL_LEASES = 10.0  # a method other than `run` may take this many leases
KILLED_AFTER = 2.0  # leases after which a silent replica is ended


@dataclass(eq=False, slots=True)
class Call:
    """A method to call in a replica; `error` is what it raised, and `commit` runs at once if it succeeded."""

    method: str
    arguments: tuple[Any, ...] = ()
    commit: Callable[[], None] | None = None
    done: bool = False
    error: Exception | None = None


@dataclass(eq=False, slots=True)
class Member:
    """A replica and its state; `Ledger.changed` guards it.

    Attributes:
        index: index of the replica.
        replica: the replica.
        state: `"starting"`; `"ready"`; `"resting"` while the pool has no restart left; or `"dead"`, for good.
        calls: methods to call before the next batch.
        first: whether its next batch is the first since it started.
        probe: whether it takes the smallest batch next, because it has just died.
        version: version of its weights.
        falls: number of times that it died since its last good batch.
        reason: why it died last.
    """

    index: int
    replica: Replica
    state: str = "starting"
    calls: deque[Call] = field(default_factory=deque)
    first: bool = True
    probe: bool = False
    version: int = 0
    falls: int = 0
    reason: str = ""


class Pool:
    """Replicas, their threads, and the state that replicas must have after they are started again.

    Args:
        replicas: the replicas, not started.
        spec: the model.
        options: lease and restarts.
    """

    def __init__(self, replicas: Sequence[Replica], spec: LoadSpec, options: ParallelOptions) -> None:
        self.ledger = Ledger(options.lease_seconds)
        self.version = 0
        self._spec = spec
        self._lease_seconds = options.lease_seconds
        self._max_restarts = options.max_restarts
        self._restarts = options.max_restarts * len(replicas)  # replicas share them
        self._good = 0
        self._members = [Member(i, each) for i, each in enumerate(replicas)]
        self._threads: list[threading.Thread] = []
        self._updates = threading.Lock()
        self._weights: Weights | None = None
        self._state_of_files: object = None
        self._asleep = False
        self._info: ModelInfo | None = None
        self._start_seconds = 0.0
        self._started = False
        self._load_error: Exception | None = None
        self._closing = False
        self._warned = False
        self._poisons = 0

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas, in order."""
        return tuple(member.replica for member in self._members)

    def start(self) -> ModelInfo:
        """Start all replicas and return the info of the first.

        Raises:
            ConfigError: a replica refuses the model, or replicas load it differently.
            RemoteError: a replica does not start.
        """
        for member in self._members:
            # A daemon, so that a script that forgets `close` can end.
            thread = threading.Thread(
                target=self._serve, args=(member,), name=f"gym_rm replica {member.index}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        with self.ledger.changed:
            self.ledger.changed.wait_for(
                lambda: self._load_error is not None or all(member.state == "ready" for member in self._members)
            )
            if self._load_error is not None:
                raise self._load_error
            assert self._info is not None
            self._started = True
            return self._info

    def run(self, batches: Sequence[Batch]) -> list[BatchResult]:
        """Run batches on any replicas and wait for all results."""
        works = self.ledger.add(batches)
        if works:
            self._asleep = False  # every replica wakes when it runs
        try:
            return self.ledger.wait_for(works)
        except BaseException:  # Ctrl-C
            self.ledger.abandon(works)
            raise

    def update_weights(self, weights: Weights) -> None:
        """Give all replicas new weights: first one alone, so that weights that do not fit change nothing."""
        with self._updates:
            state_of_files = _state_of_files(weights)

            def commit() -> None:
                self._weights, self._state_of_files, self._asleep = weights, state_of_files, False
                self.version += 1  # the other replicas notice

            self._call_one(Call("update_weights", (weights,), commit))
            with self.ledger.changed:
                self.ledger.changed.wait_for(
                    lambda: all(each.state != "ready" or each.version == self.version for each in self._members)
                )

    def set_asleep(self, asleep: bool) -> None:
        """Let all replicas sleep, or wake them; replicas that start later do the same."""
        with self._updates:
            self._asleep = asleep
            self.call_all("sleep" if asleep else "wake")

    def call_all(self, method: str, *arguments: Any) -> None:
        """Call a method in every replica that is ready; one that fails is started again, with the current state."""
        with self.ledger.changed:
            self._require_any()
            members = [each for each in self._members if each.state == "ready"]
            calls = [Call(method, arguments) for _ in members]
            for member, call in zip(members, calls, strict=True):
                member.calls.append(call)
            self.ledger.changed.notify_all()
            self.ledger.changed.wait_for(lambda: all(call.done for call in calls))
            self._require_any()

    def close(self) -> None:
        """End all replicas and threads."""
        with self.ledger.changed:
            self._closing = True
            self.ledger.refuse_all("the executor was closed while the batch ran")
            self.ledger.changed.notify_all()
        for member in self._members:
            member.replica.kill()
        for member, thread in zip(self._members, self._threads, strict=False):
            while thread.is_alive() and thread is not threading.current_thread():
                member.replica.kill()  # again, if it was just starting
                thread.join(CHECK_SECONDS)

    # --- in the driver's thread ----------------------------------------------------------------------------------

    def _call_one(self, call: Call) -> None:
        """Call a method in one replica, whichever is ready and succeeds first."""
        while True:
            with self.ledger.changed:
                self.ledger.changed.wait_for(
                    lambda: (
                        all(each.state == "dead" for each in self._members)
                        or any(each.state == "ready" for each in self._members)
                    )
                )
                self._require_any()
                call.done, call.error = False, None
                next(each for each in self._members if each.state == "ready").calls.append(call)
                self.ledger.changed.notify_all()
                self.ledger.changed.wait_for(lambda: call.done)
            if call.error is None:
                return
            if isinstance(call.error, ConfigError):
                raise call.error

    def _require_any(self) -> None:
        if all(member.state == "dead" for member in self._members):
            raise RemoteError(self.ledger.refusal or "all replicas are dead")

    # --- in the thread of a replica ------------------------------------------------------------------------------

    def _serve(self, member: Member) -> None:
        """Run the calls and batches of one replica until the pool is closed or its restarts are spent."""
        reason = "the pool was closed"
        try:
            self._build(member)
            while True:
                try:
                    task = self._next(member)
                    if task is None:
                        return
                    if isinstance(task, Call):
                        self._do_call(member, task)
                    else:
                        self._do_work(member, task)
                except ReplicaFailed as failure:
                    self._mourn(member, failure.reason)
                    self._build(member)
        except _Spent as spent:
            reason = str(spent)
        except Exception as error:  # a defect here must not leave callers waiting
            logger.exception("the thread of a replica failed")
            reason = brief(error)
        finally:
            self._retire(member, reason)

    def _next(self, member: Member) -> Call | Work | None:
        """Wait for the next thing to do; None if the pool is closed.

        Raises:
            ReplicaFailed: the replica died while it was idle.
        """
        ledger = self.ledger
        with ledger.changed:
            while not self._closing:
                if not member.replica.alive():
                    raise ReplicaFailed("it died while it was idle")
                if member.version != self.version and self._weights is not None:
                    return Call("update_weights", (self._weights,))
                if member.calls:
                    return member.calls.popleft()
                first_on_gpu = member.first and not str(self._info and self._info.device).startswith("cpu")
                work = ledger.take(
                    member.index,
                    version=member.version,
                    scale=FIRST_ON_GPU if first_on_gpu else 1.0,
                    smallest=member.probe,
                )
                if work is not None:
                    return work
                until = ledger.seconds_to_next_expiry()
                ledger.changed.wait(CHECK_SECONDS if until is None else min(until + 0.001, CHECK_SECONDS))
        return None

    def _do_work(self, member: Member, work: Work) -> None:
        lease = work.leases[member.index]
        try:
            result = member.replica.run(work.batch, KILLED_AFTER * lease.seconds)
        except ReplicaFailed as failure:
            if failure.result is not None:
                self.ledger.finish(work, member.index, failure.result)
                if failure.result.out_of_memory:  # smaller batches follow
                    self._add_restarts(1)
            elif self.ledger.give_back(work, member.index, failure.reason):
                self._forgive(work)
            raise
        except Exception as error:
            self.ledger.finish(work, member.index, BatchResult(error=brief(error)))
            return
        self.ledger.finish(work, member.index, result)
        with self.ledger.changed:
            self._poisons = 0
            member.first = member.probe = False
            member.falls = 0
            self._good += 1
            if self._good % GOOD_BATCHES == 0 and self._restarts < self._max_restarts * len(self._members):
                self._add_restarts(1)

    def _forgive(self, work: Work) -> None:
        """Restore the restarts that a poisoned batch has cost, unless nothing else ever works."""
        with self.ledger.changed:
            self._poisons += 1
            if self._poisons <= POISONS_IN_A_ROW:
                self._add_restarts(len(work.deaths))

    def _add_restarts(self, count: int) -> None:
        with self.ledger.changed:
            self._restarts += count
            self.ledger.changed.notify_all()

    def _do_call(self, member: Member, call: Call) -> None:
        error: Exception | None = None
        try:
            member.replica.call(call.method, *call.arguments, seconds=CALL_LEASES * self._lease_seconds)
        except (ConfigError, ReplicaFailed) as failure:
            error = failure
        with self.ledger.changed:
            if error is None and call.commit is not None:
                call.commit()
            if error is None and call.method == "update_weights":
                member.version = self.version
            call.error, call.done = error, True
            self.ledger.changed.notify_all()
            behind = member.version != self.version
        if isinstance(error, ReplicaFailed):
            raise error
        if error is not None and behind:
            raise ReplicaFailed(f"it refused weights that another replica has: {error}") from error

    def _build(self, member: Member) -> None:
        """Start the replica with the current weights, again and again until it runs.

        Raises:
            _Spent: the pool is closed, or no replica can be started again.
        """
        again = self._started
        while True:
            if again:
                self._take_restart(member)
            try:
                self._start(member)
            except ConfigError as error:
                if not self._started:
                    with self.ledger.changed:
                        self._load_error = error
                        self.ledger.changed.notify_all()
                    raise _Spent(str(error)) from error
                self._mourn(member, str(error))
            except ReplicaFailed as failure:
                self._mourn(member, failure.reason)
            else:
                if again:
                    self.ledger.count(restarts=1)
                return
            again = True

    def _start(self, member: Member) -> None:
        started = monotonic()
        limit = max(CALL_LEASES * self._lease_seconds, 10 * self._start_seconds) if self._started else None
        info = member.replica.start(self._spec, limit)
        with self.ledger.changed:
            self._info = self._info or info
            different = differences(self._info, [info])
        if different:
            raise ConfigError(
                f"replica {member.index} loaded another model than the others: {different}. All must read the same "
                "files, on machines of the same kind."
            )
        seconds = CALL_LEASES * self._lease_seconds
        member.first = True
        done = 0, False
        while True:
            with self.ledger.changed:
                wanted, weights = (self.version, self._asleep), self._weights
                if done == wanted:
                    member.version = self.version
                    member.state = "ready"
                    self._start_seconds = max(self._start_seconds, monotonic() - started)
                    self.ledger.changed.notify_all()
                    return
            if done[0] != wanted[0] and weights is not None:
                if _state_of_files(weights) != self._state_of_files:
                    raise ConfigError(f"the files of {weights!r} have changed since update_weights")
                member.replica.call("update_weights", weights, seconds=seconds)
            if wanted[1] != done[1] or wanted[1]:
                member.replica.call("sleep" if wanted[1] else "wake", seconds=seconds)
            done = wanted

    def _mourn(self, member: Member, reason: str) -> None:
        """End what is left of a replica that failed."""
        with self.ledger.changed:
            member.state, member.reason = "starting", reason
            member.falls += 1
            member.probe = True
            for call in member.calls:
                call.error, call.done = ReplicaFailed(reason), True
            member.calls.clear()
            self.ledger.changed.notify_all()
        member.replica.kill()
        if self._closing:
            raise _Spent("the pool was closed")
        self.ledger.count(deaths=1)
        log = logger.info if self._warned else logger.warning
        self._warned = True
        log("replica %d failed: %s; starting it again", member.index, reason)

    def _take_restart(self, member: Member) -> None:
        """Wait until the replica may be started again.

        Raises:
            _Spent: no restart is left and no replica works that could restore one, or the pool is closed.
        """
        with self.ledger.changed:
            pause = min(0.1 * max(0, member.falls - 2) ** 2, MOST_PAUSE)
            self.ledger.changed.wait_for(lambda: self._closing, pause)
            member.state = "resting" if self._restarts <= 0 else "starting"
            self.ledger.changed.notify_all()
            self.ledger.changed.wait_for(
                lambda: (
                    self._closing
                    or self._restarts > 0
                    or not self._started
                    or all(each.state in ("resting", "dead") for each in self._members)
                )
            )
            if self._closing or self._restarts <= 0:
                raise _Spent("the pool was closed" if self._closing else f"replica {member.index}: {member.reason}")
            self._restarts -= 1
            member.state = "starting"

    def _retire(self, member: Member, reason: str) -> None:
        member.replica.kill()
        with self.ledger.changed:
            member.state, member.reason = "dead", reason
            for call in member.calls:
                call.error, call.done = ReplicaFailed(reason), True
            member.calls.clear()
            if not self._started and self._load_error is None:
                self._load_error = RemoteError(f"{reason}; its output is above.")
            if not self._closing and all(each.state == "dead" for each in self._members):
                reasons = "; ".join(dict.fromkeys(each.reason for each in self._members))
                self.ledger.refuse_all(
                    f"all {len(self._members)} replicas have failed and max_restarts={self._max_restarts} is spent "
                    f"({reasons}); load a new scorer"
                )
            self.ledger.changed.notify_all()


class _Spent(Exception):
    """A replica that is not started again, with the reason."""


def _state_of_files(weights: Weights | None) -> Mapping[str, tuple[int, int]] | None:
    """Return size and modification time of the files of a folder; None for tensors and hub ids."""
    if weights is None or isinstance(weights, Mapping) or not os.path.isdir(weights):
        return None
    return {
        each.name: (each.stat().st_size, each.stat().st_mtime_ns) for each in Path(weights).iterdir() if each.is_file()
    }
