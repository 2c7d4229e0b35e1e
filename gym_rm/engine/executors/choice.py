"""Which executor runs a model, from the options of the user."""

from __future__ import annotations

import functools
from typing import Any

from gym_rm.engine.executors.executor import Executor, LoadSpec
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.executors.processes import ProcessReplica, require_gpus
from gym_rm.engine.executors.replica import (
    ParallelOptions,
    connected_to_ray,
    require_sendable,
)
from gym_rm.engine.executors.replicas import ReplicatedExecutor
from gym_rm.engine.executors.tensor_parallel import WorldExecutor, check_shards, in_foreign_world
from gym_rm.errors import ConfigError, nearest

NAMES = ("local", "processes", "ray")


def choose_executor(executor: Executor | str | None, options: ParallelOptions, spec: LoadSpec) -> Executor:
    """Return the executor for these options; it has no model yet.

    Args:
        executor: an executor, which is returned, one of `NAMES`, or None for what the options need.
        options: sizes and replicas.
        spec: the model that it will load.

    Raises:
        ConfigError: options contradict each other, the model, or the machine.
    """
    asked = {name: value for name, value in options if value != type(options).model_fields[name].default}
    if executor is not None and not isinstance(executor, str):
        if isinstance(executor, type) or not isinstance(executor, Executor):
            raise ConfigError(
                f"executor must be an Executor, such as LocalExecutor(), or one of {list(NAMES)}; got {executor!r:.80}."
            )
        others = {name: value for name, value in asked.items() if name not in ("tensor_parallel_size", "fsdp_size")}
        if others:
            raise ConfigError(f"executor={executor!r:.80} is an object, so {_written(others)} cannot be applied to it.")
        return executor
    where = _where(executor, options, asked)
    if where == "local":
        return LocalExecutor()
    require_sendable(spec)
    check_shards(spec)
    if where != "ray" and spec.num_ranks > 1 and in_foreign_world():
        if options.num_replicas > 1:
            raise ConfigError(
                f"num_replicas={options.num_replicas}: the ranks of this world (torchrun, accelerate launch) hold as "
                "many copies of the model as fit; leave it out, or share replicas: executor='ray', name='...'."
            )
        return WorldExecutor()
    if where == "ray":
        return _ray_executor(options)
    require_gpus(spec, options.num_replicas)
    return ReplicatedExecutor(options, functools.partial(ProcessReplica, num_replicas=options.num_replicas))


def _where(executor: str | None, options: ParallelOptions, asked: dict[str, Any]) -> str:
    """Return one of `NAMES`."""
    if executor is not None and executor not in NAMES:
        raise ConfigError(f"executor must be one of {list(NAMES)}, got {executor!r}.{nearest(executor, NAMES)}")
    if executor is not None and options.replicas not in ("auto", executor):
        raise ConfigError(f"executor={executor!r} and replicas={options.replicas!r} contradict each other; pass one.")
    if executor == "local" and asked:
        raise ConfigError(f"executor='local' runs the model in this process; leave out {_written(asked)}.")
    where = executor or (options.replicas if options.replicas != "auto" else None)
    if where is None and (options.name is not None or asked.keys() & {"num_replicas", *SIZES}):
        where = "ray" if options.name is not None or connected_to_ray() else "processes"
    if where is None and asked:
        raise ConfigError(f"{_written(asked)} needs num_replicas, replicas or executor; pass num_replicas=2, say.")
    if where == "processes" and options.name is not None:
        raise ConfigError(f"name={options.name!r} names replicas in Ray; pass executor='ray', or leave it out.")
    return where or "local"


SIZES = ("tensor_parallel_size", "fsdp_size")


def _ray_executor(options: ParallelOptions) -> Executor:
    """Return an executor whose replicas run in Ray; with a name, one that other processes share."""
    from gym_rm.engine.executors.ray import RayExecutor, connect  # Ray is an extra
    from gym_rm.engine.executors.ray_pool import SharedExecutor

    disconnect = connect()
    try:
        return RayExecutor(options, disconnect) if options.name is None else SharedExecutor(options, disconnect)
    except BaseException:
        disconnect()
        raise


def _written(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
