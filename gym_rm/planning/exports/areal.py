"""YAML overrides for AReaL with SGLang and FSDP; its allocations are such as `sglang:d2t4`, `fsdp:d4t2`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from gym_rm.planning.exports.parts import Library, Parts, Row, Subject, hydra
from gym_rm.planning.plan import ComponentPlan


def _line(name: str, value: Any) -> str:
    """Return an override; `++` sets a value whether or not the YAML file has it, Hydra refuses new names otherwise."""
    return f"++{hydra(name, value)}"


def _check(parts: Parts) -> None:
    parts.refuse_without_engine()
    for reward in parts.reward_models:
        if others := parts.others_of(reward):
            parts.refuse(
                f"it has no reward model of its own, so {reward.name} is a server and cannot take turns with "
                f"{', '.join(others)}; plan with it in a pool apart."
            )
        else:
            parts.note(
                f"AReaL has no reward model: serve {reward.name} with `gym-rm serve` on {parts.addresses(reward)} "
                "and call it from the reward function."
            )
    used = _used(parts)
    if len(set(used.values())) > 1:
        parts.refuse(f"its nodes have the same number of GPUs, the plan gives it {sorted(used.values())}.")
    policy, generation = parts.policy, parts.generation
    for each in (parts.reference, parts.critic):
        if each is not None and not parts.together(policy, each) and len(parts.pool(each).components) > 1:
            parts.refuse(f"{each.name} shares GPUs with others than the policy.")
    if generation is not None and parts.together(policy, generation) and generation.num_replicas != policy.num_gpus:
        parts.refuse(
            f"generation on the GPUs of training needs one engine for each of them, {policy.num_gpus}, the plan has "
            f"{generation.num_replicas} with tensor_parallel_size {generation.tensor_parallel_size}; plan with pools "
            "in which it is apart, or with tensor_parallel_size: 1."
        )
    if policy.num_replicas > 1 and policy.fsdp_size > 1:
        parts.note("AReaL shards the policy over all d groups: less memory than planned, more communication.")
    parts.refuse_epochs()


def _used(parts: Parts) -> Counter[int]:
    """Return the GPUs that AReaL gets of each node: those without a reward model, which is no part of AReaL."""
    pools = [pool for pool in parts.plan.pools if not set(pool.components) & set(parts.reward_models)]
    return Counter(address.node for pool in pools for address in pool.gpus)


def _backend(parts: Parts, each: ComponentPlan) -> str:
    return f"fsdp:d{each.num_replicas * each.fsdp_size}t{each.tensor_parallel_size}"


def _with_policy(value: str) -> Any:
    """Return a function for a setting of what shares the GPUs of the policy."""
    return lambda parts, each: value if parts.together(parts.policy, each) else None


def _offload(parts: Parts, policy: ComponentPlan) -> bool | None:
    sleeps = any(each.sleeps for each in (policy, parts.reference, parts.critic) if each is not None)
    return True if sleeps or parts.together(policy, parts.generation) else None


def _beside(name: str, of: Subject) -> tuple[Row, ...]:
    """Return the rows of the reference or the critic."""
    return (
        Row(f"{name}.backend", of, _backend),
        Row(f"{name}.path", of, "model"),
        Row(f"{name}.mb_spec.max_tokens_per_mb", of, "max_num_batched_tokens"),
        Row(f"{name}.offload", of, "sleeps"),
        Row(f"{name}.scheduling_strategy.type", of, _with_policy("colocation")),
        Row(f"{name}.scheduling_strategy.target", of, _with_policy("actor")),
    )


AREAL = Library(
    (
        Row("cluster.n_nodes", "policy", lambda parts, _: len(_used(parts))),
        Row("cluster.n_gpus_per_node", "policy", lambda parts, _: max(_used(parts).values())),
        Row(
            "rollout.backend", "generation", lambda _, each: f"sglang:d{each.num_replicas}t{each.tensor_parallel_size}"
        ),
        Row("rollout.scheduling_strategy.type", "generation", _with_policy("colocation")),
        Row("rollout.scheduling_strategy.target", "generation", _with_policy("actor")),
        Row("rollout.max_head_offpolicyness", "workload", lambda _, workload: int(workload.asynchronous)),
        Row("sglang.mem_fraction_static", "generation", lambda parts, each: parts.memory_share(each, peak=False)),
        Row("sglang.max_running_requests", "generation", "max_num_seqs"),
        Row("sglang.context_length", "workload", lambda parts, _: parts.max_total),
        Row("actor.backend", "policy", _backend),
        Row("actor.path", "policy", "model"),
        Row("actor.gradient_checkpointing", "policy", "gradient_checkpointing"),
        Row("actor.mb_spec.max_tokens_per_mb", "policy", "max_num_batched_tokens"),
        Row("actor.ppo_n_minibatches", "workload", "updates_per_step"),
        Row("actor.kl_ctl", "policy", lambda parts, _: None if parts.reference else 0.0),
        *_beside("ref", "reference"),
        *_beside("critic", "critic"),
        Row("enable_offload", "policy", _offload),
        Row("train_dataset.batch_size", "workload", "num_prompts"),
        Row("gconfig.n_samples", "workload", "group_size"),
        Row("gconfig.max_new_tokens", "workload", lambda parts, _: parts.max_reply),
    ),
    _line,
    _check,
)
