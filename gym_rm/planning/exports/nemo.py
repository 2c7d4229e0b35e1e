"""Overrides for NeMo RL."""

from __future__ import annotations

from gym_rm.errors import ConfigError
from gym_rm.planning.exports.parts import Flags, Parts, flag
from gym_rm.planning.nemo_rl.placement import NemoRequest, nemo_placement
from gym_rm.planning.nemo_rl.rules import KEYS
from gym_rm.planning.plan import ComponentPlan


def flags(parts: Parts) -> Flags:
    """Return YAML overrides for NeMo RL's `examples/run_grpo.py`; the placement is checked with NeMo RL's own rules."""
    policy, generation = parts.policy, parts.generation
    _refuse_other_shapes(parts)
    if parts.refusals or generation is None:
        return parts.finish([])
    request = _request(parts, generation)
    _check_placement(parts, request)
    lines = [
        f"{KEYS[name]}={str(value).lower()}"
        for name, value in (
            ("num_nodes", request.num_nodes),
            ("gpus_per_node", request.gpus_per_node),
            ("colocated", request.colocated),
        )
    ]
    if not request.colocated:
        lines.append(f"{KEYS['generation_nodes']}={request.generation_nodes}")
        lines.append(f"{KEYS['generation_gpus_per_node']}={request.generation_gpus_per_node}")
    lines += [
        f"{KEYS['policy_tensor_parallel_size']}={policy.tensor_parallel_size}",
        f"policy.dtensor_cfg.activation_checkpointing={flag(bool(policy.gradient_checkpointing))}",
        "policy.sequence_packing.enabled=true",
        f"policy.sequence_packing.train_mb_tokens={policy.max_num_batched_tokens}",
        f"{KEYS['generation_tensor_parallel_size']}={generation.tensor_parallel_size}",
        f"policy.generation.vllm_cfg.gpu_memory_utilization={parts.memory_share(generation)}",
    ]
    if policy.num_replicas > 1 and policy.fsdp_size > 1:
        lines.append(f"++policy.dtensor_cfg.dp_replicate_size={policy.num_replicas}")
    elif policy.num_replicas > 1:
        parts.note("NeMo RL shards the policy over all its GPUs, which takes less memory than planned.")
    for reward in parts.reward_models:
        lines += _reward(parts, reward, request)
    return parts.finish(lines + _work(parts))


def _refuse_other_shapes(parts: Parts) -> None:
    if parts.generation is None:
        parts.refuse("it needs an engine for generation (vllm); plan with generation.engine: vllm.")
    if parts.critic is not None:
        parts.refuse("its GRPO has no critic.")
    if len(parts.reward_models) > 1:
        names = ", ".join(each.name for each in parts.reward_models)
        parts.refuse(f"it has one reward model in a run, the plan {len(parts.reward_models)}: {names}.")
    if parts.reference is not None and not parts.together(parts.policy, parts.reference):
        parts.refuse("its reference is in the workers of the policy; plan with pools in which both are together.")
    for reward in parts.reward_models:
        if len(parts.pool(reward).components) > 1:
            others = ", ".join(each.name for each in parts.pool(reward).components if each is not reward)
            parts.refuse(f"its reward model shares no GPU, but {reward.name} takes turns with {others}.")
    if len(set(parts.plan.nodes)) > 1:
        parts.refuse(f"its nodes have the same number of GPUs, the plan's {list(parts.plan.nodes)}.")


def _request(parts: Parts, generation: ComponentPlan) -> NemoRequest:
    """Return the request whose placement should be the plan's, on the nodes that the plan uses."""
    nodes = len({address.node for pool in parts.plan.pools for address in pool.gpus})
    gpus = parts.plan.used_gpus if nodes == 1 else parts.plan.nodes[0]
    colocated = parts.together(parts.policy, generation)
    places: tuple[int | None, int | None] = (None, None) if colocated else parts.shape(generation)
    models = parts.reward_models
    reward: tuple[int | None, int | None] = parts.shape(models[0]) if models else (None, None)
    return NemoRequest(
        num_nodes=nodes,
        gpus_per_node=gpus,
        colocated=colocated,
        reward_model_nodes=reward[0],
        reward_model_gpus_per_node=reward[1],
        generation_nodes=places[0],
        generation_gpus_per_node=places[1],
        policy_tensor_parallel_size=parts.policy.tensor_parallel_size,
        generation_tensor_parallel_size=generation.tensor_parallel_size,
        reward_model_tensor_parallel_size=models[0].tensor_parallel_size if models else 1,
        num_prompts=parts.workload.num_prompts if parts.workload else None,
        group_size=parts.workload.group_size if parts.workload else None,
    )


def _check_placement(parts: Parts, request: NemoRequest) -> None:
    try:
        theirs = nemo_placement(request)
    except ConfigError as error:
        parts.refuse(str(error))
        return
    wanted = len(parts.pool(parts.policy).gpus)
    if len(theirs.train) != wanted:
        parts.refuse(
            f"it would give training {len(theirs.train)} GPUs of {request.num_nodes} x {request.gpus_per_node}, the "
            f"plan {wanted}: on several nodes, its parts take whole nodes."
        )
    if theirs.idle:
        parts.note(f"{len(theirs.idle)} GPUs on the nodes of the reward model stay idle.")
    if request.num_nodes > 1:
        parts.note("NeMo RL packs its parts on nodes but does not pin them; Ray may choose others than the plan.")


def _reward(parts: Parts, reward: ComponentPlan, request: NemoRequest) -> list[str]:
    parts.note("NeMo RL keeps the reward model in float32 and shards it over its GPUs; it never sleeps.")
    lines = [
        "data.default.env_name=reward_model",
        f"env.reward_model.model_name={reward.model}",
        f"env.reward_model.precision={reward.dtype}",
        f"{KEYS['reward_model_nodes']}={request.reward_model_nodes}",
        f"{KEYS['reward_model_gpus_per_node']}={request.reward_model_gpus_per_node}",
        f"{KEYS['reward_model_tensor_parallel_size']}={reward.tensor_parallel_size}",
    ]
    if parts.max_total is not None:
        rows = parts.plan.conversations // (reward.num_replicas * reward.fsdp_size)
        most = max(1, reward.max_num_batched_tokens // parts.max_total)
        batch = max(each for each in range(1, max(1, min(most, rows)) + 1) if rows % each == 0)
        lines.append(f"{KEYS['reward_model_batch_size']}={batch}")
    return lines


def _work(parts: Parts) -> list[str]:
    workload = parts.workload
    if workload is None:
        return []
    lines = [
        f"{KEYS['num_prompts']}={workload.num_prompts}",
        f"{KEYS['group_size']}={workload.group_size}",
        f"policy.train_global_batch_size={parts.update_rows()}",
    ]
    if workload.epochs > 1:
        parts.refuse(f"it trains once on each conversation of a step, the plan {workload.epochs} times.")
    if parts.max_total is not None:
        lines.append(f"policy.max_total_sequence_length={parts.max_total}")
    if parts.reference is None:
        lines.append("loss_fn.reference_policy_kl_penalty=0")
        lines.append("++grpo.skip_reference_policy_logprobs_calculation=true")
    return lines
