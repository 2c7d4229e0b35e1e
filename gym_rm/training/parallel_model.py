"""A module that is trained on all ranks: processes, shards, passes, updates, and the state that a run resumes from."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, gather_object, is_tensorboard_available, is_wandb_available
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gym_rm.errors import ConfigError, GymRMError, RemoteError, logger
from gym_rm.reports.runs import flat
from gym_rm.training.adapters import Adaptable
from gym_rm.training.checkpoints import Checkpoint
from gym_rm.training.layouts import choose_layout, enable_checkpointing
from gym_rm.training.optimizers import (
    copy_into,
    load_optimizer_state,
    make_optimizers,
    optimizer_state,
    set_learning_rates,
)
from gym_rm.training.reward_model_settings import OptimizerSettings

Batch = TypeVar("Batch")
Result = TypeVar("Result")
TOKENS_ON_CPU, TOKENS_ON_GPU = 2048, 16_384  # token budget of a pass if none is set; more leave the cache of a CPU


class ParallelModel:
    """A module on all ranks, copied (DDP) or sharded (FSDP2), and the optimizers that update it.

    Losses of micro-batches and ranks add up: divide each by what is counted over all of them.

    Args:
        module, start: the module, on its device, and the model inside of it.
        accelerator, settings: the processes, and the optimizer.
        num_updates: number of updates of the run, for the schedule of the learning rate.
        tree: whether shared prefixes may be merged, see `choose_layout`.
        fsdp: shard weights, gradients and optimizer states instead of copying them.
        checkpointing: keep only the inputs of layers for the backward.
        max_num_batched_tokens: token budget of a pass; None for a number that suits the device.

    Attributes:
        plain: the module as it was given.
        layout, budget: how its batches run, and their token budget.
        version: number of updates that are done.

    Raises:
        ConfigError: the model does not support checkpointing.
    """

    def __init__(
        self,
        module: Any,
        start: Adaptable,
        accelerator: Accelerator,
        settings: OptimizerSettings,
        *,
        num_updates: int,
        tree: bool,
        fsdp: bool,
        checkpointing: bool,
        max_num_batched_tokens: int | None,
    ) -> None:
        self.layout = choose_layout(module, start.model, tree=tree, fuse=not fsdp)
        logger.info("training %s with %s", start.name, self.layout)
        if checkpointing:
            enable_checkpointing(module, start.model, self.layout)
        self.budget = max_num_batched_tokens or (TOKENS_ON_GPU if accelerator.device.type == "cuda" else TOKENS_ON_CPU)
        self.plain, self.accelerator, self.settings, self.num_updates = module, accelerator, settings, num_updates
        self.fsdp, self.version = fsdp, 0
        self._model: Any = module.model
        self._module: nn.Module = module
        if fsdp:
            shard(module, self._model, accelerator)
        elif self.world > 1:
            accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=module.has_unused)
            self._module = accelerator.prepare_model(module)
        self.optimizers = make_optimizers(module, settings)

    @property
    def rank(self) -> int:
        """Number of this process."""
        return int(self.accelerator.process_index)

    @property
    def world(self) -> int:
        """Number of processes."""
        return int(self.accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files."""
        return bool(self.accelerator.is_main_process)

    def gathered(self, values: Sequence[Any]) -> list[Any]:
        """Return the lists of all ranks as one, in the order of ranks; all ranks must call this."""
        return list(gather_object(list(values))) if self.world > 1 else list(values)

    def agreed(self, call: Callable[[], Result]) -> Result:
        """Return what a call returns on this rank; the error of one rank is raised on all, so that none waits for it.

        Raises:
            RemoteError: that of the first rank with an error was one.
            GymRMError: it was another one; on that rank it may be an OSError.
        """
        own: GymRMError | OSError | None = None
        try:
            result = call()
        except (GymRMError, OSError) as error:
            own = error
        told = None if own is None else (isinstance(own, RemoteError), str(own))
        for rank, error_of_rank in enumerate(self.gathered([told])):
            if error_of_rank is not None:
                is_remote, text = error_of_rank
                other = (RemoteError if is_remote else GymRMError)(f"rank {rank}: {text}")
                raise own if own is not None and rank == self.rank else other
        return result

    def passes(
        self, batches: Sequence[Batch], *, padding_batch: Batch, learn: bool = True
    ) -> Iterator[tuple[Batch, bool]]:
        """Yield the micro-batches of this rank, and whether they count.

        All ranks make the same number of passes; those with fewer repeat `padding_batch`, which does not count.
        Gradients are exchanged in the last pass.
        """
        count = max(self.gathered([len(batches)]))
        self._module.train(learn)
        for number in range(count):
            waits = learn and number < count - 1 and not self.fsdp and self.world > 1
            context: Any = self.accelerator.no_sync(self._module) if waits else contextlib.nullcontext()
            with context:
                yield (batches[number], True) if number < len(batches) else (padding_batch, False)

    def forward(self, *inputs: Any) -> Any:
        """Return what the module returns, in the precision of the run."""
        with self.accelerator.autocast():
            return self._module(*inputs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a part of the loss; the parts of all micro-batches and ranks add up."""
        torch.autograd.backward(loss * self.world)  # DDP and FSDP2 divide gradients by the number of ranks

    def optimizer_step(self) -> dict[str, float]:
        """Clip the gradient, change the weights, and return the norm of the gradient and the learning rate.

        Raises:
            FloatingPointError: the gradient is not finite; no weight was changed.
        """
        learning_rate = set_learning_rates(
            self.optimizers, self.settings, step=self.version + 1, num_steps=self.num_updates
        )
        parameters = [parameter for parameter in self.plain.parameters() if parameter.requires_grad]
        total = torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm of update {self.version + 1} is {norm}; no weight was changed by it. Lower "
                "optimizer.learning_rate, or look at the data and the rewards. The last checkpoint is kept."
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.version += 1
        return {"grad_norm": norm, "learning_rate": learning_rate}

    def skip_update(self) -> dict[str, float]:
        """Count an update that has nothing to learn from; without this, AdamW's averages would change the weights."""
        self.plain.zero_grad(set_to_none=True)
        self.version += 1
        return {"grad_norm": 0.0}

    def weights(self, *, keep: bool) -> dict[str, Tensor]:
        """Return whole copies of the trained weights on the CPU by name, if `keep`; all ranks must call this."""
        return whole(((n, p) for n, p in self._model.named_parameters() if p.requires_grad), keep=keep)

    def checkpoint(self, step: int, *, settings: Mapping[str, Any], state: Mapping[str, Any]) -> Checkpoint:
        """Return the state to resume from; only the main process has the tensors, but all ranks must call this."""
        states = whole(optimizer_state(self.plain, self.optimizers), keep=self.is_main)
        return Checkpoint(step, self.weights(keep=self.is_main), states, self.version, settings, state)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take the state of a checkpoint.

        Raises:
            ConfigError: it is of another model.
        """
        parameters = {name: each for name, each in self._model.named_parameters() if each.requires_grad}
        if parameters.keys() != checkpoint.model.keys():
            raise ConfigError("the checkpoint is of another model; use another output folder.")
        for name, tensor in checkpoint.model.items():
            copy_into(parameters[name], tensor)
        load_optimizer_state(self.plain, self.optimizers, checkpoint.optimizer)
        self.version = checkpoint.version

    def start_trackers(self, project: str, settings: Mapping[str, Any]) -> None:
        """Tell the trackers, if there are any, the settings of a run, by dotted name."""
        every = flat(settings, ".")
        plain = {name: value if isinstance(value, int | float | str) else str(value) for name, value in every}
        self.accelerator.init_trackers(project, config=plain)

    def end_training(self) -> None:
        """Close the trackers, and leave the other processes.

        A gloo barrier keeps what was exchanged before it until a thread frees it. A thread that does so while the
        interpreter ends cannot get Python's lock, and aborts the process. So a last barrier, which is never freed,
        keeps all that is left. Nobody waits for it: after an error, the other processes may not come.
        """
        if self.world > 1 and dist.get_backend() == "gloo":
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.barrier(async_op=True)))
        self.accelerator.end_training()


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
        # Never free the process group, also not at exit. When the last reference to a gloo group is that of DDP, it is
        # freed with Python's lock held, and joins a thread that may be waiting for this lock, to free the last
        # collective: about one run in thirty then hangs at its end.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
    return accelerator


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
