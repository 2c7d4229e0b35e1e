"""The same request by the rules of another library, beside our plan."""

from __future__ import annotations

from typing import Any

from gym_rm.errors import ConfigError
from gym_rm.planning.plan import ComponentPlan, Plan, Role
from gym_rm.planning.settings import PlanSettings


def nemo_rl_lines(settings: PlanSettings, found: Plan) -> list[str]:
    """Return where NeMo RL places the models on the same cluster, or its error, and what the plan does otherwise.

    Raises:
        ConfigError: the nodes are of several sizes, or there is no policy.
    """
    from gym_rm.planning.nemo_rl.placement import NemoError, nemo_placement, surpass

    request = _nemo_request(settings, found)
    try:
        theirs: Any = nemo_placement(request)
    except NemoError as error:
        theirs = error
    lines = ["The same models by the rules of NeMo RL:", *(f"  {line}" for line in surpass(found, theirs).lines)]
    if len(settings.reward_models) > 1:
        lines.append("  NeMo RL's reward model environment holds one model; the first is placed.")
    return lines


def _nemo_request(settings: PlanSettings, found: Plan) -> Any:
    """Return the request in NeMo RL's terms. Where it leaves GPUs to the search, the plan's numbers are taken.

    A reward model whose GPUs are `auto` gets a node of several, or as many GPUs of a single node as its weights need.
    """
    from gym_rm.planning.nemo_rl.placement import NemoRequest

    if len(set(found.nodes)) != 1:
        raise ConfigError(f"NeMo RL's clusters have nodes of one size, got nodes with {sorted(set(found.nodes))} GPUs.")
    parts = {each.role: each for pool in reversed(found.pools) for each in reversed(pool.components)}
    if Role.POLICY not in parts:
        raise ConfigError(
            "--style nemo-rl places a policy with its generation and reward model; the request has no policy."
        )
    policy, generation = parts[Role.POLICY], parts.get(Role.GENERATION)
    num_nodes, per_node = len(found.nodes), found.nodes[0]
    values: dict[str, Any] = {"num_nodes": num_nodes, "gpus_per_node": per_node}
    values["policy_tensor_parallel_size"] = policy.tensor_parallel_size
    values["policy_parameters"] = policy.parameters
    values |= {"num_prompts": settings.workload.num_prompts, "group_size": settings.workload.group_size}
    values["gpu_memory"] = min(pool.gpu_memory for pool in found.pools)
    if generation is not None:
        values["generation_tensor_parallel_size"] = generation.tensor_parallel_size
        if found.pool_of(generation.name) is not found.pool_of(policy.name):
            nodes, gpus = _blocks(generation.num_gpus, per_node)
            values |= {"colocated": False, "generation_nodes": nodes, "generation_gpus_per_node": gpus}
    if settings.reward_models:
        name, wanted = next(iter(settings.reward_models.items()))
        reward_model: ComponentPlan = found.component(name)
        auto = per_node if num_nodes > 1 else reward_model.tensor_parallel_size
        nodes, gpus = _blocks(wanted.num_gpus if isinstance(wanted.num_gpus, int) else auto, per_node)
        values |= {"reward_model_nodes": nodes, "reward_model_gpus_per_node": gpus}
        values["reward_model_tensor_parallel_size"] = reward_model.tensor_parallel_size
        values["reward_model_parameters"] = reward_model.parameters
    return NemoRequest(**values)


def _blocks(gpus: int, per_node: int) -> tuple[int, int]:
    """Return nodes, and GPUs of each, that hold so many GPUs."""
    return (1, gpus) if gpus <= per_node else (-(-gpus // per_node), per_node)
