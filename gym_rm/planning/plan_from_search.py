"""A plan from a placement: memory of every GPU, phase by phase, and the time of a step."""

from __future__ import annotations

from gym_rm.planning.component_options import PHASES
from gym_rm.planning.hardware.devices import Device
from gym_rm.planning.plan import SIZES, ComponentPlan, MemoryItem, PhaseMemory, PhaseTime, Plan, PoolPlan
from gym_rm.planning.plan_request import Choice, Component, PlanRequest
from gym_rm.planning.pool_layouts import PoolChoice
from gym_rm.planning.search import SearchResult

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
        worked = _pool_times(pool)
        times += worked
        pools.append(
            PoolPlan(
                name="+".join(pool.names),
                gpu=device.name,
                gpu_memory=device.memory.value,
                gpus=gpus,
                components=tuple(map(_component_plan, members, [option.choice for option in pool.options])),
                memory=_pool_memory(device, pool),
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


def _pool_memory(device: Device, pool: PoolChoice) -> tuple[PhaseMemory, ...]:
    """Return the memory of each GPU of a pool, for each component that works and each of its phases."""
    kept = device.reserved
    reserved = MemoryItem("reserved", device.processor, kept.value, kept.basis, kept.source)
    memories = {
        name: option.layout.memory(option.choice) for name, option in zip(pool.names, pool.options, strict=True)
    }
    awake = [name for name, option in zip(pool.names, pool.options, strict=True) if not option.choice.sleeps]
    phases = []
    for name, memory in memories.items():
        waiting = [item for other in awake if other != name for item in memories[other].resident]
        for phase, instants in memory.phases:
            phases.append(PhaseMemory(phase, name, (reserved, *memory.working, *waiting), instants))
    return tuple(sorted(phases, key=lambda memory: PHASES.index(memory.phase)))


def _pool_times(pool: PoolChoice) -> list[PhaseTime]:
    """Return the seconds of each component of a pool in each phase."""
    times = []
    for name, option in zip(pool.names, pool.options, strict=True):
        for phase, clock in option.layout.clocks(option.choice, crosses=pool.crosses).items():
            if parts := clock.parts():
                times.append(PhaseTime(phase, name, "+".join(pool.names), clock.total, parts))
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
