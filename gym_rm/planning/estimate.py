"""A plan from a placement: memory of every GPU, phase by phase, and the time of a step."""

from __future__ import annotations

from collections.abc import Sequence

from gym_rm.planning.memory import component_memory
from gym_rm.planning.options import PHASES, phase_clocks
from gym_rm.planning.plan import (
    ComponentPlan,
    MemoryItem,
    Phase,
    PhaseMemory,
    PhaseTime,
    Plan,
    PoolPlan,
    Role,
)
from gym_rm.planning.request import Choice, Component, Request
from gym_rm.planning.search import Found, PoolChoice
from gym_rm.planning.times import wake_times

GOALS = {
    "throughput": "most conversations/s",
    "cost": "least money for a conversation",
    "smallest": "fewest GPUs that reach the step time",
}


def make_plan(request: Request, found: Found) -> Plan:
    """Return the plan of a search's result."""
    components = {each.name: each for each in request.components}
    pools, times = [], []
    for pool, gpus in zip(found.pools, found.gpus, strict=True):
        members = [components[name] for name in pool.names]
        worked = pool_times(request, pool, members)
        times += worked
        pools.append(
            PoolPlan(
                name="+".join(pool.names),
                gpu=pool.place.device.name,
                gpu_memory=pool.place.device.memory.value,
                gpus=gpus,
                components=tuple(map(_component_plan, members, pool.choices)),
                memory=pool_memory(request, pool, members),
                busy_seconds=sum(time.seconds for time in worked),
            )
        )
    order = list(PHASES)
    times.sort(key=lambda time: (order.index(time.phase), time.pool, time.component))
    phases = tuple((phase, max(pool.seconds[index] for pool in found.pools)) for index, phase in enumerate(PHASES))
    prices = [pool.place.device.price for pool in found.pools]
    price = sum(len(gpus) * each.value for gpus, each in zip(found.gpus, prices, strict=True) if each is not None)
    return Plan(
        name=request.name,
        cluster=request.cluster.text,
        nodes=tuple(node.gpus for node in request.cluster.nodes),
        pools=tuple(pools),
        times=tuple(times),
        phase_seconds=tuple((phase, seconds) for phase, seconds in phases if seconds > 0),
        step_seconds=found.step_seconds,
        conversations=request.workload.conversations,
        unique_tokens=request.workload.unique_tokens,
        tokens=request.workload.tokens,
        price_per_hour=None if None in prices else price,
        load_seconds=_load_seconds(request, found, components),
        objective=GOALS[request.goal],
        value=found.value,
        bound=found.bound,
        examined=found.examined,
        notes=request.notes,
        num_prompts=request.workload.num_prompts,
        group_size=request.workload.group_size,
        prompt_tokens=int(request.workload.prompts.maximum),
        reply_tokens=int(request.workload.replies.maximum),
    )


def _component_plan(component: Component, choice: Choice) -> ComponentPlan:
    return ComponentPlan(
        name=component.name,
        role=component.role,
        model=component.shape.name,
        parameters=component.shape.parameters,
        dtype=component.dtype,
        tensor_parallel_size=choice.tensor_parallel_size,
        fsdp_size=choice.fsdp_size,
        num_replicas=round(choice.num_replicas),
        max_num_batched_tokens=choice.max_num_batched_tokens,
        max_num_seqs=choice.max_num_seqs or None,
        gradient_checkpointing=choice.gradient_checkpointing if component.role.trains else None,
        sleeps=choice.sleeps,
    )


def pool_memory(request: Request, pool: PoolChoice, members: Sequence[Component]) -> tuple[PhaseMemory, ...]:
    """Return the memory of each GPU of a pool, for each component that works and each of its phases."""
    device = pool.place.device
    reserved = MemoryItem("reserved", "gpu", device.reserved.value, device.reserved.basis, device.reserved.source)
    parts = [
        component_memory(component, choice, request.workload, device)
        for component, choice in zip(members, pool.choices, strict=True)
    ]
    found = []
    for index, (component, part) in enumerate(zip(members, parts, strict=True)):
        waiting = [
            item
            for other, memory in enumerate(parts)
            if other != index and not pool.choices[other].sleeps
            for item in memory.resident
        ]
        for phase, instants in part.phases:
            found.append(PhaseMemory(phase, component.name, (reserved, *part.working, *waiting), instants))
    return tuple(sorted(found, key=lambda memory: PHASES.index(memory.phase)))


def pool_times(request: Request, pool: PoolChoice, members: Sequence[Component]) -> list[PhaseTime]:
    """Return the seconds of each component of a pool in each phase."""
    name = "+".join(pool.names)
    site = pool.place.site(request)
    together = {Role.POLICY, Role.GENERATION} <= {each.role for each in members}
    times = []
    for component, choice in zip(members, pool.choices, strict=True):
        phases = dict(phase_clocks(component, choice, request, site, together=together))
        if choice.sleeps:
            memory = component_memory(component, choice, request.workload, pool.place.device)
            size = sum(item.bytes for item in memory.resident)
            phases[Phase.WAKE] = wake_times(component, size, pool.place.device)
        for phase, clock in phases.items():
            if parts := clock.parts():
                times.append(PhaseTime(phase, component.name, name, clock.total, parts))
    return times


def _load_seconds(request: Request, found: Found, components: dict[str, Component]) -> float:
    """Return the time in which the node with the most weights reads them, each component once."""
    by_node: dict[int, float] = {}
    for pool, gpus in zip(found.pools, found.gpus, strict=True):
        for node in {address.node for address in gpus}:
            for name in pool.names:
                component = components[name]
                if component.engine != "transformers":
                    size = component.shape.parameters * component.bytes_per_parameter
                    by_node[node] = by_node.get(node, 0.0) + size
    return max(by_node.values(), default=0.0) / request.cluster.disk.value
