"""Arguments of TRL's `GRPOConfig`, an `accelerate launch` line, and a `trl vllm-serve` line if it is needed.

The script with these arguments is TRL's `trl/scripts/grpo.py`, or one of your own with `GRPOConfig`.
"""

from __future__ import annotations

from typing import Any

from gym_rm.planning.exports.parts import Library, Parts, Row, adapters, always
from gym_rm.planning.plan import ComponentPlan

OPTIMIZERS = {"adamw": "adamw_torch", "adamw_8bit": "adamw_bnb_8bit", "sgd": "sgd"}


def _check(parts: Parts) -> None:
    if parts.critic is not None:
        parts.refuse("GRPO has no critic.")
    for each in (parts.policy, parts.reference):
        if each is not None and each.tensor_parallel_size > 1:
            parts.refuse(f"GRPOTrainer has no tensor parallelism for {each.name}; plan with tensor_parallel_size: 1.")
        if each is not None and each.sleeps:
            parts.refuse(f"{each.name} stays on the GPU while others work; plan with sleeps: false for it.")
        if each is not None and each.fsdp_size > 1 and each.num_replicas > 1:
            parts.refuse(f"FSDP shards {each.name} over all processes, the plan has several sharded replicas.")
    if parts.reference is not None:
        if not parts.together(parts.policy, parts.reference):
            parts.refuse("the reference is in the processes of the policy; plan with both in one pool.")
        if (parts.policy.fsdp_size > 1) != (parts.reference.fsdp_size > 1):
            parts.refuse("the reference is sharded as the policy; plan both by FSDP or both in replicas.")
        parts.note("a reference is only loaded if beta is more than 0; 0.04 is a common value.")
    for reward in parts.reward_models:
        _check_reward(parts, reward)
    if _server(parts) and parts.generation is not None:
        nodes = sorted({address.node for address in parts.pool(parts.generation).gpus})
        if len(nodes) > 1:
            parts.refuse(f"one server of generation is on one node, the plan has it on nodes {nodes}.")
        if parts.generation.sleeps:
            parts.refuse("the server of generation does not sleep; plan with generation.sleeps: false.")
        parts.note(f"start `trl vllm-serve` first, on node {nodes[0]}; pass its host as --vllm_server_host.")
    if parts.plan.group_size < 2:
        parts.refuse("GRPO needs a group_size of at least 2.")
    if parts.plan.asynchronous:
        parts.refuse("GRPOTrainer has no asynchronous steps; plan with asynchronous: false.")
    if parts.plan.conversations % (_processes(parts) * parts.plan.updates_per_step):
        parts.refuse(
            f"{parts.plan.conversations} conversations are not divisible by {_processes(parts)} processes x "
            f"{parts.plan.updates_per_step} updates."
        )


def _check_reward(parts: Parts, reward: ComponentPlan) -> None:
    """Refuse a reward model that is neither whole in every process nor a server on GPUs of its own."""
    if not parts.together(parts.policy, reward):
        if parts.others_of(reward):
            parts.refuse(f"{reward.name} shares GPUs with others than the policy.")
        parts.note(f"serve {reward.name} with `gym-rm serve` on its GPUs and pass a reward function that calls it.")
    elif reward.tensor_parallel_size > 1:
        parts.refuse(f"a reward model is whole in every process, {reward.name} is tensor-parallel.")
    elif reward.sleeps:
        parts.refuse(f"{reward.name} stays on the GPU while others work; plan with sleeps: false for it.")
    else:
        parts.note(f"TRL scores a whole local batch in one forward of {reward.name}, with no budget of tokens.")


def _processes(parts: Parts) -> int:
    return len(parts.pool(parts.policy).gpus)


def _server(parts: Parts) -> bool:
    return not parts.together(parts.policy, parts.generation)


def _commands(parts: Parts) -> list[str]:
    policy, generation, processes = parts.policy, parts.generation, _processes(parts)
    nodes = parts.nodes(policy)
    launch = f"accelerate launch --num_processes {processes} --num_machines {nodes} --mixed_precision bf16"
    if processes > 1:
        launch += " --use_fsdp --fsdp_version 2" if policy.fsdp_size > 1 else " --multi_gpu"
    if policy.fsdp_size > 1:
        launch += " --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_reshard_after_forward true"
    if nodes > 1:
        parts.note(f"run the launch line on {nodes} nodes with --machine_rank and --main_process_ip.")
    if generation is None or not _server(parts):
        return [launch]
    chosen = ",".join(str(address.gpu) for address in parts.pool(generation).gpus)
    serve = (
        f"CUDA_VISIBLE_DEVICES={chosen} trl vllm-serve --model {policy.model} --tensor_parallel_size "
        f"{generation.tensor_parallel_size} --data_parallel_size {generation.num_replicas} --gpu_memory_utilization "
        f"{parts.memory_share(generation)} --max_model_len {parts.max_total}"
    )
    return [serve, launch]


def _colocated(value: Any) -> Any:
    """Return a function for a setting of generation in the processes of the policy."""
    return lambda parts, each: None if _server(parts) else value(parts, each)


def _local_batch(parts: Parts) -> tuple[int, int]:
    """Return the conversations of a process in an update, and those in one forward, within the token budget."""
    share = parts.plan.conversations // (_processes(parts) * parts.plan.updates_per_step)
    most = max(1, parts.policy.max_num_batched_tokens // parts.max_total)
    return share, max(rows for rows in range(1, min(most, share) + 1) if share % rows == 0)


def _accumulated(parts: Parts, _: Any) -> int:
    share, rows = _local_batch(parts)
    return share // rows


TRL = Library(
    (
        Row("model_name_or_path", "policy", "model"),
        *adapters("lora_r", "lora_alpha", ("use_peft", True), ("lora_target_modules", "all-linear")),
        Row("optim", "policy", lambda _, policy: OPTIMIZERS.get(policy.optimizer)),
        Row("gradient_checkpointing", "policy", "gradient_checkpointing"),
        Row("bf16", "policy", always(True)),
        Row("use_vllm", "policy", lambda parts, _: parts.generation is not None),
        Row("vllm_mode", "generation", lambda parts, _: "server" if _server(parts) else "colocate"),
        Row("vllm_tensor_parallel_size", "generation", _colocated(lambda _, each: each.tensor_parallel_size)),
        Row("vllm_gpu_memory_utilization", "generation", _colocated(Parts.memory_share)),
        Row("vllm_enable_sleep_mode", "generation", _colocated(lambda _, each: each.sleeps)),
        Row("vllm_max_model_length", "generation", _colocated(lambda parts, _: parts.max_total)),
        Row(
            "reward_model_name_or_path",
            "reward_model",
            lambda parts, each: each.model if parts.together(parts.policy, each) else None,
        ),
        Row("beta", "policy", lambda parts, _: 0.04 if parts.reference else 0.0),
        Row("per_device_train_batch_size", "plan", lambda parts, _: _local_batch(parts)[1]),
        Row("gradient_accumulation_steps", "plan", _accumulated),
        Row("steps_per_generation", "plan", lambda parts, _: _accumulated(parts, _) * parts.plan.updates_per_step),
        Row("num_generations", "plan", "group_size"),
        Row("num_iterations", "plan", "epochs"),
        Row("max_completion_length", "plan", lambda parts, _: parts.plan.reply_tokens),
    ),
    lambda name, value: f"--{name} {str(value).lower() if isinstance(value, bool) else value}",
    _check,
    _commands,
)
