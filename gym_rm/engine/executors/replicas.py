"""Executor that divides batches among replicas of a model, and starts those again that die.

Each replica has a thread, which runs batches in it, and starts it again when it fails. A batch whose replica died or is
silent gets an error, and the scheduler runs its rows again, alone. So every call ends.
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
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from time import monotonic
from typing import Any

from gym_rm.engine.executors.executor import BatchResult, LoadSpec, ModelInfo, Weights
from gym_rm.engine.executors.parallel_options import ParallelOptions
from gym_rm.engine.executors.replica import Replica, ReplicaFailed, differences
from gym_rm.engine.loading.checkpoint import ModelFiles
from gym_rm.engine.loading.files import absolute
from gym_rm.engine.token_tree import Batch
from gym_rm.errors import ConfigError, RemoteError, brief, logger

PAUSE_SECONDS = 0.5  # before a replica is started again, so that one that cannot start does not take all the time
RESTART_FACTOR = 4.0  # restarts and methods besides `run` may take this many times the first start and a batch


class ReplicaThread:
    """A replica, not started, and the thread that calls it: requests are functions without arguments, done in order.

    Attributes:
        reason: why the replica failed last.
    """

    def __init__(self, index: int, replica: Replica) -> None:
        self.index = index
        self.replica = replica
        self.reason = ""
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon, so that a script that forgets `close` can end. It does not hold the executor while it waits.
        self._thread = threading.Thread(
            target=_serve, args=(self._requests,), name=f"gym_rm replica {index}", daemon=True
        )
        self._thread.start()

    def ask(self, function: Callable[[ReplicaThread], Any]) -> Future[Any]:
        """Call a function with this replica in its thread, after what it was asked before."""
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


class ReplicatedExecutor:
    """Runs batches on several replicas at the same time; results have the order of the batches.

    `close`, the end of the program or of the object's life ends all replicas.

    Args:
        options: number of replicas, and the time that they have for a batch.
        make_replica: function that returns the replica with an index; it must not start it.
    """

    def __init__(self, options: ParallelOptions, make_replica: Callable[[int], Replica]) -> None:
        self._options = options
        self._make_replica = make_replica
        self._threads: list[ReplicaThread] = []
        self._spec: LoadSpec | None = None
        self._info: ModelInfo | None = None
        self._weights: Weights | None = None  # of `update_weights`, for replicas that start again
        self._stall_timeout = math.inf  # seconds that a start, or another method than `run`, may take
        self._closed = threading.Event()
        self._lock = threading.Lock()  # of the info
        self._end: weakref.finalize[..., ReplicatedExecutor] | None = None
        self._process = os.getpid()

    def load(self, spec: LoadSpec) -> ModelInfo:
        """See `Executor.load`. All replicas load the model at the same time.

        Raises:
            ConfigError: a replica refuses the model, or replicas load it differently.
            RemoteError: a replica does not start.
        """
        if self._threads:
            raise ConfigError("this executor already has a model; make another executor, or close() this one first.")
        require_sendable(spec)
        self._spec, self._info, self._weights, self._stall_timeout = spec, None, None, math.inf
        self._closed.clear()
        self._process = os.getpid()
        replicas = [self._make_replica(index) for index in range(self._options.num_replicas)]
        self._threads = [ReplicaThread(index, replica) for index, replica in enumerate(replicas)]
        self._end = weakref.finalize(self, _close, self._threads, self._closed, self._process)
        begun = monotonic()
        try:
            starts = [thread.ask(self._start) for thread in self._threads]
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
        self._stall_timeout = RESTART_FACTOR * (self._options.batch_timeout + monotonic() - begun)
        return replace(self._info, num_replicas=len(replicas))

    def run(self, batches: Iterable[Batch]) -> list[BatchResult]:
        """See `Executor.run`. After an interrupt, the executor can be used again."""
        threads, batches = self._loaded(), [*batches]
        waiting = deque(sorted(range(len(batches)), key=lambda i: -batches[i].num_tokens))
        answers: queue.SimpleQueue[tuple[int, BatchResult] | None] = queue.SimpleQueue()
        results: dict[int, BatchResult] = {}
        num_working = len(threads)
        try:
            for thread in threads if batches else ():
                thread.ask(functools.partial(self._work, batches, waiting, answers))
            while num_working and len(results) < len(batches):
                if (answer := answers.get()) is None:
                    num_working -= 1
                else:
                    results[answer[0]] = answer[1]
        except BaseException:  # Ctrl-C
            waiting.clear()
            raise
        return [results.get(i) or BatchResult(error=self._refusal()) for i in range(len(batches))]

    def update_weights(self, weights: Weights) -> None:
        """See `Executor.update_weights`. Replicas that start later get these weights too.

        Raises:
            ConfigError: the weights do not fit. The first replica gets them alone, so nothing has changed.
            RemoteError: no replica could take the weights.
        """
        weights = kept_weights(weights)
        threads = self._loaded()
        for thread in threads:
            if thread.ask(functools.partial(self._try_weights, weights)).result():
                self._weights = weights
                return self._call([each for each in threads if each is not thread], "update_weights", weights)
        raise RemoteError(self._refusal())

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
        self._threads = []
        if self._end is not None:
            self._end()

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas, in order."""
        return tuple(thread.replica for thread in self._loaded())

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(
            "a scorer with replicas cannot be copied to another process. Load it there, or let the processes share "
            "one: a server, or an actor of Ray (docs/scaling.md)."
        )

    def _loaded(self) -> list[ReplicaThread]:
        if not self._threads:
            raise ConfigError(
                "the executor has no model, because it is closed or was not loaded; make a new scorer, or call load()."
            )
        if os.getpid() != self._process:
            raise ConfigError(
                "this process was forked from the one that started the replicas, and cannot use them; load a scorer "
                "here, start processes with context='spawn', or share one: a server, or an actor of Ray "
                "(docs/scaling.md)."
            )
        return self._threads

    def _call(self, threads: Sequence[ReplicaThread], method: str, *arguments: Any) -> None:
        """Call a method in replicas that run. One that fails is ended; `_start` gives it the weights that all have."""

        def call(thread: ReplicaThread) -> None:
            try:
                if thread.replica.alive():
                    thread.replica.call(method, *arguments, seconds=self._stall_timeout)
            except (ReplicaFailed, ConfigError) as failure:
                self._stop_failed(thread, failure)

        for asked in [thread.ask(call) for thread in threads]:
            asked.result()

    def _start(self, thread: ReplicaThread) -> None:
        """Start a replica, and give it the weights that the others have."""
        assert self._spec is not None
        info = thread.replica.start(self._spec, self._stall_timeout)
        with self._lock:
            self._info = self._info or info
            different = differences(self._info, [info])
        if different:
            raise ConfigError(
                f"replica {thread.index} loaded another model than the others: {different}. All must read the same "
                "files, on machines of the same kind."
            )
        if self._weights is not None:
            thread.replica.call("update_weights", self._weights, seconds=self._stall_timeout)

    def _ready(self, thread: ReplicaThread) -> bool:
        """Return whether a replica runs; one that does not is started again, once."""
        if thread.replica.alive():
            return True
        if thread.reason and self._closed.wait(PAUSE_SECONDS):
            return False
        try:
            self._start(thread)
        except (ReplicaFailed, ConfigError) as failure:
            self._stop_failed(thread, failure)
            return False
        return True

    def _work(
        self,
        batches: Sequence[Batch],
        waiting: deque[int],
        answers: queue.SimpleQueue[tuple[int, BatchResult] | None],
        thread: ReplicaThread,
    ) -> None:
        """Run batches that wait, the largest first, in a replica; the last answer is None."""
        try:
            while not self._closed.is_set() and self._ready(thread):
                try:
                    index = waiting.popleft()
                except IndexError:
                    break
                answers.put((index, self._run(batches[index], thread)))
        finally:
            answers.put(None)

    def _run(self, batch: Batch, thread: ReplicaThread) -> BatchResult:
        try:
            return replace(thread.replica.run(batch, self._options.batch_timeout), replica=thread.index)
        except ReplicaFailed as failure:
            self._stop_failed(thread, failure)
            if self._closed.is_set():
                return BatchResult(error=self._refusal())
            return failure.result or BatchResult(error=f"replica {thread.index} failed: {failure.reason}")
        except Exception as error:
            return BatchResult(error=brief(error))

    def _try_weights(self, weights: Weights, thread: ReplicaThread) -> bool:
        """Return whether a replica took new weights."""
        if not self._ready(thread):
            return False
        try:
            thread.replica.call("update_weights", weights, seconds=self._stall_timeout)
        except ReplicaFailed as failure:
            self._stop_failed(thread, failure)
            return False
        return True

    def _stop_failed(self, thread: ReplicaThread, failure: Exception) -> None:
        """End what is left of a replica that failed."""
        thread.replica.kill()
        thread.reason = str(failure)
        if not self._closed.is_set():
            logger.warning("replica %d failed: %s; starting it again", thread.index, failure)

    def _refusal(self) -> str:
        """Return why no replica runs the batches that are left."""
        if self._closed.is_set():
            return "the executor was closed while the batch ran"
        reasons = "; ".join(f"replica {each.index}: {each.reason}" for each in self._threads if each.reason)
        return f"all {len(self._threads)} replicas have failed ({reasons}); load a new scorer"


def _close(threads: Sequence[ReplicaThread], closed: threading.Event, process: int) -> None:
    if os.getpid() == process:  # a forked process must not end the replicas of its parent
        closed.set()
        running = list(threads)
        while running:
            running = [thread for thread in running if not thread.end()]


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
