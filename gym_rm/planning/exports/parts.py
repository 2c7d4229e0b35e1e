"""What all exports need of a plan: its components by role, numbers of a step, and what a library cannot do.

An export is a table: a row says which setting of the library has which value of the plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from gym_rm.errors import ConfigError
from gym_rm.lora_settings import LoRASettings
from gym_rm.planning.plan import ComponentPlan, Plan, PoolPlan, Role

Subject: TypeAlias = Literal["policy", "generation", "reference", "critic", "reward_model", "plan"]


@dataclass(frozen=True, slots=True)
class Flags:
    """Settings for a library, one a line in its own form.

    The notes say what the library does otherwise than the plan, or what has to be done besides.
    """

    library: str
    lines: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def text(self) -> str:
        """The lines, after the notes as comments."""
        return "\n".join((*(f"# {note}" for note in self.notes), *self.lines))


@dataclass(frozen=True, slots=True)
class Row:
    """A setting of a library.

    Attributes:
        name: the setting.
        of: whose value it has; a row whose subject the plan does not have is left out.
        value: the name of the subject's field, or a function of the parts and the subject; a setting whose value is
            None is left out.
    """

    name: str
    of: Subject
    value: str | Callable[[Parts, Any], Any]


@dataclass(frozen=True, slots=True)
class Library:
    """How a library is told what a plan says.

    Attributes:
        rows: its settings, in their order.
        line: returns a setting as the library reads it; None leaves it out.
        check: collects what the library cannot do, and what it does otherwise.
        commands: returns the lines before the settings.
    """

    rows: tuple[Row, ...]
    line: Callable[[str, Any], str | None]
    check: Callable[[Parts], None]
    commands: Callable[[Parts], list[str]] = lambda parts: []


@dataclass(frozen=True, slots=True)
class Parts:
    """A plan by roles; `refusals` collects why the library cannot follow it, `notes` what it does otherwise."""

    plan: Plan
    library: str
    policy: ComponentPlan
    generation: ComponentPlan | None
    reference: ComponentPlan | None
    critic: ComponentPlan | None
    reward_models: tuple[ComponentPlan, ...]
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def reward_model(self) -> ComponentPlan | None:
        """The first reward model."""
        return self.reward_models[0] if self.reward_models else None

    def pool(self, component: ComponentPlan) -> PoolPlan:
        """Return the pool of a component."""
        return self.plan.pool_of(component.name)

    def together(self, *components: ComponentPlan | None) -> bool:
        """Return whether those of the components that there are share their GPUs."""
        return len({self.pool(each).name for each in components if each is not None}) <= 1

    def shape(self, component: ComponentPlan) -> tuple[int, int]:
        """Return nodes, and GPUs on each, of a component's pool; refuse other numbers of GPUs from node to node."""
        counts = Counter(address.node for address in self.pool(component).gpus)
        if len(set(counts.values())) > 1:
            found = ", ".join(f"{count} of node {node}" for node, count in sorted(counts.items()))
            self.refuse(
                f"{component.name} is on {found}, but {self.library} takes the same number of GPUs of each node; plan "
                f"with num_gpus: {max(counts.values()) * len(counts)} for it."
            )
        return len(counts), max(counts.values())

    def nodes(self, component: ComponentPlan) -> int:
        """Return the nodes of a component's pool."""
        return self.shape(component)[0]

    def gpus_per_node(self, component: ComponentPlan) -> int:
        """Return the GPUs of a component's pool on each of its nodes."""
        return self.shape(component)[1]

    def refuse(self, reason: str) -> None:
        """Collect a reason against the export."""
        if reason not in self.refusals:
            self.refusals.append(reason)

    def note(self, text: str) -> None:
        """Collect a note."""
        if text not in self.notes:
            self.notes.append(text)

    def require(self) -> None:
        """Raise ConfigError if there are reasons against the export."""
        if self.refusals:
            count = "1 reason" if len(self.refusals) == 1 else f"{len(self.refusals)} reasons"
            raise ConfigError(
                f"{self.library} cannot follow this plan, {count}:" + "".join(f"\n  {each}" for each in self.refusals)
            )

    def refuse_usual(self) -> None:
        """Refuse what most libraries lack: a policy that generates itself, several reward models, other optimizers."""
        if self.generation is None:
            self.refuse("it needs an engine for generation; plan with generation.engine: vllm.")
        if len(self.reward_models) > 1:
            names = ", ".join(each.name for each in self.reward_models)
            self.refuse(f"it has one reward model in a run, the plan {len(self.reward_models)}: {names}.")
        for each in (self.policy, self.critic):
            if each is not None and each.optimizer not in (None, "adamw"):
                self.refuse(f"it trains with adamw, the plan has {each.name}.optimizer={each.optimizer}.")

    def others_of(self, component: ComponentPlan) -> list[str]:
        """Return the names of what is in the pool of a reward model besides reward models."""
        return [each.name for each in self.pool(component).components if each not in self.reward_models]

    def memory_share(self, component: ComponentPlan) -> float:
        """Return the share of a GPU's memory that a component has while it works itself, rounded up to a hundredth."""
        pool = self.pool(component)
        most = 0.0
        for phase in pool.memory:
            if phase.component == component.name:
                size = sum(item.bytes for item in phase.persistent if item.component == component.name)
                most = max(most, size + phase.largest.bytes)
        share = math.ceil(most / pool.gpu_memory * 100 - 1e-9) / 100
        if not 0 < share < 1:
            self.refuse(f"{component.name} takes {share:.0%} of a GPU's memory; it must be less than all of it.")
        return share

    def update_rows(self) -> int:
        """Return the conversations of one update; refuse a number that the ranks of the policy do not divide."""
        groups = self.policy.fsdp_size * self.policy.num_replicas
        updates = self.plan.updates_per_step
        rows, rest = divmod(self.plan.conversations, updates)
        if rest or rows % groups:
            parts = f" in {updates} updates" if updates > 1 else ""
            self.refuse(
                f"{self.plan.conversations} conversations{parts} are not divisible by the policy's {groups} "
                "data-parallel ranks; plan with another number of GPUs or prompts."
            )
        return rows

    @property
    def max_total(self) -> int:
        """Tokens of the longest conversation."""
        plan = self.plan
        return plan.prompt_tokens + plan.turns * plan.reply_tokens + (plan.turns - 1) * plan.turn_tokens


def divide(plan: Plan, library: str) -> Parts:
    """Return the parts of a plan.

    Raises:
        ConfigError: the plan trains no policy.
    """
    components = [each for pool in plan.pools for each in pool.components]
    first = {each.role: each for each in reversed(components)}
    if Role.POLICY not in first:
        has = ", ".join(each.name for each in components)
        raise ConfigError(f"flags for {library} are for reinforcement learning, but the plan has no policy: {has}.")
    parts = Parts(
        plan,
        library,
        first[Role.POLICY],
        first.get(Role.GENERATION),
        first.get(Role.REFERENCE),
        first.get(Role.CRITIC),
        tuple(each for each in components if each.role is Role.REWARD_MODEL),
    )
    if plan.processor == "CPU" and library != "gym-rm":
        parts.refuse("it trains on GPUs, and the plan is for CPUs; print it --for gym-rm.")
    for each in components:
        if each.quantization is not None and library != "gym-rm":
            parts.refuse(f"{each.name} has {each.quantization} weights, which only gym_rm's scorers have.")
        if each.role is Role.REWARD_MODEL and each.fsdp_size > 1 and library != "gym-rm":
            parts.refuse(f"{each.name} is divided by FSDP, as only gym_rm's scorers are.")
    if Role.REWARD_TRAINING in first:
        parts.refuse(f"{first[Role.REWARD_TRAINING].name} trains a reward model, which is a run of its own.")
    return parts


def write(parts: Parts, library: Library) -> Flags:
    """Return the settings of a library, with the notes.

    Raises:
        ConfigError: there are reasons against the export.
    """
    library.check(parts)
    parts.require()
    lines = library.commands(parts)
    for row in library.rows:
        subject = getattr(parts, row.of)
        if subject is not None:
            value = getattr(subject, row.value) if isinstance(row.value, str) else row.value(parts, subject)
            line = None if value is None else library.line(row.name, value)
            lines += [] if line is None else [line]
    parts.require()
    return Flags(parts.library, tuple(lines), tuple(parts.notes))


def hydra(name: str, value: Any) -> str:
    """Return a setting as YAML and Hydra read it."""
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"


def adapters(rank: str, alpha: str, *others: tuple[str, Any]) -> tuple[Row, ...]:
    """Return the rows of LoRA adapters on all linear layers of the policy."""

    def if_any(name: str, value: Callable[[LoRASettings], Any]) -> Row:
        return Row(name, "policy", lambda parts, policy: value(policy.lora) if policy.lora else None)

    constants = (if_any(name, lambda _, value=value: value) for name, value in others)  # type: ignore[misc]
    return if_any(rank, lambda lora: lora.rank), if_any(alpha, lambda lora: f"{lora.alpha:g}"), *constants


def always(value: Any) -> Callable[[Parts, Any], Any]:
    """Return a function for a setting that does not depend on the plan."""
    return lambda parts, subject: value
