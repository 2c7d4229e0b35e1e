"""What all exports need of a plan: its components by role, numbers of a step, and what a library cannot do."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from gym_rm.errors import ConfigError
from gym_rm.planning.plan import SIZES, ComponentPlan, Plan, PoolPlan, Role


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
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

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

    def together(self, *components: ComponentPlan | None) -> bool:
        """Return whether those of the components that there are share their GPUs."""
        return len({self.pool(each).name for each in components if each is not None}) <= 1

    @property
    def generates_itself(self) -> bool:
        """Whether replies are generated with the policy's own weights, without an engine."""
        name = "" if self.generation is None else self.generation.name
        bars = (memory for pool in self.plan.pools for memory in pool.memory if memory.component == name)
        return not any(item.name == "weights" and item.component == name for bar in bars for item in bar.persistent)

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
        """Refuse what most libraries lack: a policy that generates itself, and several reward models."""
        if self.generates_itself:
            self.refuse("generation.engine=transformers, but its replies come from vLLM; set generation.engine=vllm.")
        if len(self.reward_models) > 1:
            names = ", ".join(each.name for each in self.reward_models)
            self.refuse(f"it has one reward model in a run, the plan {len(self.reward_models)}: {names}.")

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

    def least_tokens(self, *components: ComponentPlan | None) -> int:
        """Return the smallest token budget of components that have one setting together; note others."""
        found = {self.path(each): each.max_num_batched_tokens for each in components if each is not None}
        if len(set(found.values())) > 1:
            shown = ", ".join(f"{path}.max_num_batched_tokens={tokens}" for path, tokens in found.items())
            self.note(f"one number of tokens for several models, the smallest of {shown}.")
        return min(found.values())

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
    if Role.REWARD_TRAINING in first:
        parts.refuse(f"{first[Role.REWARD_TRAINING].name} trains a reward model, which is a run of its own.")
    return parts


def options_of(reward: ComponentPlan) -> dict[str, Any]:
    """Return the options of `load_scorer` for one copy of a reward model."""
    names = ("dtype", "quantization", "max_num_batched_tokens")
    return {name: value for name in names if (value := getattr(reward, name)) is not None}
