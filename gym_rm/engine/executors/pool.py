"""The threads of a pool of replicas: one per replica runs batches in it, and starts it again when it fails.

A batch whose replica died or is silent runs again, elsewhere if another replica is free. The second time it gets an
error, and the scheduler runs its rows alone. So every call ends: a batch costs two replicas at most.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from gym_rm.engine.executors.executor import BatchResult, LoadSpec, ModelInfo, Weights
from gym_rm.engine.executors.replica import Replica, ReplicaFailed, differences
from gym_rm.engine.token_tree import Batch
from gym_rm.errors import ConfigError, RemoteError, brief, logger

MAX_ATTEMPTS = 2  # replicas that may fail with a batch before it gets an error
MAX_FAILURES = 8  # failures of a replica, without a good batch in between, after which it is not started again
PAUSE_SECONDS = 0.1  # before a replica that failed twice in a row is started again; longer after more failures
CHECK_SECONDS = 1.0  # between checks whether an idle replica is alive
PATIENCE = 4.0  # restarts and methods besides `run` may take this many times the first start and a batch


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """What happened in a pool of replicas since it was loaded.

    Attributes:
        batches: batches that got values or an error from a replica.
        failures: replicas that died, hung or disagreed, and were ended.
        restarts: replicas that were started again.
        given_up: batches that got an error because every replica that ran them failed.
    """

    batches: int = 0
    failures: int = 0
    restarts: int = 0
    given_up: int = 0


@dataclass(frozen=True, slots=True)
class PoolState:
    """State that a replica must have before it runs a batch. `version` and `clears` count changes."""

    version: int = 0
    weights: Weights | None = field(default=None, compare=False)
    files: object = field(default=None, compare=False)
    asleep: bool = False
    clears: int = 0


@dataclass(eq=False, slots=True)
class Member:
    """A replica of a pool; `Pool.changed` guards it.

    Attributes:
        index: index of the replica.
        replica: the replica.
        state: state that it has; None if it does not run.
        failures: number of times that it failed since its last good batch.
        reason: why it failed last.
    """

    index: int
    replica: Replica
    state: PoolState | None = None
    failures: int = 0
    reason: str = ""


@dataclass(eq=False, slots=True)
class Task:
    """Something that any one of the replicas must do, and its future result."""

    run: Callable[[Member], Any]
    future: Future[Any] = field(default_factory=Future)
    attempts: int = 0


class Pool:
    """Replicas, their threads, and the state that replicas must have after they are started again.

    Args:
        replicas: the replicas, not started.
        spec: the model.
        batch_timeout: seconds after which a silent replica is started again.
    """

    def __init__(self, replicas: Sequence[Replica], spec: LoadSpec, batch_timeout: float) -> None:
        self.changed = threading.Condition()
        self.stats = ReplicaStats()
        self.wanted = PoolState()
        self._spec = spec
        self._batch_timeout = batch_timeout
        self._patience = math.inf  # seconds that other methods than `run` may take
        self._members = [Member(i, replica) for i, replica in enumerate(replicas)]
        self._left = len(replicas)  # replicas that are not given up
        self._threads: list[threading.Thread] = []
        self._tasks: deque[Task] = deque()
        self._info: ModelInfo | None = None
        self._started = False
        self._load_error: Exception | None = None
        self._refusal: str | None = None  # error of every task, once the pool is closed or no replica is left

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
        started = monotonic()
        for member in self._members:
            # A daemon, so that a script that forgets `close` can end.
            name = f"gym_rm replica {member.index}"
            self._threads.append(threading.Thread(target=self._serve, args=(member,), name=name, daemon=True))
            self._threads[-1].start()
        with self.changed:
            self.changed.wait_for(
                lambda: self._load_error is not None or all(member.state is not None for member in self._members)
            )
            if self._load_error is not None:
                raise self._load_error
            assert self._info is not None
            self._started = True
            self._patience = PATIENCE * (self._batch_timeout + monotonic() - started)
            return self._info

    def run(self, batches: Sequence[Batch]) -> list[BatchResult]:
        """Run batches on any replicas, the largest first, and wait for all results."""
        tasks = [Task(functools.partial(self._run_batch, batch)) for batch in batches]
        self._finish([tasks[i] for i in sorted(range(len(batches)), key=lambda i: -batches[i].num_tokens)])
        return [_result_of(task.future) for task in tasks]

    def update_weights(self, weights: Weights) -> None:
        """Give all replicas new weights: first one alone, so that weights that do not fit change nothing."""
        files = files_of(weights)

        def try_weights(member: Member) -> None:
            self._call(member, "update_weights", weights)
            with self.changed:
                version = self.wanted.version + 1
                # The executor of a rank wakes to take new weights.
                self.wanted = replace(self.wanted, version=version, weights=weights, files=files, asleep=False)
                member.state = self.wanted

        task = Task(try_weights)
        self._finish([task])
        try:
            task.future.result()
        except ReplicaFailed as failure:
            raise RemoteError(failure.reason) from failure
        self._wait_until_all_agree()

    def set_asleep(self, asleep: bool) -> None:
        """Let all replicas sleep, or wake them; replicas that start later do the same."""
        with self.changed:
            self.wanted = replace(self.wanted, asleep=asleep)
        self._wait_until_all_agree()

    def clear_cache(self) -> None:
        """Clear the caches of all replicas."""
        with self.changed:
            self.wanted = replace(self.wanted, clears=self.wanted.clears + 1)
        self._wait_until_all_agree()

    def close(self) -> None:
        """End all replicas and threads."""
        self._refuse("the executor was closed while the batch ran")
        for member, thread in zip(self._members, self._threads, strict=False):
            while thread.is_alive() and thread is not threading.current_thread():
                member.replica.kill()  # again, if it was just starting
                thread.join(0.1)

    # --- in the driver's threads ---------------------------------------------------------------------------------

    def _finish(self, tasks: Sequence[Task]) -> None:
        """Wait until tasks have a result or an error; after an interrupt, those that do not run yet are forgotten."""
        with self.changed:
            self._add(tasks)
        try:
            concurrent.futures.wait([task.future for task in tasks])
        except BaseException:  # Ctrl-C
            with self.changed:
                for task in tasks:
                    task.future.cancel()
            raise

    def _add(self, tasks: Sequence[Task]) -> None:
        if self._refusal is not None:
            for task in tasks:
                task.future.set_exception(ReplicaFailed(self._refusal))
            return
        self._tasks.extend(tasks)
        self.changed.notify_all()

    def _wait_until_all_agree(self) -> None:
        """Wait until every replica that runs has the wanted state; one that starts gets it before its first batch.

        Raises:
            RemoteError: no replica is left.
        """
        with self.changed:
            self.changed.notify_all()
            self.changed.wait_for(lambda: all(member.state in (None, self.wanted) for member in self._members))
            if self._refusal is not None:
                raise RemoteError(self._refusal)

    def _refuse(self, reason: str) -> None:
        """Give every task this error, also those that come later."""
        with self.changed:
            self._refusal = self._refusal or reason
            for task in self._tasks:
                if not task.future.cancelled():
                    task.future.set_exception(ReplicaFailed(self._refusal))
            self._tasks.clear()
            self.changed.notify_all()

    # --- in the thread of a replica ------------------------------------------------------------------------------

    def _serve(self, member: Member) -> None:
        """Start the replica, and run tasks in it, until the pool is closed or the replica failed too often."""
        try:
            while self._refusal is None and member.failures < MAX_FAILURES:
                try:
                    self._start(member)
                    while (task := self._next(member)) is not None:
                        self._run(member, task)
                except (ReplicaFailed, ConfigError) as failure:
                    if not self._started:
                        raise
                    self._mourn(member, failure)
        except Exception as error:  # at load; later it is a defect, which must not leave callers waiting
            if self._started:
                logger.exception("the thread of a replica failed")
            member.reason = brief(error)
            failed = RemoteError(f"replica {member.index}: {error}; its output is above.")
            self._load_error = self._load_error or (error if isinstance(error, ConfigError) else failed)
        finally:
            self._retire(member)

    def _start(self, member: Member) -> None:
        again = self._started
        info = member.replica.start(self._spec, self._patience)
        with self.changed:
            self._info = self._info or info
            different = differences(self._info, [info])
            if different:
                raise ConfigError(
                    f"replica {member.index} loaded another model than the others: {different}. All must read the same "
                    "files, on machines of the same kind."
                )
            member.state = PoolState()
            if again:
                self._count(restarts=1)
            self.changed.notify_all()

    def _next(self, member: Member) -> Task | None:
        """Wait for the next task; None if the pool is closed."""
        while True:
            with self.changed:
                wanted = self.wanted
                if self._refusal is not None:
                    return None
                if not member.replica.alive():
                    raise ReplicaFailed("it died while it was idle")
                if self._tasks and wanted.asleep:
                    wanted = self.wanted = replace(wanted, asleep=False)
                    self.changed.notify_all()
                if member.state == wanted:
                    if self._tasks:
                        return self._tasks.popleft()
                    self.changed.wait(CHECK_SECONDS)
                    continue
            self._change_state(member, wanted)

    def _change_state(self, member: Member, wanted: PoolState) -> None:
        """Give a replica the state that all must have."""
        has = member.state
        assert has is not None
        if has.version != wanted.version:
            assert wanted.weights is not None
            if files_of(wanted.weights) != wanted.files:
                raise ReplicaFailed(f"the files of {wanted.weights!r} have changed since update_weights")
            self._call(member, "update_weights", wanted.weights)
        elif has.clears != wanted.clears:
            self._call(member, "clear_cache")
        if wanted.asleep or has.asleep:
            self._call(member, "sleep" if wanted.asleep else "wake")
        with self.changed:
            member.state = wanted
            self.changed.notify_all()

    def _run(self, member: Member, task: Task) -> None:
        if task.attempts == 0 and not task.future.set_running_or_notify_cancel():
            return  # its caller was interrupted
        try:
            value = task.run(member)
        except ReplicaFailed as failure:
            self._give_back(task, failure)
            raise
        except Exception as error:
            task.future.set_exception(error)
        else:
            task.future.set_result(value)

    def _run_batch(self, batch: Batch, member: Member) -> BatchResult:
        result = member.replica.run(batch, self._batch_timeout)
        with self.changed:
            member.failures = 0
            self._count(batches=1)
        return result

    def _give_back(self, task: Task, failure: ReplicaFailed) -> None:
        """Let another replica run a task, unless it has failed too often or its own error is known."""
        task.attempts += 1
        with self.changed:
            if failure.result is not None:
                task.future.set_result(failure.result)
            elif task.attempts >= MAX_ATTEMPTS:
                self._count(given_up=1)
                reason = f"its replica failed, {task.attempts} times; the last time, {failure.reason}"
                task.future.set_exception(ReplicaFailed(reason))
            else:
                self._add([task])

    def _mourn(self, member: Member, failure: Exception) -> None:
        """End what is left of a replica that failed, and wait a little if it keeps failing."""
        member.replica.kill()
        with self.changed:
            member.state, member.reason = None, str(failure)
            member.failures += getattr(failure, "result", None) is None  # after out of memory, a smaller batch follows
            self.changed.notify_all()
            if self._refusal is not None:
                return
            log = logger.info if self.stats.failures else logger.warning
            log("replica %d failed: %s; starting it again", member.index, failure)
            self._count(failures=1)
            self.changed.wait_for(lambda: self._refusal is not None, PAUSE_SECONDS * (member.failures - 1) ** 2)

    def _retire(self, member: Member) -> None:
        member.replica.kill()
        with self.changed:
            member.state = None
            self._left -= 1
            if not self._left:
                reasons = "; ".join(dict.fromkeys(f"replica {each.index}: {each.reason}" for each in self._members))
                self._refuse(f"all {len(self._members)} replicas have failed ({reasons}); load a new scorer")
            self.changed.notify_all()

    def _call(self, member: Member, method: str, *arguments: Any) -> None:
        member.replica.call(method, *arguments, seconds=self._patience)

    def _count(self, **changes: int) -> None:
        self.stats = replace(self.stats, **{name: getattr(self.stats, name) + n for name, n in changes.items()})


def _result_of(future: Future[Any]) -> BatchResult:
    try:
        result: BatchResult = future.result()
    except ReplicaFailed as failure:
        return BatchResult(error=failure.reason)
    except Exception as error:
        return BatchResult(error=brief(error))
    return result


def files_of(weights: Weights | None) -> Mapping[str, tuple[int, int]] | None:
    """Return size and modification time of the files of a folder; None for tensors and hub ids."""
    if weights is None or isinstance(weights, Mapping) or not os.path.isdir(weights):
        return None
    files = [path for path in Path(weights).iterdir() if path.is_file()]
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}
