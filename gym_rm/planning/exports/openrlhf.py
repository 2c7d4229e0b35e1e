"""Arguments for `python -m openrlhf.cli.train_ppo_ray` with DeepSpeed and vLLM."""

from __future__ import annotations

from typing import Any

from gym_rm.planning.exports.parts import Library, Parts, Row, Subject, adapters, always
from gym_rm.planning.plan import ComponentPlan


def _line(name: str, value: Any) -> str | None:
    """Return an argument; a flag stands without a value, or not at all."""
    if isinstance(value, bool):
        return f"--{name}" if value else None
    return f"--{name} {value}"


def _trained(parts: Parts) -> list[ComponentPlan]:
    """Return what DeepSpeed holds, which is everything besides vLLM."""
    every = (parts.policy, parts.reference, parts.critic, *parts.reward_models)
    return [each for each in every if each is not None]


def _check(parts: Parts) -> None:
    parts.refuse_usual()
    if not parts.reward_models:
        parts.refuse("the plan has no reward model; give --reward.remote_url or --train.agent_func_path yourself.")
    if parts.critic is not None and parts.critic.lora != parts.policy.lora:
        parts.refuse("the plan has other adapters for critic.lora than for policy.lora; it has one for both.")
    _check_pools(parts)
    sizes = {each.name: each.tensor_parallel_size for each in _trained(parts)}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        parts.refuse(f"--ds.tensor_parallel_size is one number for all models but vLLM, the plan has {shown}.")
    for each in _trained(parts):
        parts.shape(each)
        if each.fsdp_size > 1 and each.num_replicas > 1:
            parts.refuse(
                f"ZeRO-3 shards over all GPUs of a model, the plan has several sharded replicas of {each.name}."
            )
    policy = parts.policy
    if policy.fsdp_size > 1 and any(each.num_replicas > 1 for each in parts.reward_models):
        parts.note("ZeRO-3 of the policy also shards the reward model over its GPUs, which is slower than replicas.")
    if policy.fsdp_size == 1 and policy.num_replicas > 1:
        parts.note("ZeRO-2 shards gradients and optimizer over the replicas, which takes less memory than planned.")
    parts.update_rows()
    if parts.plan.group_size == 1 and parts.critic is None:
        parts.refuse("advantages without a critic need a group_size of at least 2.")
    if parts.plan.asynchronous and parts.together(policy, parts.generation):
        parts.refuse("asynchronous steps need generation on GPUs of its own.")


def _check_pools(parts: Parts) -> None:
    """Refuse what shares GPUs otherwise than in one of OpenRLHF's three ways."""
    possible = [{parts.policy, parts.reference}, {parts.critic, *parts.reward_models}]
    for pool in parts.plan.pools:
        if len(pool.components) > 1 and not _all_together(parts) and set(pool.components) not in possible:
            names = ", ".join(each.name for each in pool.components)
            parts.refuse(
                "it has all models on the same GPUs, or policy with reference, or critic with reward model; the plan "
                f"has {names} together and others apart."
            )


def _all_together(parts: Parts, _: Any = None) -> bool:
    return len(parts.plan.pools) == 1


def _shared(parts: Parts, *components: ComponentPlan | None) -> bool:
    """Return whether components that the plan has share GPUs that not all others share."""
    return None not in components and parts.together(*components) and not _all_together(parts)


def _shapes(name: str, of: Subject) -> tuple[Row, Row]:
    """Return the rows for the nodes and GPUs of a component."""
    return (Row(f"{name}.num_nodes", of, Parts.nodes), Row(f"{name}.num_gpus_per_node", of, Parts.gpus_per_node))


OPENRLHF = Library(
    (
        Row("actor.model_name_or_path", "policy", "model"),
        *adapters("ds.lora.rank", "ds.lora.alpha"),
        Row("actor.optim", "policy", always("adam")),
        Row("critic.optim", "critic", always("adam")),
        *_shapes("actor", "policy"),
        *_shapes("ref", "reference"),
        *_shapes("critic", "critic"),
        *_shapes("reward", "reward_model"),
        Row("reward.model_name_or_path", "reward_model", "model"),
        Row("critic.model_name_or_path", "critic", "model"),
        Row("train.colocate_all", "policy", _all_together),
        Row("train.colocate_actor_ref", "reference", lambda parts, _: _shared(parts, parts.policy, parts.reference)),
        Row(
            "train.colocate_critic_reward", "critic", lambda parts, _: _shared(parts, parts.critic, parts.reward_model)
        ),
        Row("vllm.num_engines", "generation", "num_replicas"),
        Row("vllm.tensor_parallel_size", "generation", "tensor_parallel_size"),
        Row("vllm.gpu_memory_utilization", "generation", Parts.memory_share),
        Row("vllm.enable_sleep", "generation", "sleeps"),
        Row("ds.tensor_parallel_size", "policy", "tensor_parallel_size"),
        Row("ds.zero_stage", "policy", lambda parts, _: 3 if parts.policy.fsdp_size > 1 else 2),
        Row("ds.packing_samples", "policy", always(True)),
        Row("ds.enable_sleep", "policy", "sleeps"),
        Row("ref.offload", "reference", "sleeps"),
        Row("reward.offload", "reward_model", "sleeps"),
        Row("actor.gradient_checkpointing_enable", "policy", "gradient_checkpointing"),
        Row("algo.kl.init_coef", "policy", lambda parts, _: None if parts.reference else 0),
        Row("algo.advantage.estimator", "policy", lambda parts, _: "gae" if parts.critic else "group_norm"),
        Row("train.dynamic_batch_enable", "policy", always(True)),
        Row("train.max_tokens_per_gpu", "policy", "max_num_batched_tokens"),
        Row("train.batch_size", "plan", lambda parts, _: parts.update_rows()),
        Row("train.max_epochs", "plan", "epochs"),
        Row("train.async_enable", "plan", "asynchronous"),
        Row("rollout.batch_size", "plan", "num_prompts"),
        Row("rollout.n_samples_per_prompt", "plan", "group_size"),
        Row("rollout.max_new_tokens", "plan", lambda parts, _: parts.plan.reply_tokens),
        Row("data.max_len", "plan", lambda parts, _: parts.max_total),
    ),
    _line,
    _check,
)
