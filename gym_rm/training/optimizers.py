"""Optimizers of a run, the schedule of their learning rates, and their states by the names of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Muon, Optimizer

from gym_rm.errors import ConfigError
from gym_rm.training.reward_model_settings import OptimizerSettings

MASTER = "master"  # name of the float32 copy among the states
HEADS_AND_TABLES = ("embed", "wte", "wpe", "score", "classifier", "classification_head", "logits_proj")


def make_optimizers(module: nn.Module, settings: OptimizerSettings) -> list[Optimizer]:
    """Return the optimizers of the parameters that are trained.

    Parameters in low precision are rounded copies of float32 ones, which are part of the optimizer's state: an update
    that is smaller than half a rounding step would be lost otherwise (arXiv 1710.03740, section 3.1).

    Raises:
        ConfigError: nothing is trained, or Muon is asked for parameters that are sharded.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not named:
        raise ConfigError("the model has no parameter that is trained.")
    masters = {p: nn.Parameter(p.detach().float()) for _, p in named if p.dtype in (torch.bfloat16, torch.float16)}
    optimizers = _optimizers([(name, masters.get(parameter, parameter)) for name, parameter in named], settings)
    for optimizer in optimizers:
        _keep_masters(optimizer, masters)
    return optimizers


def _optimizers(named: Sequence[tuple[str, nn.Parameter]], settings: OptimizerSettings) -> list[Optimizer]:
    if settings.name != "adamw" and any(isinstance(parameter, DTensor) for _, parameter in named):
        raise ConfigError(f"optimizer.name={settings.name!r} needs whole matrices; set fsdp=false, or use adamw.")
    if settings.name != "muon":
        return [_adamw([parameter for _, parameter in named], settings)]
    # The embeddings and the head are no products inside the layers (Jordan et al., Muon, 2024).
    matrices = [p for name, p in named if p.ndim == 2 and not any(part in name for part in HEADS_AND_TABLES)]
    ids = {id(parameter) for parameter in matrices}
    muon = Muon(matrices, lr=settings.muon_learning_rate, weight_decay=settings.weight_decay)
    return [muon, _adamw([parameter for _, parameter in named if id(parameter) not in ids], settings)]


def _keep_masters(optimizer: Optimizer, masters: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Give an optimizer of float32 copies the gradients of the parameters, and round its updates into them.

    The gradients of the parameters are freed as soon as they are copied.
    """
    inside = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owned = {parameter: master for parameter, master in masters.items() if id(master) in inside}

    def take_gradients(*arguments: Any) -> None:
        for parameter, master in owned.items():
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
            parameter.grad = None

    def round_into_parameters(*arguments: Any) -> None:
        with torch.no_grad():
            for parameter, master in owned.items():
                parameter.copy_(master)
                master.grad = None

    optimizer.masters = owned  # type: ignore[attr-defined]
    if owned:
        optimizer.register_step_pre_hook(take_gradients)
        optimizer.register_step_post_hook(round_into_parameters)


def _states(optimizer: Optimizer) -> dict[nn.Parameter, nn.Parameter]:
    """Return the parameter of the module by each tensor whose state the optimizer keeps."""
    owners = {master: parameter for parameter, master in getattr(optimizer, "masters", {}).items()}
    return {owners.get(tensor, tensor): tensor for group in optimizer.param_groups for tensor in group["params"]}


def _adamw(parameters: Sequence[nn.Parameter], settings: OptimizerSettings) -> Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return AdamW(filled, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True)


def set_learning_rates(
    optimizers: Sequence[Optimizer], settings: OptimizerSettings, *, step: int, num_steps: int
) -> float:
    """Set the learning rates of a step, counted from 1, and return that of AdamW."""
    factor = schedule(settings, step=step, num_steps=num_steps)
    for optimizer in optimizers:
        full = settings.muon_learning_rate if isinstance(optimizer, Muon) else settings.learning_rate
        for group in optimizer.param_groups:
            group["lr"] = full * factor
    return settings.learning_rate * factor


def schedule(settings: OptimizerSettings, *, step: int, num_steps: int) -> float:
    """Return the share of the learning rate at a step, counted from 1.

    It rises linearly over the warm-up, then falls to 0 (arXiv 1608.03983, section 3, without restarts).
    """
    warmup = round(settings.warmup_share * num_steps)
    if step <= warmup:
        return step / warmup
    done = (step - warmup - 1) / max(1, num_steps - warmup)
    return {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[settings.schedule]


def optimizer_state(module: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """Yield the states of all optimizers as `(parameter name/state name, tensor)`; `master` is the float32 copy."""
    kept = [_states(optimizer) for optimizer in optimizers]
    for name, parameter in module.named_parameters():
        for optimizer, tensors in zip(optimizers, kept, strict=True):
            tensor = tensors.get(parameter)
            if tensor is None:
                continue
            if tensor is not parameter:
                yield f"{name}/{MASTER}", tensor.detach()
            for key, value in optimizer.state.get(tensor, {}).items():
                yield f"{name}/{key}", value


def load_optimizer_state(module: nn.Module, optimizers: Sequence[Optimizer], states: Mapping[str, Tensor]) -> None:
    """Load what `optimizer_state` yielded, also into another number of shards."""
    owners = {
        parameter: (optimizer, tensor) for optimizer in optimizers for parameter, tensor in _states(optimizer).items()
    }
    parameters = dict(module.named_parameters())
    for entry, value in states.items():
        name, _, key = entry.rpartition("/")
        optimizer, tensor = owners[parameters[name]]
        state = optimizer.state[tensor]
        if key == MASTER:
            copy_into(tensor, value)
        elif value.shape == tensor.shape:
            state[key] = torch.zeros_like(tensor)
            copy_into(state[key], value)
        else:  # the number of steps
            state[key] = value.to(tensor.device, copy=True)


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy a whole tensor into a tensor that may be sharded."""
    source = source.to(target.device, target.dtype)
    if isinstance(target, DTensor):
        source = distribute_tensor(source, target.device_mesh, target.placements)
    with torch.no_grad():
        target.copy_(source)
