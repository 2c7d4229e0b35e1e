"""Arguments of TRL's `GRPOConfig`, an `accelerate launch` line, and a `trl vllm-serve` line if it is needed.

The script with these arguments is TRL's `trl/scripts/grpo.py`, or one of your own with `GRPOConfig`. Rewards are those
of `gym_rm.adapters.trl`: TRL would load a reward model in the policy's dtype, and score a whole batch in one forward.
"""

from __future__ import annotations

import shlex
from typing import Any

from gym_rm.planning.exports.mapping import SHARDED, USUAL, Library, Only, Parts, Row, options_of, same, show
from gym_rm.planning.plan import ComponentPlan

OPTIMIZERS = {"adamw": "adamw_torch", "adamw_8bit": "adamw_bnb_8bit", "sgd": "sgd"}


def _check(parts: Parts) -> None:
    if parts.critic is not None:
        parts.refuse("GRPO has no critic.")
    if parts.reference is not None:
        if not parts.together(parts.policy, parts.reference):
            parts.refuse("the reference is in the processes of the policy; plan with both in one pool.")
        parts.note("a reference is only loaded if beta is more than 0; 0.04 is a common value.")
        if parts.policy.lora:
            parts.note("the reference is the policy without its adapters, which takes less memory than planned.")
    for reward in parts.reward_models:
        _check_reward(parts, reward)
    if _mode(parts) == "server" and parts.generation is not None:
        nodes = sorted({address.node for address in parts.pool(parts.generation).gpus})
        if len(nodes) > 1:
            parts.refuse(f"one server of generation is on one node, the plan has it on nodes {nodes}.")
        parts.note(f"start `trl vllm-serve` first, on node {nodes[0]}; pass its host as --vllm_server_host.")
    if parts.plan.group_size < 2:
        parts.refuse("GRPO needs a group_size of at least 2.")
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
    elif reward.tensor_parallel_size * reward.fsdp_size > 1:
        path = parts.path(reward)
        parts.refuse(f"each process has a whole {path}; set {path}.tensor_parallel_size=1 {path}.fsdp_size=1.")


def _processes(parts: Parts) -> int:
    return len(parts.pool(parts.policy).gpus)


def _mode(parts: Parts, _: Any = None) -> str | None:
    """Return where vLLM is; None if the policy generates itself."""
    if parts.generates_itself:
        return None
    return "colocate" if parts.together(parts.policy, parts.generation) else "server"


def _mixed(parts: Parts, _: Any = None) -> bool:
    """Return whether bfloat16 is computed from float32 weights or adapters."""
    return parts.policy.dtype == "bfloat16" and parts.policy.master_weights


def _loaded(parts: Parts, _: Any = None) -> str:
    """Return the dtype in which policy and reference are loaded: FSDP2 makes its own float32 weights of bfloat16."""
    policy = parts.policy
    own = policy.lora or policy.fsdp_size > 1 or not policy.master_weights
    return policy.dtype if own else "float32"


def _rewards(parts: Parts, _: Any) -> tuple[str, ...] | None:
    """Return the names of the reward functions, and note the file that has them."""
    for index, reward in enumerate(parts.reward_models):
        inside = parts.together(parts.policy, reward)
        options = options_of(reward) if inside else {}
        given = [f"{name}={value!r}" for name, value in {"name": reward.name, **options}.items()]
        source = reward.model if inside else parts.serve(reward)
        parts.note("rewards.py: from gym_rm.adapters.trl import RewardModelReward")
        parts.note(f"rewards.py: reward{index} = RewardModelReward({', '.join([repr(source), *given])})")
    return tuple(f"rewards.reward{index}" for index, _ in enumerate(parts.reward_models)) or None


def _words(value: Any) -> str:
    """Return a value as the arguments of a shell's command."""
    return shlex.join(value) if isinstance(value, tuple) else shlex.quote(show(value))


def _commands(parts: Parts) -> list[str]:
    policy, generation, processes = parts.policy, parts.generation, _processes(parts)
    nodes = parts.nodes(policy)
    launch = f"accelerate launch --num_processes {processes} --num_machines {nodes} --mixed_precision "
    launch += "bf16" if _mixed(parts) else "no"
    if processes > 1:
        launch += " --use_fsdp --fsdp_version 2" if policy.fsdp_size > 1 else " --multi_gpu"
    if policy.fsdp_size > 1:
        launch += " --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_reshard_after_forward true"
    if nodes > 1:
        parts.note(f"run the launch line on {nodes} nodes with --machine_rank and --main_process_ip.")
    if generation is None or _mode(parts) != "server":
        return [launch]
    chosen = ",".join(str(address.gpu) for address in parts.pool(generation).gpus)
    serve = (
        f"CUDA_VISIBLE_DEVICES={chosen} trl vllm-serve --model {shlex.quote(policy.model)} --tensor_parallel_size "
        f"{generation.tensor_parallel_size} --data_parallel_size {generation.num_replicas} --gpu_memory_utilization "
        f"{parts.memory_share(generation)} --max_model_len {parts.max_total} --dtype {generation.dtype}"
    )
    return [serve, launch]


def _colocated(parts: Parts) -> bool:
    return _mode(parts) == "colocate"


def _of_engine(parts: Parts, generation: ComponentPlan) -> tuple[str]:
    return ("bfloat16" if _colocated(parts) else generation.dtype,)


def _rows(parts: Parts, generation: ComponentPlan) -> tuple[int | None]:
    """Return how many conversations the policy generates at a time; of vLLM, any."""
    return (parts.plan.conversations // _processes(parts) if parts.generates_itself else generation.max_num_seqs,)


def _of_vllm(parts: Parts, generation: ComponentPlan) -> tuple[int | None]:
    return (generation.max_num_seqs if parts.generates_itself else None,)


def _local_batch(parts: Parts) -> tuple[int, int]:
    """Return the conversations of a process in one forward, within the token budget, and the forwards of an update."""
    share = parts.plan.conversations // (_processes(parts) * parts.plan.updates_per_step)
    most = max(1, parts.policy.max_num_batched_tokens // parts.max_total)
    rows = max(rows for rows in range(1, min(most, share) + 1) if share % rows == 0)
    return rows, share // rows


TRL = Library(
    (
        *USUAL,
        Only("generation", "max_num_seqs", _rows, "it generates all conversations of a process at a time"),
        Only("generation", "max_num_seqs", _of_vllm, "vLLM runs as many as its memory holds", harmless=True),
        SHARDED,
        Only("policy", "dtype", ("bfloat16", "float32"), "its trainer cannot unscale gradients in float16"),
        Only("policy", "master_weights", lambda _, each: (True, bool(each.lora)), "peft has adapters in float32"),
        Only("policy reference", "tensor_parallel_size", (1,), "GRPOTrainer has no tensor parallelism"),
        Only("policy reference reward_model", "sleeps", (False,), "it stays on the GPU while others work"),
        Only("generation", "sleeps", lambda parts, _: (False, _colocated(parts)), "a server does not"),
        Only("generation", "dtype", _of_engine, "its vLLM takes the dtype in config.json, mostly bfloat16"),
        Only("reference", "dtype", lambda *each: (_loaded(*each),), "it has that of policy.dtype and master_weights"),
        same("reference", "fsdp_size", "it is sharded as the policy"),
        same("reference", "max_num_batched_tokens", "it takes as many rows as the policy", harmless=True),
        Only("plan", "asynchronous", (False,), "GRPOTrainer has no asynchronous steps"),
        Row("model_name_or_path", "policy", "model"),
        Row("dtype", "policy", _loaded),
        Row("bf16", "policy", _mixed),
        Row("use_peft", "policy", lambda _, policy: policy.lora and True),
        Row("lora_r", "policy", "lora.rank"),
        Row("lora_alpha", "policy", "lora.alpha"),
        Row("lora_dropout", "policy", "lora.dropout"),
        Row("lora_target_modules", "policy", "lora.target_modules"),
        Row("optim", "policy", lambda _, policy: OPTIMIZERS.get(policy.optimizer)),
        Row("gradient_checkpointing", "policy", "gradient_checkpointing"),
        Row("use_vllm", "policy", lambda parts, _: _mode(parts) is not None),
        Row("vllm_mode", "generation", _mode),
        Row("vllm_tensor_parallel_size", "generation", "tensor_parallel_size", _colocated),
        Row("vllm_gpu_memory_utilization", "generation", Parts.memory_share, _colocated),
        Row("vllm_enable_sleep_mode", "generation", "sleeps", _colocated),
        Row("vllm_max_model_length", "generation", lambda parts, _: parts.max_total, _colocated),
        Row("reward_funcs", "plan", _rewards),
        Row("beta", "policy", lambda parts, _: 0.04 if parts.reference else 0.0),
        Row("per_device_train_batch_size", "plan", lambda parts, _: _local_batch(parts)[0]),
        Row("gradient_accumulation_steps", "plan", lambda parts, _: _local_batch(parts)[1]),
        Row("steps_per_generation", "plan", lambda parts, plan: _local_batch(parts)[1] * plan.updates_per_step),
        Row("num_generations", "plan", "group_size"),
        Row("num_iterations", "plan", "epochs"),
        Row("max_completion_length", "plan", "reply_tokens"),
    ),
    lambda name, value: f"--{name} {_words(value)}",
    _check,
    _commands,
)
