"""Which executor runs a model, from the options of the user."""

from __future__ import annotations

import functools

import torch

from gym_rm.engine.executors.executor import Executor, LoadSpec
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.executors.parallel_options import ParallelOptions
from gym_rm.engine.executors.processes import ProcessReplica
from gym_rm.engine.executors.ranks import check_shards
from gym_rm.engine.executors.replicas import ReplicatedExecutor, require_sendable
from gym_rm.engine.loading.checkpoint import ModelFiles
from gym_rm.engine.loading.device_and_dtype import resolve_device
from gym_rm.errors import ConfigError, nearest

NAMES = ("local", "processes", "ray")


def choose_executor(executor: Executor | str | None, options: ParallelOptions, spec: LoadSpec) -> Executor:
    """Return the executor for these options; it has no model yet.

    Args:
        executor: an executor, which is returned, one of `NAMES`, or None for what the options need.
        options: sizes of the model's parts, and number of its copies.
        spec: the model that it will load.

    Raises:
        ConfigError: options contradict each other, the model, or the machine.
    """
    asked = [name for name, value in options if value != type(options).model_fields[name].default]
    if executor is not None and not isinstance(executor, str):
        if isinstance(executor, type) or not isinstance(executor, Executor):
            raise ConfigError(
                f"executor must be an Executor, such as LocalExecutor(), or one of {list(NAMES)}; got {executor!r:.80}."
            )
        if ignored := {"num_replicas", "batch_timeout"}.intersection(asked):
            raise ConfigError(f"executor={executor!r:.80} is an object; leave out {' and '.join(sorted(ignored))}.")
        return executor
    if executor is not None and executor not in NAMES:
        raise ConfigError(f"executor must be one of {list(NAMES)}, got {executor!r}.{nearest(executor, NAMES)}")
    if executor == "local" and asked:
        raise ConfigError(f"executor='local' runs the model in this process; leave out {' and '.join(asked)}.")
    if executor == "local" or not (executor or asked):
        return LocalExecutor()
    require_sendable(spec)
    check_shards(spec)
    if executor == "ray":
        from gym_rm.engine.executors.ray import RayExecutor  # Ray is an extra

        return RayExecutor(options)
    require_gpus(spec, options.num_replicas)
    return ReplicatedExecutor(options, functools.partial(ProcessReplica, num_replicas=options.num_replicas))


def require_gpus(spec: LoadSpec, num_replicas: int) -> None:
    """Raise ConfigError if the model goes to GPUs and there are fewer than ranks."""
    assert isinstance(spec.model, ModelFiles)
    if resolve_device(spec.model.options.device).type != "cuda":
        return
    needed, visible = num_replicas * spec.num_ranks, torch.cuda.device_count()
    if needed > visible:
        raise ConfigError(
            f"num_replicas={num_replicas} with {spec.num_ranks} ranks each needs {needed} GPUs, but this "
            f"process sees {visible}; pass a smaller num_replicas, or device='cpu'."
        )
