"""Hydra overrides for `python -m verl.trainer.main_ppo` with FSDP and vLLM."""

from __future__ import annotations

from typing import Any

from gym_rm.planning.exports.mapping import USUAL, Library, Only, Parts, Row, always, hydra
from gym_rm.planning.plan import ComponentPlan

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_REF, _REWARD = "actor_rollout_ref.ref", "reward.reward_model"


def _check(parts: Parts) -> None:
    if parts.generates_itself:
        parts.refuse("generation.engine=transformers, but its replies come from vLLM; set generation.engine=vllm.")
    if len(parts.reward_models) > 1:
        names = ", ".join(each.name for each in parts.reward_models)
        parts.refuse(f"it has one reward model in a run, the plan {len(parts.reward_models)}: {names}.")
    if not parts.together(parts.policy, parts.generation, parts.reference, parts.critic):
        parts.refuse(
            "its trainer has policy, generation, reference and critic on the same GPUs; plan with all of them in one "
            "pool (generation apart is for its experimental asynchronous trainers)."
        )
    for reward in parts.reward_models:
        if parts.others_of(reward) and not parts.together(reward, parts.policy):
            parts.refuse(f"its reward model shares GPUs with all others or with none; {reward.name} does with some.")
        parts.note(
            "verl scores with vLLM: its memory is the plan's for gym_rm, rounded up; enlarge it if vLLM refuses."
        )
        if _apart(parts) and len(parts.plan.nodes) > 1:
            parts.note("verl does not pin its pools to nodes: parts of one node may be placed on others.")
    policy = parts.policy
    if policy.lora and policy.master_weights and policy.dtype != "float32":
        parts.note(f"policy.master_weights=true, but verl has adapters and their optimizer in {policy.dtype}.")
    if policy.lora and parts.reference:
        parts.note("the reference is the policy without its adapters, which takes less memory than planned.")
    if parts.plan.num_prompts % parts.plan.updates_per_step:
        parts.refuse(
            f"its mini-batches are whole prompts, but {parts.plan.updates_per_step} updates do not divide "
            f"{parts.plan.num_prompts} prompts."
        )
    ranks = parts.policy.fsdp_size * parts.policy.num_replicas
    if parts.plan.conversations % (parts.plan.updates_per_step * ranks):
        parts.refuse(
            f"{parts.plan.conversations / parts.plan.updates_per_step:g} conversations of an update are not divisible "
            f"by the policy's {ranks} data-parallel ranks; plan with another number of GPUs or prompts."
        )


def _apart(parts: Parts, _: Any = None) -> bool:
    return not parts.together(parts.reward_model, parts.policy)


def _kept(_: Parts, each: ComponentPlan) -> str:
    """Return the dtype of weights that FSDP keeps: float32 for an optimizer with master weights."""
    return SHORT["float32" if each.optimizer and each.master_weights and not each.lora else each.dtype]


def _fsdp(name: str, of: Any) -> tuple[Row, ...]:
    """Return the rows of a model that FSDP holds."""
    return (
        Row(f"{name}.model_dtype", of, _kept),
        Row(f"++{name}.mixed_precision.param_dtype", of, lambda _, each: SHORT[each.dtype]),
        Row(f"{name}.fsdp_size", of, "fsdp_size"),
        Row(f"{name}.param_offload", of, "sleeps"),
    )


VERL = Library(
    (
        *USUAL,
        Only("policy critic", "optimizer", ("adamw",), "it trains with AdamW"),
        Only("reward_model", "quantization", (None,), "only gym_rm's scorers have such weights"),
        Only("reward_model", "fsdp_size", (1,), "only gym_rm's scorers are divided so"),
        Only("policy", "lora.dropout", (0.0,), "its adapters have none"),
        Only("policy critic reference", "tensor_parallel_size", (1,), "its FSDP has no tensor parallelism"),
        Only("critic", "lora", (None,), "it trains the whole critic"),
        Only("reference", "sleeps", (True,), "it is always in the host's memory, layer by layer", harmless=True),
        Only("plan", "asynchronous", (False,), "that is for its experimental trainers, with generation apart"),
        Row("trainer.nnodes", "policy", Parts.nodes),
        Row("trainer.n_gpus_per_node", "policy", Parts.gpus_per_node),
        Row("algorithm.adv_estimator", "policy", lambda parts, _: "gae" if parts.critic else "grpo"),
        Row("actor_rollout_ref.model.path", "policy", "model"),
        Row("actor_rollout_ref.model.enable_gradient_checkpointing", "policy", "gradient_checkpointing"),
        Row("actor_rollout_ref.model.lora_rank", "policy", "lora.rank"),
        Row("actor_rollout_ref.model.lora_alpha", "policy", "lora.alpha"),
        Row(f"{_ROLLOUT}.load_format", "policy", lambda _, policy: policy.lora and "safetensors"),
        Row("actor_rollout_ref.model.target_modules", "policy", "lora.target_modules"),
        Row(f"{_ACTOR}.optim.optimizer", "policy", always("AdamW")),
        Row("critic.optim.optimizer", "critic", always("AdamW")),
        Row(f"{_ACTOR}.strategy", "policy", always("fsdp2")),
        *_fsdp(f"{_ACTOR}.fsdp_config", "policy"),
        Row(f"{_ACTOR}.fsdp_config.optimizer_offload", "policy", "sleeps"),
        Row(f"{_ACTOR}.use_dynamic_bsz", "policy", always(True)),
        Row(f"{_ACTOR}.ppo_max_token_len_per_gpu", "policy", "max_num_batched_tokens"),
        Row(f"{_ACTOR}.ppo_mini_batch_size", "plan", lambda _, plan: plan.num_prompts // plan.updates_per_step),
        Row(f"{_ACTOR}.ppo_epochs", "plan", "epochs"),
        Row(f"{_ACTOR}.use_kl_loss", "policy", lambda parts, _: parts.reference is not None),
        Row(f"{_ROLLOUT}.name", "generation", always("vllm")),
        Row(f"{_ROLLOUT}.tensor_model_parallel_size", "generation", "tensor_parallel_size"),
        Row(f"{_ROLLOUT}.gpu_memory_utilization", "generation", Parts.memory_share),
        Row(f"{_ROLLOUT}.free_cache_engine", "generation", "sleeps"),
        Row(f"{_ROLLOUT}.dtype", "generation", "dtype"),
        Row(f"{_ROLLOUT}.max_num_seqs", "generation", "max_num_seqs"),
        Row(f"{_ROLLOUT}.max_num_batched_tokens", "generation", "max_num_batched_tokens"),
        Row(f"{_ROLLOUT}.max_model_len", "generation", lambda parts, _: parts.max_total),
        Row(f"{_ROLLOUT}.n", "plan", "group_size"),
        *_fsdp(f"{_REF}.fsdp_config", "reference"),
        Row(f"{_REF}.log_prob_max_token_len_per_gpu", "reference", "max_num_batched_tokens"),
        Row("critic.model.path", "critic", "model"),
        Row("critic.model.enable_gradient_checkpointing", "critic", "gradient_checkpointing"),
        Row("critic.strategy", "critic", always("fsdp2")),
        *_fsdp("critic.fsdp", "critic"),
        Row("critic.fsdp.optimizer_offload", "critic", "sleeps"),
        Row("critic.use_dynamic_bsz", "critic", always(True)),
        Row("critic.ppo_max_token_len_per_gpu", "critic", "max_num_batched_tokens"),
        Row(f"{_REWARD}.enable", "policy", lambda parts, _: parts.reward_model is not None),
        Row(f"{_REWARD}.enable_resource_pool", "reward_model", _apart),
        Row(f"{_REWARD}.nnodes", "reward_model", Parts.nodes, _apart),
        Row(f"{_REWARD}.n_gpus_per_node", "reward_model", Parts.gpus_per_node, _apart),
        Row(f"{_REWARD}.model_path", "reward_model", "model"),
        Row(f"{_REWARD}.rollout.name", "reward_model", always("vllm")),
        Row(f"{_REWARD}.rollout.dtype", "reward_model", "dtype"),
        Row(f"{_REWARD}.rollout.tensor_model_parallel_size", "reward_model", "tensor_parallel_size"),
        Row(f"{_REWARD}.rollout.gpu_memory_utilization", "reward_model", Parts.memory_share),
        Row(f"{_REWARD}.rollout.max_num_batched_tokens", "reward_model", "max_num_batched_tokens"),
        Row(f"{_REWARD}.rollout.max_model_len", "reward_model", lambda parts, _: parts.max_total),
        Row(f"{_REWARD}.rollout.free_cache_engine", "reward_model", "sleeps"),
        Row("data.train_batch_size", "plan", "num_prompts"),
        Row("data.max_prompt_length", "plan", "prompt_tokens"),
        Row("data.max_response_length", "plan", "reply_tokens"),
    ),
    hydra,
    _check,
)
