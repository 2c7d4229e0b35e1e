"""Plans made by hand, with numbers of the right size, for the tests of what shows plans. Not a test."""

from __future__ import annotations

from typing import Any

from gym_rm.planning.plan import (
    Address,
    ComponentPlan,
    Instant,
    MemoryItem,
    Phase,
    PhaseMemory,
    PhaseTime,
    Plan,
    PoolPlan,
    Role,
    TimePart,
)
from gym_rm.planning.quantities import GIB, Basis
from tests.planning import plans

KINDS = {"h100_sxm": 80 * GIB, "h200_sxm": 141 * GIB, "rtx_4090": 24 * GIB}


def component(name: str, role: Role, *, gpus: int, tp: int = 1, fsdp: int = 1, **changes: Any) -> ComponentPlan:
    """A component of 8 billion parameters on `gpus` GPUs."""
    slots = 256 if role is Role.GENERATION else None
    values = {"model": "Qwen/Qwen3-8B", "parameters": 8_190_735_360, "max_num_seqs": slots, "sleeps": False}
    sizes = {"tensor_parallel_size": tp, "fsdp_size": fsdp, "num_replicas": gpus // tp // fsdp}
    return plans.component(name, role, **{**values, **sizes, **changes})


def items(owner: str, **gib: float) -> list[MemoryItem]:
    """Items of memory by name; the fragmentation is an assumption."""
    basis = {"fragmentation": Basis.ASSUMPTION}
    return [
        MemoryItem(name, owner, size * GIB, basis.get(name, Basis.FORMULA), "made by hand")
        for name, size in gib.items()
    ]


def memory(phase: Phase, owner: str, persistent: list[MemoryItem], **instants: list[MemoryItem]) -> PhaseMemory:
    """Memory of a phase; `optimizer_step` is the instant `optimizer step`."""
    reserved = MemoryItem("reserved", "", 1.25 * GIB, Basis.ASSUMPTION, "CUDA context and workspaces")
    found = tuple(Instant(name.replace("_", " "), tuple(each)) for name, each in instants.items())
    return PhaseMemory(phase, owner, (*persistent, reserved), found)


def pool(
    name: str,
    gpu: str,
    gpus: tuple[Address, ...],
    components: tuple[ComponentPlan, ...],
    bars: tuple[PhaseMemory, ...],
    works: list[tuple[Phase, str, float, str]],
) -> tuple[PoolPlan, list[PhaseTime]]:
    """A pool and its work: phase, component, seconds, and what takes three quarters of them."""
    times = []
    for phase, owner, seconds, main in works:
        launches = TimePart("kernel launches", 0.25 * seconds, Basis.ASSUMPTION, "5 microseconds each")
        parts = (TimePart(main, 0.75 * seconds, Basis.TABLE, "table of h100_sxm"), launches)
        times.append(PhaseTime(phase, owner, name, seconds, parts))
    busy = sum(time.seconds for time in times)
    return PoolPlan(name, gpu, KINDS[gpu], gpus, components, bars, busy), times


def finish(pools: list[tuple[PoolPlan, list[PhaseTime]]], nodes: tuple[int, ...], **changes: Any) -> Plan:
    """The plan of pools with their work."""
    sums: dict[Phase, float] = {}
    for phase in Phase:
        longest = max(sum(time.seconds for time in times if time.phase is phase) for _, times in pools)
        sums |= {phase: longest} if longest else {}
    values: dict[str, Any] = {
        "name": "example",
        "cluster": f"{len(nodes)} x {nodes[0]} {pools[0][0].gpu}",
        "step_seconds": sum(sums.values()),
        "conversations": 512,
        "unique_tokens": 512 * 600.0,
        "tokens": 512 * 1024.0,
        "load_seconds": 41.0,
        "objective": "throughput",
        "exact": True,
        "notes": ("lengths are assumed: 512 tokens for every reply",),
    }
    return Plan(
        nodes=nodes,
        pools=tuple(made for made, _ in pools),
        times=tuple(time for _, times in pools for time in times),
        phase_seconds=tuple(sums.items()),
        **(values | changes),
    )


def addresses(first: int, count: int, per_node: int) -> tuple[Address, ...]:
    """GPUs `first` to `first + count - 1`, numbered through all nodes."""
    return tuple(Address(number // per_node, number % per_node) for number in range(first, first + count))


def together(nodes: int = 1, per_node: int = 8, *, gpu: str = "h100_sxm", scale: float = 1.0, **changes: Any) -> Plan:
    """All components take turns on all GPUs. `scale` multiplies the sizes of the weights."""
    gpus, one = nodes * per_node, scale
    fsdp, tp, seconds = min(gpus, 8), 2 if gpus > 1 else 1, 8 / gpus
    held = items("policy", weights=15.3 * one / fsdp, optimizer=91.5 * one / fsdp)
    forward = {"activations": 6.1 * one, "logits": 4.6 * one}
    bars = (
        memory(
            Phase.GENERATE,
            "generation",
            held + items("generation", weights=15.3 * one / tp, kv_cache=31 * one),
            decode=items("generation", activations=1.2 * one),
        ),
        memory(
            Phase.SCORE,
            "helpful",
            held + items("helpful", weights=14.1 * one),
            forward=items("helpful", activations=1.9 * one, fragmentation=0.2 * one),
        ),
        memory(Phase.SCORE, "policy", held, forward=items("policy", **forward)),
        memory(
            Phase.UPDATE,
            "policy",
            held + items("policy", gradients=30.5 * one / fsdp),
            optimizer_step=items("policy", communication=0.4),
            backward=items("policy", **forward, fragmentation=1.1 * one),
        ),
    )
    works = [
        (Phase.WAKE, "generation", 0.9, "host link"),
        (Phase.GENERATE, "generation", 21.4 * seconds, "memory bandwidth"),
        (Phase.SCORE, "helpful", 3.3 * seconds, "matrix products"),
        (Phase.SCORE, "policy", 3.1 * seconds, "matrix products"),
        (Phase.UPDATE, "policy", 11.2 * seconds, "matrix products"),
        (Phase.SYNC, "policy", 0.4, "network"),
    ]
    parts = (
        component("policy", Role.POLICY, gpus=gpus, fsdp=fsdp),
        component("generation", Role.GENERATION, gpus=gpus, tp=tp, sleeps=True),
        component("helpful", Role.REWARD_MODEL, gpus=gpus, model="Skywork/Skywork-Reward-V2-Llama-3.1-8B", sleeps=True),
    )
    made = pool("policy+generation+helpful", gpu, addresses(0, gpus, per_node), parts, bars, works)
    return finish([made], (per_node,) * nodes, **changes)


def apart(nodes: int = 4, per_node: int = 8, *, gpu: str = "h200_sxm", unused: int = 0, **changes: Any) -> Plan:
    """Training on half of the GPUs, generation on a quarter, two reward models on the rest, without `unused` GPUs."""
    gpus = nodes * per_node
    half, quarter, seconds = gpus // 2, gpus // 4, 32 / gpus
    rest = gpus - half - quarter - unused
    held = items("policy", weights=1.9, optimizer=11.4)
    kept = items("helpful", weights=64.7) + items("safe", weights=14)
    matmul = "matrix products"
    training = pool(
        "policy",
        gpu,
        addresses(0, half, per_node),
        (
            component("policy", Role.POLICY, gpus=half, fsdp=8),
            component("reference", Role.REFERENCE, gpus=half, sleeps=True),
        ),
        (
            memory(Phase.SCORE, "policy", held, forward=items("policy", activations=4, logits=9)),
            memory(
                Phase.SCORE,
                "reference",
                held + items("reference", weights=15.3),
                forward=items("reference", activations=4, logits=9),
            ),
            memory(
                Phase.UPDATE,
                "policy",
                held + items("policy", gradients=3.8),
                backward=items("policy", activations=22, logits=18),
            ),
        ),
        [
            (Phase.SCORE, "policy", 1.1 * seconds, matmul),
            (Phase.SCORE, "reference", 1.1 * seconds, matmul),
            (Phase.UPDATE, "policy", 3.9 * seconds, matmul),
            (Phase.SYNC, "policy", 0.3 * seconds, "network"),
        ],
    )
    generation = pool(
        "generation",
        gpu,
        addresses(half, quarter, per_node),
        (component("generation", Role.GENERATION, gpus=quarter, tp=2),),
        (
            memory(
                Phase.GENERATE,
                "generation",
                items("generation", weights=7.6, kv_cache=96),
                decode=items("generation", activations=3.1),
            ),
        ),
        [
            (Phase.GENERATE, "generation", 14.2 * seconds, "memory bandwidth"),
            (Phase.SYNC, "generation", 0.3 * seconds, "network"),
        ],
    )
    large = {"model": "nvidia/Llama-3.3-Nemotron-70B-Reward", "parameters": 69_500_000_000}
    small = {"model": "Skywork/Skywork-Reward-V2-Llama-3.1-8B", "parameters": 7_500_000_000}
    rewards = pool(
        "rewards",
        gpu,
        addresses(half + quarter, rest, per_node),
        (
            component("helpful", Role.REWARD_MODEL, gpus=rest, tp=2, **large),
            component("safe", Role.REWARD_MODEL, gpus=rest, **small),
        ),
        (
            memory(Phase.SCORE, "helpful", kept, forward=items("helpful", activations=6.5)),
            memory(Phase.SCORE, "safe", kept, forward=items("safe", activations=1.9)),
        ),
        [(Phase.SCORE, "helpful", 5.2 * seconds, matmul), (Phase.SCORE, "safe", 0.7 * seconds, matmul)],
    )
    return finish([training, generation, rewards], (per_node,) * nodes, **changes)
