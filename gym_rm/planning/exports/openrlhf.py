"""Arguments for `python -m openrlhf.cli.train_ppo_ray` with DeepSpeed and vLLM."""

from __future__ import annotations

from typing import Any

from gym_rm.planning.exports.parts import Parts
from gym_rm.planning.exports.table import SHARDED, SHORT, STRICT, Library, Only, Row, always, same, words
from gym_rm.planning.plan import ComponentPlan


def _line(name: str, value: Any) -> str | None:
    """Return an argument; a flag stands without a value, or not at all."""
    if isinstance(value, bool):
        return f"--{name}" if value else None
    return f"--{name} {words(value)}"


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
    for each in _trained(parts):
        parts.shape(each)
    policy = parts.policy
    if policy.fsdp_size > 1 and (copied := [each.name for each in _trained(parts) if each.num_replicas > 1]):
        parts.note(f"ZeRO-3 of the policy also shards {', '.join(copied)}, which is slower than replicas.")
    if policy.fsdp_size == 1 and policy.num_replicas > 1:
        parts.note("ZeRO-2 shards gradients and optimizer over the replicas, which takes less memory than planned.")
    parts.update_rows()
    if parts.plan.group_size == 1 and parts.critic is None:
        parts.refuse("advantages without a critic need a group_size of at least 2.")


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


def _shapes(name: str, of: Any) -> tuple[Row, Row]:
    """Return the rows for the nodes and GPUs of a component."""
    return (Row(f"{name}.num_nodes", of, Parts.nodes), Row(f"{name}.num_gpus_per_node", of, Parts.gpus_per_node))


def _stage(parts: Parts, each: ComponentPlan) -> tuple[int, int]:
    """Return the FSDP sizes of another model, whose ZeRO stage is the policy's."""
    return 1, each.fsdp_size if parts.policy.fsdp_size > 1 else 1


def _tokens(parts: Parts, *components: ComponentPlan | None) -> int:
    """Return the tokens of a forward for each GPU of a tensor-parallel group, which share them."""
    return parts.least_tokens(*components) // parts.policy.tensor_parallel_size


def _modules(_: Parts, policy: ComponentPlan) -> tuple[str, ...] | None:
    """Return the modules with adapters: a list of names, or None for all."""
    return policy.lora.target_modules if policy.lora and isinstance(policy.lora.target_modules, tuple) else None


OPENRLHF = Library(
    (
        *STRICT,
        Only("generation", "max_num_seqs", (), "vLLM runs as many as its memory holds", harmless=True),
        SHARDED,
        Only("policy", "dtype", ("bfloat16", "float16"), "DeepSpeed trains in 16 bits"),
        Only("generation", "dtype", ("bfloat16",), "its vLLM is in bfloat16"),
        Only("policy critic", "master_weights", (True,), "DeepSpeed keeps float32 weights for the optimizer"),
        Only("policy", "lora.target_modules", lambda *each: ("all-linear", _modules(*each)), "it takes a list"),
        Only("reference critic", "fsdp_size", _stage, "ZeRO-3 shards it only with the policy, by policy.fsdp_size"),
        Only("plan", "asynchronous", lambda *each: (False, not _all_together(*each)), "all share their GPUs"),
        same("reference critic reward_model", "dtype", "--ds.param_dtype is for all models but vLLM"),
        same("reference critic reward_model", "tensor_parallel_size", "--ds.tensor_parallel_size is one number"),
        same("critic", "gradient_checkpointing", "it is checkpointed with the policy"),
        same("critic", "sleeps", "--ds.enable_sleep is for both"),
        Row("actor.model_name_or_path", "policy", "model"),
        Row("ds.lora.rank", "policy", "lora.rank"),
        Row("ds.lora.alpha", "policy", "lora.alpha"),
        Row("ds.lora.dropout", "policy", "lora.dropout"),
        Row("ds.lora.target_modules", "policy", _modules),
        Row("ds.param_dtype", "policy", lambda _, policy: SHORT[policy.dtype]),
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
        Row("train.colocate_critic_reward", "critic", lambda parts, each: _shared(parts, each, parts.reward_model)),
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
        Row("train.max_tokens_per_gpu", "policy", lambda parts, policy: _tokens(parts, policy, parts.critic)),
        Row("rollout.max_tokens_per_gpu", "policy", lambda parts, _: _tokens(parts, *_trained(parts))),
        Row("train.batch_size", "plan", lambda parts, _: parts.update_rows()),
        Row("train.max_epochs", "plan", "epochs"),
        Row("train.async_enable", "plan", "asynchronous"),
        Row("rollout.batch_size", "plan", "num_prompts"),
        Row("rollout.n_samples_per_prompt", "plan", "group_size"),
        Row("rollout.max_new_tokens", "plan", "reply_tokens"),
        Row("data.max_len", "plan", lambda parts, _: parts.max_total),
    ),
    _line,
    _check,
)
