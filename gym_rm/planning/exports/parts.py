"""What all exports need of a plan: its components by role, the shapes of pools, and the numbers of a step."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from gym_rm.errors import ConfigError
from gym_rm.planning.plan import ComponentPlan, Plan, PoolPlan, Role
from gym_rm.planning.settings import WorkloadSettings


@dataclass(frozen=True, slots=True)
class Flags:
    """Settings for a library.

    Attributes:
        library: its name.
        lines: the settings, one a line, in the library's own form.
        notes: what the library does otherwise than the plan, or what has to be done besides.
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
    """A plan by roles, with the reasons that are found against an export.

    Attributes:
        plan: the plan.
        workload: the work of a step; None if not given.
        library: name for messages.
        policy, generation, reference, critic: the components; None for those that the plan does not have.
        reward_models: the reward models.
        refusals: why the library cannot follow the plan; `finish` raises them all.
        notes: notes of the result.
    """

    plan: Plan
    workload: WorkloadSettings | None
    library: str
    policy: ComponentPlan
    generation: ComponentPlan | None
    reference: ComponentPlan | None
    critic: ComponentPlan | None
    reward_models: tuple[ComponentPlan, ...]
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

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

    def refuse(self, reason: str) -> None:
        """Collect a reason against the export."""
        if reason not in self.refusals:
            self.refusals.append(reason)

    def note(self, text: str) -> None:
        """Collect a note."""
        if text not in self.notes:
            self.notes.append(text)

    def finish(self, lines: list[str]) -> Flags:
        """Return the lines with the notes.

        Raises:
            ConfigError: there are reasons against the export.
        """
        if self.refusals:
            count = "1 reason" if len(self.refusals) == 1 else f"{len(self.refusals)} reasons"
            raise ConfigError(
                f"{self.library} cannot follow this plan, {count}:" + "".join(f"\n  {each}" for each in self.refusals)
            )
        if self.workload is None:
            self.note("batch sizes and lengths are left out, because the workload was not given.")
        return Flags(self.library, tuple(lines), tuple(self.notes))

    def memory_share(self, component: ComponentPlan, *, instants: bool = True) -> float:
        """Return the share of a GPU's memory that a component has while it works itself, rounded up to a hundredth.

        Args:
            component: the component.
            instants: also what comes at an instant, such as activations; else only what stays, such as the KV cache.
        """
        pool = self.pool(component)
        most = 0.0
        for phase in pool.memory:
            if phase.component == component.name:
                size = sum(item.bytes for item in phase.persistent if item.component == component.name)
                most = max(most, size + (phase.largest.bytes if instants and phase.instants else 0.0))
        share = math.ceil(most / pool.gpu_memory * 100 - 1e-9) / 100
        if not 0 < share < 1:
            self.refuse(f"{component.name} takes {share:.0%} of a GPU's memory; it must be less than all of it.")
        return share

    def update_rows(self) -> int:
        """Return the conversations of one update; refuse a number that the ranks of the policy do not divide."""
        groups = self.policy.fsdp_size * self.policy.num_replicas
        rows, rest = divmod(self.plan.conversations, self.updates)
        if rest or rows % groups:
            parts = f" in {self.updates} updates" if self.updates > 1 else ""
            self.refuse(
                f"{self.plan.conversations} conversations{parts} are not divisible by the policy's {groups} "
                "data-parallel ranks; plan with another number of GPUs or prompts."
            )
        return rows

    @property
    def updates(self) -> int:
        """Optimizer updates of a step."""
        return self.workload.updates_per_step if self.workload else 1

    @property
    def max_lengths(self) -> tuple[int, int] | None:
        """Longest prompt and longest reply; None if they are not in the workload."""
        if self.workload is None or self.workload.rows is not None:
            return None
        found = []
        for length in (self.workload.prompt_tokens, self.workload.reply_tokens):
            value = length.get("max") if isinstance(length, dict) else length
            if value is None:
                return None
            found.append(math.ceil(value))
        return found[0], found[1]

    @property
    def max_total(self) -> int | None:
        """Tokens of the longest conversation; None if not known."""
        lengths, workload = self.max_lengths, self.workload
        if lengths is None or workload is None:
            return None
        return lengths[0] + workload.turns * lengths[1] + (workload.turns - 1) * workload.turn_tokens


def divide(plan: Plan, workload: WorkloadSettings | None, library: str) -> Parts:
    """Return the parts of a plan.

    Raises:
        ConfigError: the plan trains no policy, or the workload is another than that of the plan.
    """
    components = [each for pool in plan.pools for each in pool.components]
    by_role = {role: [each for each in components if each.role is role] for role in Role}
    if not by_role[Role.POLICY]:
        has = ", ".join(each.name for each in components)
        raise ConfigError(f"flags for {library} are for reinforcement learning, but the plan has no policy: {has}.")
    if workload is not None and workload.num_prompts * workload.group_size != plan.conversations:
        raise ConfigError(
            f"the workload has {workload.num_prompts} x {workload.group_size} conversations in a step, the plan "
            f"{plan.conversations}; pass the workload that the plan was made for."
        )

    def first(role: Role) -> ComponentPlan | None:
        return by_role[role][0] if by_role[role] else None

    parts = Parts(
        plan,
        workload,
        library,
        by_role[Role.POLICY][0],
        first(Role.GENERATION),
        first(Role.REFERENCE),
        first(Role.CRITIC),
        tuple(by_role[Role.REWARD_MODEL]),
    )
    for each in components:
        if each.dtype == "int8":
            parts.refuse(f"{each.name} has int8 weights, which only gym_rm's scorers have; plan with bfloat16.")
    if by_role[Role.REWARD_TRAINING]:
        parts.refuse(f"{by_role[Role.REWARD_TRAINING][0].name} trains a reward model, which is a run of its own.")
    return parts


def flag(value: bool) -> str:
    """Return a boolean as YAML and Hydra write it."""
    return "true" if value else "false"
