"""Overrides for AReaL."""

from __future__ import annotations

from gym_rm.planning.exports.parts import Flags, Parts, flag
from gym_rm.planning.plan import ComponentPlan


def flags(parts: Parts) -> Flags:
    """Return YAML overrides for AReaL with SGLang and FSDP; its allocations are such as `sglang:d2t4`, `fsdp:d4t2`.

    `++` sets a value whether or not the YAML file has it: Hydra refuses new names otherwise.
    """
    policy, generation = parts.policy, parts.generation
    nodes, gpus = _cluster(parts)
    if generation is None:
        parts.refuse("it needs an engine for generation; plan with generation.engine: vllm (also for SGLang).")
    for each in (parts.reference, parts.critic):
        if each is not None and not parts.together(policy, each) and len(parts.pool(each).components) > 1:
            parts.refuse(f"{each.name} shares GPUs with others than the policy.")
    colocated = generation is not None and parts.together(policy, generation)
    if colocated and generation is not None and generation.num_replicas != policy.num_gpus:
        parts.refuse(
            f"generation on the GPUs of training needs one engine for each of them, {policy.num_gpus}, the plan has "
            f"{generation.num_replicas} with tensor_parallel_size {generation.tensor_parallel_size}; plan with pools "
            "in which it is apart, or with tensor_parallel_size: 1."
        )
    if parts.refusals or generation is None:
        return parts.finish([])
    lines = [
        f"cluster.n_nodes={nodes}",
        f"cluster.n_gpus_per_node={gpus}",
        f"rollout.backend=sglang:d{generation.num_replicas}t{generation.tensor_parallel_size}",
        f"actor.backend={_training(policy)}",
        f"actor.path={policy.model}",
        f"actor.gradient_checkpointing={flag(bool(policy.gradient_checkpointing))}",
        f"actor.mb_spec.max_tokens_per_mb={policy.max_num_batched_tokens}",
        f"sglang.mem_fraction_static={parts.memory_share(generation, instants=False)}",
    ]
    if colocated:
        lines += ["rollout.scheduling_strategy.type=colocation", "rollout.scheduling_strategy.target=actor"]
    if generation.max_num_seqs:
        lines.append(f"sglang.max_running_requests={generation.max_num_seqs}")
    for name, each in (("ref", parts.reference), ("critic", parts.critic)):
        if each is not None:
            lines += _other(parts, name, each)
    if colocated or any(each.sleeps for each in (policy, parts.reference, parts.critic) if each is not None):
        lines.append("enable_offload=true")
    if parts.reference is None:
        lines.append("actor.kl_ctl=0.0")
    if policy.num_replicas > 1 and policy.fsdp_size > 1:
        parts.note("AReaL shards the policy over all d groups: less memory than planned, more communication.")
    return parts.finish([f"++{line}" for line in (*lines, *_work(parts))])


def _training(component: ComponentPlan) -> str:
    return f"fsdp:d{component.num_replicas * component.fsdp_size}t{component.tensor_parallel_size}"


def _other(parts: Parts, name: str, component: ComponentPlan) -> list[str]:
    lines = [
        f"{name}.backend={_training(component)}",
        f"{name}.path={component.model}",
        f"{name}.mb_spec.max_tokens_per_mb={component.max_num_batched_tokens}",
        f"{name}.offload={flag(component.sleeps)}",
    ]
    if parts.together(parts.policy, component):
        lines += [f"{name}.scheduling_strategy.type=colocation", f"{name}.scheduling_strategy.target=actor"]
    return lines


def _cluster(parts: Parts) -> tuple[int, int]:
    """Return nodes and GPUs of each that AReaL gets: those without a reward model, which is no part of AReaL."""
    for reward in parts.reward_models:
        others = [each for each in parts.pool(reward).components if each not in parts.reward_models]
        if others:
            names = ", ".join(each.name for each in others)
            parts.refuse(
                f"it has no reward model of its own, so {reward.name} is a server and cannot take turns with {names}; "
                "plan with it in a pool apart."
            )
        else:
            parts.note(
                f"AReaL has no reward model: serve {reward.name} with `gym-rm serve` on {_addresses(parts, reward)} "
                "and call it from the reward function."
            )
    used: dict[int, int] = {}
    for pool in parts.plan.pools:
        if not any(each in parts.reward_models for each in pool.components):
            for address in pool.gpus:
                used[address.node] = used.get(address.node, 0) + 1
    if len(set(used.values())) > 1:
        parts.refuse(f"its nodes have the same number of GPUs, the plan gives it {sorted(used.values())}.")
    return len(used), max(used.values(), default=0)


def _addresses(parts: Parts, component: ComponentPlan) -> str:
    nodes: dict[int, list[int]] = {}
    for address in parts.pool(component).gpus:
        nodes.setdefault(address.node, []).append(address.gpu)
    return ", ".join(f"GPUs {gpus} of node {node}" for node, gpus in sorted(nodes.items()))


def _work(parts: Parts) -> list[str]:
    workload = parts.workload
    if workload is None:
        return []
    lines = [
        f"train_dataset.batch_size={workload.num_prompts}",
        f"gconfig.n_samples={workload.group_size}",
        f"actor.ppo_n_minibatches={workload.updates_per_step}",
        f"rollout.max_head_offpolicyness={1 if workload.asynchronous else 0}",
    ]
    if workload.epochs > 1:
        parts.refuse(f"it trains once on each conversation of a step, the plan {workload.epochs} times.")
    if parts.max_total is not None and parts.max_lengths is not None:
        lines += [f"gconfig.max_new_tokens={parts.max_lengths[1]}", f"sglang.context_length={parts.max_total}"]
    return lines
