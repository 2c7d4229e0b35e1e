"""Settings of the package's own runs as YAML: GRPO by `gym-rm grpo`, or a reward model by `gym-rm train`."""

from __future__ import annotations

from typing import Any

from gym_rm.documents import to_yaml
from gym_rm.planning.exports.mapping import SHARDED, Flags, Only, Parts, check, divide, options_of, read, same
from gym_rm.planning.plan import Plan, Role


def own_settings(plan: Plan) -> Flags:
    """Return the settings with which a run of this package follows a plan; the first note is the command.

    Raises:
        ConfigError: a run cannot do what the plan says. The message lists all reasons.
    """
    first = plan.pools[0].components[0]
    if first.role is Role.REWARD_TRAINING and len(plan.times) == 1:
        parts = Parts(plan, "gym-rm train", first, None, None, None, ())
        values, command = _train(parts), "train run.yaml data.train=comparisons.jsonl"
    else:
        parts = divide(plan, "gym-rm")
        values, command = _grpo(parts), "grpo --config run.yaml env.prompts=prompts.jsonl"
    nodes, processes = parts.shape(parts.policy)
    parts.require()
    lengths = f"{plan.prompt_tokens} tokens and {plan.group_size} replies of at most {plan.reply_tokens}"
    parts.note(f"the plan is for prompts of at most {lengths}; longer ones may need more memory.")
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 " if nodes > 1 else ""
    start = f"torchrun {several}--nproc-per-node {processes} -m gym_rm" if nodes * processes > 1 else "gym-rm"
    return Flags(parts.library, tuple(to_yaml(values).splitlines()), (f"{start} {command}", *parts.notes))


_TRAINED = (
    SHARDED,
    Only("policy", "optimizer", ("adamw",), "it trains with float32 AdamW"),
    Only("policy", "master_weights", (True,), "it trains with float32 AdamW"),
    Only("policy", "tensor_parallel_size", (1,), "its layers are whole"),
    Only("policy", "sleeps", (False,), "its weights stay on the GPU"),
    Only("plan", "asynchronous", (False,), "its steps are not asynchronous"),
)
_OF_TRAIN = (
    *_TRAINED,
    Only("policy", "dtype", lambda _, part: ("float32", "float32" if part.lora else "bfloat16"), "it keeps float32"),
    Only("plan", "turns", (1,), "a comparison has one reply to a prompt"),
)
_OF_GRPO = (
    *_TRAINED,
    Only("policy", "dtype", ("bfloat16", "float32"), "it has weights in bfloat16 or float32"),
    Only("reference", "sleeps", (False,), "it stays on the GPU"),
    same("reference", "model", "it is a copy of the policy"),
    same("reference", "dtype", "it is a copy of the policy"),
    same("reference", "fsdp_size", "it is divided as the policy"),
    same("reference", "tensor_parallel_size", "it is divided as the policy"),
    same("reference", "max_num_batched_tokens", "it takes as many tokens as the policy", harmless=True),
)


def _train(parts: Parts) -> dict[str, Any]:
    check(parts, _OF_TRAIN)
    part = parts.policy
    lora = part.lora and part.lora.model_dump(mode="json")
    names = ("max_num_batched_tokens", "gradient_checkpointing")
    return {
        "model": {"path": part.model, "lora": lora},
        "epochs": parts.plan.epochs,
        "batch": {
            "batch_size": max(parts.plan.num_prompts // parts.plan.updates_per_step, 1),
            "precision": "bf16" if part.dtype == "bfloat16" else "no",
            "tree": part.shared_prompts,
            "fsdp": part.fsdp_size > 1,
            **{name: getattr(part, name) for name in names},
        },
    }


def _grpo(parts: Parts) -> dict[str, Any]:
    check(parts, _OF_GRPO)
    _check_grpo(parts)
    plan, policy = parts.plan, parts.policy
    return {
        "policy": {name: getattr(policy, name) for name in ("model", "dtype", "gradient_checkpointing")}
        | {"precision": "no", "lora": policy.lora and policy.lora.model_dump(mode="json")},
        "sampling": {"max_new_tokens": plan.reply_tokens, "max_num_seqs": read(parts.generation, "max_num_seqs")},
        "env": {"num_prompts": plan.num_prompts, "group_size": plan.group_size, "max_turns": plan.turns}
        | _reward(parts),
        "loss": {"measure_kl": parts.reference is not None},
        "optimizer": {
            "max_num_batched_tokens": policy.max_num_batched_tokens,
            "updates_per_step": plan.updates_per_step,
            "epochs": plan.epochs,
            "tree": policy.shared_prompts,
            "fsdp": policy.fsdp_size > 1,
        },
    }


def _check_grpo(parts: Parts) -> None:
    plan, policy, reference = parts.plan, parts.policy, parts.reference
    processes = policy.fsdp_size * policy.num_replicas
    if not parts.generates_itself:
        parts.refuse(
            "it generates with the policy's own weights, whole in each process; set generation.engine=transformers, "
            "and policy.lora.rank=16 if nothing else fits."
        )
    if parts.critic is not None:
        parts.refuse("GRPO has no critic.")
    if reference is not None and not parts.together(policy, reference):
        parts.refuse("the reference stays with the policy; set pools with both in one.")
    if reference is not None and policy.lora:
        parts.note("the reference is the policy without its adapters, which takes less memory than planned.")
    if plan.num_prompts % processes or plan.num_prompts < plan.updates_per_step:
        parts.refuse(f"{plan.num_prompts} prompts of a step do not divide among {processes} processes and updates.")
    if plan.turns > 1:
        parts.note(f"workload.turn_tokens={plan.turn_tokens}: set env.respond for the turns between the replies.")


def _reward(parts: Parts) -> dict[str, Any]:
    """Return the settings of the reward model; refuse one that is neither whole in every process nor apart."""
    if (part := parts.reward_model) is None:
        return {}
    if len(parts.reward_models) > 1:
        parts.refuse("its run has one reward model, which may be of kind weighted; plan with the largest alone.")
    if not parts.together(parts.policy, part):
        return {"reward_model": parts.serve(part)}
    if part.tensor_parallel_size * part.fsdp_size > 1:
        path = parts.path(part)
        parts.refuse(f"each process has a whole {part.name}; set {path}.tensor_parallel_size=1 {path}.fsdp_size=1.")
    return {"reward_model": part.model, "reward_model_kwargs": options_of(part), "sleep": part.sleeps}
