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

KINDS = {"h100_sxm": 80 * GIB, "h200_sxm": 141 * GIB, "rtx_4090": 24 * GIB}


def component(name: str, role: Role, *, gpus: int, tp: int = 1, fsdp: int = 1, **changes: Any) -> ComponentPlan:
    """A component of 8 billion parameters on `gpus` GPUs."""
    values: dict[str, Any] = {
        "model": "Qwen/Qwen3-8B",
        "parameters": 8_190_735_360,
        "dtype": "bfloat16",
        "max_num_batched_tokens": 16384,
        "max_num_seqs": 256 if role is Role.GENERATION else None,
        "gradient_checkpointing": True if role.trains else None,
        "sleeps": False,
    }
    return ComponentPlan(
        name=name,
        role=role,
        tensor_parallel_size=tp,
        fsdp_size=fsdp,
        num_replicas=gpus // tp // fsdp,
        **{**values, **changes},
    )


def item(name: str, owner: str, gib: float, basis: Basis = Basis.FORMULA) -> MemoryItem:
    """An item of memory."""
    return MemoryItem(name, owner, gib * GIB, basis, "made by hand")


def memory(phase: Phase, owner: str, persistent: list[MemoryItem], **instants: list[MemoryItem]) -> PhaseMemory:
    """Memory of a phase; `optimizer_step` is the instant `optimizer step`."""
    reserved = MemoryItem("reserved", "", 1.25 * GIB, Basis.ASSUMPTION, "CUDA context and workspaces")
    found = tuple(Instant(name.replace("_", " "), tuple(items)) for name, items in instants.items())
    return PhaseMemory(phase, owner, (*persistent, reserved), found)


def work(phase: Phase, owner: str, pool: str, seconds: float, main: str) -> PhaseTime:
    """Time of which `main` takes three quarters."""
    parts = (
        TimePart(main, 0.75 * seconds, Basis.TABLE, "table of h100_sxm"),
        TimePart("kernel launches", 0.25 * seconds, Basis.ASSUMPTION, "5 microseconds each"),
    )
    return PhaseTime(phase, owner, pool, seconds, parts)


def addresses(first: int, count: int, per_node: int) -> tuple[Address, ...]:
    """GPUs `first` to `first + count - 1`, numbered through all nodes."""
    return tuple(Address(number // per_node, number % per_node) for number in range(first, first + count))


def finish(pools: list[PoolPlan], times: list[PhaseTime], *, nodes: tuple[int, ...], **changes: Any) -> Plan:
    """The plan of pools whose work is in `times`."""
    phases = [phase for phase in Phase if any(time.phase is phase for time in times)]
    sums = {
        phase: max(sum(t.seconds for t in times if t.phase is phase and t.pool == pool.name) for pool in pools)
        for phase in phases
    }
    values: dict[str, Any] = {
        "name": "example",
        "cluster": f"{len(nodes)} x {nodes[0]} {pools[0].gpu}",
        "step_seconds": sum(sums.values()),
        "conversations": 512,
        "unique_tokens": 512 * 600.0,
        "tokens": 512 * 1024.0,
        "load_seconds": 41.0,
        "objective": "throughput",
        "exact": True,
        "notes": ("lengths are assumed: 512 tokens for every reply",),
    }
    values |= changes
    return Plan(nodes=nodes, pools=tuple(pools), times=tuple(times), phase_seconds=tuple(sums.items()), **values)


def together(nodes: int = 1, per_node: int = 8, *, gpu: str = "h100_sxm", scale: float = 1.0, **changes: Any) -> Plan:
    """All components take turns on all GPUs. `scale` multiplies the sizes of the weights."""
    gpus, name = nodes * per_node, "policy+generation+helpful"
    fsdp = min(gpus, 8)
    tp = 2 if gpus > 1 else 1
    shares = {"policy": 15.3 * scale / fsdp, "generation": 15.3 * scale / tp, "helpful": 14.1 * scale}
    optimizer = [item("optimizer", "policy", 91.5 * scale / fsdp)]
    held = [item("weights", "policy", shares["policy"]), *optimizer]
    own = {name: item("weights", name, share) for name, share in shares.items()}
    cache = item("kv_cache", "generation", 31 * scale)
    forward = [item("activations", "helpful", 1.9 * scale), item("fragmentation", "helpful", 0.2 * scale)]
    backward = [
        item("activations", "policy", 6.1 * scale),
        item("logits", "policy", 4.6 * scale),
        item("fragmentation", "policy", 1.1 * scale, Basis.ASSUMPTION),
    ]
    bars = (
        memory(
            Phase.GENERATE,
            "generation",
            [*held, own["generation"], cache],
            decode=[item("activations", "generation", 1.2 * scale)],
        ),
        memory(Phase.SCORE, "helpful", [*held, own["helpful"]], forward=forward),
        memory(Phase.SCORE, "policy", held, forward=backward[:2]),
        memory(
            Phase.UPDATE,
            "policy",
            [*held, item("gradients", "policy", 30.5 * scale / fsdp)],
            optimizer_step=[item("communication", "policy", 0.4)],
            backward=backward,
        ),
    )
    seconds = 8 / gpus
    times = [
        work(Phase.WAKE, "generation", name, 0.9, "host link"),
        work(Phase.GENERATE, "generation", name, 21.4 * seconds, "memory bandwidth"),
        work(Phase.SCORE, "helpful", name, 3.3 * seconds, "matrix products"),
        work(Phase.SCORE, "policy", name, 3.1 * seconds, "matrix products"),
        work(Phase.UPDATE, "policy", name, 11.2 * seconds, "matrix products"),
        work(Phase.SYNC, "policy", name, 0.4, "network"),
    ]
    components = (
        component("policy", Role.POLICY, gpus=gpus, fsdp=fsdp),
        component("generation", Role.GENERATION, gpus=gpus, tp=tp, sleeps=True),
        component("helpful", Role.REWARD_MODEL, gpus=gpus, model="Skywork/Skywork-Reward-V2-Llama-3.1-8B", sleeps=True),
    )
    busy = sum(time.seconds for time in times)
    pool = PoolPlan(name, gpu, KINDS[gpu], addresses(0, gpus, per_node), components, bars, busy)
    return finish([pool], times, nodes=(per_node,) * nodes, **changes)


def apart(nodes: int = 4, per_node: int = 8, *, gpu: str = "h200_sxm", unused: int = 0, **changes: Any) -> Plan:
    """Training on half of the GPUs, generation on a quarter, two reward models on the rest, without `unused` GPUs."""
    gpus = nodes * per_node
    half, quarter = gpus // 2, gpus // 4
    sizes = {"policy": half, "generation": quarter, "rewards": gpus - half - quarter - unused}
    first, pools, times = 0, [], []
    parts: dict[str, tuple[ComponentPlan, ...]] = {
        "policy": (
            component("policy", Role.POLICY, gpus=half, fsdp=8),
            component("reference", Role.REFERENCE, gpus=half, sleeps=True),
        ),
        "generation": (component("generation", Role.GENERATION, gpus=quarter, tp=2),),
        "rewards": tuple(
            component(name, Role.REWARD_MODEL, gpus=sizes["rewards"], tp=tp, model=model, parameters=size)
            for name, tp, model, size in (
                ("helpful", 2, "nvidia/Llama-3.3-Nemotron-70B-Reward", 69_500_000_000),
                ("safe", 1, "Skywork/Skywork-Reward-V2-Llama-3.1-8B", 7_500_000_000),
            )
        ),
    }
    seconds = 32 / gpus
    held = [item("weights", "policy", 1.9), item("optimizer", "policy", 11.4)]
    bars = {
        "policy": (
            memory(
                Phase.SCORE, "policy", held, forward=[item("activations", "policy", 4), item("logits", "policy", 9)]
            ),
            memory(
                Phase.SCORE,
                "reference",
                [*held, item("weights", "reference", 15.3)],
                forward=[item("activations", "reference", 4), item("logits", "reference", 9)],
            ),
            memory(
                Phase.UPDATE,
                "policy",
                [*held, item("gradients", "policy", 3.8)],
                backward=[item("activations", "policy", 22), item("logits", "policy", 18)],
            ),
        ),
        "generation": (
            memory(
                Phase.GENERATE,
                "generation",
                [item("weights", "generation", 7.6), item("kv_cache", "generation", 96)],
                decode=[item("activations", "generation", 3.1)],
            ),
        ),
        "rewards": (
            memory(
                Phase.SCORE,
                "helpful",
                [item("weights", "helpful", 64.7), item("weights", "safe", 14)],
                forward=[item("activations", "helpful", 6.5)],
            ),
            memory(
                Phase.SCORE,
                "safe",
                [item("weights", "helpful", 64.7), item("weights", "safe", 14)],
                forward=[item("activations", "safe", 1.9)],
            ),
        ),
    }
    works = {
        "policy": [
            (Phase.SCORE, "policy", 1.1, "matrix products"),
            (Phase.SCORE, "reference", 1.1, "matrix products"),
            (Phase.UPDATE, "policy", 3.9, "matrix products"),
            (Phase.SYNC, "policy", 0.3, "network"),
        ],
        "generation": [
            (Phase.GENERATE, "generation", 14.2, "memory bandwidth"),
            (Phase.SYNC, "generation", 0.3, "network"),
        ],
        "rewards": [(Phase.SCORE, "helpful", 5.2, "matrix products"), (Phase.SCORE, "safe", 0.7, "matrix products")],
    }
    for name, size in sizes.items():
        mine = [work(phase, owner, name, length * seconds, main) for phase, owner, length, main in works[name]]
        busy = sum(time.seconds for time in mine)
        pools.append(PoolPlan(name, gpu, KINDS[gpu], addresses(first, size, per_node), parts[name], bars[name], busy))
        times += mine
        first += size
    return finish(pools, times, nodes=(per_node,) * nodes, **changes)
