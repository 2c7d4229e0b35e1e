"""From settings to a plan: read the models and lengths, check the rules, search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from gym_rm.config import Config, load_config
from gym_rm.errors import ConfigError
from gym_rm.planning.hardware.clusters import read_cluster
from gym_rm.planning.lengths import parse_lengths
from gym_rm.planning.model.known_models import load_shape
from gym_rm.planning.model.shape import ModelShape
from gym_rm.planning.plan import SIZES_OF, Plan, Role
from gym_rm.planning.plan_from_search import make_plan
from gym_rm.planning.plan_request import Component, PlanRequest, StepWorkload
from gym_rm.planning.refusals import Changes, broken_rules, has_plan, refusal
from gym_rm.planning.request_settings import ComponentSettings, InferenceSettings, PlanSettings
from gym_rm.planning.search import search

Source = PlanSettings | Mapping[str, Any] | str | Path
Result = TypeVar("Result")


def plan(source: Source, *, overrides: tuple[str, ...] = ()) -> Plan:
    """Return the best plan for a request.

    Args:
        source: settings, a mapping of them, or a YAML file with them.
        overrides: changes such as `cluster.nodes=2`, of a file or a mapping.

    Raises:
        Infeasible: there is no plan; the message has all reasons, and the changes of settings that are enough.
        ConfigError: settings are wrong; the message lists all problems.

    Example:
        >>> planned = plan({"cluster": {"gpu": "h100_sxm"}, "reward_models": {"rm": {"model": "Qwen/Qwen3-8B"}}})
        >>> planned.used_gpus
        1
    """
    if isinstance(source, PlanSettings) and not overrides:
        settings = source
    else:
        values = source.model_dump(exclude_unset=True) if isinstance(source, PlanSettings) else source
        settings = load_config(PlanSettings, values, overrides)
    request = read_request(settings)
    rules = list(broken_rules(request))
    result = None if rules else search(request)
    if result is None:

        def fits(changes: Changes) -> bool:
            try:
                return has_plan(read_request(load_config(PlanSettings, settings.model_dump(), changes)))
            except ConfigError:
                return False

        raise refusal(settings, request, rules, fits)
    return make_plan(request, result)


def read_request(settings: PlanSettings) -> PlanRequest:
    """Return the request with the sizes of all models.

    Raises:
        ConfigError: a model or a number is wrong; the message lists all problems.
    """
    problems = list(_mistakes(settings))

    def tried(read: Callable[[], Result]) -> Result | None:
        try:
            return read()
        except ConfigError as error:
            problems.append(str(error))
            return None

    cluster = tried(lambda: read_cluster(settings.cluster))
    shapes = {name: tried(lambda: _shape(name, role, model)) for name, role, model in _models(settings)}  # noqa: B023
    workload = tried(lambda: _workload(settings))
    if problems or cluster is None or workload is None:
        many = f"{settings.name}: {len(problems)} problems in the request:\n  " if len(problems) > 1 else ""
        raise ConfigError(many + "\n  ".join(problems))
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    components = tuple(_components(settings, known, on_cpu=cluster.device.is_cpu))
    notes = [f"{shape.name}: {text}" for shape in known.values() for text in (shape.source, *shape.notes)]
    notes.append(f"lengths of prompts: {workload.prompts.source}; of replies: {workload.replies.source}")
    return PlanRequest(
        name=settings.name,
        cluster=cluster,
        components=components,
        workload=workload,
        pools=_pools(settings, components),
        step_seconds=settings.step_seconds,
        notes=tuple(dict.fromkeys(notes)),
    )


def _mistakes(settings: PlanSettings) -> Iterator[str]:
    """Yield problems between settings."""
    generation = settings.generation
    if settings.policy is None and not settings.reward_models and settings.reward_training is None:
        yield "nothing to plan: give policy, reward_models or reward_training, such as policy: {model: Qwen/Qwen3-8B}."
    if settings.policy is None and (settings.critic is not None or settings.reference is not False):
        yield "critic and reference belong to a policy, and there is none; add policy: {model: ...}."
    for name in sorted({"policy", "generation", "reference", "critic", "reward_training"} & {*settings.reward_models}):
        yield f"reward_models.{name}: this name is taken by another part; rename it."
    if generation.engine == "transformers":
        fixed = [("generation", name) for name in ("num_gpus", "tensor_parallel_size", "num_replicas")]
        fixed += [("policy", name) for name in ("tensor_parallel_size", "fsdp_size")]
        words = "generation by transformers needs the policy's whole weights in each process"
        for part, name in fixed:
            value = getattr(getattr(settings, part), name, None)
            if value is not None and (part, value) != ("policy", 1):
                yield f"{part}.{name}={value}: {words}; remove it, or set generation.engine=vllm."


# --- models and work -------------------------------------------------------------------------------------------------


def _models(settings: PlanSettings) -> Iterator[tuple[str, Role, ComponentSettings]]:
    """Yield the names, roles and settings of the models; the reference and the critic may have the policy's model."""
    policy, reference = settings.policy, settings.reference
    if policy is not None:
        yield "policy", Role.POLICY, policy
        own = {"model": policy.model, "config": policy.config}
        wanted = InferenceSettings(dtype=policy.dtype) if reference is True else reference
        for role, model in ((Role.REFERENCE, wanted), (Role.CRITIC, settings.critic)):
            if isinstance(model, ComponentSettings):
                named = model.model is not None or model.config is not None
                yield role.value, role, model if named else model.model_copy(update=own)
    yield from ((name, Role.REWARD_MODEL, model) for name, model in settings.reward_models.items())
    if settings.reward_training is not None:
        yield "reward_training", Role.REWARD_TRAINING, settings.reward_training


def _shape(name: str, role: Role, model: ComponentSettings) -> ModelShape:
    labels = None if role in (Role.POLICY, Role.REFERENCE) else 1  # numbers that a head computes
    shape = load_shape(model.model, model.config, num_labels=labels, name=name)
    return replace(shape, name=model.model or f"{SIZES_OF}{name}")


def _workload(settings: PlanSettings) -> StepWorkload:
    values = dict(settings.workload)
    prompts, replies = (
        parse_lengths(f"workload.{name}", values.pop(name)) for name in ("prompt_tokens", "reply_tokens")
    )
    return StepWorkload(prompts=prompts, replies=replies, **values)


# --- components and pools --------------------------------------------------------------------------------------------


def _components(settings: PlanSettings, shapes: Mapping[str, ModelShape], *, on_cpu: bool) -> Iterator[Component]:
    generation = settings.generation
    own = settings.critic is None and (on_cpu or generation.engine == "transformers")  # a run of `gym-rm grpo`
    for name, role, model in _models(settings):
        shares = getattr(model, "shared_prompts", False)
        shares = (own or role is Role.REWARD_TRAINING) if shares is None else shares
        engine = "training" if role.trains else "gym_rm"
        yield _component(name, role, model, shapes[name], engine=engine, shared_prompts=shares)
        if role is Role.POLICY:
            changes: dict[str, Any] = {"dtype": generation.dtype or ("float32" if on_cpu else "bfloat16")}
            if generation.engine == "transformers":
                changes = {"dtype": model.dtype, "num_gpus": model.num_gpus, "tensor_parallel_size": 1}
            yield _component("generation", Role.GENERATION, generation, shapes[name], **changes)


def _component(name: str, role: Role, settings: Config, shape: ModelShape, **changes: Any) -> Component:
    """Return a component with the settings of the same names, and changes."""
    taken = {field.name for field in fields(Component)} & type(settings).model_fields.keys()
    return Component(
        name=name, role=role, shape=shape, **{field: getattr(settings, field) for field in taken} | changes
    )


def _pools(settings: PlanSettings, components: Sequence[Component]) -> tuple[tuple[str, ...], ...] | None:
    """Return the pools that the request fixes, or None. Generation with the policy's weights is in its pool.

    Raises:
        ConfigError: a component is in no pool, in two, or unknown.
    """
    names = [component.name for component in components]
    inside = {component.name for component in components if component.engine == "transformers"}
    if settings.pools == "auto":
        return None
    if settings.pools == "together":
        return (tuple(names),)
    pools = [(name,) for name in names if name not in inside] if settings.pools == "apart" else list(settings.pools)
    listed = [name for group in pools for name in group]
    wrong = [f"{name!r} is no component" for name in listed if name not in names]
    wrong += [f"{name!r} is in more than one pool" for name in dict.fromkeys(listed) if listed.count(name) > 1]
    wrong += [f"{name!r} is in no pool" for name in names if name not in listed and name not in inside]
    if inside & {*listed} and not any({"policy", *inside} <= set(group) for group in pools):
        wrong.append("generation by transformers uses the policy's weights and is listed with policy")
    if wrong:
        raise ConfigError(f"pools: {'; '.join(wrong)}. List each of {', '.join(names)} in one pool.")
    missing = inside - {*listed}
    return tuple((*group, *missing) if "policy" in group else tuple(group) for group in pools if group)
