"""Settings of the package's own runs as YAML: GRPO by `gym-rm grpo`, or a reward model by `gym-rm train`."""

from __future__ import annotations

from typing import Any

from gym_rm.documents import to_yaml
from gym_rm.planning.exports.parts import Flags, Parts, divide
from gym_rm.planning.plan import SIZES_OF, Plan, Role


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
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 " if nodes > 1 else ""
    start = f"torchrun {several}--nproc-per-node {processes} -m gym_rm" if nodes * processes > 1 else "gym-rm"
    return Flags(parts.library, tuple(to_yaml(values).splitlines()), (f"{start} {command}", *parts.notes))


def _trained(parts: Parts, *dtypes: str) -> dict[str, Any]:
    """Return the settings of adapters; refuse what no run does with the model that it trains."""
    part, name = parts.policy, parts.policy.name
    if part.tensor_parallel_size > 1 or (part.fsdp_size > 1 and part.num_replicas > 1):
        parts.refuse(f"it has whole copies of {name}, or shards it over all; set {name}.tensor_parallel_size=1.")
    if part.optimizer != "adamw" or not part.master_weights:
        parts.refuse(f"it trains with float32 AdamW; set {name}.optimizer=adamw {name}.master_weights=true.")
    if part.model.startswith(SIZES_OF):
        parts.refuse(f"the plan has only sizes for {name}; set {name}.model.")
    if part.dtype not in dtypes:
        parts.refuse(f"it has weights in {' or '.join(dtypes)}; set {name}.dtype={dtypes[0]}.")
    return {} if part.lora is None else {"lora": part.lora.model_dump(mode="json")}


def _train(parts: Parts) -> dict[str, Any]:
    part = parts.policy
    names = ("max_num_batched_tokens", "gradient_checkpointing")
    size = parts.plan.num_prompts // parts.plan.updates_per_step
    return {
        "model": {"path": part.model, **_trained(parts, "float32")},
        "batch": {"batch_size": size, "fsdp": part.fsdp_size > 1, **{name: getattr(part, name) for name in names}},
    }


def _grpo(parts: Parts) -> dict[str, Any]:
    plan, policy, generation, reference = parts.plan, parts.policy, parts.generation, parts.reference
    adapters, processes = _trained(parts, "bfloat16", "float32"), policy.fsdp_size * policy.num_replicas
    kept = {(each.name, each.component) for pool in plan.pools for memory in pool.memory for each in memory.persistent}
    if generation is None or ("weights", generation.name) in kept:
        parts.refuse("it generates with the policy's own weights; set generation.engine=transformers.")
    if parts.critic is not None:
        parts.refuse("GRPO has no critic.")
    if reference is not None and (not parts.together(policy, reference) or reference.sleeps):
        parts.refuse("the reference stays with the policy; set reference.sleeps=false, and pools with both in one.")
    if plan.asynchronous:
        parts.refuse("its steps are not asynchronous; set workload.asynchronous=false.")
    if plan.num_prompts % processes or plan.num_prompts < plan.updates_per_step:
        parts.refuse(f"{plan.num_prompts} prompts of a step do not divide among {processes} processes and updates.")
    return {
        "policy": {name: getattr(policy, name) for name in ("model", "dtype", "gradient_checkpointing")} | adapters,
        "sampling": {"max_new_tokens": plan.reply_tokens, "max_num_seqs": generation and generation.max_num_seqs},
        "env": {"num_prompts": plan.num_prompts, "group_size": plan.group_size, "max_turns": plan.turns}
        | _reward(parts),
        "loss": {"measure_kl": reference is not None or policy.lora is not None},
        "optimizer": {
            "max_num_batched_tokens": policy.max_num_batched_tokens,
            "updates_per_step": plan.updates_per_step,
            "epochs": plan.epochs,
            "fsdp": policy.fsdp_size > 1,
        },
    }


def _reward(parts: Parts) -> dict[str, Any]:
    """Return the settings of the reward model; refuse one that is neither whole in every process nor apart."""
    if (part := parts.reward_model) is None:
        return {}
    if len(parts.reward_models) > 1:
        parts.refuse("its run has one reward model, which may be of kind weighted; plan with the largest alone.")
    if not parts.together(parts.policy, part):
        parts.note(f"first `gym-rm serve {part.model}` on the {parts.plan.processor}s of {part.name}")
        return {"reward_model": "http://127.0.0.1:8000"}
    if part.tensor_parallel_size * part.fsdp_size > 1:
        path = f"reward_models.{part.name}"
        parts.refuse(f"each process has a whole {part.name}; set {path}.tensor_parallel_size=1 {path}.fsdp_size=1.")
    names = ("dtype", "quantization", "max_num_batched_tokens")
    options = {name: value for name in names if (value := getattr(part, name)) is not None}
    return {"reward_model": part.model, "reward_model_kwargs": options, "sleep": part.sleeps}
