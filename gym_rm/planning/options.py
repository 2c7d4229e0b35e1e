"""What a component could choose in a pool of a given size, with its memory and its seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from gym_rm.planning.hardware.devices import Device
from gym_rm.planning.memory import component_memory
from gym_rm.planning.plan import Phase, Role
from gym_rm.planning.request import Choice, Component, Request, Workload
from gym_rm.planning.times import Clock, Site, component_times, sync_times, wake_times

PHASES = tuple(Phase)
SEATS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)  # conversations that an engine generates at a time
LARGEST_BATCH = 65536  # tokens of a forward; more do not make products faster
SMALLEST_BATCH = 512
ZERO = (0.0,) * len(PHASES)


@dataclass(frozen=True, slots=True)
class Option:
    """One choice of a component, with what it takes.

    Attributes:
        choice: the choice.
        resident: bytes of each GPU while other components of the pool work.
        extra: bytes on top of `resident` at the largest instant of its own work.
        host: bytes of the host's memory, summed over its GPUs, while it sleeps.
        seconds: of each phase, in the order of `PHASES`.
    """

    choice: Choice
    resident: float
    extra: float
    host: float
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A pool as its components see it.

    Attributes:
        device: kind of the GPUs.
        num_gpus: number of GPUs.
        node_gpus: GPUs of the largest node of this kind.
        spans: whether the pool is in more than one node.
        bound: for a bound on pools of `smallest` to `num_gpus` GPUs instead of a pool of `num_gpus`.
        smallest: see `bound`.
    """

    device: Device
    num_gpus: int
    node_gpus: int
    spans: bool
    bound: bool = False
    smallest: int = 1

    def site(self, request: Request) -> Site:
        """Return the place as the formulas of time need it."""
        if self.bound:
            return Site(self.device, request.cluster.network, self.spans, self.node_gpus, optimistic=True)
        nodes = max(math.ceil(self.num_gpus / self.node_gpus), 2)
        return Site(self.device, request.cluster.network, self.spans, max(self.num_gpus // nodes, 1))


@dataclass(frozen=True, slots=True)
class Awake:
    """A choice of a component that stays on the GPUs: what both of its sleeping and its waking option are made from.

    Attributes:
        choice: the choice.
        resident, working, largest: bytes of each GPU while others work, while it works, and of its largest instant.
        seconds: of each phase.
    """

    choice: Choice
    resident: float
    working: float
    largest: float
    seconds: tuple[float, ...]


Sizes: TypeAlias = tuple[float, float, float]
"""Bytes that are resident, that work takes, and of the largest instant."""


def _sizes(component: Component, choice: Choice, workload: Workload, device: Device) -> Sizes:
    memory = component_memory(component, choice, workload, device)
    largest = max((instant.bytes for _, instants in memory.phases for instant in instants), default=0.0)
    return sum(item.bytes for item in memory.resident), sum(item.bytes for item in memory.working), largest


def awake_options(
    component: Component,
    place: Place,
    request: Request,
    *,
    together: bool,
    known: dict[tuple[str, str, Choice], Sizes] | None = None,
) -> list[Awake]:
    """Return the choices of a component in a pool that fit a GPU while nothing else is awake.

    Args:
        component: the component.
        place: the pool's GPUs.
        request: for the work and the cluster.
        together: whether the policy and generation share the pool.
        known: sizes of earlier calls; new ones are added.
    """
    known = {} if known is None else known
    site = place.site(request)
    share = component.gpu_memory_utilization if component.engine == "vllm" else 1.0
    capacity = share * place.device.memory.value - place.device.reserved.value
    found: list[Awake] = []
    for choice in _choices(component, place, request):
        held = choice
        if not component.role.trains:  # replicas share nothing
            held = replace(choice, num_replicas=1)
        key = (component.name, place.device.name, held)
        if key not in known:
            known[key] = _sizes(component, held, request.workload, place.device)
        resident, working, largest = known[key]
        if working + largest > capacity:
            continue
        seconds = option_seconds(component, choice, request, site, together=together)
        found.append(Awake(choice, resident, working, largest, seconds))
    return found


def options_of(
    component: Component, place: Place, awake: Sequence[Awake], request: Request, *, alone: bool, spans: bool = False
) -> list[Option]:
    """Return the options of a component; none is worse than another one in memory and in every phase.

    Args:
        component, place, request: as in `awake_options`.
        awake: what that returned.
        alone: whether the component has the pool for itself, so that it never sleeps.
        spans: whether the GPUs are in several nodes, where a smaller tensor-parallel group has more places.
    """
    found: list[Option] = []
    for sleeps in _sleeps(component, request, alone=alone):
        for each in awake:
            peak = each.working + each.largest
            if not sleeps:
                found.append(Option(each.choice, each.resident, peak - each.resident, 0.0, each.seconds))
                continue
            waking = wake_times(component, each.resident, place.device).total
            seconds = tuple(
                value + (waking if phase is Phase.WAKE else 0.0)
                for phase, value in zip(PHASES, each.seconds, strict=True)
            )
            # Generation gets its weights from the policy, and its cache is dropped.
            host = 0.0 if component.role is Role.GENERATION else each.resident * each.choice.num_gpus
            found.append(Option(replace(each.choice, sleeps=True), 0.0, peak, host, seconds))
    return undominated(found, spans=spans)


def option_seconds(
    component: Component, choice: Choice, request: Request, site: Site, *, together: bool
) -> tuple[float, ...]:
    """Return the seconds of each phase, without waking."""
    phases = phase_clocks(component, choice, request, site, together=together)
    return tuple(phases[phase].total if phase in phases else 0.0 for phase in PHASES)


def phase_clocks(
    component: Component, choice: Choice, request: Request, site: Site, *, together: bool
) -> dict[Phase, Clock]:
    """Return the seconds of each phase and what they are spent on, without waking."""
    phases = component_times(component, choice, request.workload, site, old_log_probs=needs_old_log_probs(request))
    if component.role is Role.POLICY and generation_of(request).engine != "transformers":
        nodes = len(request.cluster.nodes)
        phases[Phase.SYNC] = sync_times(component, choice, site, together=together, nodes=nodes)
    return phases


def generation_of(request: Request) -> Component:
    """Return the component that generates."""
    return next(each for each in request.components if each.role is Role.GENERATION)


def needs_old_log_probs(request: Request) -> bool:
    """Return whether the policy computes log-probabilities before it is updated.

    With one update, and replies from the policy's own forward, they are those of the update. Another engine computes
    slightly different ones.
    """
    work = request.workload
    engines = {each.engine for each in request.components if each.role is Role.GENERATION}
    return work.updates_per_step * work.epochs > 1 or engines == {"vllm"}


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


def _choices(component: Component, place: Place, request: Request) -> Iterator[Choice]:
    """Yield the ways to divide a component over the GPUs of its pool, all awake."""
    work, n = request.workload, place.num_gpus
    most = work.conversations // work.updates_per_step if component.role.trains else work.conversations
    whole = component.role is Role.POLICY and generation_of(request).engine == "transformers"
    for tp in tensor_parallel_sizes(component, place.node_gpus):
        if (whole and tp > 1) or tp > n or (n % tp and not place.bound):
            continue
        for fsdp in _fsdp_sizes(component, place, tp, whole=whole):
            replicas: float = n / (tp * fsdp) if place.bound else n // (tp * fsdp)
            if not place.bound and component.num_replicas not in (None, replicas):
                continue
            if not place.bound and replicas * fsdp > most:
                continue
            base = Choice(tensor_parallel_size=tp, fsdp_size=fsdp, num_replicas=replicas)
            if component.role.trains:
                yield from _training_choices(component, base, work)
            elif component.role is Role.GENERATION:
                yield from _generation_choices(component, base, work)
            else:
                for tokens in batch_sizes(component, work, replicas * fsdp):
                    yield replace(base, max_num_batched_tokens=tokens)


def _fsdp_sizes(component: Component, place: Place, tp: int, *, whole: bool) -> list[int]:
    """Return the FSDP sizes: up to the groups of one node, and all groups of the pool."""
    groups = place.num_gpus // tp
    if not component.role.trains or whole:
        return [1]
    inside = max(place.node_gpus // tp, 1)
    if place.bound:  # the least memory; the time of gathers is left out
        return [max(groups, 1)]
    sizes = {groups} | {size for size in range(1, inside + 1) if groups % size == 0}
    if component.fsdp_size is not None:
        sizes = {component.fsdp_size} if groups % component.fsdp_size == 0 else set()
    return sorted(sizes)


def _training_choices(component: Component, base: Choice, work: Workload) -> Iterator[Choice]:
    checkpointing = (False, True) if component.gradient_checkpointing is None else (component.gradient_checkpointing,)
    for again in checkpointing:
        for tokens in batch_sizes(component, work, base.num_replicas * base.fsdp_size):
            yield replace(base, max_num_batched_tokens=tokens, gradient_checkpointing=again)


def _generation_choices(component: Component, base: Choice, work: Workload) -> Iterator[Choice]:
    share = math.ceil(work.conversations / base.num_replicas)
    tokens = component.max_num_batched_tokens or max(8192, int(work.prompts.maximum))
    seats = (component.max_num_seqs,) if component.max_num_seqs else sorted({min(each, share) for each in SEATS})
    for each in seats:
        yield replace(base, max_num_batched_tokens=tokens, max_num_seqs=each)


def batch_sizes(component: Component, work: Workload, ranks: float) -> list[int]:
    """Return the token budgets to try: at least the longest conversation, at most the work of a rank."""
    if component.max_num_batched_tokens is not None:
        return [component.max_num_batched_tokens]
    least = max(work.longest, SMALLEST_BATCH)
    share = work.tokens / work.updates_per_step / ranks if component.role.trains else work.tokens / ranks
    most = max(least, min(LARGEST_BATCH, int(share)))
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(min(1 << sizes[-1].bit_length(), LARGEST_BATCH))
        if sizes[-1] == LARGEST_BATCH:
            break
    return sorted(set(sizes))


def _sleeps(component: Component, request: Request, *, alone: bool) -> tuple[bool, ...]:
    if alone or component.engine == "transformers":
        return (False,)
    if component.role is Role.POLICY and generation_of(request).engine == "transformers":
        return (False,)
    return (False, True) if component.sleeps is None else (component.sleeps,)


def undominated(options: Sequence[Option], *, spans: bool = False) -> list[Option]:
    """Return the options that no other one equals or beats in memory and in every phase, the fastest first.

    In a pool of several nodes, only an option whose tensor-parallel groups fit wherever the other's do beats it.
    """
    kept: list[Option] = []
    for option in sorted(options, key=lambda each: (sum(each.seconds), each.resident, each.extra, each.host)):
        worse = any(
            other.resident <= option.resident
            and other.resident + other.extra <= option.resident + option.extra
            and other.extra <= option.extra
            and other.host <= option.host
            and not (spans and option.choice.tensor_parallel_size % other.choice.tensor_parallel_size)
            and all(a <= b for a, b in zip(other.seconds, option.seconds, strict=True))
            for other in kept
        )
        if not worse:
            kept.append(option)
    return kept
