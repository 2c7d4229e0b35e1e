"""Bytes that a component takes of one GPU: what stays, and what comes at each instant of its work."""

from __future__ import annotations

from dataclasses import dataclass

from gym_rm.planning.hardware import Device
from gym_rm.planning.plan import Instant, MemoryItem, Phase, Role
from gym_rm.planning.quantities import Basis
from gym_rm.planning.request import Choice, Component, Workload


@dataclass(frozen=True, slots=True)
class ComponentMemory:
    """Memory of one component on each of its GPUs.

    Attributes:
        resident: while it is awake and others work: weights, and what training keeps between steps.
        working: persistent memory while it works itself, in place of `resident`; gradients and the KV cache are here.
        phases: instants of each phase in which it works.
    """

    resident: tuple[MemoryItem, ...]
    working: tuple[MemoryItem, ...]
    phases: tuple[tuple[Phase, tuple[Instant, ...]], ...]


def component_memory(component: Component, choice: Choice, workload: Workload, device: Device) -> ComponentMemory:
    """Return what a component takes of each GPU."""
    shape, tp = component.shape, choice.tensor_parallel_size
    parts = tp * choice.fsdp_size
    weights = shape.parameters * component.bytes_per_parameter

    def item(name: str, size: float, source: str, basis: Basis = Basis.FORMULA) -> MemoryItem:
        return MemoryItem(name, component.name, size, basis, source)

    resident = [item("weights", weights / parts, "parameters x bytes")]
    tokens = choice.max_num_batched_tokens
    widest = max(layer.intermediate + layer.heads * layer.head_dim * 3 for layer, _ in shape.layers)
    activations = tokens * (widest / tp + 4 * shape.hidden) * component.bytes_per_parameter
    working = list(resident)
    instants = [Instant("forward", (item("activations", activations, "widest layer", Basis.ASSUMPTION),))]
    phase = Phase.SCORE
    phases: list[tuple[Phase, tuple[Instant, ...]]] = []
    if component.role is Role.GENERATION:
        phase = Phase.GENERATE
        cached = shape.cached_numbers(workload.longest) * 2.0 / tp * choice.max_num_seqs
        working.append(item("kv_cache", cached, "conversations x tokens"))
    if component.role.trains:
        working.append(item("gradients", shape.parameters * 4.0 / parts, "float32"))
        resident.append(item("optimizer", shape.parameters * 12.0 / parts, "AdamW"))
        working.append(resident[-1])
        saved = activations * (1 if choice.gradient_checkpointing else shape.num_layers)
        backward = Instant("backward", (item("activations", saved, "saved for the backward", Basis.ASSUMPTION),))
        phases.append((Phase.UPDATE, (backward,)))
    if component.role is not Role.REWARD_TRAINING:
        phases.append((phase, tuple(instants)))
    return ComponentMemory(tuple(resident), tuple(working), tuple(phases))
