"""Commands and arguments for TRL."""

from __future__ import annotations

from gym_rm.planning.exports.parts import Flags, Parts, flag


def flags(parts: Parts) -> Flags:
    """Return an `accelerate launch` line, arguments of `GRPOConfig`, and a `trl vllm-serve` line if it is needed.

    The script with these arguments is TRL's `trl/scripts/grpo.py`, or one of your own with `GRPOConfig`.
    """
    policy, generation = parts.policy, parts.generation
    _refuse_other_shapes(parts)
    nodes = parts.shape(policy)[0]
    processes = len(parts.pool(policy).gpus)
    launch = f"accelerate launch --num_processes {processes} --num_machines {nodes} --mixed_precision bf16"
    if processes > 1:
        launch += " --use_fsdp --fsdp_version 2" if policy.fsdp_size > 1 else " --multi_gpu"
    if policy.fsdp_size > 1:
        launch += " --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_reshard_after_forward true"
    if nodes > 1:
        parts.note(f"run the launch line on {nodes} nodes with --machine_rank and --main_process_ip.")
    lines = [
        launch,
        f"--model_name_or_path {policy.model}",
        f"--gradient_checkpointing {flag(bool(policy.gradient_checkpointing))}",
        "--bf16 true",
        *_generation(parts),
        *_reward(parts, processes),
    ]
    if parts.reference is None:
        lines.append("--beta 0.0")
    else:
        parts.note("a reference is only loaded if beta is more than 0; 0.04 is a common value.")
        lines.append("--beta 0.04")
    lines += _work(parts, processes)
    if generation is not None and not parts.together(policy, generation):
        lines.insert(0, _server(parts))
    return parts.finish(lines)


def _refuse_other_shapes(parts: Parts) -> None:
    policy = parts.policy
    if parts.critic is not None:
        parts.refuse("GRPO has no critic.")
    for each in (policy, parts.reference):
        if each is not None and each.tensor_parallel_size > 1:
            parts.refuse(f"GRPOTrainer has no tensor parallelism for {each.name}; plan with tensor_parallel_size: 1.")
        if each is not None and each.sleeps:
            parts.refuse(f"{each.name} stays on the GPU while others work; plan with sleeps: false for it.")
        if each is not None and each.fsdp_size > 1 and each.num_replicas > 1:
            parts.refuse(f"FSDP shards {each.name} over all processes, the plan has several sharded replicas.")
    if parts.reference is not None:
        if not parts.together(policy, parts.reference):
            parts.refuse("the reference is in the processes of the policy; plan with both in one pool.")
        if (policy.fsdp_size > 1) != (parts.reference.fsdp_size > 1):
            parts.refuse(
                "the reference is divided as the policy: one by FSDP and one in replicas is not possible; plan both "
                "with replicas."
            )


def _generation(parts: Parts) -> list[str]:
    generation = parts.generation
    if generation is None:
        return ["--use_vllm false"]
    if not parts.together(parts.policy, generation):
        if generation.sleeps:
            parts.refuse("the server of generation does not sleep; plan with generation.sleeps: false.")
        return ["--use_vllm true", "--vllm_mode server"]
    lines = [
        "--use_vllm true",
        "--vllm_mode colocate",
        f"--vllm_tensor_parallel_size {generation.tensor_parallel_size}",
        f"--vllm_gpu_memory_utilization {parts.memory_share(generation)}",
        f"--vllm_enable_sleep_mode {flag(generation.sleeps)}",
    ]
    if parts.max_total is not None:
        lines.append(f"--vllm_max_model_length {parts.max_total}")
    return lines


def _server(parts: Parts) -> str:
    generation = parts.generation
    assert generation is not None
    nodes = sorted({address.node for address in parts.pool(generation).gpus})
    if len(nodes) > 1:
        parts.refuse(f"one server of generation is on one node, the plan has it on nodes {nodes}.")
    chosen = ",".join(str(address.gpu) for address in parts.pool(generation).gpus)
    parts.note(f"start `trl vllm-serve` first, on node {nodes[0]}; pass its host as --vllm_server_host.")
    length = f" --max_model_len {parts.max_total}" if parts.max_total is not None else ""
    return (
        f"CUDA_VISIBLE_DEVICES={chosen} trl vllm-serve --model {parts.policy.model} --tensor_parallel_size "
        f"{generation.tensor_parallel_size} --data_parallel_size {generation.num_replicas} --gpu_memory_utilization "
        f"{parts.memory_share(generation)}{length}"
    )


def _reward(parts: Parts, processes: int) -> list[str]:
    """Return the reward model as part of every process if the plan has it so; else it is a server."""
    inside = [each for each in parts.reward_models if parts.together(parts.policy, each)]
    for reward in parts.reward_models:
        others = [each for each in parts.pool(reward).components if each not in parts.reward_models]
        if reward not in inside:
            if others:
                parts.refuse(f"{reward.name} shares GPUs with others than the policy.")
            parts.note(f"serve {reward.name} with `gym-rm serve` on its GPUs and pass a reward function that calls it.")
        elif reward.tensor_parallel_size > 1:
            parts.refuse(f"a reward model is whole in every process, {reward.name} is tensor-parallel.")
        elif reward.num_replicas != processes and reward.fsdp_size != processes:
            parts.refuse(f"{reward.name} must be in all {processes} processes of the policy.")
        elif reward.sleeps:
            parts.refuse(f"{reward.name} stays on the GPU while others work; plan with sleeps: false for it.")
        else:
            parts.note(f"TRL scores a whole local batch in one forward of {reward.name}, with no budget of tokens.")
    if len(inside) > 1:
        parts.note("TRL's script takes one reward model; pass the list of all as reward_funcs in your own.")
    return [f"--reward_model_name_or_path {each.model}" for each in inside[:1]]


def _work(parts: Parts, processes: int) -> list[str]:
    workload = parts.workload
    if workload is None:
        return []
    share, rest = divmod(parts.plan.conversations, processes * parts.updates)
    if rest:
        parts.refuse(
            f"{parts.plan.conversations} conversations are not divisible by {processes} processes x {parts.updates} "
            "updates."
        )
        return []
    if workload.group_size < 2:
        parts.refuse("GRPO needs a group_size of at least 2.")
    if workload.asynchronous:
        parts.refuse("GRPOTrainer has no asynchronous steps; plan with asynchronous: false.")
    most = max(1, parts.policy.max_num_batched_tokens // parts.max_total) if parts.max_total else 1
    rows = max(each for each in range(1, min(most, share) + 1) if share % each == 0)
    lines = [
        f"--per_device_train_batch_size {rows}",
        f"--gradient_accumulation_steps {share // rows}",
        f"--steps_per_generation {share // rows * parts.updates}",
        f"--num_generations {workload.group_size}",
        f"--num_iterations {workload.epochs}",
    ]
    if parts.max_lengths is not None:
        lines.append(f"--max_completion_length {parts.max_lengths[1]}")
    return lines
