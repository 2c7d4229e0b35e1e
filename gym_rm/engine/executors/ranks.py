"""Executor of a rank: one process of several that hold a model together, tensor parallel.

Every rank runs the same batches in the same order and gets the same values, bit for bit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gym_rm.engine.executors.executor import Executor, LoadSpec, ModelInfo
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.loading.checkpoint import ModelFiles
from gym_rm.engine.loading.device_and_dtype import resolve_device
from gym_rm.engine.loading.sharding import Sharding, require_divisible
from gym_rm.engine.loading.trial import FAILURES
from gym_rm.errors import ConfigError, GymRMError

JOIN_SECONDS = 600  # maximum time until all ranks of a group have started
COLLECTIVE_SECONDS = 1800  # maximum time of one operation of all ranks; the driver stops a group before


@dataclass(frozen=True, slots=True)
class Rank:
    """Place of a process in its group.

    Attributes:
        index: index of this rank, from 0.
        size: number of ranks in the group.
        store: `"HOST:PORT"` of the `TCPStore` where the ranks meet; None if the group has one rank.
        device_index: index of the GPU among those that this process sees; not used on CPUs.
        threads: number of torch's threads on the CPU.
        quiet: whether only errors are logged, because another rank logs the same.
    """

    index: int = 0
    size: int = 1
    store: str | None = None
    device_index: int = 0
    threads: int = 1
    quiet: bool = False


def start_rank(rank: Rank) -> Executor:
    """Return the executor that runs a rank's part of every batch; call it once, in a process started for the rank.

    All ranks of a group must call the same methods in the same order.
    """
    torch.set_num_threads(rank.threads)
    return RankExecutor(rank)


def check_shards(spec: LoadSpec) -> None:
    """Refuse a model that cannot be divided as asked for, before any process starts.

    Raises:
        ConfigError: the model has too few heads, or an option that does not work when it is divided.
    """
    if spec.num_ranks == 1:
        return
    size = spec.fsdp_size
    option = f"fsdp_size={size}" if size > 1 else f"tensor_parallel_size={spec.tensor_parallel_size}"
    if size > 1 and spec.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size={spec.tensor_parallel_size} and fsdp_size={size} cannot be combined; pass one of "
            "them, and num_replicas for more devices."
        )
    if size > 1 and spec.quantization is not None:
        raise ConfigError(
            f"quantization={spec.quantization!r} does not work with {option}; use tensor_parallel_size instead."
        )
    for source in spec.sources:
        assert isinstance(source, ModelFiles)
        if source.adapter is not None:
            raise ConfigError(
                f"{option}: {source.source!r} is an adapter, which is merged into whole weights; merge it first "
                "(merge_and_unload, then save_pretrained), and pass the merged model."
            )
        if source.options.quantization_config is not None:
            raise ConfigError(f"quantization_config does not work with {option}; pass only one of them.")
        require_divisible(source.config, Sharding(spec.tensor_parallel_size, size), source.source)


class RankExecutor(LocalExecutor):
    """Executor of one rank, in a process that was started for it."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank

    def load(self, spec: LoadSpec) -> ModelInfo:
        """Join the group, read this rank's part of the weights, and choose the layout together; see `Executor.load`."""
        assert isinstance(spec.model, ModelFiles)
        _join(self._rank, resolve_device(spec.model.options.device))
        if spec.num_ranks > 1:
            self._sharding = Sharding(spec.tensor_parallel_size, spec.fsdp_size)
        try:
            return super().load(spec)
        except FAILURES as error:  # the forward of transformers does not run on divided weights
            size = spec.tensor_parallel_size
            if isinstance(error, GymRMError) or size == 1:
                raise
            raise ConfigError(
                f"this model does not run with tensor_parallel_size={size} in this version of transformers ("
                f"{type(error).__name__}: {error}); pass fsdp_size={size}."
            ) from error


def _join(rank: Rank, device: torch.device) -> None:
    """Join the group of a rank; this process belongs to it alone, so its environment may be changed."""
    if device.type == "cuda":
        torch.cuda.set_device(rank.device_index)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers shards over GPUs wherever it sees some
    if rank.size == 1:
        return
    assert rank.store is not None
    os.environ.update(RANK=str(rank.index), WORLD_SIZE=str(rank.size), LOCAL_RANK=str(rank.device_index))
    host, _, port = rank.store.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=JOIN_SECONDS))
    store.set(f"rank {rank.index}", "here")
    store.wait([f"rank {index}" for index in range(rank.size)], timedelta(seconds=JOIN_SECONDS))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank.index,
        world_size=rank.size,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        device_id=torch.device("cuda", rank.device_index) if device.type == "cuda" else None,
    )
    dist.barrier()
