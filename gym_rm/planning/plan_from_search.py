"""A plan from a placement: memory of every GPU, phase by phase, and the time of a step."""

from __future__ import annotations

from collections.abc import Sequence

from gym_rm.planning.component_options import PHASES, phase_clocks
from gym_rm.planning.gpu_memory import ComponentMemory, component_memory
from gym_rm.planning.hardware.devices import Device
from gym_rm.planning.plan import SIZES, ComponentPlan, MemoryItem, Phase, PhaseMemory, PhaseTime, Plan, PoolPlan, Role
from gym_rm.planning.plan_request import Choice, Component, PlanRequest
from gym_rm.planning.search import PoolChoice, SearchResult
from gym_rm.planning.step_times import wake_times

# Fields that a plan has of the work of a step.
OF_WORK = ("conversations", "unique_tokens", "tokens", "num_prompts", "group_size", "turns", "turn_tokens",
           "updates_per_step", "epochs", "asynchronous")  # fmt: skip
OF_COMPONENT = ("name", "role", "dtype", "quantization", "lora", "shared_prompts")


def make_plan(request: PlanRequest, result: SearchResult) -> Plan:
    """Return the plan of a search's result."""
    components = {component.name: component for component in request.components}
    device, work = request.cluster.device, request.workload
    pools, times = [], []
    for pool, gpus in zip(result.pools, result.gpus, strict=True):
        members = [components[name] for name in pool.names]
        memories = [component_memory(part, how, work, device) for part, how in zip(members, pool.choices, strict=True)]
        worked = _pool_times(request, pool, members, memories)
        times += worked
        pools.append(
            PoolPlan(
                name="+".join(pool.names),
                gpu=device.name,
                gpu_memory=device.memory.value,
                gpus=gpus,
                components=tuple(map(_component_plan, members, pool.choices)),
                memory=_pool_memory(device, pool, memories),
                busy_seconds=sum(time.seconds for time in worked),
            )
        )
    times.sort(key=lambda time: (PHASES.index(time.phase), time.pool, time.component))
    phases = [(phase, max(pool.seconds[index] for pool in result.pools)) for index, phase in enumerate(PHASES)]
    return Plan(
        name=request.name,
        cluster=request.cluster.text,
        nodes=request.cluster.nodes,
        pools=tuple(pools),
        times=tuple(times),
        phase_seconds=tuple((phase, seconds) for phase, seconds in phases if seconds > 0),
        step_seconds=result.step_seconds,
        load_seconds=_load_seconds(request, result),
        objective="most conversations/s"
        if request.step_seconds is None
        else f"fewest {device.processor}s that are enough",
        exact=result.exact,
        notes=request.notes,
        prompt_tokens=int(work.prompts.maximum),
        reply_tokens=int(work.replies.maximum),
        processor=device.processor,
        **{name: getattr(work, name) for name in OF_WORK},
    )


def _component_plan(component: Component, choice: Choice) -> ComponentPlan:
    return ComponentPlan(
        model=component.shape.name,
        parameters=component.shape.parameters,
        max_num_seqs=choice.max_num_seqs or None,
        gradient_checkpointing=choice.gradient_checkpointing if component.role.trains else None,
        sleeps=choice.sleeps,
        optimizer=component.optimizer if component.role.trains else None,
        master_weights=component.master_weights or component.dtype == "float32",
        **{name: getattr(component, name) for name in OF_COMPONENT},
        **{name: getattr(choice, name) for name in SIZES},
    )


def _pool_memory(device: Device, pool: PoolChoice, memories: Sequence[ComponentMemory]) -> tuple[PhaseMemory, ...]:
    """Return the memory of each GPU of a pool, for each component that works and each of its phases."""
    kept = device.reserved
    reserved = MemoryItem("reserved", device.processor, kept.value, kept.basis, kept.source)
    awake = [memory for memory, choice in zip(memories, pool.choices, strict=True) if not choice.sleeps]
    phases = []
    for name, memory in zip(pool.names, memories, strict=True):
        waiting = [item for other in awake if other is not memory for item in other.resident]
        for phase, instants in memory.phases:
            phases.append(PhaseMemory(phase, name, (reserved, *memory.working, *waiting), instants))
    return tuple(sorted(phases, key=lambda memory: PHASES.index(memory.phase)))


def _pool_times(
    request: PlanRequest, pool: PoolChoice, members: Sequence[Component], memories: Sequence[ComponentMemory]
) -> list[PhaseTime]:
    """Return the seconds of each component of a pool in each phase."""
    times = []
    together = {Role.POLICY, Role.GENERATION} <= {component.role for component in members}
    for component, choice, memory in zip(members, pool.choices, memories, strict=True):
        site = pool.place.of(component).site(request.cluster)
        clocks = phase_clocks(component, choice, request, site, together=together, crosses=pool.crosses)
        if choice.sleeps:
            size = sum(item.bytes for item in memory.resident)
            clocks[Phase.WAKE] = wake_times(component, size, request.cluster.device)
        for phase, clock in clocks.items():
            if parts := clock.parts():
                times.append(PhaseTime(phase, component.name, "+".join(pool.names), clock.total, parts))
    return times


def _load_seconds(request: PlanRequest, result: SearchResult) -> float:
    """Return the time in which the node with the most weights reads them, each component once."""
    sizes = {
        component.name: component.shape.parameters * component.bytes_per_parameter
        for component in request.components
        if component.engine != "transformers"
    }
    by_node: dict[int, float] = {}
    for pool, gpus in zip(result.pools, result.gpus, strict=True):
        for node in {address.node for address in gpus}:
            by_node[node] = by_node.get(node, 0.0) + sum(sizes.get(name, 0.0) for name in pool.names)
    return max(by_node.values(), default=0.0) / request.cluster.disk.value
