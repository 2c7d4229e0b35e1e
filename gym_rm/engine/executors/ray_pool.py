"""A pool of replicas in Ray with a name: the first process makes it, others find it, and it ends with the last one.

The pool lives in a detached actor, so it does not depend on the process that made it. Its clients send signs of life;
when there are none for a while, as after SIGKILL, the pool ends its replicas and itself.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import ray

from gym_rm.engine.executors.answers import Answer
from gym_rm.engine.executors.executor import BatchResult, LoadSpec, ModelInfo, Weights
from gym_rm.engine.executors.ledger import ReplicaStats
from gym_rm.engine.executors.processes import dumps
from gym_rm.engine.executors.ray import RayExecutor, connect
from gym_rm.engine.executors.replica import ParallelOptions, require_sendable, with_absolute_paths
from gym_rm.engine.executors.replicas import kept_weights
from gym_rm.engine.token_tree import Batch
from gym_rm.errors import ConfigError, RemoteError, brief

NAMESPACE = "gym_rm"
BEAT_SECONDS = 2.0  # between the signs of life of a client
SILENT_SECONDS = 20.0  # without a sign of life after which a client counts as gone
FIRST_SECONDS = 120.0  # that the pool waits for its first client
MOST_CALLS = 256  # concurrent calls of all clients
ATTEMPTS = 5  # to find or make a pool while another one with the name is ending


class PoolActor:
    """The detached actor: one `RayExecutor`, and the clients that use it.

    Args:
        silent_seconds: seconds without a sign of life after which a client counts as gone.
    """

    def __init__(self, silent_seconds: float) -> None:
        self._silent_seconds = silent_seconds
        self._executor: RayExecutor | None = None
        self._description: dict[str, str] = {}
        self._info: ModelInfo | None = None
        self._loading = threading.Lock()
        self._seen: dict[str, float] = {}
        self._ends = time.monotonic() + FIRST_SECONDS
        threading.Thread(target=self._watch, name="gym_rm clients", daemon=True).start()

    def load(self, client: str, description: dict[str, str], spec: bytes, options: dict[str, Any]) -> Answer:
        """Load the model for the first client; compare the description of the others with it."""
        self.beat(client)
        with self._loading:
            try:
                if self._executor is None:
                    executor = RayExecutor(ParallelOptions(**options), lambda: None)
                    self._info = executor.load(pickle.loads(spec))
                    self._executor, self._description = executor, description
                different = {
                    name: (self._description.get(name), description.get(name))
                    for name in {*self._description, *description}
                    if self._description.get(name) != description.get(name)
                }
                if different:
                    shown = "; ".join(
                        f"{name}: {ours} there, {yours} here" for name, (ours, yours) in different.items()
                    )
                    raise ConfigError(f"the pool of this name has another model or other options ({shown})")
                return Answer(self._info)
            except Exception as error:
                self.leave(client)
                return Answer(error=str(error) if isinstance(error, ConfigError) else brief(error),
                              refused=isinstance(error, ConfigError))  # fmt: skip

    def run(self, client: str, batches: bytes) -> tuple[list[BatchResult], int]:
        """Run batches of a client; return the results and the version of the weights."""
        self.beat(client)
        assert self._executor is not None
        return self._executor.run(pickle.loads(batches)), self.version(client)

    def version(self, client: str) -> int:
        """Note a sign of life; return the version of the weights, 0 until they are updated."""
        self.beat(client)
        return 0 if self._executor is None else self._executor.weights_version()

    def call(self, client: str, request: bytes) -> Answer:
        """Call another method of the executor, or read its `stats`."""
        self.beat(client)
        try:
            method, *arguments = pickle.loads(request)
            found = getattr(self._executor, method)
            return Answer(found(*arguments) if callable(found) else found)
        except Exception as error:
            refused = isinstance(error, ConfigError)
            return Answer(error=str(error) if refused else brief(error), refused=refused)

    def beat(self, client: str) -> int:
        """Note a sign of life; return the process id of the pool."""
        self._seen[client] = time.monotonic()
        self._ends = time.monotonic() + self._silent_seconds
        return os.getpid()

    def leave(self, client: str) -> None:
        """Forget a client; with the last one, the pool ends."""
        self._seen.pop(client, None)
        if not self._seen:
            self._ends = time.monotonic() + 0.5  # another client may be on its way

    def _watch(self) -> None:
        """End the pool when no client is left."""
        while True:
            time.sleep(0.5)
            now = time.monotonic()
            self._seen = {each: seen for each, seen in list(self._seen.items()) if now - seen < self._silent_seconds}
            if not self._seen and now > self._ends and not self._loading.locked():
                if self._executor is not None:
                    self._executor.close()
                os._exit(0)


class SharedExecutor:
    """An executor in a pool that several processes share; see `PoolActor`.

    Args:
        options: name, sizes and replicas; they must be equal in all processes.
        disconnect: function that undoes the connection to Ray.
    """

    def __init__(self, options: ParallelOptions, disconnect: Callable[[], None]) -> None:
        self._options = options
        self._client = uuid.uuid4().hex
        self._actor: Any = None
        self._request: tuple[Any, ...] = ()
        self._updated = threading.Event()  # whether the weights are known to be others than those of the checkpoint
        self._disconnect = weakref.finalize(self, disconnect)
        self._disconnect.atexit = False
        self._stop: weakref.finalize[..., SharedExecutor] | None = None

    def load(self, spec: LoadSpec) -> ModelInfo:
        """See `Executor.load`. Finds the pool, or makes it.

        Raises:
            ConfigError: a pool of this name has another model or other options.
        """
        if self._actor is not None:
            raise ConfigError("this executor already has a model; make another executor, or close() this one first.")
        require_sendable(spec)
        spec = with_absolute_paths(spec)
        options = dict(self._options)
        self._request = (_description(spec, options), dumps_spec(spec), options)
        return self._connect()

    def run(self, batches: Sequence[Batch]) -> list[BatchResult]:
        """See `Executor.run`. If the pool has died, another one is made, unless it had other weights."""
        request = pickle.dumps(list(batches), protocol=pickle.HIGHEST_PROTOCOL)
        for attempt in range(2):
            try:
                results, version = self._ask("run", request)
                if version:
                    self._updated.set()
                return results  # type: ignore[no-any-return]
            except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
                full = BatchResult(error=f"Ray's object store is full: {brief(error)[:300]}", out_of_memory=True)
                return [full] * len(batches)
            except ray.exceptions.RayActorError as error:
                if attempt or self._updated.is_set():
                    reason = f"the pool {self._options.name!r} has died ({brief(error)[:200]}); load a new scorer"
                    return [BatchResult(error=reason)] * len(batches)
                self._actor = None
                self._connect()
        raise AssertionError("unreachable")

    def update_weights(self, weights: Weights) -> None:
        """See `Executor.update_weights`. All processes that share the pool get these weights."""
        self._updated.set()
        self._call("update_weights", kept_weights(weights))

    def sleep(self) -> None:
        """See `Executor.sleep`; for all processes that share the pool."""
        self._call("sleep")

    def wake(self) -> None:
        """See `Executor.wake`."""
        self._call("wake")

    def weights_version(self) -> int:
        """See `Executor.weights_version`; it also changes when another process updates the weights."""
        version: int = self._call("weights_version")
        return version

    def clear_cache(self) -> None:
        """See `Executor.clear_cache`."""
        self._call("clear_cache")

    def close(self) -> None:
        """Leave the pool, which ends if nobody else uses it; closing twice is allowed."""
        self._actor = None
        if self._stop is not None:
            self._stop()
            self._stop = None
        self._disconnect()

    @property
    def stats(self) -> ReplicaStats:
        """What happened to the replicas of the pool, for all its clients."""
        stats: ReplicaStats = self._call("stats")
        return stats

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to use the pool as a client of its own."""
        return {"options": self._options, "request": self._request, "updated": self._updated.is_set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["options"], connect())  # type: ignore[misc]
        self._request = state["request"]
        if state["updated"]:
            self._updated.set()
        if self._request:
            self._connect()

    def _connect(self) -> ModelInfo:
        if self._stop is not None:
            self._stop()
        make = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=MOST_CALLS)(PoolActor)
        found = make.options(name=self._options.name, namespace=NAMESPACE, get_if_exists=True, lifetime="detached")
        for attempt in range(ATTEMPTS):
            try:
                actor = found.remote(SILENT_SECONDS)
                ray.get(actor.beat.remote(self._client))
                stop = threading.Event()
                threading.Thread(
                    target=_send_beats,
                    args=(actor, self._client, stop, self._updated),
                    name="gym_rm client",
                    daemon=True,
                ).start()
                self._stop = weakref.finalize(self, _leave, actor, self._client, stop, os.getpid())
                answer: Answer = ray.get(actor.load.remote(self._client, *self._request))
                break
            except ray.exceptions.RayActorError as error:
                if self._stop is not None:
                    self._stop()
                if attempt + 1 == ATTEMPTS:
                    raise RemoteError(
                        f"the pool {self._options.name!r} does not start: {brief(error)[:300]}"
                    ) from error
                time.sleep(1.0)  # the pool of this name was just ending
        if answer.error is not None:
            if self._stop is not None:
                self._stop()
            raise ConfigError(answer.error) if answer.refused else RemoteError(answer.error)
        self._actor = actor
        info: ModelInfo = answer.value
        return info

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            answer: Answer = self._ask("call", dumps(method, *arguments))
        except ray.exceptions.RayError as error:
            raise RemoteError(f"the pool {self._options.name!r} does not answer: {brief(error)[:300]}") from error
        if answer.error is not None:
            raise ConfigError(answer.error) if answer.refused else RemoteError(answer.error)
        return answer.value

    def _ask(self, method: str, request: bytes) -> Any:
        if self._actor is None:
            raise ConfigError(
                "the executor has no model, because it is closed or was not loaded; make a new scorer, or call load()."
            )
        return ray.get(getattr(self._actor, method).remote(self._client, request))


def _send_beats(actor: Any, client: str, stop: threading.Event, updated: threading.Event) -> None:
    while not stop.wait(BEAT_SECONDS) and ray.is_initialized():
        try:
            if ray.get(actor.version.remote(client), timeout=SILENT_SECONDS):
                updated.set()  # by another process
        except Exception:  # the next call of the client reports it
            return


def _leave(actor: Any, client: str, stop: threading.Event, process: int) -> None:
    stop.set()
    if os.getpid() == process and ray.is_initialized():
        try:
            ray.get(actor.leave.remote(client), timeout=5)
        except Exception:  # it has ended already
            return


def dumps_spec(spec: LoadSpec) -> bytes:
    """Return a spec as bytes, without the method name of a request."""
    dumps("load", spec)  # a clear error
    return pickle.dumps(spec, protocol=pickle.HIGHEST_PROTOCOL)


def _description(spec: LoadSpec, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the model and the options as texts, to compare those of two processes."""
    plain = replace(spec, model=None, reference=None)
    described = {name: repr(value) for name, value in {**asdict(plain), **options}.items()}
    for name, source in (("model", spec.model), ("reference", spec.reference)):
        if source is not None:
            described[name] = f"{source.name} ({source.read_revision()})"
            chosen = {key: value for key, value in source.options if key not in ("path", "tokenizer")}
            described |= {f"{name} {key}": repr(value) for key, value in chosen.items()}
    return described
