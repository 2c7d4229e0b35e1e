"""Executor that divides batches among replicas of a model, and starts those again that die."""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gym_rm.engine.executors.executor import BatchResult, LoadSpec, ModelInfo, Weights
from gym_rm.engine.executors.parallel_options import ParallelOptions
from gym_rm.engine.executors.pool import Pool, ReplicaStats
from gym_rm.engine.executors.replica import Replica
from gym_rm.engine.loading.checkpoint import ModelFiles
from gym_rm.engine.loading.files import absolute
from gym_rm.engine.token_tree import Batch
from gym_rm.errors import ConfigError


class ReplicatedExecutor:
    """Runs batches on several replicas at the same time; results have the order of the batches.

    A replica that dies or hangs is started again, and its batch runs on another one. A batch whose replicas failed
    twice gets an error. `close`, the end of the program or of the object's life ends all replicas.

    Args:
        options: number of replicas, and the time that they have for a batch.
        make_replica: function that returns the replica with an index; it must not start it.
    """

    def __init__(self, options: ParallelOptions, make_replica: Callable[[int], Replica]) -> None:
        self._options = options
        self._make_replica = make_replica
        self._pool: Pool | None = None
        self._end: weakref.finalize[..., ReplicatedExecutor] | None = None
        self._process = os.getpid()

    def load(self, spec: LoadSpec) -> ModelInfo:
        """See `Executor.load`. All replicas load the model at the same time."""
        if self._pool is not None:
            raise ConfigError("this executor already has a model; make another executor, or close() this one first.")
        require_sendable(spec)
        replicas = [self._make_replica(index) for index in range(self._options.num_replicas)]
        pool = Pool(replicas, spec, self._options.batch_timeout)
        self._process = os.getpid()
        # The threads of the pool hold the pool, not this object, so that they end when nobody holds it any more.
        self._end = weakref.finalize(self, _close, pool, self._process)
        self._pool = pool
        try:
            info = pool.start()
        except BaseException:
            self.close()
            raise
        return replace(info, num_replicas=len(replicas))

    def run(self, batches: Sequence[Batch]) -> list[BatchResult]:
        """See `Executor.run`. After an interrupt, the executor can be used again."""
        return self._loaded().run(batches)

    def update_weights(self, weights: Weights) -> None:
        """See `Executor.update_weights`. Replicas that start later get these weights too."""
        self._loaded().update_weights(kept_weights(weights))

    def sleep(self) -> None:
        """See `Executor.sleep`."""
        self._loaded().set_asleep(True)

    def wake(self) -> None:
        """See `Executor.wake`."""
        self._loaded().set_asleep(False)

    def weights_version(self) -> int:
        """See `Executor.weights_version`."""
        return self._loaded().wanted.version

    def clear_cache(self) -> None:
        """See `Executor.clear_cache`."""
        self._loaded().clear_cache()

    def close(self) -> None:
        """End all replicas; closing twice is allowed."""
        self._pool = None
        if self._end is not None:
            self._end()

    @property
    def stats(self) -> ReplicaStats:
        """What happened to the replicas since `load`."""
        return self._loaded().stats

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas, in order."""
        return self._loaded().replicas

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(
            "a scorer with replicas cannot be copied to another process. Load it there, or let the processes share "
            "one: a server, or an actor of Ray (docs/scaling.md)."
        )

    def _loaded(self) -> Pool:
        if self._pool is None:
            raise ConfigError(
                "the executor has no model, because it is closed or was not loaded; make a new scorer, or call load()."
            )
        if os.getpid() != self._process:
            raise ConfigError(
                "this process was forked from the one that started the replicas, and cannot use them; load a scorer "
                "here, start processes with context='spawn', or share one: a server, or an actor of Ray "
                "(docs/scaling.md)."
            )
        return self._pool


def _close(pool: Pool, process: int) -> None:
    if os.getpid() == process:  # a forked process must not end the replicas of its parent
        pool.close()


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
                "and pass its folder to gym_rm.load_scorer, or leave out num_replicas, tensor_parallel_size "
                "and executor."
            )
        options = source.options
        if options.device_map is not None:
            raise ConfigError(
                f"device_map={options.device_map!r} divides the model over the devices of one process; with "
                "num_replicas or tensor_parallel_size every process has one device. Pass only one of them."
            )
        if str(options.device).startswith("cuda:"):
            raise ConfigError(
                f"device={str(options.device)!r} names one GPU, but the processes of the model get one GPU each, in "
                "order; pass device='cuda', and choose the GPUs with CUDA_VISIBLE_DEVICES."
            )
