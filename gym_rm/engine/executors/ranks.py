"""Executors of a rank: one process of several that hold a model together, tensor parallel.

Every rank runs the same batches in the same order and gets the same values, bit for bit. A `RankExecutor` runs in a
process that was started for it and gets its batches from there. A `WorldExecutor` runs in a process that torchrun or
`accelerate launch` started, and gets the conversations of all ranks of its group.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gym_rm.engine.executors.executor import BatchResult, Executor, LoadSpec, ModelInfo
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.loading.checkpoint import ModelFiles
from gym_rm.engine.loading.device_and_dtype import resolve_device
from gym_rm.engine.loading.sharding import require_divisible
from gym_rm.engine.loading.trial import FAILURES
from gym_rm.engine.token_tree import TokenSequence
from gym_rm.errors import ConfigError, GymRMError, RemoteError, brief

JOIN_SECONDS = 600  # maximum time until all ranks of a group have started
# Maximum time that a rank waits for the others in one operation; a group with a driver is stopped by it before.
COLLECTIVE_SECONDS = 1800
AGREE_SECONDS = 300  # maximum time that a rank of a world waits for the others after a batch


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
    if spec.tensor_parallel_size == 1:
        return
    size = spec.tensor_parallel_size
    option = f"tensor_parallel_size={size}"
    for source in spec.sources:
        assert isinstance(source, ModelFiles)
        if source.adapter is not None:
            raise ConfigError(
                f"{option}: {source.source!r} is an adapter, which is merged into whole weights; merge it first "
                "(merge_and_unload, then save_pretrained), and pass the merged model."
            )
        if source.options.quantization_config is not None:
            raise ConfigError(f"quantization_config does not work with {option}; pass only one of them.")
        require_divisible(source.config, size, source.source)


class RankExecutor(LocalExecutor):
    """Executor of one rank, in a process that was started for it.

    Args:
        rank: place of this process in its group.
    """

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank

    def load(self, spec: LoadSpec) -> ModelInfo:
        """Join the group, read this rank's part of the weights, and choose the layout together; see `Executor.load`."""
        assert isinstance(spec.model, ModelFiles)
        _join(self._rank, resolve_device(spec.model.options.device))
        self._tensor_parallel_size = spec.tensor_parallel_size
        with _refusing(spec):
            return super().load(spec)


class WorldExecutor(LocalExecutor):
    """Executor in a world that torchrun or `accelerate launch` started: its ranks hold the model together.

    All ranks must load the model and call `score` equally often, as for every collective operation of
    torch.distributed. The conversations of all of them are scored together, and each rank gets the scores of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._group: dist.ProcessGroup | None = None
        self._after_batch: dist.ProcessGroup | None = None
        self._broken: str | None = None

    def load(self, spec: LoadSpec) -> ModelInfo:
        """See `Executor.load`.

        Raises:
            ConfigError: the world has another number of ranks than the model.
        """
        if not dist.is_initialized():
            _join_world()
        world = dist.get_world_size()
        if world != spec.num_ranks:
            raise ConfigError(
                f"this process belongs to a world of {world} ranks, which must hold the model together; pass "
                f"tensor_parallel_size={world}, or score with a server (docs/scaling.md)."
            )
        self._group, self._after_batch = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
            for seconds in (COLLECTIVE_SECONDS, AGREE_SECONDS)
        )
        self._tensor_parallel_size = spec.tensor_parallel_size
        with _refusing(spec):
            return super().load(spec)

    def gather(self, sequences: Sequence[TokenSequence]) -> tuple[list[TokenSequence], slice]:
        """Return the sequences of all ranks of the world, and which of them are this rank's."""
        assert self._group is not None
        if self._broken is not None:
            raise RemoteError(self._broken)
        index = dist.get_rank()
        parts: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(parts, list(sequences), group=self._group)
        except RuntimeError as error:
            raise RemoteError(
                f"rank {index} scored, but the other ranks that hold the model with it did not within "
                f"{COLLECTIVE_SECONDS} seconds, or one of them ended ({error}); all of them must call score equally "
                "often, also with an empty list."
            ) from error
        first = sum(map(len, parts[:index]))
        return [each for part in parts for each in part], slice(first, first + len(sequences))

    def _agree(self, failure: BatchResult | None) -> BatchResult | None:
        """Return the failure that a batch has in all ranks, or None.

        Raises:
            RemoteError: only some ranks failed. The others wait in the middle of the batch, or have its sums, so
                nothing that the ranks computed after it would be right.
        """
        failures: list[BatchResult | None] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(failures, failure, group=self._after_batch)
        except RuntimeError as error:
            own = "" if failure is None else f"{failure.error}; "
            reason = f"{own}the others did not finish the batch within {AGREE_SECONDS} seconds: {brief(error)}"
        else:
            errors = {i: each.error for i, each in enumerate(failures) if each is not None}
            if len(errors) in (0, len(failures)):
                return failures[0]
            reason = "; ".join(f"rank {i} of {len(failures)} failed alone: {each}" for i, each in errors.items())
        self._broken = (
            f"a batch failed in some of the ranks that hold the model together, and rank {dist.get_rank()} cannot "
            f"score any more ({reason}); start the program again."
        )
        raise RemoteError(self._broken)


def in_foreign_world() -> bool:
    """Return whether this process was started as one of several ranks, by torchrun or a similar launcher."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextlib.contextmanager
def _refusing(spec: LoadSpec) -> Iterator[None]:
    """Raise ConfigError if the forward of transformers does not run on divided weights."""
    try:
        yield
    except FAILURES as error:
        if isinstance(error, GymRMError) or spec.tensor_parallel_size == 1:
            raise
        size = spec.tensor_parallel_size
        raise ConfigError(
            f"this model does not run with tensor_parallel_size={size} in this version of transformers ("
            f"{type(error).__name__}: {error}); pass device_map='auto'."
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
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank.index,
        world_size=rank.size,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        device_id=torch.device("cuda", rank.device_index) if device.type == "cuda" else None,
    )
    dist.barrier()


def _join_world() -> None:
    """Join the world that the launcher describes in the environment."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
