"""How a plan becomes settings: the plan by roles, and tables of a library's settings and of the values that it fixes.

The tests change every field of a plan: an export has it in its text, or is refused with the field's name.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from gym_rm.errors import ConfigError
from gym_rm.planning.plan import SIZES, SIZES_OF, ComponentPlan, Plan, PoolPlan, Role

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
class Parts:
    """A plan by roles; `refusals` collects why the library cannot follow it, `notes` what it does otherwise."""

    plan: Plan
    library: str
    policy: ComponentPlan
    generation: ComponentPlan | None
    reference: ComponentPlan | None
    critic: ComponentPlan | None
    reward_models: tuple[ComponentPlan, ...]
    refusals: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    @property
    def reward_model(self) -> ComponentPlan | None:
        """The first reward model."""
        return self.reward_models[0] if self.reward_models else None

    def of(self, subject: str) -> tuple[Any, ...]:
        """Return the components that a row is for, or the plan."""
        found = self.reward_models if subject == "reward_model" else (getattr(self, subject),)
        return tuple(each for each in found if each is not None)

    def path(self, subject: ComponentPlan | Plan) -> str:
        """Return the place of a component, or of the work of a step, in a request."""
        if isinstance(subject, Plan):
            return "workload"
        return f"reward_models.{subject.name}" if subject.role is Role.REWARD_MODEL else subject.name

    def pool(self, component: ComponentPlan) -> PoolPlan:
        """Return the pool of a component."""
        return self.plan.pool_of(component.name)

    def others_of(self, component: ComponentPlan) -> list[str]:
        """Return the names of what is in the pool of a reward model besides reward models."""
        return [each.name for each in self.pool(component).components if each not in self.reward_models]

    def together(self, *components: ComponentPlan | None) -> bool:
        """Return whether those of the components that there are share their GPUs."""
        return len({self.pool(each).name for each in components if each is not None}) <= 1

    @property
    def generates_itself(self) -> bool:
        """Whether replies are generated with the policy's own weights, without an engine."""
        name = "" if self.generation is None else self.generation.name
        bars = (memory for pool in self.plan.pools for memory in pool.memory if memory.component == name)
        return not any(item.name == "weights" and item.component == name for bar in bars for item in bar.persistent)

    @property
    def max_total(self) -> int:
        """Tokens of the longest conversation."""
        plan = self.plan
        return plan.prompt_tokens + plan.turns * plan.reply_tokens + (plan.turns - 1) * plan.turn_tokens

    def refuse(self, reason: str) -> None:
        """Collect a reason against the export."""
        self.refusals[reason] = None

    def note(self, text: str) -> None:
        """Collect a note."""
        self.notes[text] = None

    def require(self) -> None:
        """Raise ConfigError if there are reasons against the export."""
        if self.refusals:
            count = "1 reason" if len(self.refusals) == 1 else f"{len(self.refusals)} reasons"
            reasons = "".join(f"\n  {each}" for each in self.refusals)
            raise ConfigError(f"{self.library} cannot follow this plan, {count}:{reasons}")

    def serve(self, reward: ComponentPlan) -> str:
        """Note the command that serves a reward model on GPUs of its own, and return the server's address."""
        port = 5000 + self.reward_models.index(reward)
        options = options_of(reward) | {name: size for name in SIZES if (size := getattr(reward, name)) > 1}
        given = " ".join(f"--option {name}={value}" for name, value in options.items())
        where = f"on the {self.plan.processor}s of {reward.name}"
        self.note(f"first, {where}: gym-rm serve {shlex.quote(reward.model)} --port {port} {given}")
        return f"http://127.0.0.1:{port}"

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

    def memory_share(self, component: ComponentPlan) -> float:
        """Return the share of a GPU's memory that a component has while it works itself, rounded up to a hundredth."""
        pool = self.pool(component)
        own = [
            sum(item.bytes for item in phase.persistent if item.component == component.name) + phase.peak_instant.bytes
            for phase in pool.memory
            if phase.component == component.name
        ]
        share = math.ceil(max(own, default=0.0) / pool.gpu_memory * 100 - 1e-9) / 100
        if not 0 < share < 1:
            self.refuse(f"{component.name} takes {share:.0%} of a GPU's memory; it must be less than all of it.")
        return share


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
    if Role.REWARD_TRAINING in first:
        parts.refuse(f"{first[Role.REWARD_TRAINING].name} trains a reward model, which is a run of its own.")
    return parts


def options_of(reward: ComponentPlan) -> dict[str, Any]:
    """Return the options of `load_scorer` for one copy of a reward model."""
    names = ("dtype", "quantization", "max_num_batched_tokens")
    return {name: value for name in names if (value := getattr(reward, name)) is not None}


# --- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A setting of a library for each subject that the plan has.

    Its value is the subject's field of a name, or that of a function of the parts and the subject. It is left out where
    this is None, or `when` does not hold.
    """

    name: str
    of: Subject
    value: str | Callable[[Parts, Any], Any]
    when: Callable[[Parts], bool] = lambda parts: True


@dataclass(frozen=True, slots=True)
class Only:
    """A field of subjects that the library fixes at some values: another is refused, or noted if it is harmless.

    What the library does instead is for the message. It is harmless if it takes no more memory than planned.
    """

    of: str
    name: str
    values: tuple[Any, ...] | Callable[[Parts, Any], tuple[Any, ...]]
    does: str
    harmless: bool = False

    def check(self, parts: Parts, subject: Any) -> None:
        """Refuse or note another value, by its place in a request."""
        value, path = read(subject, self.name), f"{parts.path(subject)}.{self.name}"
        values = self.values(parts, subject) if callable(self.values) else self.values
        if value is None or value in values:
            return
        text = f"{path}={show(value)}, but {self.does}"
        if self.harmless:
            parts.note(f"{text}.")
        else:
            parts.refuse(f"{text}; set {path}={show(values[0])}.")


@dataclass(frozen=True, slots=True)
class Library:
    """How a library is told what a plan says.

    Attributes:
        rows: its settings in their order, and the fields that it fixes.
        line: returns a setting as the library reads it.
        check: collects what the library cannot do, and what it does otherwise.
        commands: returns the lines before the settings.
    """

    rows: tuple[Row | Only, ...]
    line: Callable[[str, Any], str]
    check: Callable[[Parts], None]
    commands: Callable[[Parts], list[str]] = lambda parts: []

    def write(self, plan: Plan, name: str) -> Flags:
        """Return the settings with which the library of this name follows a plan, with the notes.

        Raises:
            ConfigError: there are reasons against the export.
        """
        parts = divide(plan, name)
        self.check(parts)
        check(parts, [row for row in self.rows if isinstance(row, Only)])
        parts.require()
        lines = self.commands(parts)
        written = [row for row in self.rows if isinstance(row, Row) and row.when(parts)]
        for row, subject in [(each, subject) for each in written for subject in parts.of(each.of)]:
            value = read(subject, row.value) if isinstance(row.value, str) else row.value(parts, subject)
            lines += [] if value is None else [self.line(row.name, value)]
        parts.require()
        return Flags(name, tuple(lines), tuple(parts.notes))


def check(parts: Parts, rows: Iterable[Only]) -> None:
    """Refuse or note what a library fixes otherwise, and models of which the plan has only sizes."""
    for row in rows:
        for subject in (each for name in row.of.split() for each in parts.of(name)):
            row.check(parts, subject)
    for each in (parts.policy, *parts.of("critic"), *parts.reward_models):
        if each.model.startswith(SIZES_OF):
            parts.refuse(f"the plan has only sizes for {each.name}; set {parts.path(each)}.model.")


def read(subject: Any, name: str) -> Any:
    """Return a field, such as `dtype` or `lora.rank`; None for one of adapters that there are not."""
    for part in name.split("."):
        subject = getattr(subject, part, None)
    return subject


def show(value: Any) -> str:
    """Return a value as a request has it."""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def hydra(name: str, value: Any) -> str:
    """Return a setting as a shell and Hydra read it: a text with other letters than those of a path is quoted."""
    if isinstance(value, str) and not re.fullmatch(r"[\w./:+-]*", value):
        return shlex.quote(f"{name}={json.dumps(value)}")
    return f"{name}={show(value)}"


def always(value: Any) -> Callable[[Parts, Any], Any]:
    """Return a function for a setting that does not depend on the plan."""
    return lambda parts, subject: value


def same(of: str, name: str, does: str, *, harmless: bool = False) -> Only:
    """Return the row of a field that has the policy's value."""
    return Only(of, name, lambda parts, _: (getattr(parts.policy, name),), f"{does}, as policy.{name}", harmless)


def _whole(_: Parts, policy: ComponentPlan) -> tuple[int]:
    return (max(round(policy.lora.alpha if policy.lora else 0), 1),)


# What several libraries fix.
USUAL = (
    Only("policy critic", "shared_prompts", (False,), "every reply has its prompt in its own row"),
    Only("policy critic", "lora.alpha", _whole, "it reads a whole number"),
    Only("plan", "turns", (1,), "its run has one reply to a prompt; more need an agent loop of your own"),
    same("reference", "model", "its reference is a copy of the policy"),
)
SHARDED = Only(
    "policy reference critic",
    "fsdp_size",
    lambda _, each: (each.fsdp_size * each.num_replicas, 1),
    "it shards a model over all of its GPUs, or over none",
)
