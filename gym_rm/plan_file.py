"""The options that a plan of `gym-rm plan` prescribes, and the check that no given option exceeds them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gym_rm.documents import read_mapping
from gym_rm.errors import ConfigError

WEIGHT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The plain options of a plan.

    Attributes:
        name: its file, or `the plan`, for messages.
        options: those of a step, and by role: `policy`, `generation`, `reference`, and each of the `reward_models`.
        part: the reward model that was asked for (`plan.json#name`); None for the only one.
    """

    name: str
    options: Mapping[str, Any]
    part: str | None = None

    def get(self, *place: str) -> Any:
        """Return an option, such as `get("policy", "fsdp_size")`; None if the plan does not have it."""
        value: Any = self.options
        for key in place:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def line(self, *place: str) -> str:
        """Return an option in words: `plan.json: options.policy.fsdp_size is 8`."""
        return f"{self.name}: options.{'.'.join(place)} is {self.get(*place)}"

    def limit(self, name: str, value: Any, *place: str) -> None:
        """Raise ConfigError if a number, or the size of a dtype, is more than the plan has at a place."""
        most = self.get(*place)
        if most is None:
            raise ConfigError(f"{self.name} is not complete: it has no options.{'.'.join(place)}.")
        size, limit = WEIGHT_BYTES.get(value, value), WEIGHT_BYTES.get(most, most)
        if isinstance(size, int | float) and size > limit:
            raise ConfigError(f"{name}={value} exceeds the plan: {self.line(*place)}.")


def read_plan_file(source: Any) -> PlanFile:
    """Return the options of a plan from its file (`plan.json`, or `plan.json#name`), its values, or a `Plan`.

    Raises:
        ConfigError: it is not a plan.
    """
    values, name, part = source, "the plan", ""
    if isinstance(source, str | os.PathLike):
        name, _, part = os.fspath(source).partition("#")
        values = read_mapping(name, "a plan")
    elif hasattr(source, "to_dict"):
        values = source.to_dict()
    options = values.get("options") if isinstance(values, Mapping) else None
    if not isinstance(options, Mapping):
        raise ConfigError(f"{name} is not a plan; make one with `gym-rm plan REQUEST -o plan.json`.")
    return PlanFile(name, options, part or None)


def planned_scorer(
    source: Any, reward_model: Any, options: Mapping[str, Any], *, conversations: int
) -> tuple[Any, dict[str, Any]]:
    """Return the reward model and the options of `load_scorer` that follow a plan.

    Args:
        source: the plan, as for `read_plan_file`.
        reward_model: what the user gave; None for the plan's.
        options: what the user gave; they may be smaller than the plan's.
        conversations: conversations that are scored in one call.

    Raises:
        ConfigError: the plan has no such reward model, or something exceeds the plan; the message names its line.
    """
    plan = read_plan_file(source)
    place = ("reward_models", _reward_model(plan))
    plan.limit("num_envs", conversations, "conversations")
    planned = {name: value for name, value in plan.get(*place).items() if name != "model" and value != 1}
    for name, value in options.items():
        if plan.get(*place, name) is not None:
            plan.limit(name, str(value).removeprefix("torch.") if name == "dtype" else value, *place, name)
    return planned_model(plan, *place) if reward_model is None else reward_model, {**planned, **options}


def _reward_model(plan: PlanFile) -> str:
    """Return the name of the reward model that was asked for, or of the only one."""
    known = list(plan.get("reward_models") or ())
    if plan.part is not None and plan.part not in known:
        raise ConfigError(f"{plan.name} has no reward model {plan.part!r}; it has {', '.join(known) or 'none'}.")
    if plan.part is None and len(known) != 1:
        choices = ", ".join(f"{plan.name}#{name}" for name in known)
        hint = f"name one: plan={choices!r}." if known else "plan reward_models too."
        raise ConfigError(f"{plan.name} has {len(known)} reward models; {hint}")
    return plan.part or known[0]


def planned_model(plan: PlanFile, *place: str) -> str:
    """Return the folder or hub id of a component.

    Raises:
        ConfigError: the plan was made from sizes alone.
    """
    model = plan.get(*place, "model")
    if model is None:
        raise ConfigError(
            f"the plan has only sizes for {place[-1]}; pass its folder or hub id (reward_model or policy.model)."
        )
    return str(model)
