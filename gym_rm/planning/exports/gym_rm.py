"""Settings of the package's own runs as YAML: GRPO by `gym-rm grpo`, or a reward model by `gym-rm train`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from gym_rm.documents import to_yaml
from gym_rm.planning.exports.parts import Flags, Parts, divide
from gym_rm.planning.plan import SIZES_OF, ComponentPlan, Plan, PoolPlan, Role

FILE = "run.yaml"  # in the commands


def own_settings(plan: Plan) -> Flags:
    """Return the settings with which a run of this package follows a plan, and as notes the commands that start it.

    Raises:
        ConfigError: a run cannot do what the plan says. The message lists all reasons.
    """
    components = [(each, pool) for pool in plan.pools for each in pool.components]
    if len(components) == 1 and components[0][0].role is Role.REWARD_TRAINING:
        parts = Parts(plan, "gym-rm train", components[0][0], None, None, None, ())
        values, command = _train(parts), f"train {FILE} data.train=comparisons.jsonl"
    else:
        parts = divide(plan, "gym-rm")
        values, command = _grpo(parts), f"grpo --config {FILE} env.prompts=prompts.jsonl"
    parts.require()
    notes = (_command(parts.pool(parts.policy), command), *parts.notes)
    return Flags(parts.library, tuple(to_yaml(values).splitlines()), notes)


def _command(pool: PoolPlan, command: str) -> str:
    """Return the command with a process for each GPU."""
    counts = Counter(address.node for address in pool.gpus)
    if len(pool.gpus) == 1:
        return f"gym-rm {command}"
    nodes = f"--nnodes {len(counts)} --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 " if len(counts) > 1 else ""
    return f"torchrun {nodes}--nproc-per-node {max(counts.values())} -m gym_rm {command}"


def _trained(parts: Parts, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings of adapters; refuse what no run does with the model that it trains."""
    part = parts.policy
    parts.shape(part)
    if part.tensor_parallel_size > 1 or (part.fsdp_size > 1 and part.num_replicas > 1):
        parts.refuse(f"{part.name} is in whole copies or sharded over all processes; set {part.name}.fsdp_size=1.")
    if part.optimizer != "adamw" or not part.master_weights:
        parts.refuse(f"it trains with float32 AdamW; set {part.name}.optimizer=adamw {part.name}.master_weights=true.")
    if part.model.startswith(SIZES_OF):
        parts.refuse(f"the plan has only sizes for {part.name}; set {part.name}.model.")
    if part.dtype not in dtypes:
        parts.refuse(f"it has weights in {' or '.join(dtypes)}; set {part.name}.dtype={dtypes[0]}.")
    return {} if part.lora is None else {"lora": part.lora.model_dump(mode="json")}


def _train(parts: Parts) -> dict[str, Any]:
    part, plan = parts.policy, parts.plan
    return {
        "model": {"path": part.model, **_trained(parts, ("float32",))},
        "batch": {
            "batch_size": plan.num_prompts // plan.updates_per_step,
            "max_num_batched_tokens": part.max_num_batched_tokens,
            "gradient_checkpointing": part.gradient_checkpointing,
            "fsdp": part.fsdp_size > 1,
        },
    }


def _grpo(parts: Parts) -> dict[str, Any]:
    plan, policy, generation, reference = parts.plan, parts.policy, parts.generation, parts.reference
    adapters, processes = _trained(parts, ("bfloat16", "float32")), policy.fsdp_size * policy.num_replicas
    if generation is not None and (not parts.together(policy, generation) or _has_weights(parts, generation)):
        parts.refuse("it generates with the policy's own weights; set generation.engine=transformers.")
    if parts.critic is not None:
        parts.refuse("GRPO has no critic.")
    if reference is not None and (not parts.together(policy, reference) or reference.sleeps):
        parts.refuse("the reference stays with the policy; set reference.sleeps=false, and pools with both in one.")
    if plan.asynchronous:
        parts.refuse("its steps are not asynchronous; set workload.asynchronous=false.")
    if plan.num_prompts % processes or plan.num_prompts < plan.updates_per_step:
        parts.refuse(
            f"{plan.num_prompts} prompts are not divisible by {processes} processes and the updates of a step."
        )
    return {
        "policy": {
            "model": policy.model,
            "dtype": policy.dtype,
            "gradient_checkpointing": policy.gradient_checkpointing,
            **adapters,
        },
        "sampling": {"max_new_tokens": plan.reply_tokens, "max_num_seqs": generation and generation.max_num_seqs},
        "env": {
            "num_prompts": plan.num_prompts,
            "group_size": plan.group_size,
            "max_turns": plan.turns,
            **_rewards(parts),
        },
        "loss": {"measure_kl": reference is not None or policy.lora is not None},
        "optimizer": {
            "max_num_batched_tokens": policy.max_num_batched_tokens,
            "updates_per_step": plan.updates_per_step,
            "epochs": plan.epochs,
            "fsdp": policy.fsdp_size > 1,
        },
    }


def _has_weights(parts: Parts, generation: ComponentPlan) -> bool:
    items = [item for memory in parts.pool(generation).memory for item in memory.persistent]
    return any((item.name, item.component) == ("weights", generation.name) for item in items)


def _rewards(parts: Parts) -> dict[str, Any]:
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
