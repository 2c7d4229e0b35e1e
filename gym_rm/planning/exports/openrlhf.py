"""Arguments for OpenRLHF."""

from __future__ import annotations

from gym_rm.planning.exports.parts import Flags, Parts
from gym_rm.planning.plan import ComponentPlan


def flags(parts: Parts) -> Flags:
    """Return arguments for `python -m openrlhf.cli.train_ppo_ray` with DeepSpeed and vLLM."""
    policy, generation = parts.policy, parts.generation
    trained = [each for each in (policy, parts.reference, parts.critic, *parts.reward_models) if each is not None]
    sharing = _sharing(parts)
    _refuse_other_shapes(parts, trained)
    shapes = {each.name: parts.shape(each) for each in trained}
    if parts.refusals or generation is None:
        return parts.finish([])
    names = {policy.name: "actor"}
    names |= {parts.reference.name: "ref"} if parts.reference else {}
    names |= {parts.critic.name: "critic"} if parts.critic else {}
    names |= {each.name: "reward" for each in parts.reward_models}
    lines = [f"--actor.model_name_or_path {policy.model}"]
    for each in trained:
        nodes, gpus = shapes[each.name]
        lines += [f"--{names[each.name]}.num_nodes {nodes}", f"--{names[each.name]}.num_gpus_per_node {gpus}"]
    lines += [f"--reward.model_name_or_path {each.model}" for each in parts.reward_models]
    lines += sharing
    lines += [
        f"--vllm.num_engines {generation.num_replicas}",
        f"--vllm.tensor_parallel_size {generation.tensor_parallel_size}",
        f"--vllm.gpu_memory_utilization {parts.memory_share(generation)}",
        f"--ds.tensor_parallel_size {policy.tensor_parallel_size}",
        f"--ds.zero_stage {3 if policy.fsdp_size > 1 else 2}",
        "--ds.packing_samples",
        "--train.dynamic_batch_enable",
        f"--train.max_tokens_per_gpu {policy.max_num_batched_tokens}",
    ]
    if policy.fsdp_size == 1 and policy.num_replicas > 1:
        parts.note("ZeRO-2 shards gradients and optimizer over the replicas, which takes less memory than planned.")
    if policy.gradient_checkpointing:
        lines.append("--actor.gradient_checkpointing_enable")
    if generation.sleeps:
        lines.append("--vllm.enable_sleep")
    if policy.sleeps:
        lines.append("--ds.enable_sleep")
    lines += [
        f"--{names[each.name]}.offload" for each in (parts.reference, *parts.reward_models) if each and each.sleeps
    ]
    if parts.reference is None:
        lines.append("--algo.kl.init_coef 0")
    lines.append(f"--algo.advantage.estimator {'gae' if parts.critic else 'group_norm'}")
    if parts.critic is not None:
        lines.append(f"--critic.model_name_or_path {parts.critic.model}")
    return parts.finish(lines + _work(parts))


def _sharing(parts: Parts) -> list[str]:
    """Return the flags for which components share GPUs; refuse what they cannot say."""
    everything = [each for pool in parts.plan.pools for each in pool.components]
    if len(everything) > 1 and parts.together(*everything):
        return ["--train.colocate_all"]
    possible = [{parts.policy, parts.reference}, {parts.critic, *parts.reward_models}]
    found = []
    for pool in parts.plan.pools:
        shared = set(pool.components)
        if len(shared) == 1:
            continue
        if shared not in possible:
            names = ", ".join(each.name for each in pool.components)
            parts.refuse(
                "it has all models on the same GPUs, or policy with reference, or critic with reward model; the plan "
                f"has {names} together and others apart."
            )
        else:
            found.append("--train.colocate_actor_ref" if parts.policy in shared else "--train.colocate_critic_reward")
    return found


def _refuse_other_shapes(parts: Parts, trained: list[ComponentPlan]) -> None:
    if parts.generation is None:
        parts.refuse("it needs an engine for generation (vllm); plan with generation.engine: vllm.")
    if len(parts.reward_models) > 1:
        names = ", ".join(each.name for each in parts.reward_models)
        parts.refuse(f"it has one reward model in a run, the plan {len(parts.reward_models)}: {names}.")
    if not parts.reward_models:
        parts.refuse("the plan has no reward model; give --reward.remote_url or --train.agent_func_path yourself.")
    sizes = {each.name: each.tensor_parallel_size for each in trained}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        parts.refuse(f"--ds.tensor_parallel_size is one number for all models but vLLM, the plan has {shown}.")
    sharded = [each.name for each in trained if each.fsdp_size > 1 and each.num_replicas > 1]
    if sharded:
        parts.refuse(f"ZeRO-3 shards over all GPUs of a model, the plan has several sharded replicas of {sharded[0]}.")
    if parts.policy.fsdp_size > 1 and any(each.num_replicas > 1 for each in parts.reward_models):
        parts.note("ZeRO-3 of the policy also shards the reward model over its GPUs, which is slower than replicas.")


def _work(parts: Parts) -> list[str]:
    workload = parts.workload
    if workload is None:
        return []
    lines = [
        f"--rollout.batch_size {workload.num_prompts}",
        f"--rollout.n_samples_per_prompt {workload.group_size}",
        f"--train.batch_size {parts.update_rows()}",
        f"--train.max_epochs {workload.epochs}",
    ]
    if workload.group_size == 1 and parts.critic is None:
        parts.refuse("advantages without a critic need a group_size of at least 2.")
    if workload.asynchronous:
        lines.append("--train.async_enable")
        if parts.generation is not None and parts.together(parts.policy, parts.generation):
            parts.refuse("asynchronous steps need generation on GPUs of its own.")
    if parts.max_total is not None and parts.max_lengths is not None:
        lines += [f"--data.max_len {parts.max_total}", f"--rollout.max_new_tokens {parts.max_lengths[1]}"]
    return lines
