"""Small requests for the tests of the planner."""

from dataclasses import replace

from gym_rm.planning.hardware.devices import KINDS, Cluster, Device
from gym_rm.planning.lengths import Lengths, constant
from gym_rm.planning.model.config_sizes import shape_from_config
from gym_rm.planning.plan import Role
from gym_rm.planning.plan_request import Component, PlanRequest, StepWorkload
from gym_rm.planning.quantities import GIB, Basis, Quantity

NETWORK = Quantity(50e9, Basis.TABLE, "test")
SIZES = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}


def device(*, memory: float = 80, kind: str = "h100_sxm") -> Device:
    """Return a GPU with this many GiB."""
    return KINDS[kind].with_quantities({"memory": Quantity(memory * GIB, Basis.FORMULA, "given")})


def cluster(*gpus: int, memory: float = 80) -> Cluster:
    """Return a cluster with these numbers of GPUs in its nodes."""
    assert len(set(gpus)) == 1
    return Cluster(device(memory=memory), len(gpus), gpus[0], NETWORK, Quantity(2e9, Basis.ASSUMPTION, "test"))


def component(role: Role, *, name: str | None = None, size: float = 1.0, **numbers) -> Component:
    """Return a component with a model of about `size` billion parameters."""
    labels = None if role in (Role.POLICY, Role.GENERATION, Role.REFERENCE) else 1
    sizes = {**SIZES, "num_hidden_layers": max(int(16 * size), 1)}
    shape = shape_from_config(sizes, name=f"{size:g}B", num_labels=labels)
    engine = "training" if role.trains else "vllm" if role is Role.GENERATION else "gym_rm"
    return Component(name or role.value, role, shape, "bfloat16", engine, **numbers)


def workload(**numbers) -> StepWorkload:
    replies = Lengths((50.0, 100.0, 200.0, 400.0), Basis.FORMULA, "test")
    made = StepWorkload(16, 4, 1, 0, constant(200), replies)
    return replace(made, **numbers)


def grpo(
    hardware: Cluster, *, size: float = 1.0, critic: bool = False, reference: bool = False, **numbers
) -> PlanRequest:
    """Return a request for GRPO with a reward model, or PPO with a critic."""
    parts = [component(Role.POLICY, size=size), component(Role.GENERATION, size=size)]
    if reference:
        parts.append(component(Role.REFERENCE, size=size))
    if critic:
        parts.append(component(Role.CRITIC, size=size))
    parts.append(component(Role.REWARD_MODEL, name="rm", size=size))
    return PlanRequest("test", hardware, tuple(parts), workload(), **numbers)


def scoring(hardware: Cluster, *, size: float = 1.0, models: int = 1, **numbers) -> PlanRequest:
    """Return a request for scoring alone."""
    parts = [component(Role.REWARD_MODEL, name=f"rm{index}", size=size, **numbers) for index in range(models)]
    return PlanRequest("test", hardware, tuple(parts), workload(num_prompts=512))
