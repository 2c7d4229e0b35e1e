"""Overrides for verl."""

from __future__ import annotations

from gym_rm.planning.exports.parts import Flags, Parts, flag
from gym_rm.planning.plan import ComponentPlan

_ACTOR, _ROLLOUT, _REWARD = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "reward.reward_model"


def flags(parts: Parts) -> Flags:
    """Return Hydra overrides for `python -m verl.trainer.main_ppo` with FSDP and vLLM."""
    policy, generation = parts.policy, parts.generation
    _refuse_other_shapes(parts)
    nodes, gpus = parts.shape(policy)
    if parts.refusals or generation is None:
        return parts.finish([])
    lines = [
        f"trainer.nnodes={nodes}",
        f"trainer.n_gpus_per_node={gpus}",
        f"algorithm.adv_estimator={'grpo' if parts.critic is None else 'gae'}",
        f"actor_rollout_ref.model.path={policy.model}",
        f"actor_rollout_ref.model.enable_gradient_checkpointing={flag(bool(policy.gradient_checkpointing))}",
        f"{_ACTOR}.strategy=fsdp2",
        f"{_ACTOR}.fsdp_config.fsdp_size={policy.fsdp_size}",
        f"{_ACTOR}.fsdp_config.param_offload={flag(policy.sleeps)}",
        f"{_ACTOR}.fsdp_config.optimizer_offload={flag(policy.sleeps)}",
        f"{_ACTOR}.use_dynamic_bsz=true",
        f"{_ACTOR}.ppo_max_token_len_per_gpu={policy.max_num_batched_tokens}",
        f"{_ROLLOUT}.name=vllm",
        f"{_ROLLOUT}.tensor_model_parallel_size={generation.tensor_parallel_size}",
        f"{_ROLLOUT}.gpu_memory_utilization={parts.memory_share(generation)}",
        f"{_ROLLOUT}.free_cache_engine={flag(generation.sleeps)}",
    ]
    if generation.max_num_seqs:
        lines.append(f"{_ROLLOUT}.max_num_seqs={generation.max_num_seqs}")
    reference = parts.reference
    lines.append(f"{_ACTOR}.use_kl_loss={flag(reference is not None)}")
    if reference is not None:
        lines.append(f"actor_rollout_ref.ref.fsdp_config.fsdp_size={reference.fsdp_size}")
        lines.append(f"actor_rollout_ref.ref.fsdp_config.param_offload={flag(reference.sleeps)}")
        lines.append(f"actor_rollout_ref.ref.log_prob_max_token_len_per_gpu={reference.max_num_batched_tokens}")
    if parts.critic is not None:
        lines += _critic(parts.critic)
    lines += _reward(parts)
    return parts.finish(lines + _work(parts))


def _refuse_other_shapes(parts: Parts) -> None:
    if parts.generation is None:
        parts.refuse("it needs an engine for generation (vllm); plan with generation.engine: vllm.")
    if not parts.together(parts.policy, parts.generation, parts.reference, parts.critic):
        parts.refuse(
            "its trainer has policy, generation, reference and critic on the same GPUs; plan with all of them in one "
            "pool (generation apart is for its experimental asynchronous trainers)."
        )
    for each in (parts.policy, parts.critic, parts.reference):
        if each is not None and each.tensor_parallel_size > 1:
            parts.refuse(f"its FSDP has no tensor parallelism; plan {each.name} with tensor_parallel_size: 1.")
    if len(parts.reward_models) > 1:
        names = ", ".join(each.name for each in parts.reward_models)
        parts.refuse(f"it has one reward model in a run, the plan {len(parts.reward_models)}: {names}.")
    for reward in parts.reward_models:
        if reward.fsdp_size > 1:
            parts.refuse(f"vLLM does not shard {reward.name} by FSDP; plan it with tensor parallelism.")
        others = [each for each in parts.pool(reward).components if each is not reward]
        if others and not parts.together(reward, parts.policy):
            parts.refuse(f"its reward model shares GPUs with all others or with none; {reward.name} does with some.")


def _critic(critic: ComponentPlan) -> list[str]:
    return [
        f"critic.model.path={critic.model}",
        f"critic.model.enable_gradient_checkpointing={flag(bool(critic.gradient_checkpointing))}",
        f"critic.fsdp.fsdp_size={critic.fsdp_size}",
        f"critic.fsdp.param_offload={flag(critic.sleeps)}",
        f"critic.fsdp.optimizer_offload={flag(critic.sleeps)}",
        "critic.use_dynamic_bsz=true",
        f"critic.ppo_max_token_len_per_gpu={critic.max_num_batched_tokens}",
    ]


def _reward(parts: Parts) -> list[str]:
    if not parts.reward_models:
        return [f"{_REWARD}.enable=false"]
    reward = parts.reward_models[0]
    apart = not parts.together(reward, parts.policy)
    lines = [f"{_REWARD}.enable=true", f"{_REWARD}.enable_resource_pool={flag(apart)}"]
    if apart:
        nodes, gpus = parts.shape(reward)
        lines += [f"{_REWARD}.nnodes={nodes}", f"{_REWARD}.n_gpus_per_node={gpus}"]
        used = {address.node for address in parts.pool(reward).gpus}
        if len(parts.plan.nodes) > 1 and used & {address.node for address in parts.pool(parts.policy).gpus}:
            parts.note("verl does not pin its pools to nodes: parts of one node may be placed on others.")
    parts.note("verl scores with vLLM: its memory is the plan's for gym_rm, rounded up; enlarge it if vLLM refuses.")
    return [
        *lines,
        f"{_REWARD}.model_path={reward.model}",
        f"{_REWARD}.rollout.name=vllm",
        f"{_REWARD}.rollout.dtype={reward.dtype}",
        f"{_REWARD}.rollout.tensor_model_parallel_size={reward.tensor_parallel_size}",
        f"{_REWARD}.rollout.gpu_memory_utilization={parts.memory_share(reward)}",
        f"{_REWARD}.rollout.max_num_batched_tokens={reward.max_num_batched_tokens}",
        f"{_REWARD}.rollout.free_cache_engine={flag(reward.sleeps)}",
    ]


def _work(parts: Parts) -> list[str]:
    workload = parts.workload
    if workload is None:
        return []
    if workload.num_prompts % parts.updates:
        parts.refuse(
            f"its mini-batches are whole prompts, but {parts.updates} updates do not divide {workload.num_prompts} "
            "prompts."
        )
    parts.update_rows()
    mini = workload.num_prompts // parts.updates
    lines = [
        f"data.train_batch_size={workload.num_prompts}",
        f"{_ROLLOUT}.n={workload.group_size}",
        f"{_ACTOR}.ppo_mini_batch_size={mini}",
        f"{_ACTOR}.ppo_epochs={workload.epochs}",
    ]
    if parts.critic is not None:
        lines.append(f"critic.ppo_mini_batch_size={mini}")
    if workload.asynchronous:
        parts.refuse("asynchronous steps need generation on GPUs of its own, in its experimental trainers.")
    if parts.max_lengths is not None and workload.turns == 1:
        prompt, reply = parts.max_lengths
        lines += [f"data.max_prompt_length={prompt}", f"data.max_response_length={reply}"]
    return lines
