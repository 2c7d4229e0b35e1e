"""From settings to a plan: read the models and lengths, check the rules, search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gym_rm.config import load_config, parse_settings
from gym_rm.errors import ConfigError
from gym_rm.planning.estimate import make_plan
from gym_rm.planning.follow import SIZES_OF
from gym_rm.planning.hardware.clusters import read_cluster
from gym_rm.planning.model.loading import ModelShape, load_shape
from gym_rm.planning.plan import Plan, Role
from gym_rm.planning.quantities import Basis
from gym_rm.planning.request import Component, Request, Workload
from gym_rm.planning.rules import Infeasible, Violation, check, explain, memory_of_others
from gym_rm.planning.search import search
from gym_rm.planning.settings import (
    GenerationSettings,
    InferenceSettings,
    ModelSettings,
    PlanSettings,
    TrainingSettings,
    WorkloadSettings,
)
from gym_rm.planning.workload.lengths import parse_lengths
from gym_rm.planning.workload.rows import RowLengths, measure_rows

Source = PlanSettings | Mapping[str, Any] | str | Path


def plan(source: Source, *, overrides: tuple[str, ...] = ()) -> Plan:
    """Return the best plan for a request.

    Args:
        source: settings, a mapping of them, or a YAML file with them.
        overrides: changes such as `cluster.nodes=2`, of a file or a mapping.

    Raises:
        Infeasible: there is no plan; the message has all reasons, each with a change that mends it.
        ConfigError: a setting is wrong.

    Example:
        >>> found = plan({"cluster": {"gpu": "h100_sxm"}, "reward_models": {"rm": {"model": "Qwen/Qwen3-8B"}}})
        >>> found.used_gpus
        1
    """
    return plan_request(read_request(read_settings(source, overrides=overrides)))


def plan_request(request: Request) -> Plan:
    """Return the best plan for a request that was read."""
    if violations := check(request):
        raise Infeasible([*violations, *memory_of_others(request, violations)], name=request.name)
    found = search(request)
    if found is None:
        raise explain(request)
    return make_plan(request, found)


def read_settings(source: Source, *, overrides: tuple[str, ...] = ()) -> PlanSettings:
    """Return the settings of a request.

    Raises:
        ConfigError: a setting is unknown or invalid; the message lists all problems.
    """
    if isinstance(source, PlanSettings) and not overrides:
        return source
    if isinstance(source, str | Path):
        return load_config(PlanSettings, source, overrides)
    values = source.model_dump(exclude_unset=True) if isinstance(source, PlanSettings) else dict(source)
    if not overrides:
        return parse_settings(PlanSettings, values)
    return load_config(PlanSettings, values, overrides)


def read_request(settings: PlanSettings) -> Request:
    """Return the request with sizes of all models and measured lengths.

    Raises:
        ConfigError: a model, a file or a number is wrong; the message lists all problems.
    """
    problems: list[str] = []

    def tried(function: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except ConfigError as error:
            problems.append(str(error))
            return None

    cluster = tried(read_cluster, settings.cluster)
    shapes: dict[str, ModelShape] = {}
    for name, model, labels in _models(settings):
        shape = tried(load_shape, model.model, model.config, num_labels=labels, name=name)
        if shape is not None:
            shapes[name] = replace(shape, name=model.model or f"{SIZES_OF}{name}")
    work = tried(_workload, settings)
    problems += _mistakes(settings)
    if problems:
        raise ConfigError("\n  ".join([f"{settings.name}: {len(problems)} problems in the request:", *problems])
                          if len(problems) > 1 else problems[0])  # fmt: skip
    workload, row_notes = work
    components = tuple(_components(settings, shapes, on_cpu=all(device.is_cpu for device in cluster.devices)))
    notes = tuple(
        dict.fromkeys(
            [
                *(f"{shape.name}: {text}" for shape in shapes.values() for text in (shape.source, *shape.notes)),
                *row_notes,
                f"lengths of prompts: {workload.prompts.source}; of replies: {workload.replies.source}",
            ]
        )
    )
    return Request(
        name=settings.name,
        cluster=cluster,
        components=components,
        workload=workload,
        pools=_pools(settings, components),
        goal=settings.objective.goal,
        step_seconds=settings.objective.step_seconds,
        notes=notes,
    )


def _models(settings: PlanSettings) -> list[tuple[str, ModelSettings, int | None]]:
    """Return the models to read: names, settings, and the numbers that a head computes."""
    found: list[tuple[str, ModelSettings, int | None]] = []
    if settings.policy is not None:
        found.append(("policy", settings.policy, None))
    if isinstance(settings.reference, InferenceSettings):
        found.append(("reference", _of_policy(settings.reference, settings), None))
    if settings.critic is not None:
        found.append(("critic", _of_policy(settings.critic, settings), 1))
    found += [(name, model, 1) for name, model in settings.reward_models.items()]
    if settings.reward_training is not None:
        found.append(("reward_training", settings.reward_training, 1))
    return found


def _of_policy(model: Any, settings: PlanSettings) -> Any:
    """Return the settings with the policy's model if they name none."""
    if model.model is None and model.config is None and settings.policy is not None:
        return model.model_copy(update={"model": settings.policy.model, "config": settings.policy.config})
    return model


def _mistakes(settings: PlanSettings) -> list[str]:
    """Return problems between settings."""
    found = []
    if settings.policy is None and not settings.reward_models and settings.reward_training is None:
        found.append(
            "nothing to plan: give policy, reward_models or reward_training, such as reward_models: {rm: {model: ..}}."
        )
    if settings.policy is None and (settings.critic is not None or settings.reference is not False):
        found.append("critic and reference belong to a policy, and there is none; add policy: {model: ...}.")
    taken = {"policy", "generation", "reference", "critic", "reward_training"} & settings.reward_models.keys()
    found += [f"reward_models.{name}: this name is taken by another part; rename it." for name in sorted(taken)]
    if settings.objective.goal == "smallest" and settings.objective.step_seconds is None:
        found.append("objective.goal=smallest needs objective.step_seconds, the longest step that is fast enough.")
    priced = not isinstance(settings.cluster, str) and settings.cluster.price_per_gpu_hour is not None
    if settings.objective.goal == "cost" and not priced:
        found.append("objective.goal=cost needs cluster.price_per_gpu_hour, a price or one for each kind of GPU.")
    if settings.generation.engine == "transformers":
        found += [
            f"generation.{name}={value}: generation by transformers has no GPUs of its own; remove it, or set "
            "generation.engine=vllm."
            for name in ("num_gpus", "tensor_parallel_size", "num_replicas")
            if (value := getattr(settings.generation, name)) != "auto"
        ]
    return found


def _workload(settings: PlanSettings) -> tuple[Workload, tuple[str, ...]]:
    """Return the work of a step, and notes on how it was measured."""
    work = settings.workload
    measured = _rows(settings, work)
    if measured is None:
        prompts = parse_lengths("workload.prompt_tokens", work.prompt_tokens)
        replies = parse_lengths("workload.reply_tokens", work.reply_tokens)
        shared, basis = 0.0, Basis.ASSUMPTION
    else:
        prompts, shared, basis = measured.prompts, measured.shared.value, measured.shared.basis
        replies = measured.replies or parse_lengths("workload.reply_tokens", work.reply_tokens)
    workload = Workload(
        num_prompts=work.num_prompts,
        group_size=work.group_size,
        turns=work.turns,
        turn_tokens=work.turn_tokens,
        prompts=prompts,
        replies=replies,
        updates_per_step=work.updates_per_step,
        epochs=work.epochs,
        asynchronous=work.asynchronous,
        shared=shared,
        shared_basis=basis,
    )
    return workload, () if measured is None else measured.notes


def _rows(settings: PlanSettings, work: WorkloadSettings) -> RowLengths | None:
    if work.rows is None:
        return None
    models = [model.model for _, model, _ in _models(settings) if model.model is not None]
    folders = [model for model in models if Path(model).is_dir()]
    tokenizer = work.tokenizer or next(iter(folders), None)
    return measure_rows(work.rows, tokenizer=tokenizer, limit=None, num_prompts=work.num_prompts)


def _components(settings: PlanSettings, shapes: Mapping[str, ModelShape], *, on_cpu: bool) -> list[Component]:
    found: list[Component] = []
    policy = settings.policy
    if policy is not None:
        found.append(_training("policy", Role.POLICY, policy, shapes["policy"]))
        found.append(_generation(settings.generation, found[0], on_cpu=on_cpu))
        reference = settings.reference
        if reference is not False:
            if isinstance(reference, InferenceSettings):
                found.append(_inference("reference", Role.REFERENCE, reference, shapes["reference"]))
            else:
                plain = InferenceSettings(dtype=policy.dtype)
                found.append(_inference("reference", Role.REFERENCE, plain, shapes["policy"]))
    if settings.critic is not None:
        found.append(_training("critic", Role.CRITIC, settings.critic, shapes["critic"]))
    for name, model in settings.reward_models.items():
        found.append(_inference(name, Role.REWARD_MODEL, model, shapes[name]))
    if settings.reward_training is not None:
        shape = shapes["reward_training"]
        found.append(_training("reward_training", Role.REWARD_TRAINING, settings.reward_training, shape))
    return found


def _number(value: int | str) -> int | None:
    return None if isinstance(value, str) else value


def _shared_settings(name: str, role: Role, model: ModelSettings, shape: ModelShape, engine: str) -> Component:
    return Component(
        name=name,
        role=role,
        shape=shape,
        dtype=model.dtype,
        engine=engine,
        num_gpus=_number(model.num_gpus),
        tensor_parallel_size=_number(model.tensor_parallel_size),
        max_num_batched_tokens=_number(model.max_num_batched_tokens),
        sleeps=None if model.sleeps == "auto" else model.sleeps,
    )


def _inference(name: str, role: Role, model: InferenceSettings, shape: ModelShape) -> Component:
    component = _shared_settings(name, role, model, shape, "gym_rm")
    return replace(component, num_replicas=_number(model.num_replicas))


def _training(name: str, role: Role, model: TrainingSettings, shape: ModelShape) -> Component:
    again = model.gradient_checkpointing
    return replace(
        _shared_settings(name, role, model, shape, "training"),
        fsdp_size=_number(model.fsdp_size),
        gradient_checkpointing=None if again == "auto" else again,
        optimizer=model.optimizer,
        master_weights=model.master_weights,
        lora_rank=model.lora_rank,
        shared_prompts=model.shared_prompts,
    )


def _generation(settings: GenerationSettings, policy: Component, *, on_cpu: bool) -> Component:
    own = settings.engine == "transformers"
    dtype = policy.dtype if own else settings.dtype or ("float32" if on_cpu else "bfloat16")
    return Component(
        name="generation",
        role=Role.GENERATION,
        shape=policy.shape,
        dtype=dtype,
        engine=settings.engine,
        num_gpus=policy.num_gpus if own else _number(settings.num_gpus),
        tensor_parallel_size=1 if own else _number(settings.tensor_parallel_size),
        num_replicas=None if own else _number(settings.num_replicas),
        max_num_seqs=_number(settings.max_num_seqs),
        sleeps=None if settings.sleeps == "auto" else settings.sleeps,
        gpu_memory_utilization=settings.gpu_memory_utilization,
    )


def _pools(settings: PlanSettings, components: tuple[Component, ...]) -> tuple[tuple[str, ...], ...] | None:
    """Return the pools that the request fixes, or None.

    Raises:
        Infeasible: a component is in no pool, in two, or unknown.
    """
    names = [each.name for each in components]
    inside = {each.name for each in components if each.engine == "transformers"}
    if settings.pools == "auto":
        return None
    if settings.pools == "together":
        return (tuple(names),)
    if settings.pools == "apart":
        return tuple((name, *inside) if name == "policy" else (name,) for name in names if name not in inside)
    listed = [name for group in settings.pools for name in group]
    found = [Violation(f"pools: {name!r} is no component.", f"Components are {', '.join(names)}.")
             for name in listed if name not in names]  # fmt: skip
    found += [Violation(f"pools: {name!r} is in more than one pool.", "List it once.")
              for name in dict.fromkeys(listed) if listed.count(name) > 1]  # fmt: skip
    missing = [name for name in names if name not in listed and name not in inside]
    found += [Violation(f"pools: {name!r} is in no pool.", "Add it to a pool, or as a pool of its own.")
              for name in missing]  # fmt: skip
    apart = inside and not any({"policy", *inside} <= set(group) for group in settings.pools)
    if apart and inside & set(listed):
        found.append(Violation("pools: generation by transformers uses the policy's weights.", "List it with policy."))
    if found:
        raise Infeasible(found, name=settings.name)
    groups: list[tuple[str, ...]] = list(settings.pools)
    if inside and not inside & set(listed):
        groups = [(*group, *sorted(inside)) if "policy" in group else group for group in groups]
    return tuple(group for group in groups if group)
