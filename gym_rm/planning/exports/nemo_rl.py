"""YAML overrides for NeMo RL's `examples/run_grpo.py`.

NeMo RL places its parts by counting (`algorithms/grpo.py`, `distributed/virtual_cluster.py` at 7ea279abf): GPUs on one
node, whole nodes on several, where a reward model takes its nodes alone even if it uses some of their GPUs.
"""

from __future__ import annotations

from typing import Any

from gym_rm.planning.exports.mapping import STRICT, Library, Only, Parts, Row, always, hydra, same
from gym_rm.planning.plan import ComponentPlan, Role

_GENERATION, _VLLM = "policy.generation.colocated.resources", "policy.generation.vllm_cfg"
_PACKING = "policy.sequence_packing"
_REWARD = "++env.reward_model"  # not in the default file, as the adapters in some versions
_LORA = "++policy.dtensor_cfg.lora_cfg"


def _check(parts: Parts) -> None:
    parts.refuse_usual()
    base = "grpo_rm_1B" if parts.reward_models else "grpo_math_1B"
    parts.note(f"the settings are for --config examples/configs/{base}.yaml; ++ marks those that its file may lack.")
    if parts.critic is not None:
        parts.refuse("its GRPO has no critic.")
    if parts.reference is not None and not parts.together(parts.policy, parts.reference):
        parts.refuse("its reference is in the workers of the policy; plan with pools in which both are together.")
    for reward in parts.reward_models:
        others = [each.name for each in parts.pool(reward).components if each is not reward]
        if others:
            parts.refuse(
                f"its reward model shares no GPU, but {reward.name} takes turns with {', '.join(others)}; plan with "
                f"pools=[[{', '.join(others)}], [{reward.name}]]."
            )
        parts.note("NeMo RL keeps the reward model in float32 and shards it over its GPUs.")
        rows, ranks = parts.plan.conversations, reward.num_replicas * reward.fsdp_size
        if rows % ranks:
            parts.refuse(f"{rows} conversations are not divisible by the {ranks} data-parallel ranks of {reward.name}.")
    if not parts.refusals:
        _check_placement(parts)
    if parts.policy.num_replicas > 1 and parts.policy.fsdp_size == 1:
        parts.note("NeMo RL shards the policy over all its GPUs, which takes less memory than planned.")


def _check_placement(parts: Parts) -> None:
    """Refuse a plan whose policy would get other GPUs by NeMo RL's counting."""
    nodes, gpus = _nodes(parts), parts.plan.nodes[0]
    reward = parts.shape(parts.reward_models[0]) if parts.reward_models else (0, 0)
    generation = (0, 0) if _colocated(parts) or parts.generation is None else parts.shape(parts.generation)
    left = nodes - reward[0]  # nodes for training and generation; the reward model takes whole nodes of several
    if nodes == 1:
        train = gpus - reward[1] - generation[1]
    elif left == 1:
        train = gpus - generation[1]
    else:
        train = (left - generation[0]) * gpus
        if generation[0] and generation[1] != gpus:
            parts.refuse(
                f"on several nodes, generation gets whole nodes, the plan gives it {generation[1]} GPUs of each."
            )
    wanted = len(parts.pool(parts.policy).gpus)
    if train != wanted:
        parts.refuse(
            f"it would give training {train} GPUs of {nodes} x {gpus}, the plan {wanted}: on several nodes, its parts "
            "take whole nodes."
        )
    if nodes > 1:
        parts.note("NeMo RL packs its parts on nodes but does not pin them; Ray may choose others than the plan.")
        if reward[1] < gpus and reward[0]:
            parts.note(f"{reward[0] * (gpus - reward[1])} GPUs on the nodes of the reward model stay idle.")


def _nodes(parts: Parts) -> int:
    """Return the nodes that the plan uses."""
    return len({address.node for pool in parts.plan.pools for address in pool.gpus})


def _colocated(parts: Parts, _: Any = None) -> bool:
    return parts.together(parts.policy, parts.generation)


def _replicas(parts: Parts, policy: ComponentPlan) -> int | None:
    return policy.num_replicas if policy.num_replicas > 1 and policy.fsdp_size > 1 else None


def _reward_batch(parts: Parts, reward: ComponentPlan) -> int:
    """Return the largest number of conversations within the token budget that divides those of a rank."""
    rows = parts.plan.conversations // (reward.num_replicas * reward.fsdp_size)
    most = max(1, min(reward.max_num_batched_tokens // parts.max_total, rows))
    return max(size for size in range(1, most + 1) if rows % size == 0)


def _least_tokens(parts: Parts, policy: ComponentPlan) -> int:
    """Return the smaller token budget of policy and reference, which have one setting together; note others."""
    own = policy.max_num_batched_tokens
    other = own if parts.reference is None else parts.reference.max_num_batched_tokens
    if own != other:
        shown = f"policy.max_num_batched_tokens={own}, reference.max_num_batched_tokens={other}"
        parts.note(f"one number of tokens for several models, the smallest of {shown}.")
    return min(own, other)


def _loaded(_: Parts, each: ComponentPlan) -> tuple[str, ...]:
    """Return the dtypes that take as much memory as float32 weights, shared by all GPUs of a model."""
    frozen = each.lora is not None or (each.role is Role.REWARD_MODEL and each.num_replicas == 1)
    return ("float32",) if frozen else ("bfloat16", "float16", "float32")


NEMO_RL = Library(
    (
        *STRICT,
        Only("policy", "lora.target_modules", ("all-linear",), "its adapters are on all linear layers"),
        Only("policy", "dtype", _loaded, "it loads all weights in float32, also those under policy.lora"),
        Only("reward_model", "dtype", _loaded, "it loads the weights in float32"),
        Only("policy", "master_weights", (True,), "it keeps float32 weights"),
        Only("policy generation", "sleeps", lambda parts, _: (False, _colocated(parts)), "it stays on GPUs of its own"),
        Only("policy generation", "sleeps", lambda parts, _: (_colocated(parts), True), "it does", harmless=True),
        Only("reference", "sleeps", (True,), "it is in the host's memory while the policy works", harmless=True),
        Only("reward_model", "sleeps", (False,), "it never sleeps"),
        Only("plan", "asynchronous", lambda parts, _: (False, not _colocated(parts)), "generation shares its GPUs"),
        Only("plan", "epochs", (1,), "it trains once on each conversation of a step"),
        same("reference", "dtype", "it computes in policy.precision"),
        same("reference", "tensor_parallel_size", "it is divided as the policy", harmless=True),
        same("reference", "fsdp_size", "it is divided as the policy", harmless=True),
        Row("policy.model_name", "policy", "model"),
        Row("policy.precision", "policy", "dtype"),
        Row(f"{_LORA}.enabled", "policy", lambda _, policy: policy.lora and True),
        Row(f"{_LORA}.dim", "policy", "lora.rank"),
        Row(f"{_LORA}.alpha", "policy", "lora.alpha"),
        Row(f"{_LORA}.dropout", "policy", "lora.dropout"),
        Row(f"{_LORA}.use_triton", "policy", lambda _, each: each.lora and each.tensor_parallel_size == 1),
        Row("policy.optimizer.name", "policy", always("torch.optim.AdamW")),
        Row("cluster.num_nodes", "policy", lambda parts, _: _nodes(parts)),
        Row("cluster.gpus_per_node", "policy", lambda parts, _: parts.plan.nodes[0]),
        Row("policy.generation.colocated.enabled", "generation", _colocated),
        Row(f"{_GENERATION}.num_nodes", "generation", Parts.nodes, lambda parts: not _colocated(parts)),
        Row(f"{_GENERATION}.gpus_per_node", "generation", Parts.gpus_per_node, lambda parts: not _colocated(parts)),
        Row(f"{_VLLM}.precision", "generation", "dtype"),
        Row(f"{_VLLM}.tensor_parallel_size", "generation", "tensor_parallel_size"),
        Row(f"{_VLLM}.gpu_memory_utilization", "generation", Parts.memory_share),
        Row("++policy.generation.vllm_kwargs.max_num_seqs", "generation", "max_num_seqs"),
        Row("++policy.generation.vllm_kwargs.max_num_batched_tokens", "generation", "max_num_batched_tokens"),
        Row("policy.dtensor_cfg.tensor_parallel_size", "policy", "tensor_parallel_size"),
        Row("++policy.dtensor_cfg.dp_replicate_size", "policy", _replicas),
        Row("policy.dtensor_cfg.activation_checkpointing", "policy", "gradient_checkpointing"),
        Row(f"{_PACKING}.enabled", "policy", always(True)),
        Row(f"{_PACKING}.train_mb_tokens", "policy", "max_num_batched_tokens"),
        Row(f"{_PACKING}.logprob_mb_tokens", "policy", _least_tokens),
        Row("policy.train_global_batch_size", "plan", lambda parts, _: parts.update_rows()),
        Row("policy.max_total_sequence_length", "plan", lambda parts, _: parts.max_total),
        Row("policy.generation.max_new_tokens", "plan", "reply_tokens"),
        Row("++grpo.async_grpo.enabled", "plan", "asynchronous"),
        Row("loss_fn.use_importance_sampling_correction", "plan", lambda _, plan: plan.asynchronous or None),
        Row(f"{_VLLM}.async_engine", "plan", lambda _, plan: plan.asynchronous or None),
        Row("++data.default.env_name", "reward_model", always("reward_model")),
        Row(f"{_REWARD}.model_name", "reward_model", "model"),
        Row(f"{_REWARD}.precision", "reward_model", "dtype"),
        Row(f"{_REWARD}.resources.num_nodes", "reward_model", Parts.nodes),
        Row(f"{_REWARD}.resources.gpus_per_node", "reward_model", Parts.gpus_per_node),
        Row(f"{_REWARD}.dtensor_cfg.tensor_parallel_size", "reward_model", "tensor_parallel_size"),
        Row(f"{_REWARD}.batch_size", "reward_model", _reward_batch),
        Row("grpo.num_prompts_per_step", "plan", "num_prompts"),
        Row("grpo.num_generations_per_prompt", "plan", "group_size"),
        Row("loss_fn.reference_policy_kl_penalty", "plan", lambda parts, _: None if parts.reference else 0),
        Row(
            "++grpo.skip_reference_policy_logprobs_calculation",
            "plan",
            lambda parts, _: parts.reference is None or None,
        ),
    ),
    hydra,
    _check,
)
