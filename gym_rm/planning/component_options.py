"""What a component could choose in a pool of a given size, with its memory and its seconds."""

from __future__ import annotations

import bisect
import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from gym_rm.planning.gpu_memory import ComponentMemory, component_memory, rows_of_update
from gym_rm.planning.hardware.devices import Cluster
from gym_rm.planning.placement import Need
from gym_rm.planning.plan import Phase, Role
from gym_rm.planning.plan_request import Choice, Component, PlanRequest
from gym_rm.planning.step_times import (
    PhaseClock,
    Site,
    batched_tokens,
    component_times,
    largest_share,
    sync_times,
    wake_times,
)

PHASES = tuple(Phase)
EXACT_GPUS = 64  # of a cluster; in larger ones not every number and division of GPUs is tried
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
        layout: the layout that it is of, which knows what the bytes and the seconds are of.
    """

    choice: Choice
    resident: float
    extra: float
    seconds: Seconds
    layout: Layout = field(compare=False)


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

    def need(self, units: Sequence[int] = ()) -> Need:
        """Return the GPUs that it needs, and how many of them in one node, for components with these units."""
        return Need(self.num_gpus, math.lcm(self.per_node, *units))

    def site(self, cluster: Cluster) -> Site:
        """Return the place as the formulas of time need it."""
        return Site(cluster.device, cluster.network, self.num_gpus, self.per_node)


def places(size: int, node_gpus: int) -> Iterator[PoolPlace]:
    """Yield the ways to place so many GPUs: in equal parts, each in a node, the largest first."""
    parts = [part for part in reversed(divisors(size)) if part <= node_gpus]
    tried = parts if size <= EXACT_GPUS else dict.fromkeys((parts[0], 1))
    yield from (PoolPlace(size, node_gpus, part) for part in tried)


KnownSizes: TypeAlias = dict[tuple[str, Choice], tuple[float, float]]
"""Bytes that stay and at the peak, by component and choice."""


class Layout:
    """A component divided over the GPUs of its pool, with batches of any possible size.

    A size is the tokens of a batch, or the conversations that are generated at a time. Within each of the `spans`,
    more need more memory and are never slower.

    Attributes:
        component, choice: what is divided, and how; the choice has no size.
        spans: ranges of sizes, the largest first.
        resident, extra: bytes at the smallest size, as those of an option.
        fastest: the fastest option that fits a GPU while nothing else is awake; None if none does.
    """

    def __init__(
        self, component: Component, choice: Choice, request: PlanRequest, site: Site, together: bool, known: KnownSizes
    ) -> None:
        self.component, self.choice, self._request, self._site = component, choice, request, site
        self._together, self._known = together, known
        self._memories: dict[int, tuple[float, float]] = {}
        self._seconds: dict[int, Seconds] = {}
        is_batch = component.role is not Role.GENERATION
        self._name = "max_num_batched_tokens" if is_batch else "max_num_seqs"
        self._tokens = batched_tokens(component, choice, request.workload, site) if is_batch else []
        self.spans = self._batches() if is_batch else self._conversations()
        share = component.gpu_memory_utilization if component.engine == "vllm" else 1.0
        self._most = share * request.cluster.device.memory.value - request.cluster.device.reserved.value
        self.resident, self.extra = self._needs(self.spans[-1][0])
        self.fastest = self._within(self._most, lambda size: self._bytes(size)[1])

    def asleep(self) -> Layout:
        """Return the layout of a component whose weights and state leave the GPUs while others work."""
        layout = copy.copy(self)
        layout.choice = replace(self.choice, sleeps=True)
        layout.resident, layout.extra = layout._needs(self.spans[-1][0])
        layout.fastest = self.fastest and layout.option(getattr(self.fastest.choice, self._name))
        return layout

    @property
    def best(self) -> Option:
        """The fastest option of a layout that fits."""
        assert self.fastest is not None, "layouts that do not fit are no candidates"
        return self.fastest

    @property
    def peak(self) -> float:
        """Bytes at the peak of its own work at the smallest size."""
        return self.resident + self.extra

    @property
    def grows(self) -> bool:
        """Whether what it keeps while others work depends on the size."""
        return self.component.engine == "vllm" and not self.choice.sleeps

    def within(self, room: float) -> Option | None:
        """Return the fastest option that adds at most so many bytes to what it keeps; None if none does."""
        return self._within(min(room, self._most - self.resident), lambda size: self._needs(size)[1])

    def option(self, size: int) -> Option:
        """Return the option of the smallest size that makes as many batches as this one."""
        fewest = [math.ceil(tokens / math.ceil(tokens / size)) for tokens in self._tokens]
        first = next(span[0] for span in self.spans if size in span)
        size = max(first, min(size, max(fewest, default=size)))
        choice = replace(self.choice, **{self._name: size})  # type: ignore[arg-type]
        if size not in self._seconds:
            clocks = self.clocks(replace(choice, sleeps=False))
            self._seconds[size] = tuple(clocks[phase].total if phase in clocks else 0.0 for phase in PHASES)
        seconds = self._seconds[size]
        if choice.sleeps:
            seconds = (self._waking(self._bytes(size)[0]).total, *seconds[1:])
        return Option(choice, *self._needs(size), seconds, self)

    def memory(self, choice: Choice) -> ComponentMemory:
        """Return what a choice takes of each GPU."""
        return component_memory(self.component, choice, self._request.workload, self._request.cluster.device)

    def clocks(self, choice: Choice, *, crosses: bool = False) -> dict[Phase, PhaseClock]:
        """Return the seconds of each phase of a choice, and what they are spent on."""
        phases = phase_clocks(
            self.component, choice, self._request, self._site, together=self._together, crosses=crosses
        )
        if choice.sleeps:
            phases[Phase.WAKE] = self._waking(sum(item.bytes for item in self.memory(choice).resident))
        return phases

    def _waking(self, size: float) -> PhaseClock:
        return wake_times(self.component, size, self._request.cluster.device)

    def _within(self, room: float, needed: Callable[[int], float]) -> Option | None:
        counts = ((span, bisect.bisect_right(span, room, key=needed)) for span in self.spans)
        fitting = (self.option(span[count - 1]) for span, count in counts if count)
        if self.component.engine == "transformers":  # a last round of few conversations is as long as one of many
            return min(fitting, key=lambda option: sum(option.seconds), default=None)
        return next(fitting, None)

    def _bytes(self, size: int) -> tuple[float, float]:
        """Return the bytes that stay where it is awake, and those at the peak; replicas share only what they train."""
        if size not in self._memories:
            replicas = self.choice.num_replicas if self.component.role.trains else 1
            sized: dict[str, Any] = {self._name: size, "num_replicas": replicas, "sleeps": False}
            key = self.component.name, replace(self.choice, **sized)
            if key not in self._known:
                memory = self.memory(key[1])
                self._known[key] = sum(item.bytes for item in memory.resident), memory.peak
            self._memories[size] = self._known[key]
        return self._memories[size]

    def _needs(self, size: int) -> tuple[float, float]:
        """Return `resident` and `extra` of a size."""
        resident, peak = self._bytes(size)
        return (0.0, peak) if self.choice.sleeps else (resident, peak - resident)

    def _batches(self) -> list[range]:
        """Return the sizes from the longest conversation to all tokens.

        Training whose updates are one batch each is a span of its own: it keeps no gradients of other batches.
        """
        if given := self.component.max_num_batched_tokens:
            return [range(given, given + 1)]
        work, least = self._request.workload, max(self._request.workload.longest, 1)
        most = max(least, *map(math.ceil, self._tokens))
        if not self.component.role.trains:
            return [range(least, most + 1)]
        whole = rows_of_update(self.choice, work) * least
        return [span for span in (range(whole, max(most, whole) + 1), range(least, whole)) if span]

    def _conversations(self) -> list[range]:
        """Return the numbers of conversations at a time; of transformers those that fill the last round."""
        if given := self.component.max_num_seqs:
            return [range(given, given + 1)]
        _, share = largest_share(self._request.workload, self.choice.num_replicas)
        if self.component.engine != "transformers":
            return [range(1, share + 1)]
        sizes = sorted({math.ceil(share / rounds) for rounds in range(1, share + 1)}, reverse=True)
        return [range(size, size + 1) for size in sizes]


def layouts(
    component: Component, place: PoolPlace, request: PlanRequest, *, together: bool, known: KnownSizes
) -> list[Layout]:
    """Return the divisions of a component over a pool that fit a GPU while nothing else is awake; none sleeps.

    `together` is whether the policy and generation share the pool. Sizes of earlier calls are `known`; new ones are
    added.
    """
    site = place.site(request.cluster)
    made = (Layout(component, choice, request, site, together, known) for choice in choices(component, place, request))
    return [layout for layout in made if layout.fastest is not None]


def with_sleeping(component: Component, awake: Sequence[Layout], request: PlanRequest, *, alone: bool) -> list[Layout]:
    """Return the layouts with those that sleep while others of the pool work; a component alone never does.

    On a CPU none does, because the host's memory is the memory that they would leave.
    """
    policy_is_shared = component.role is Role.POLICY and generates_with_policy(request)
    stays = component.engine == "transformers" or policy_is_shared or component.sleeps is False
    if alone or stays or request.cluster.device.is_cpu:
        return [*awake]
    asleep = [layout.asleep() for layout in awake]
    return asleep if component.sleeps else [*awake, *asleep]


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


def step_seconds(pools: Sequence[Seconds], *, asynchronous: bool) -> float:
    """Return the duration of a step.

    Phases follow each other, and each waits for the slowest pool. Asynchronous pools work one step apart, so only the
    busiest pool counts.
    """
    if asynchronous:
        return max(sum(pool) for pool in pools)
    return float(sum(max(phase) for phase in zip(*pools, strict=True)))


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


def choices(component: Component, place: PoolPlace, request: PlanRequest) -> Iterator[Choice]:
    """Yield the ways to divide a component over the GPUs of its pool, all awake and without sizes."""
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
            prefill = max(8192, int(work.prompts.maximum))  # of an engine
            base = Choice(tp, fsdp, replicas, max_num_batched_tokens=prefill, one_node=not component.role.trains)
            given = component.gradient_checkpointing
            for again in (False,) if not component.role.trains else (False, True) if given is None else (given,):
                yield replace(base, gradient_checkpointing=again)


def _fsdp_sizes(component: Component, place: PoolPlace, tp: int, *, whole: bool) -> list[int]:
    """Return the FSDP sizes: of training any that divides its groups; other models stay in a node."""
    given, groups = component.fsdp_size, place.num_gpus // tp
    if whole or component.role is Role.GENERATION:
        return [1]
    sizes = [size for size in divisors(groups) if given in (None, size)]
    if component.role.trains:
        tried = place.num_gpus <= EXACT_GPUS or given is not None
        return [size for size in sizes if tried or size == groups or size * tp <= place.node_gpus]
    alone = tp == 1 and component.quantization is None  # as load_scorer combines them
    return [size for size in sizes if size == 1 or (alone and size <= place.node_gpus)]


@functools.lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number in rising order."""
    return tuple(size for size in range(1, number + 1) if number % size == 0)
