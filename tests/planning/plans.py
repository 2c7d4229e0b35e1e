"""Plans made by hand, for tests of what is done with a plan."""

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


def component(name, role, *, tensor_parallel_size=1, fsdp_size=1, num_replicas=1, sleeps=True, **changes):
    role = Role(role)
    values = {
        "model": "org/model",
        "parameters": 8_000_000_000,
        "dtype": "bfloat16",
        "max_num_batched_tokens": 16384,
        "max_num_seqs": 64 if role is Role.GENERATION else None,
        "gradient_checkpointing": True if role.trains else None,
        "optimizer": "adamw" if role.trains else None,
        **changes,
    }
    return ComponentPlan(
        name=name, role=role, tensor_parallel_size=tensor_parallel_size, fsdp_size=fsdp_size,
        num_replicas=num_replicas, sleeps=sleeps, **values,
    )  # fmt: skip


def pool(components, gpus, *, memory=20 * GIB, gpu_memory=80 * GIB):
    """Return a pool on GPUs that are given as pairs (node, GPU); each component takes `memory` while it works."""
    phases = {Role.POLICY: Phase.UPDATE, Role.GENERATION: Phase.GENERATE, Role.REWARD_TRAINING: Phase.UPDATE}
    bars = tuple(
        PhaseMemory(
            phases.get(each.role, Phase.SCORE),
            each.name,
            (MemoryItem("weights", each.name, memory, Basis.FORMULA, "by hand"),),
            (Instant("forward", ()),),
        )
        for each in components
    )
    return PoolPlan(
        name="+".join(each.name for each in components),
        gpu="h100_sxm",
        gpu_memory=gpu_memory,
        gpus=tuple(Address(node, gpu) for node, gpu in gpus),
        components=tuple(components),
        memory=bars,
        busy_seconds=6.0,
    )


def plan_of(nodes, *pools, conversations=512):
    times = tuple(
        PhaseTime(bar.phase, bar.component, each.name, 2.0, (TimePart("compute", 2.0, Basis.FORMULA, "by hand"),))
        for each in pools
        for bar in each.memory
    )
    return Plan(
        name="by hand", cluster="by hand", nodes=tuple(nodes), pools=tuple(pools), times=times,
        phase_seconds=((Phase.GENERATE, 4.0), (Phase.SCORE, 2.0), (Phase.UPDATE, 4.0)), step_seconds=10.0,
        conversations=conversations, unique_tokens=4e5, tokens=5e5, load_seconds=60.0,
        objective="throughput", exact=True, notes=(),
        num_prompts=64, group_size=8, prompt_tokens=1024, reply_tokens=1024, updates_per_step=2,
    )  # fmt: skip


def gpus(node, first, count):
    return [(node, gpu) for gpu in range(first, first + count)]


def training(size=8, **changes):
    """Return policy, generation and reference for a pool of so many GPUs, with a generation of TP 2."""
    return (
        component("policy", "policy", fsdp_size=size, **changes),
        component("generation", "generation", tensor_parallel_size=2, num_replicas=size // 2, **changes),
        component("reference", "reference", fsdp_size=size, **changes),
    )


def reward(count, size=1, name="rm", **changes):
    return component(name, "reward_model", tensor_parallel_size=size, num_replicas=count // size, **changes)


def apart(nodes=2, count=8, size=4, **changes):
    """Return a plan with training on the first node and a reward model on `count` GPUs of the last, with TP `size`."""
    last = nodes - 1
    return plan_of(
        [8] * nodes,
        pool(training(**changes), [pair for node in range(last) for pair in gpus(node, 0, 8)][:8]),
        pool((reward(count, size, sleeps=False, **changes),), gpus(last, 0, count)),
    )


def together(count=8, **changes):
    return plan_of([count], pool((*training(count, **changes), reward(count, **changes)), gpus(0, 0, count)))


def awake(count):
    """Return a plan that TRL can follow: everything on all GPUs, replicas that stay awake but for generation."""
    parts = (
        component("policy", "policy", num_replicas=count, sleeps=False),
        component("generation", "generation", num_replicas=count),
        reward(count, sleeps=False),
    )
    return plan_of([count], pool(parts, gpus(0, 0, count)))
