"""A replica whose ranks are Ray actors in one placement group, on one node."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

from gym_rm.engine.executors.executor import Executor, LoadSpec
from gym_rm.engine.executors.parallel_options import ParallelOptions
from gym_rm.engine.executors.ranks import Rank, start_rank
from gym_rm.engine.executors.replica import Replica, ReplicaFailed
from gym_rm.engine.executors.replicas import ReplicatedExecutor
from gym_rm.engine.executors.worker import Answer, RankWorker
from gym_rm.errors import ConfigError

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as missing:
    raise ConfigError(
        f"executor='ray' needs Ray, but importing it failed: {missing}. Install it with pip install 'gym-rm[ray]', or "
        "pass executor='processes' for replicas on this machine."
    ) from missing

ROOM_SECONDS = 60.0  # that a replica waits for free resources
INLINE_BYTES = 100_000  # which Ray sends with a call; more is read from the object store, as a copy for all ranks
START_SECONDS = 600.0  # in which actors must start and import torch, before they load the model


class RankActor:
    """The Ray actor of a rank: as the process of a rank, with Ray's messages."""

    def host_store(self) -> str:
        """Open the store at which the ranks of the group meet, on a free port, and return its address."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host = str(ray.util.get_node_ip_address())
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return f"{host}:{self._store.port}"

    def begin(self, rank: Rank, make: Callable[[Rank], Executor]) -> int:
        """Take the place in the group; return the process id."""
        self._worker = RankWorker(rank, make)
        return os.getpid()

    def answer(self, request: bytes) -> bytes:
        """Answer a request of the driver."""
        return self._worker.answer(request)


class RayReplica(Replica):
    """One group of ranks as Ray actors; see `Replica`.

    Each rank gets one CPU and, for a model on GPUs, one GPU. The actors end with the process that made them. `make`
    returns the executor of a rank, and is called in the rank's process.
    """

    def __init__(self, index: int = 0, *, make: Callable[[Rank], Executor] = start_rank) -> None:
        self._index = index
        self._make = make
        self._lock = threading.Lock()
        self._group: Any = None
        self._actors: list[Any] = []
        self._process_ids: tuple[int, ...] = ()
        self._answers: dict[Any, int] = {}

    @property
    def process_ids(self) -> tuple[int, ...]:
        """See `Replica.process_ids`; each is one of the replica's node."""
        return self._process_ids

    def alive(self) -> bool:
        """See `Replica.alive`. The end of an idle actor is noticed by the next request."""
        return bool(self._actors) and ray.is_initialized()

    def kill(self) -> None:
        """See `Replica.kill`."""
        with self._lock:
            actors, group = self._actors, self._group
            self._actors, self._group, self._process_ids = [], None, ()
        if not ray.is_initialized():  # Ray has ended them
            return
        with contextlib.suppress(ray.exceptions.RayError):
            for actor in actors:
                ray.kill(actor)
            if group is not None:
                remove_placement_group(group)

    def _start_ranks(self, spec: LoadSpec) -> None:
        size = spec.num_ranks
        with _ray_errors():
            _require_node()
            self._reserve(spec)
            for i in range(size):
                self._add_actor(i)
            actors = list(self._actors)
            store = ray.get(actors[0].host_store.remote(), timeout=START_SECONDS) if size > 1 else None
            ranks = [Rank(i, size, store, quiet=bool(self._index or i)) for i in range(size)]
            begun = [actor.begin.remote(rank, self._make) for actor, rank in zip(actors, ranks, strict=True)]
            self._process_ids = tuple(ray.get(begun, timeout=START_SECONDS))

    def _reserve(self, spec: LoadSpec) -> None:
        """Reserve the resources of the group on one node."""
        # `"auto"` is a GPU if a node has one: the driver's own machine may have none.
        device = str(getattr(getattr(spec.model, "options", None), "device", "auto"))
        on_gpu = device.startswith("cuda") or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
        bundle = {"CPU": 1, "GPU": 1} if on_gpu else {"CPU": 1}
        group = placement_group([bundle] * spec.num_ranks, strategy="STRICT_PACK")
        with self._lock:
            self._group = group
        ends = monotonic() + ROOM_SECONDS
        while not group.wait(1.0):
            if self._group is not group:
                raise ReplicaFailed("it was stopped")
            if monotonic() > ends:
                raise ReplicaFailed(
                    f"no node had {spec.num_ranks} x {bundle} free for {ROOM_SECONDS:.0f} seconds (free "
                    f"now, on all nodes: {ray.available_resources()}); pass a smaller num_replicas, or add nodes"
                )

    def _add_actor(self, index: int) -> None:
        with self._lock:
            if self._group is None:
                raise ReplicaFailed("it was stopped")
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            num_gpus = self._group.bundle_specs[index].get("GPU", 0)
            actor_class = ray.remote(RankActor).options(num_cpus=1, num_gpus=num_gpus, scheduling_strategy=place)
            self._actors.append(actor_class.remote())

    def _send(self, request: bytes) -> None:
        actors = list(self._actors)
        if len(actors) < self._size:
            raise ReplicaFailed("it was stopped")
        with _ray_errors():
            _require_node()
            message = request if len(actors) == 1 or len(request) < INLINE_BYTES else ray.put(request)
            self._answers = {actor.answer.remote(message): i for i, actor in enumerate(actors)}

    def _receive(self, ends: float) -> dict[int, Answer]:
        left = None if ends == math.inf else max(0.0, ends - monotonic())
        with _ray_errors():
            ready, _ = ray.wait(list(self._answers), timeout=left)
            if not ready:
                raise ReplicaFailed(
                    f"ranks {sorted(self._answers.values())} did not answer in time; raise batch_timeout if a batch "
                    "may take so long"
                )
            return {self._answers.pop(reference): pickle.loads(ray.get(reference)) for reference in ready}


def _require_node() -> None:
    """Raise ReplicaFailed if the raylet of this machine has ended: Ray would wait for it, or end this process."""
    here = ray.get_runtime_context().get_node_id()
    if not any(node["NodeID"] == here and node["Alive"] for node in ray.nodes()):
        raise ReplicaFailed("Ray has ended on this machine (its raylet is dead); start it again, and this program")


@contextlib.contextmanager
def _ray_errors() -> Iterator[None]:
    """Raise ReplicaFailed for errors of Ray."""
    try:
        yield
    except ray.exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ReplicaFailed(f"{type(error).__name__}: {' '.join(lines)[:200]}") from error


class RayExecutor(ReplicatedExecutor):
    """A `ReplicatedExecutor` of `RayReplica`s.

    If this process is not connected to Ray, the executor connects to the cluster that RAY_ADDRESS names or that runs on
    this machine, or starts a local one; `close` then disconnects, or ends it.
    """

    def __init__(self, options: ParallelOptions) -> None:
        super().__init__(options, RayReplica)
        self._connected = not ray.is_initialized()
        if self._connected:
            try:
                ray.init(logging_level="warning")
            except ConnectionError as error:
                raise ConfigError(f"the Ray cluster does not answer: {error}; check RAY_ADDRESS.") from error

    def close(self) -> None:
        """End all replicas, and the connection to Ray if it was made for this executor."""
        super().close()
        if self._connected:
            ray.shutdown()
            self._connected = False
