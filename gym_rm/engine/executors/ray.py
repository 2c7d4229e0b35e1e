"""Replicas in Ray: the ranks of a replica are actors in one placement group, on one node."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from gym_rm.engine.executors.answers import (
    Answer,
    agreed_call,
    agreed_info,
    agreed_result,
    has_error,
    raise_if_refused,
    result_of,
)
from gym_rm.engine.executors.executor import BatchResult, Executor, LoadSpec, ModelInfo
from gym_rm.engine.executors.processes import GRACE, dumps
from gym_rm.engine.executors.rank import Rank, start_rank
from gym_rm.engine.executors.rank_worker import RankStart, RankWorker
from gym_rm.engine.executors.replica import ParallelOptions, ReplicaFailed, require_sendable
from gym_rm.engine.executors.replicas import ReplicatedExecutor
from gym_rm.engine.token_tree import Batch
from gym_rm.errors import ConfigError, brief, logger

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
except ImportError as missing:
    raise ConfigError(
        f"executor='ray' needs Ray, but importing it failed: {missing}. Install it with pip install 'gym-rm[ray]', or "
        "pass executor='processes' for replicas on this machine."
    ) from missing

ROOM_SECONDS = 60.0  # that a replica waits for free resources
START_SECONDS = 600.0  # in which actors must start and import torch, before they load the model
END_SECONDS = 5.0  # after which an actor that does not end is killed by its process id


class RankActor:
    """The Ray actor of a rank: as the process of a rank, with Ray's messages."""

    def host_store(self) -> str:
        """Open the store at which the ranks of the group meet, on a free port, and return its address."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host = str(ray.util.get_node_ip_address())
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return f"tcp:{host}:{self._store.port}"

    def begin(self, start: bytes) -> tuple[str, int]:
        """Take the place in the group; return the node and the process id."""
        self._worker = RankWorker(pickle.loads(start))
        return str(ray.get_runtime_context().get_node_id()), os.getpid()

    def handle(self, request: bytes) -> bytes:
        """Answer a request of the driver."""
        try:
            method, *arguments = pickle.loads(request)
        except Exception as error:  # for example a class that this node cannot import
            answer = Answer(error=f"the request cannot be read: {brief(error)}")
        else:
            answer = self._worker.handle(method, *arguments)
        return pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)

    def wait(self) -> None:
        """Return never: the caller learns of the end of the actor."""
        threading.Event().wait()


class RayReplica:
    """One group of ranks as Ray actors; see `Replica`.

    Each rank gets one CPU and, for a model on GPUs, one GPU. The actors end with the process that made them.

    Args:
        index: index of the replica, from 0.
        num_replicas: number of replicas, for the check of resources.
        make: function that returns the executor of a rank; it is called in the rank's process.
    """

    def __init__(self, index: int = 0, *, num_replicas: int = 1, make: Callable[[Rank], Executor] = start_rank) -> None:
        self._index = index
        self._num_replicas = num_replicas
        self._make = make
        self._lock = threading.Lock()
        self._group: Any = None
        self._actors: list[Any] = []
        self._ends: list[Any] = []
        self._places: list[tuple[str, int]] = []
        self._starts = 0
        self._killed = False

    def start(self, spec: LoadSpec, seconds: float | None = None) -> ModelInfo:
        """See `Replica.start`."""
        require_sendable(spec)
        request = dumps("load", spec)
        with self._lock:
            self._killed = False
        try:
            with _ray_errors():
                self._place(_bundle(spec), spec.num_ranks)
                self._begin(spec.num_ranks, seconds or START_SECONDS)
            answers = self._ask(request, seconds)
            raise_if_refused(answers)
            failed = [f"rank {i}: {each.error}" for i, each in enumerate(answers) if each.error is not None]
            if failed:
                raise ReplicaFailed(f"the model did not load; {'; '.join(failed)}")
            return agreed_info([each.value for each in answers])
        except BaseException:
            self.kill()
            raise

    def run(self, batch: Batch, seconds: float) -> BatchResult:
        """See `Replica.run`."""
        try:
            return agreed_result(self._ask(dumps("run", batch), seconds))
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            return BatchResult(error=f"Ray's object store is full: {brief(error)[:300]}", out_of_memory=True)

    def call(self, method: str, *arguments: Any, seconds: float) -> None:
        """See `Replica.call`."""
        agreed_call(method, self._ask(dumps(method, *arguments), seconds))

    def alive(self) -> bool:
        """See `Replica.alive`."""
        with self._lock:
            if self._killed or not self._ends or not ray.is_initialized():
                return False
            ended, _ = ray.wait(self._ends, timeout=0)
        return not ended

    def kill(self) -> None:
        """See `Replica.kill`. Also ends actors that are stopped, which Ray alone does not."""
        with self._lock:
            self._killed = True
            actors, group, places, ends = self._actors, self._group, self._places, self._ends
            self._actors, self._group, self._places, self._ends = [], None, [], []
        if not ray.is_initialized():  # Ray has ended them
            return
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        if ends:
            _end_processes(ends, places)
        if group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(group)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of the ranks on their node, in order."""
        with self._lock:
            return tuple(process_id for _, process_id in self._places)

    def _place(self, bundle: dict[str, float], size: int) -> None:
        """Reserve the resources of the group on one node."""
        room = _room(bundle, size)
        if self._starts == 0 and room < self._num_replicas:
            raise ConfigError(
                f"num_replicas={self._num_replicas} with {size} ranks each needs {self._num_replicas} times {size} x "
                f"{bundle} on one node, but the nodes of this Ray cluster have room for {room}: "
                f"{[_resources(node) for node in _nodes()]}. Pass a smaller num_replicas or add nodes."
            )
        group = placement_group([bundle] * size, strategy="STRICT_PACK")
        with self._lock:
            self._group = group
        ends = time.monotonic() + ROOM_SECONDS
        while not group.wait(1.0):
            if self._killed:
                raise ReplicaFailed("it was stopped")
            if time.monotonic() > ends:
                raise ReplicaFailed(
                    f"no node had {size} x {bundle} free for {ROOM_SECONDS:.0f} seconds; free now: "
                    f"{ray.available_resources()}"
                )

    def _begin(self, size: int, seconds: float) -> None:
        actor_class = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"end": 1})(RankActor)
        gpus = int(self._group.bundle_specs[0].get("GPU", 0))
        for i in range(size):
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=i)
            with self._lock:
                if self._killed:
                    raise ReplicaFailed("it was stopped while it started")
                actor = actor_class.options(num_cpus=1, num_gpus=gpus, scheduling_strategy=where).remote()
                self._actors.append(actor)
                self._ends.append(actor.wait.options(concurrency_group="end").remote())
        actors = list(self._actors)
        store = ray.get(actors[0].host_store.remote(), timeout=seconds) if size > 1 else None
        starts = [
            RankStart(Rank(i, size, store, device_index=0, threads=1), self._make, quiet=bool(self._index or i))
            for i in range(size)
        ]
        begun = [actor.begin.remote(pickle.dumps(each)) for actor, each in zip(actors, starts, strict=True)]
        places = ray.get(begun, timeout=seconds)
        with self._lock:
            self._places = places
        self._starts += 1

    def _ask(self, request: bytes, seconds: float | None) -> list[Answer]:
        """Send a request to all ranks and return their answers, in order."""
        with self._lock:
            actors = list(self._actors)
        if not actors:
            raise ReplicaFailed("it was stopped")
        answers: dict[int, Answer] = {}
        ends = None if seconds is None else time.monotonic() + seconds
        try:
            with _ray_errors():
                message = request if len(actors) == 1 else ray.put(request)
                waiting = {actor.handle.remote(message): i for i, actor in enumerate(actors)}
                while waiting:
                    left = None if ends is None else max(0.001, ends - time.monotonic())
                    done, _ = ray.wait(list(waiting), timeout=left)
                    if not done:
                        raise ReplicaFailed(f"ranks {sorted(waiting.values())} did not answer in time")
                    for reference in done:
                        i = waiting.pop(reference)
                        answers[i] = pickle.loads(ray.get(reference))
                        if has_error(answers[i]):
                            in_grace = time.monotonic() + GRACE
                            ends = in_grace if ends is None else min(ends, in_grace)
        except ReplicaFailed as failure:
            first = next((each for each in answers.values() if has_error(each)), None)
            if first is not None:
                self.kill()  # the silent rank may have changed its weights
                raise_if_refused([first])
                failure.result = result_of(first)
            raise
        return [answers[i] for i in range(len(actors))]


@contextlib.contextmanager
def _ray_errors() -> Iterator[None]:
    """Raise ReplicaFailed for errors of Ray, except for a full object store."""
    try:
        yield
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
        raise
    except ray.exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ReplicaFailed(f"{type(error).__name__}: {' '.join(lines)[:200]}") from error


def _end_processes(ends: list[Any], places: list[tuple[str, int]]) -> None:
    """Wait for the actors to end; kill those that do not, because they are stopped, from a task on their node."""
    with contextlib.suppress(Exception):
        _, left = ray.wait(ends, num_returns=len(ends), timeout=END_SECONDS)
        kill = ray.remote(num_cpus=0, max_retries=0)(_kill)
        tasks = [
            kill.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(process_id)
            for end, (node, process_id) in zip(ends, places, strict=False)
            if end in left
        ]
        ray.wait(tasks, num_returns=len(tasks), timeout=END_SECONDS) if tasks else None


def _kill(process_id: int) -> None:
    import signal

    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)


def _bundle(spec: LoadSpec) -> dict[str, float]:
    """Return the resources of a rank. `"auto"` is a GPU if a node has one: the driver's own machine may have none."""
    device = str(getattr(getattr(spec.model, "options", None), "device", "auto"))
    on_gpu = device.startswith("cuda") or (
        device == "auto" and any(node.get("GPU") for node in map(_resources, _nodes()))
    )
    return {"CPU": 1, "GPU": 1} if on_gpu else {"CPU": 1}


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _resources(node: dict[str, Any]) -> dict[str, float]:
    return {name: node["Resources"].get(name, 0) for name in ("CPU", "GPU")}


def _room(bundle: dict[str, float], size: int) -> int:
    """Return how many groups the nodes can hold, if nothing else runs on them."""
    return sum(
        int(min(resources[name] // (size * needed) for name, needed in bundle.items()))
        for resources in map(_resources, _nodes())
    )


# --- the connection to Ray -----------------------------------------------------------------------------------------

_users = 0  # executors that use a Ray that was started here
_users_lock = threading.Lock()


def connect() -> Callable[[], None]:
    """Connect to Ray if this process is not connected; return the function that undoes it.

    A cluster that RAY_ADDRESS names or that runs on this machine is used, otherwise a local one is started.
    """
    global _users
    with _users_lock:
        if _users == 0 and ray.is_initialized():
            return lambda: None
        if _users == 0:
            _start_ray()
        _users += 1
    return _disconnect


def _start_ray() -> None:
    address = os.environ.get("RAY_ADDRESS")
    try:
        ray.init(address=address or "auto", log_to_driver=True, logging_level="warning")
        logger.info("connected to the Ray cluster at %s", ray.get_runtime_context().gcs_address)
    except ConnectionError as error:
        if address:
            raise ConfigError(f"RAY_ADDRESS={address!r} names a Ray cluster that does not answer: {error}") from error
        ray.init(address="local", include_dashboard=False, logging_level="warning")
        logger.info("started a local Ray cluster: %s", _resources(_nodes()[0]))


def _disconnect() -> None:
    global _users
    with _users_lock:
        _users -= 1
        if _users == 0:
            ray.shutdown()


class RayExecutor(ReplicatedExecutor):
    """A `ReplicatedExecutor` of `RayReplica`s; `close` also ends a Ray that was started for it."""

    def __init__(self, options: ParallelOptions, disconnect: Callable[[], None]) -> None:
        super().__init__(options, functools.partial(RayReplica, num_replicas=options.num_replicas))
        self._disconnect = weakref.finalize(self, disconnect)
        self._disconnect.atexit = False  # Ray ends itself at exit

    def close(self) -> None:
        """End all replicas, and Ray if it was started for this executor."""
        super().close()
        self._disconnect()
