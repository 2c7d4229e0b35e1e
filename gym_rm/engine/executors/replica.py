"""A replica: a group of ranks that hold one copy of a model. The protocol, the options, and how a group fails."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from typing import Annotated, Any, Literal, Protocol, TypeAlias

import pydantic

from gym_rm.checks import finite
from gym_rm.config import Config, NonNegativeInt, PositiveInt
from gym_rm.engine.executors.executor import BatchResult, LoadSpec, ModelInfo
from gym_rm.engine.token_tree import Batch
from gym_rm.errors import ConfigError

Where: TypeAlias = Literal["auto", "processes", "ray"]


def _lease_seconds(value: Any) -> float:
    seconds = finite("lease_seconds", value)
    if seconds <= 0:
        raise ConfigError(f"lease_seconds must be positive, got {value!r}.")
    return seconds


class ParallelOptions(Config):
    """Options for a model that is divided over several processes, or copied to them."""

    tensor_parallel_size: PositiveInt = 1
    """Number of processes that share every layer of a model: each has some of its heads and columns."""
    fsdp_size: PositiveInt = 1
    """Number of processes that share the weights of a model: each computes whole layers, with gathered weights."""
    num_replicas: PositiveInt = 1
    """Number of copies of the model, which score different batches at the same time."""
    replicas: Where = "auto"
    """Where the copies run: `"processes"` of this machine, or `"ray"`. `"auto"` is Ray if this process is connected to
    it, otherwise processes."""
    lease_seconds: Annotated[float, pydantic.BeforeValidator(_lease_seconds)] = 120.0
    """Seconds after which a batch without a result is also given to another copy; after twice this time the silent copy
    is started again. A batch gets more if it is expected to take more than a tenth of this time."""
    max_restarts: NonNegativeInt = 3
    """Number of times, per copy, that copies may be started again; batches that succeed restore it."""
    name: str | None = None
    """Name of a group of copies in Ray that several processes share: the first makes it, the others find it."""

    @property
    def num_ranks(self) -> int:
        """Number of processes that hold one copy of the model."""
        return self.tensor_parallel_size * self.fsdp_size


class ReplicaFailed(Exception):
    """A rank died, does not answer, or disagrees with the others: the group must be started again.

    Attributes:
        reason: what happened.
        result: result of the batch that ran, if a rank reported an error before the group failed; otherwise None.
    """

    def __init__(self, reason: str, result: BatchResult | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.result = result


class Replica(Protocol):
    """One group of `LoadSpec.num_ranks` ranks that hold one model. One thread calls it; `kill` may come from any."""

    def start(self, spec: LoadSpec, seconds: float | None = None) -> ModelInfo:
        """Start the ranks and load the model; after `kill`, start again.

        Raises:
            ConfigError: the ranks refuse the model or an option, with their message.
            ReplicaFailed: a rank died, or did not answer within `seconds` (None for no limit).
        """
        ...

    def run(self, batch: Batch, seconds: float) -> BatchResult:
        """Run a batch and wait for its result.

        Raises:
            ReplicaFailed: a rank died, or did not answer within `seconds`.
        """
        ...

    def call(self, method: str, *arguments: Any, seconds: float) -> None:
        """Call a method of the executor in every rank, such as `"update_weights"`.

        Raises:
            ConfigError: every rank refused the arguments, and nothing has changed; or one refused and another is
                silent, and the group has been killed.
            ReplicaFailed: a rank died, did not answer within `seconds`, or disagrees with the others.
        """
        ...

    def alive(self) -> bool:
        """Return False if a rank is known to be dead."""
        ...

    def kill(self) -> None:
        """End all ranks and remove everything that was made for them; a running call raises `ReplicaFailed`."""
        ...


def require_sendable(spec: LoadSpec) -> None:
    """Raise ConfigError if the model of a spec cannot be loaded by other processes."""
    for source in (spec.model, spec.reference):
        if source is None:
            continue
        options = getattr(source, "options", None)
        if options is None:
            raise ConfigError(
                f"a model that is passed in cannot be sent to other processes, got {type(source).__name__}: save it "
                "and pass its folder to gym_rm.load_scorer, or leave out num_replicas, tensor_parallel_size, "
                "fsdp_size, replicas and executor."
            )
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


def with_absolute_paths(spec: LoadSpec) -> LoadSpec:
    """Return the spec with absolute folders: the working directory changes, and other processes have another."""

    def absolute(source: Any) -> Any:
        if source is None:
            return None
        adapter = source.adapter
        if adapter is not None:
            adapter = replace(adapter, source=_absolute(adapter.source), base=_absolute(adapter.base))
        options = source.options.model_copy(update={"path": source.options.path and _absolute(source.options.path)})
        return replace(source, source=_absolute(source.source), adapter=adapter, options=options)

    return replace(spec, model=absolute(spec.model), reference=absolute(spec.reference))


def _absolute(path: str) -> str:
    return os.path.abspath(path) if os.path.isdir(path) else path


def connected_to_ray() -> bool:
    """Return whether this process is connected to Ray; does not import Ray."""
    import sys

    loaded = sys.modules.get("ray")
    return loaded is not None and importlib.util.find_spec("ray") is not None and bool(loaded.is_initialized())
