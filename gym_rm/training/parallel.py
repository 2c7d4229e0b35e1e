"""Processes of a run: accelerate's state, weights sharded over the ranks (FSDP2), and whole tensors of shards."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from accelerate.utils import is_tensorboard_available, is_wandb_available
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from gym_rm.errors import ConfigError
from gym_rm.training.reward_model_settings import flat_settings


def make_accelerator(*, folder: str, precision: str, report_to: str, fsdp: bool) -> Accelerator:
    """Return the state of this process; processes are started by `accelerate launch` or `torchrun`.

    Args:
        folder: folder of the run, for trackers that write files.
        precision: `auto`, `no` or `bf16`.
        report_to: tracker, or `none`.
        fsdp: whether weights are sharded over the processes.
    """
    installed = {"none": True, "tensorboard": is_tensorboard_available(), "wandb": is_wandb_available()}
    if not installed[report_to]:
        raise ConfigError(f"report_to={report_to!r} needs {report_to}, which is not installed.")
    if precision == "auto":
        precision = "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"
    trackers = None if report_to == "none" else report_to
    AcceleratorState._reset_state()  # accelerate keeps the precision of an earlier run in this process
    # Without cpu=True, accelerate ignores the other processes on a machine that has no accelerator.
    cpu = not torch.accelerator.is_available()
    accelerator = Accelerator(mixed_precision=precision, log_with=trackers, project_dir=folder, cpu=cpu)
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ConfigError(
            f"accelerate is configured for {kind.value}, which would divide the model a second time; launch with "
            "torchrun or accelerate launch --multi_gpu, and set fsdp=true to shard it."
        )
    if fsdp and accelerator.num_processes == 1:
        raise ConfigError("fsdp=true needs several processes; start them with torchrun --nproc-per-node N ...")
    if accelerator.num_processes > 1:
        _keep_group()
    return accelerator


def start_trackers(accelerator: Accelerator, name: str, settings: Mapping[str, Any]) -> None:
    """Tell the trackers, if there are any, the settings of a run, by dotted name."""
    flat = flat_settings(settings)
    plain = {name: value if isinstance(value, int | float | str | bool) else str(value) for name, value in flat.items()}
    if accelerator.log_with:
        accelerator.init_trackers(name, config=plain)


def _keep_group() -> None:
    """Never free the process group, also not at exit.

    When the last reference to a gloo group is that of DDP, it is freed with Python's lock held, and joins a thread
    that may be waiting for this lock, to free the last collective: about one run in thirty then hangs at its end.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))


def shard(module: nn.Module, model: PreTrainedModel, accelerator: Accelerator) -> None:
    """Shard the parameters of each layer, and of the rest, over all ranks (FSDP2)."""
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    names = set(getattr(model, "_no_split_modules", None) or ())
    for part in model.modules():
        if type(part).__name__ in names:
            fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)


def reshard(module: nn.Module) -> None:
    """Shard the parameters again that a forward without a backward left whole; nothing without FSDP2."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def whole(named: Iterable[tuple[str, Tensor]], *, keep: bool) -> dict[str, Tensor]:
    """Return copies of tensors on the CPU, gathered from all ranks if they are sharded; all ranks must call this.

    Args:
        named: tensors by name.
        keep: whether this rank needs the copies; otherwise nothing is returned.
    """
    found = {}
    for name, tensor in named:
        gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            found[name] = gathered.detach().cpu().clone(memory_format=torch.contiguous_format)
    return found


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy a whole tensor into a tensor that may be sharded."""
    source = source.to(target.device, target.dtype)
    if isinstance(target, DTensor):
        source = distribute_tensor(source, target.device_mesh, target.placements)
    with torch.no_grad():
        target.copy_(source)
