"""The options of an environment and of an agent that a plan prescribes; what exceeds it is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gym_rm.errors import ConfigError
from gym_rm.planning.plan import ComponentPlan, Plan, Role, load_plan
from gym_rm.planning.request import BYTES

SIZES_OF = "sizes of "  # how the model of a component is called that was given by its sizes
PlanSource = Plan | Mapping[str, Any] | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Lines:
    """A plan with the names of its lines, for messages.

    Attributes:
        plan: the plan.
        name: its file, or `the plan`.
        part: the reward model that was named; None for the only one.
    """

    plan: Plan
    name: str
    part: str | None

    def of(self, component: ComponentPlan, field: str) -> str:
        """Return a line of a component in words: `plan.json: pools.0.components.1.num_replicas is 4`."""
        for number, pool in enumerate(self.plan.pools):
            if component in pool.components:
                place = f"pools.{number}.components.{pool.components.index(component)}.{field}"
                return f"{self.name}: {place} is {getattr(component, field)}"
        raise AssertionError(component)

    def own(self, field: str) -> str:
        """Return a line of the plan itself in words."""
        return f"{self.name}: {field} is {getattr(self.plan, field)}"


def read_lines(source: PlanSource) -> Lines:
    """Return a plan from its file (`plan.json`, or `plan.json#name` for one of its reward models), values or object.

    Raises:
        ConfigError: it is not a plan.
    """
    if isinstance(source, Plan):
        return Lines(source, "the plan", None)
    if isinstance(source, Mapping):
        return Lines(load_plan(dict(source)), "the plan", None)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"plan must be a file, the values of a plan or a Plan, got {type(source).__name__}.")
    file, _, part = os.fspath(source).partition("#")
    return Lines(load_plan(file), file, part or None)


def follow_scoring(
    source: PlanSource, reward_model: Any, options: Mapping[str, Any], *, conversations: int
) -> tuple[Any, dict[str, Any]]:
    """Return the reward model and the options of `load_scorer` that follow a plan.

    Args:
        source: the plan.
        reward_model: what the user gave; None for the plan's.
        options: what the user gave; they may be smaller than the plan's.
        conversations: conversations that are scored in one call.

    Raises:
        ConfigError: the plan has no such reward model, or something exceeds the plan; the message names its line.
    """
    lines = read_lines(source)
    component = _reward_model(lines)
    if conversations > lines.plan.conversations:
        raise ConfigError(f"num_envs={conversations} exceeds the plan: {lines.own('conversations')}.")
    planned: dict[str, Any] = {"max_num_batched_tokens": component.max_num_batched_tokens}
    planned |= {
        name: value for name in ("tensor_parallel_size", "num_replicas") if (value := getattr(component, name)) > 1
    }
    planned |= {"quantization": "int8"} if component.dtype == "int8" else {"dtype": component.dtype}
    for name in ("max_num_batched_tokens", "tensor_parallel_size", "num_replicas"):
        given = options.get(name)
        limit = getattr(component, name)
        if isinstance(given, int) and given > limit:
            raise ConfigError(f"{name}={given} exceeds the plan: {lines.of(component, name)}.")
    if options.get("fsdp_size", 1) != 1:
        raise ConfigError(f"fsdp_size={options['fsdp_size']} is not in the plan: {lines.of(component, 'fsdp_size')}.")
    dtype = str(options.get("dtype", component.dtype)).removeprefix("torch.")
    if BYTES.get(dtype, 0.0) > BYTES[component.dtype]:
        raise ConfigError(f"dtype={dtype!r} exceeds the plan: {lines.of(component, 'dtype')}.")
    return _loadable(component) if reward_model is None else reward_model, {**planned, **options}


def _loadable(component: ComponentPlan) -> str:
    """Return the folder or hub id of a component.

    Raises:
        ConfigError: the plan was made from sizes alone.
    """
    if component.model.startswith(SIZES_OF):
        raise ConfigError(
            f"the plan has only sizes for {component.name}; pass its folder or hub id (reward_model or policy.model)."
        )
    return component.model


def _reward_model(lines: Lines) -> ComponentPlan:
    found = {each.name: each for pool in lines.plan.pools for each in pool.components if each.role is Role.REWARD_MODEL}
    if lines.part is not None and lines.part not in found:
        raise ConfigError(f"{lines.name} has no reward model {lines.part!r}; it has {', '.join(found) or 'none'}.")
    if lines.part is None and len(found) != 1:
        known = ", ".join(f"{lines.name}#{name}" for name in found)
        raise ConfigError(
            f"{lines.name} has {len(found)} reward models; "
            + (f"name one: plan={known!r}." if found else "plan reward_models too.")
        )
    return found[lines.part or next(iter(found))]


@dataclass(frozen=True, slots=True)
class TrainingLimits:
    """What a plan allows an agent of one process.

    Attributes:
        conversations: in a step.
        max_new_tokens: of a reply.
        micro_batch_size: conversations in one forward and backward.
        rollout_batch_size: conversations that are generated at a time.
        reference: whether there is room for a copy of the policy.
        component: the policy.
        lines: the plan, for messages.
    """

    conversations: int
    max_new_tokens: int
    micro_batch_size: int
    rollout_batch_size: int
    reference: bool
    component: ComponentPlan
    lines: Lines

    @property
    def policy(self) -> str:
        """Folder or hub id of the policy. Raises ConfigError if the plan has only sizes."""
        return _loadable(self.component)

    def require(self, name: str, value: int, limit: int, line: str) -> None:
        """Raise ConfigError if a setting exceeds a limit of the plan."""
        if value > limit:
            raise ConfigError(f"{name}={value} exceeds the plan, which allows {limit}: {line}.")


def training_limits(
    source: PlanSource, *, dtype: str, gradient_checkpointing: bool, num_processes: int = 1, fsdp: bool = False
) -> TrainingLimits:
    """Return what a plan allows an agent that trains and generates in the same processes, each on one GPU or CPU.

    Args:
        source: the plan.
        dtype: dtype of the agent's weights.
        gradient_checkpointing: whether the agent computes activations again in the backward.
        num_processes: number of processes of the agent.
        fsdp: whether the agent shards the policy over its processes.

    Raises:
        ConfigError: the plan is for other processes, another engine, or needs less memory than the agent takes.
    """
    lines = read_lines(source)
    components = {each.role: each for pool in lines.plan.pools for each in pool.components}
    policy, generation = components.get(Role.POLICY), components.get(Role.GENERATION)
    if policy is None or generation is None:
        raise ConfigError(f"{lines.name} has no policy; plan one: policy: {{model: ...}}.")
    ways = {"num_replicas": 1 if fsdp else num_processes, "fsdp_size": num_processes if fsdp else 1}
    for field, ours in {**ways, "tensor_parallel_size": 1}.items():
        if getattr(policy, field) != ours:
            raise ConfigError(
                f"{lines.of(policy, field)}, but this agent has {ours}: it runs in {num_processes} processes (torchrun "
                f"--nproc-per-node) with optimizer.fsdp={str(fsdp).lower()}. Start it as planned, or plan with other "
                "policy.num_gpus."
            )
    if generation not in lines.plan.pool_of(policy.name).components or generation.dtype != policy.dtype:
        raise ConfigError(
            f"{lines.of(generation, 'dtype')}, but this agent generates with the policy's own weights; plan with "
            "generation.engine=transformers."
        )
    if BYTES[dtype] > BYTES[policy.dtype]:
        raise ConfigError(
            f"{lines.of(policy, 'dtype')}, but this agent holds {dtype} weights; plan with policy.dtype={dtype}."
        )
    if policy.gradient_checkpointing and not gradient_checkpointing:
        raise ConfigError(
            f"{lines.of(policy, 'gradient_checkpointing')}, but this agent keeps all activations; plan with "
            "policy.gradient_checkpointing=false."
        )
    longest = lines.plan.prompt_tokens + lines.plan.reply_tokens
    return TrainingLimits(
        conversations=lines.plan.conversations,
        max_new_tokens=lines.plan.reply_tokens,
        micro_batch_size=max(policy.max_num_batched_tokens // longest, 1),
        rollout_batch_size=generation.max_num_seqs or lines.plan.conversations,
        reference=Role.REFERENCE in components,
        component=policy,
        lines=lines,
    )
