"""Executors of a model that several ranks hold together: tensor parallel, or fully sharded (`LoadSpec.fsdp_size`).

Every rank runs the same batches in the same order and gets the same values, bit for bit. A `RankExecutor` runs in a
process that was started for it and gets its batches from there. A `WorldExecutor` runs in a process that torchrun or
`accelerate launch` started, and gets the conversations of all ranks of its group.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from gym_rm.engine.executors.executor import BatchResult, LoadSpec, ModelInfo, ModelSource
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.loading.checkpoint import Checkpoint, resolve_device
from gym_rm.engine.loading.sharding import Sharding, require_divisible
from gym_rm.engine.loading.trial import FAILURES
from gym_rm.engine.token_tree import TokenSequence
from gym_rm.errors import ConfigError, GymRMError, RemoteError, brief

if TYPE_CHECKING:
    from gym_rm.engine.executors.rank import Rank

JOIN_SECONDS = 600  # maximum time until all ranks of a group have started
MEETING_SECONDS = 300  # maximum time until all ranks of a world load the model
# Maximum time that a rank waits for the others in one operation; a group with a driver is stopped by it before.
COLLECTIVE_SECONDS = 1800
AGREE_SECONDS = 300  # maximum time that a rank of a world waits for the others after a batch
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_shards(spec: LoadSpec) -> None:
    """Refuse a model that cannot be divided as asked for, before any process starts.

    Raises:
        ConfigError: the model has too few heads, is loaded already, or has an option that does not work when sharded.
    """
    if spec.num_ranks == 1:
        return
    option = (
        f"fsdp_size={spec.fsdp_size}" if spec.fsdp_size > 1 else f"tensor_parallel_size={spec.tensor_parallel_size}"
    )
    if spec.fsdp_size > 1 and spec.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size={spec.tensor_parallel_size} and fsdp_size={spec.fsdp_size} cannot be combined; pass "
            f"one of them, and num_replicas for more devices."
        )
    if spec.fsdp_size > 1 and spec.quantization is not None:
        raise ConfigError(
            f"quantization={spec.quantization!r} does not work with {option}; use tensor_parallel_size instead."
        )
    for source in _sources(spec):
        if not isinstance(source, Checkpoint):
            raise ConfigError(
                f"{option} needs a checkpoint, because every rank reads its part of the weights; got the model "
                f"{type(source).__name__}. Save it with save_pretrained, and pass its folder."
            )
        options = source.options
        if source.adapter is not None:
            raise ConfigError(
                f"{option}: {source.source!r} is an adapter, which is merged into whole weights; merge it first "
                "(merge_and_unload, then save_pretrained), and pass the merged model."
            )
        for name in ("device_map", "quantization_config"):
            if getattr(options, name) is not None:
                raise ConfigError(f"{name} does not work with {option}; pass only one of them.")
        require_divisible(source.config, Sharding(spec.tensor_parallel_size, spec.fsdp_size), source.source)


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
        check_shards(spec)
        if isinstance(spec.model, Checkpoint):
            _join(self._rank, resolve_device(spec.model.options.device))
        if spec.num_ranks > 1:
            self._sharding = Sharding(spec.tensor_parallel_size, spec.fsdp_size)
        with _refusing(spec):
            return super().load(spec)


class WorldExecutor(LocalExecutor):
    """Executor in a world that torchrun or `accelerate launch` started: its ranks hold the model together.

    A world of more ranks than the model is divided into has several groups, each with the whole model. All ranks of a
    group must call `score` equally often, as for every collective operation of torch.distributed. The conversations of
    all of them are scored together, and each rank gets the scores of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._group: dist.ProcessGroup | None = None
        self._after_batch: dist.ProcessGroup | None = None
        self._broken: str | None = None

    def load(self, spec: LoadSpec) -> ModelInfo:
        """See `Executor.load`.

        Raises:
            ConfigError: the world cannot be divided into groups of this size, or torch.distributed cannot start.
        """
        check_shards(spec)
        world = int(os.environ.get("WORLD_SIZE", "1")) if not dist.is_initialized() else dist.get_world_size()
        if world % spec.num_ranks:
            raise ConfigError(
                f"this process belongs to a world of {world} ranks, which cannot be divided into groups of "
                f"{spec.num_ranks}; start a multiple of {spec.num_ranks} processes, pass a size that divides {world}, "
                "or score with a server or a pool of replicas (docs/scaling.md)."
            )
        _start_world()
        _meet(world)
        groups = [list(range(first, first + spec.num_ranks)) for first in range(0, world, spec.num_ranks)]
        own = dist.get_rank() // spec.num_ranks
        self._group, self._after_batch = (
            [dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=seconds)) for ranks in groups][own]
            for seconds in (COLLECTIVE_SECONDS, AGREE_SECONDS)
        )
        self._sharding = Sharding(spec.tensor_parallel_size, spec.fsdp_size, num_groups=len(groups))
        with _refusing(spec):
            return super().load(spec)

    def gather(self, sequences: Sequence[TokenSequence]) -> tuple[list[TokenSequence], slice]:
        """Return the sequences of all ranks of the group, and which of them are this rank's."""
        assert self._group is not None
        if self._broken is not None:
            raise RemoteError(self._broken)
        index, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        parts: list[Any] = [None] * size
        try:
            dist.all_gather_object(parts, list(sequences), group=self._group)
        except RuntimeError as error:
            raise RemoteError(
                f"rank {dist.get_rank()} scored, but the other ranks that hold the model with it did not within "
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
        failures: list[BatchResult | None] = [None] * dist.get_world_size(self._after_batch)
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
    scheme, _, address = rank.store.partition(":")
    timeout = timedelta(seconds=JOIN_SECONDS)
    if scheme == "file":
        store: Any = FileStore(address, rank.size)
    else:
        host, _, port = address.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, timeout=timeout)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank.index,
        world_size=rank.size,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        device_id=torch.device("cuda", rank.device_index) if device.type == "cuda" else None,
    )
    dist.barrier()


def _start_world() -> None:
    if dist.is_initialized():
        return
    missing = [
        name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that this process is one of several ranks, but {missing} are "
            "missing in the environment; start it with torchrun or accelerate launch, or remove WORLD_SIZE."
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def _meet(world: int) -> None:
    """Raise ConfigError if not all ranks of the world load the model; without this, the others would wait forever."""
    try:
        dist.destroy_process_group(dist.new_group(backend="gloo", timeout=timedelta(seconds=MEETING_SECONDS)))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"not all {world} ranks of this world loaded the model within {MEETING_SECONDS} seconds ({error}). All of "
            "them must call load_scorer, and then score equally often; or share replicas: executor='ray', name='...'."
        ) from error


def _sources(spec: LoadSpec) -> list[ModelSource]:
    return [spec.model] if spec.reference is None else [spec.model, spec.reference]
