"""What a component could choose in a pool of a given size, with its memory and its seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from gym_rm.planning.gpu_memory import component_memory
from gym_rm.planning.hardware.devices import Cluster
from gym_rm.planning.phase_clock import PhaseClock, Site
from gym_rm.planning.plan import Phase, Role
from gym_rm.planning.plan_request import Choice, Component, PlanRequest, StepWorkload
from gym_rm.planning.step_times import component_times, sync_times, wake_times

PHASES = tuple(Phase)
SLOTS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)  # conversations that an engine generates at a time
LARGEST_BATCH = 65536  # tokens of a forward; more do not make products faster
SMALLEST_BATCH = 512
ZERO = (0.0,) * len(PHASES)

Seconds: TypeAlias = tuple[float, ...]
"""Seconds of each phase, in the order of `PHASES`."""


@dataclass(frozen=True, slots=True)
class Option:
    """One choice of a component, with what it takes.

    Attributes:
        choice: the choice.
        resident: bytes of each GPU while other components of the pool work.
        extra: bytes on top of `resident` at the peak of its own work.
        seconds: of each phase.
    """

    choice: Choice
    resident: float
    extra: float
    seconds: Seconds

    @property
    def peak(self) -> float:
        """Bytes of each GPU at the peak of its own work."""
        return self.resident + self.extra


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """The GPUs of a pool as its components see them.

    Attributes:
        num_gpus: number of GPUs.
        node_gpus: GPUs of the largest node.
        per_node: GPUs of the pool that are in the same node at least: all, an equal part, or 1 for any place.
    """

    num_gpus: int
    node_gpus: int
    per_node: int

    @property
    def spans(self) -> bool:
        """Whether the pool is in more than one node."""
        return self.per_node < self.num_gpus

    def of(self, component: Component) -> PoolPlace:
        """Return the place as a component sees it: only training and its weights go between nodes."""
        return self if component.role.trains else replace(self, per_node=self.num_gpus)

    def site(self, cluster: Cluster) -> Site:
        """Return the place as the formulas of time need it."""
        return Site(cluster.device, cluster.network, self.num_gpus, self.per_node)


def places(size: int, node_gpus: int) -> Iterator[PoolPlace]:
    """Yield the ways to place so many GPUs: in one node, in equal parts of as few nodes as can be, and anywhere."""
    nodes = max(math.ceil(size / node_gpus), 2)
    parts = {size if size <= node_gpus else 1, size // nodes if size % nodes == 0 else 1, 1}
    yield from (PoolPlace(size, node_gpus, part) for part in sorted(parts, reverse=True))


KnownSizes: TypeAlias = dict[tuple[str, Choice], tuple[float, float]]
"""Bytes that stay and at the peak, by component and choice."""


def awake_options(
    component: Component, place: PoolPlace, request: PlanRequest, *, together: bool, known: KnownSizes
) -> list[Option]:
    """Return the choices of a component in a pool that fit a GPU while nothing else is awake; it does not sleep.

    `together` is whether the policy and generation share the pool. Sizes of earlier calls are `known`; new ones are
    added.
    """
    device, site = request.cluster.device, place.site(request.cluster)
    share = component.gpu_memory_utilization if component.engine == "vllm" else 1.0
    capacity = share * device.memory.value - device.reserved.value
    options = []
    for choice in _choices(component, place, request):
        alike = choice if component.role.trains else replace(choice, num_replicas=1)  # replicas share nothing
        if (component.name, alike) not in known:
            memory = component_memory(component, alike, request.workload, device)
            known[component.name, alike] = (sum(item.bytes for item in memory.resident), memory.peak)
        resident, peak = known[component.name, alike]
        if peak <= capacity:
            clocks = phase_clocks(component, choice, request, site, together=together)
            seconds = tuple(clocks[phase].total if phase in clocks else 0.0 for phase in PHASES)
            options.append(Option(choice, resident, peak - resident, seconds))
    return options


def with_sleeping(component: Component, awake: Sequence[Option], request: PlanRequest, *, alone: bool) -> list[Option]:
    """Return the options with those that sleep while others of the pool work; a component alone never does.

    On a CPU none does, because the host's memory is the memory that they would leave.
    """
    policy_is_shared = component.role is Role.POLICY and generates_with_policy(request)
    stays = component.engine == "transformers" or policy_is_shared or component.sleeps is False
    if alone or stays or request.cluster.device.is_cpu:
        return [*awake]
    asleep = []
    for option in awake:
        waking = wake_times(component, option.resident, request.cluster.device).total
        seconds = (option.seconds[0] + waking, *option.seconds[1:])
        asleep.append(Option(replace(option.choice, sleeps=True), 0.0, option.peak, seconds))
    return asleep if component.sleeps else [*awake, *asleep]


def undominated(options: Sequence[Option], *, spans: bool = False) -> list[Option]:
    """Return the options that no other one equals or beats in memory and in every phase, the fastest first.

    In a pool of several nodes (`spans`), only an option whose tensor-parallel groups fit wherever the other's do beats
    it.
    """
    kept: list[Option] = []
    for option in sorted(options, key=lambda one: (sum(one.seconds), one.resident, one.extra)):
        worse = any(
            other.resident <= option.resident
            and other.peak <= option.peak
            and other.extra <= option.extra
            and not (spans and option.choice.unit % other.choice.unit)
            and all(a <= b for a, b in zip(other.seconds, option.seconds, strict=True))
            for other in kept
        )
        if not worse:
            kept.append(option)
    return kept


def phase_clocks(
    component: Component, choice: Choice, request: PlanRequest, site: Site, *, together: bool, crosses: bool = False
) -> dict[Phase, PhaseClock]:
    """Return the seconds of each phase and what they are spent on, without waking.

    `together` is whether the policy and generation share the pool, `crosses` whether they are in different nodes.
    """
    work, shared = request.workload, generates_with_policy(request)
    # With one update, and replies from the policy's own forward, the log-probabilities are those of the update.
    # Another engine computes slightly different ones.
    old_log_probs = work.updates_per_step * work.epochs > 1 or not shared
    phases = component_times(component, choice, work, site, old_log_probs=old_log_probs)
    if component.role is Role.POLICY and not shared:
        phases[Phase.SYNC] = sync_times(component, choice, site, together=together, crosses=crosses)
    return phases


def generates_with_policy(request: PlanRequest) -> bool:
    """Return whether generation has no weights of its own."""
    return any(component.engine == "transformers" for component in request.components)


# --- the choices -----------------------------------------------------------------------------------------------------


def tensor_parallel_sizes(component: Component, node_gpus: int) -> list[int]:
    """Return the tensor-parallel sizes that the model allows inside a node."""
    if component.tensor_parallel_size is not None:
        return [component.tensor_parallel_size]
    if component.engine == "transformers":
        return [1]
    return [size for size in range(1, node_gpus + 1) if not divisors_violated(component, size)]


def divisors_violated(component: Component, size: int) -> list[tuple[str, int]]:
    """Return what a tensor-parallel size must divide and does not: names and numbers."""
    shape = component.shape
    inner = math.gcd(*(layer.intermediate for layer, _ in shape.layers))
    needed = [("attention heads", shape.heads), ("numbers inside the MLP", inner)]
    # vLLM copies key and value heads if there are fewer than GPUs.
    if component.engine != "vllm" or (shape.kv_heads % size and size % shape.kv_heads):
        needed.append(("key and value heads", shape.kv_heads))
    if component.role.trains and shape.is_language_model:
        needed.append(("tokens of the vocabulary", shape.vocabulary))
    return [(name, number) for name, number in needed if number % size]


def _choices(component: Component, place: PoolPlace, request: PlanRequest) -> Iterator[Choice]:
    """Yield the ways to spread a component over the GPUs of its pool, all awake."""
    work, gpus = request.workload, place.num_gpus
    most = work.conversations // work.updates_per_step if component.role.trains else work.conversations
    whole = component.role is Role.POLICY and generates_with_policy(request)
    for tp in tensor_parallel_sizes(component, place.node_gpus):
        if (whole and tp > 1) or gpus % tp:
            continue
        for fsdp in _fsdp_sizes(component, place, tp, whole=whole):
            replicas = gpus // (tp * fsdp)
            # The ranks of a reward model compute the same rows, with gathered weights; others divide them.
            ranks = replicas * (1 if component.role is Role.REWARD_MODEL else fsdp)
            if component.num_replicas not in (None, replicas) or ranks > most:
                continue
            base = Choice(tp, fsdp, replicas, one_node=not component.role.trains)
            if component.role is Role.GENERATION:
                yield from _generation_choices(component, base, work)
                continue
            given = component.gradient_checkpointing
            for again in (False,) if not component.role.trains else (False, True) if given is None else (given,):
                for tokens in batch_sizes(component, work, ranks):
                    yield replace(base, max_num_batched_tokens=tokens, gradient_checkpointing=again)


def _fsdp_sizes(component: Component, place: PoolPlace, tp: int, *, whole: bool) -> list[int]:
    """Return the FSDP sizes: up to the groups of one node, and all groups of the pool where it trains.

    A model that only computes forwards stays in one node, and is divided further than its heads can be.
    """
    groups = place.num_gpus // tp
    if whole or component.role is Role.GENERATION:
        return [1]
    given, inside = component.fsdp_size, max(place.node_gpus // tp, 1)
    if not component.role.trains:
        more = max(tensor_parallel_sizes(component, place.node_gpus), default=1)
        alone = tp == 1 and component.quantization is None  # as load_scorer combines them
        sizes = [1, *range(more + 1, inside + 1)] if given is None else [given]
        return [size for size in sizes if groups % size == inside % size == 0 and (alone or size == 1)]
    if given is not None:
        return [given] if groups % given == 0 else []
    return sorted({groups} | {size for size in range(1, inside + 1) if groups % size == 0})


def _generation_choices(component: Component, base: Choice, work: StepWorkload) -> Iterator[Choice]:
    share = math.ceil(work.conversations / base.num_replicas)
    tokens = max(8192, int(work.prompts.maximum))
    for slots in (component.max_num_seqs,) if component.max_num_seqs else sorted({min(each, share) for each in SLOTS}):
        yield replace(base, max_num_batched_tokens=tokens, max_num_seqs=slots)


def batch_sizes(component: Component, work: StepWorkload, ranks: int) -> list[int]:
    """Return the token budgets to try: at least the longest conversation, at most the work of a rank."""
    if component.max_num_batched_tokens is not None:
        return [component.max_num_batched_tokens]
    least = max(work.longest, SMALLEST_BATCH)
    share = work.tokens / ranks / (work.updates_per_step if component.role.trains else 1)
    most = max(least, min(LARGEST_BATCH, int(share)))
    sizes = [least]
    while sizes[-1] < min(most, LARGEST_BATCH):
        sizes.append(min(1 << sizes[-1].bit_length(), LARGEST_BATCH))
    return sizes
