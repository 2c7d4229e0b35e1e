"""Executor that divides batches among replicas of a model, and starts those again that die.

Each replica has a thread, which runs batches in it, and starts it again when it fails. A batch whose replica died or is
silent runs again, elsewhere if another replica is free. The second time it gets an error, and the scheduler runs its
rows alone. So every call ends: a batch costs two replicas at most.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import os
import pickle
import queue
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from gym_rm.engine.executors.executor import BatchResult, LoadSpec, ModelInfo, Weights
from gym_rm.engine.executors.parallel_options import ParallelOptions
from gym_rm.engine.executors.replica import Replica, ReplicaFailed, differences
from gym_rm.engine.loading.checkpoint import ModelFiles
from gym_rm.engine.loading.files import absolute
from gym_rm.engine.token_tree import Batch
from gym_rm.errors import ConfigError, RemoteError, brief, logger

MAX_ATTEMPTS = 2  # replicas that may fail with a batch before it gets an error
MAX_FAILURES = 8  # failures of a replica, without a good batch in between, after which it is not started again
PAUSE_SECONDS = 0.1  # before a replica that failed twice in a row is started again; longer after more failures
PATIENCE = 4.0  # restarts and methods besides `run` may take this many times the first start and a batch


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """What happened to the replicas of an executor since it was loaded.

    Attributes:
        batches: batches that got values or an error from a replica.
        failures: replicas that died, hung or disagreed during a call, and were ended.
        restarts: replicas that were started again.
        given_up: batches that got an error because every replica that ran them failed.
    """

    batches: int = 0
    failures: int = 0
    restarts: int = 0
    given_up: int = 0


class Member:
    """A replica, not started, and the thread that calls it: requests are functions without arguments, done in order.

    Attributes:
        failures: number of times that the replica failed since its last good batch.
        reason: why it failed last.
    """

    def __init__(self, index: int, replica: Replica) -> None:
        self.index = index
        self.replica = replica
        self.failures = 0
        self.reason = ""
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon, so that a script that forgets `close` can end. It does not hold the executor while it waits.
        self._thread = threading.Thread(
            target=_serve, args=(self._requests,), name=f"gym_rm replica {index}", daemon=True
        )
        self._thread.start()

    def ask(self, function: Callable[[Member], Any]) -> Future[Any]:
        """Call a function with this member in its thread, after what it was asked before."""
        future: Future[Any] = Future()

        def request() -> None:
            try:
                future.set_result(function(self))
            except BaseException as error:  # raised again by the future
                future.set_exception(error)

        self._requests.put(request)
        return future

    def end(self) -> bool:
        """End the replica, and the thread once it has nothing to do; return whether the thread has ended."""
        self._requests.put(None)
        self.replica.kill()
        if self._thread is threading.current_thread():
            return True
        self._thread.join(0.1)
        if self._thread.is_alive():
            return False
        self.replica.kill()  # again, if it was just starting
        return True


def _serve(requests: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (request := requests.get()) is not None:
        request()
        del request


class RunCall:
    """The batches of one call of `run`, which `workers` threads of replicas take, the largest first."""

    def __init__(self, batches: Sequence[Batch], workers: int) -> None:
        self.batches = batches
        self._results: dict[int, BatchResult] = {}
        self._waiting = deque(sorted(range(len(batches)), key=lambda i: -batches[i].num_tokens))
        self._attempts: Counter[int] = Counter()
        self._workers = workers
        self._cancelled = False
        self._changed = threading.Condition()

    def take(self) -> int | None:
        """Return the index of a batch to run, once there is one; None after the last one has its result."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_over())
            return self._waiting.popleft() if self._waiting else None

    def finish(self, index: int, result: BatchResult) -> None:
        """Set the result of a batch."""
        with self._changed:
            self._results[index] = result
            self._changed.notify_all()

    def give_back(self, index: int, failure: ReplicaFailed) -> bool:
        """Let another replica run a batch; return False if it has failed too often and gets an error."""
        self._attempts[index] += 1
        again = self._attempts[index] < MAX_ATTEMPTS
        with self._changed:
            if not again:
                reason = f"its replica failed, {MAX_ATTEMPTS} times; the last time, {failure.reason}"
                self._results[index] = BatchResult(error=reason)
            elif not self._cancelled:
                self._waiting.append(index)
            self._changed.notify_all()
        return again

    def leave(self, reason: str) -> None:
        """Take a thread out of the call; after the last one, batches without a result get this error."""
        with self._changed:
            self._workers -= 1
            if self._workers == 0:
                self._results = dict.fromkeys(range(len(self.batches)), BatchResult(error=reason)) | self._results
            self._changed.notify_all()

    def wait(self) -> list[BatchResult]:
        """Return the results when all are there; after an interrupt, batches that do not run yet are forgotten."""
        with self._changed:
            try:
                self._changed.wait_for(self._is_over)
            except BaseException:  # Ctrl-C
                self._cancelled = True
                self._waiting.clear()
                self._changed.notify_all()
                raise
            return [self._results[i] for i in range(len(self.batches))]

    def _is_over(self) -> bool:
        return self._cancelled or len(self._results) == len(self.batches)


class ReplicatedExecutor:
    """Runs batches on several replicas at the same time; results have the order of the batches.

    `close`, the end of the program or of the object's life ends all replicas.

    Args:
        options: number of replicas, and the time that they have for a batch.
        make_replica: function that returns the replica with an index; it must not start it.
    """

    def __init__(self, options: ParallelOptions, make_replica: Callable[[int], Replica]) -> None:
        self.stats = ReplicaStats()
        self._options = options
        self._make_replica = make_replica
        self._members: list[Member] = []
        self._spec: LoadSpec | None = None
        self._info: ModelInfo | None = None
        self._weights: Weights | None = None  # of `update_weights`, for replicas that start again
        self._seconds = math.inf  # that a start, or another method than `run`, may take
        self._closed = threading.Event()
        self._lock = threading.Lock()  # of the info and the statistics
        self._end: weakref.finalize[..., ReplicatedExecutor] | None = None
        self._process = os.getpid()

    def load(self, spec: LoadSpec) -> ModelInfo:
        """See `Executor.load`. All replicas load the model at the same time.

        Raises:
            ConfigError: a replica refuses the model, or replicas load it differently.
            RemoteError: a replica does not start.
        """
        if self._members:
            raise ConfigError("this executor already has a model; make another executor, or close() this one first.")
        require_sendable(spec)
        self._spec, self._info, self._weights, self._seconds = spec, None, None, math.inf
        self._closed.clear()
        self._process = os.getpid()
        replicas = [self._make_replica(index) for index in range(self._options.num_replicas)]
        self._members = [Member(index, replica) for index, replica in enumerate(replicas)]
        self._end = weakref.finalize(self, _close, self._members, self._closed, self._process)
        begun = monotonic()
        try:
            starts = [member.ask(self._start) for member in self._members]
            concurrent.futures.wait(starts, return_when=concurrent.futures.FIRST_EXCEPTION)
            errors = {i: error for i, each in enumerate(starts) if each.done() and (error := each.exception())}
            for error in errors.values():
                if isinstance(error, ConfigError):
                    raise error
            for i, error in errors.items():
                raise RemoteError(f"replica {i}: {error}; its output is above.")
        except BaseException:
            self.close()
            raise
        assert self._info is not None
        self._seconds = PATIENCE * (self._options.batch_timeout + monotonic() - begun)
        return replace(self._info, num_replicas=len(replicas))

    def run(self, batches: Sequence[Batch]) -> list[BatchResult]:
        """See `Executor.run`. After an interrupt, the executor can be used again."""
        members = self._loaded()
        call = RunCall(batches, len(members))
        if batches:
            for member in members:
                member.ask(functools.partial(self._work, call))
        return call.wait()

    def update_weights(self, weights: Weights) -> None:
        """See `Executor.update_weights`. Replicas that start later get these weights too.

        Raises:
            ConfigError: the weights do not fit. The first replica gets them alone, so nothing has changed.
            RemoteError: no replica could take the weights.
        """
        weights = kept_weights(weights)
        members = self._loaded()
        failure = ""
        for member in members:
            try:
                member.ask(functools.partial(self._try_weights, weights)).result()
            except ReplicaFailed as failed:
                failure = failed.reason
                continue
            self._weights = weights
            return self._call([each for each in members if each is not member], "update_weights", weights)
        raise RemoteError(failure)

    def sleep(self) -> None:
        """See `Executor.sleep`."""
        self._call(self._loaded(), "sleep")

    def wake(self) -> None:
        """See `Executor.wake`."""
        self._call(self._loaded(), "wake")

    def clear_cache(self) -> None:
        """See `Executor.clear_cache`."""
        self._call(self._loaded(), "clear_cache")

    def close(self) -> None:
        """End all replicas; closing twice is allowed."""
        self._members = []
        if self._end is not None:
            self._end()

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas, in order."""
        return tuple(member.replica for member in self._loaded())

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(
            "a scorer with replicas cannot be copied to another process. Load it there, or let the processes share "
            "one: a server, or an actor of Ray (docs/scaling.md)."
        )

    def _loaded(self) -> list[Member]:
        if not self._members:
            raise ConfigError(
                "the executor has no model, because it is closed or was not loaded; make a new scorer, or call load()."
            )
        if os.getpid() != self._process:
            raise ConfigError(
                "this process was forked from the one that started the replicas, and cannot use them; load a scorer "
                "here, start processes with context='spawn', or share one: a server, or an actor of Ray "
                "(docs/scaling.md)."
            )
        return self._members

    def _call(self, members: Sequence[Member], method: str, *arguments: Any) -> None:
        """Call a method in replicas that run. One that fails is ended; `_start` gives it the weights that all have."""

        def call(member: Member) -> None:
            try:
                if member.replica.alive():
                    member.replica.call(method, *arguments, seconds=self._seconds)
            except (ReplicaFailed, ConfigError) as failure:
                self._mourn(member, failure)

        concurrent.futures.wait([member.ask(call) for member in members])

    def _start(self, member: Member) -> None:
        """Start a replica, and give it the weights that the others have."""
        assert self._spec is not None
        info = member.replica.start(self._spec, self._seconds)
        with self._lock:
            self._info = self._info or info
            different = differences(self._info, [info])
        if different:
            raise ConfigError(
                f"replica {member.index} loaded another model than the others: {different}. All must read the same "
                "files, on machines of the same kind."
            )
        if self._weights is not None:
            member.replica.call("update_weights", self._weights, seconds=self._seconds)

    def _ready(self, member: Member) -> bool:
        """Start a replica again that does not run; return False if it has failed too often, or after `close`."""
        while not self._closed.is_set() and member.failures < MAX_FAILURES:
            if member.replica.alive():
                return True
            try:
                self._start(member)
                self._count(restarts=1)
            except (ReplicaFailed, ConfigError) as failure:
                self._mourn(member, failure)
        return False

    def _work(self, call: RunCall, member: Member) -> None:
        """Run batches of a call in a replica."""
        try:
            while self._ready(member) and (index := call.take()) is not None:
                self._run(call, index, member)
        finally:
            call.leave(self._refusal(member))

    def _run(self, call: RunCall, index: int, member: Member) -> None:
        try:
            result = member.replica.run(call.batches[index], self._options.batch_timeout)
        except ReplicaFailed as failure:
            if failure.result is not None:
                call.finish(index, failure.result)
            elif self._closed.is_set():
                call.finish(index, BatchResult(error=self._refusal(member)))
            elif not call.give_back(index, failure):
                self._count(given_up=1)
            self._mourn(member, failure)
        except Exception as error:
            call.finish(index, BatchResult(error=brief(error)))
        else:
            member.failures = 0
            self._count(batches=1)
            call.finish(index, result)

    def _try_weights(self, weights: Weights, member: Member) -> None:
        if not self._ready(member):
            raise ReplicaFailed(self._refusal(member))
        try:
            member.replica.call("update_weights", weights, seconds=self._seconds)
        except ReplicaFailed as failure:
            self._mourn(member, failure)
            raise

    def _mourn(self, member: Member, failure: Exception) -> None:
        """End what is left of a replica that failed, and wait a little if it keeps failing."""
        member.replica.kill()
        member.reason = str(failure)
        member.failures += getattr(failure, "result", None) is None  # after out of memory, a smaller batch follows
        if not self._closed.is_set():
            log = logger.info if self.stats.failures else logger.warning
            log("replica %d failed: %s; starting it again", member.index, failure)
            self._count(failures=1)
            self._closed.wait(PAUSE_SECONDS * max(0, member.failures - 1) ** 2)

    def _refusal(self, member: Member) -> str:
        """Return why a replica runs no more batches, for those that it leaves."""
        if self._closed.is_set():
            return "the executor was closed while the batch ran"
        reasons = "; ".join(dict.fromkeys(f"replica {each.index}: {each.reason}" for each in self._members))
        return f"all {len(self._members)} replicas have failed ({reasons}); load a new scorer"

    def _count(self, **changes: int) -> None:
        with self._lock:
            self.stats = replace(self.stats, **{name: getattr(self.stats, name) + n for name, n in changes.items()})


def _close(members: Sequence[Member], closed: threading.Event, process: int) -> None:
    if os.getpid() == process:  # a forked process must not end the replicas of its parent
        closed.set()
        left = list(members)
        while left:
            left = [member for member in left if not member.end()]


def kept_weights(weights: Weights) -> Weights:
    """Return weights that later changes of the caller do not reach: tensors are copied to the CPU, once."""
    if not isinstance(weights, Mapping):
        return absolute(os.fspath(weights)) if isinstance(weights, str | os.PathLike) else weights
    return {
        name: value.detach().to("cpu", copy=True) if hasattr(value, "detach") else value
        for name, value in weights.items()
    }


def require_sendable(spec: LoadSpec) -> None:
    """Raise ConfigError if the model of a spec cannot be loaded by other processes."""
    for source in spec.sources:
        if not isinstance(source, ModelFiles):
            raise ConfigError(
                f"a model that is passed in cannot be sent to other processes, got {type(source).__name__}: save it "
                "and pass its folder to gym_rm.load_scorer, or leave out num_replicas, tensor_parallel_size, "
                "fsdp_size and executor."
            )
        options = source.options
        if options.device_map is not None:
            raise ConfigError(
                f"device_map={options.device_map!r} divides the model over the devices of one process; with "
                "num_replicas, tensor_parallel_size or fsdp_size every process has one device. Pass only one of them."
            )
        if str(options.device).startswith("cuda:"):
            raise ConfigError(
                f"device={str(options.device)!r} names one GPU, but the processes of the model get one GPU each, in "
                "order; pass device='cuda', and choose the GPUs with CUDA_VISIBLE_DEVICES."
            )
