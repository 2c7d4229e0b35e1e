"""The best placement: partitions of the components into pools, times sizes of the pools, times choices within them.

Up to `EXACT_GPUS` GPUs every size is tried, so the result is the best plan of this space. Above, sizes grow in steps,
and the same search over bounds of the steps says how far from the best the result can be.

HybridFlow (arXiv 2409.19256, section 6) enumerates the same space without time-shared memory; here branches whose bound
is no better than the best plan so far are cut.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gym_rm.errors import ConfigError
from gym_rm.planning.hardware.devices import Device
from gym_rm.planning.options import (
    PHASES,
    ZERO,
    Awake,
    Option,
    Place,
    Sizes,
    awake_options,
    options_of,
    tensor_parallel_sizes,
)
from gym_rm.planning.placement import Need, place
from gym_rm.planning.plan import Address, Phase, Role
from gym_rm.planning.request import Choice, Request
from gym_rm.planning.times import sync_times

EXACT_GPUS = 64
MOST_COMPONENTS = 6  # more have too many partitions: reward models then stay in one pool
MOST_NODES = 100_000  # of the search tree; a search that is cut here says so in its bound

Seconds = tuple[float, ...]
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """A pool of a plan.

    Attributes:
        names: its components.
        choices: one for each.
        place: its GPUs.
        seconds: of each phase.
        host: bytes of sleeping components in the hosts' memory.
    """

    names: tuple[str, ...]
    choices: tuple[Choice, ...]
    place: Place
    seconds: Seconds
    host: float

    @property
    def unit(self) -> int:
        """GPUs that must be in one node."""
        if not self.place.spans:
            return self.place.num_gpus
        return math.lcm(*(choice.tensor_parallel_size for choice in self.choices))


@dataclass(frozen=True, slots=True)
class Candidate:
    """GPUs for a group of components whose options are not chosen yet.

    Attributes:
        names: the components.
        place: the GPUs.
        options: of each component.
        seconds: no choice is faster than this in any phase.
        least: GPUs that it takes; fewer than `place.num_gpus` only in a bound.
        exact: whether the options that reach `seconds` fit together.
        unit: GPUs that must be in one node, if it is exact.
    """

    names: tuple[str, ...]
    place: Place
    options: tuple[tuple[Option, ...], ...]
    seconds: Seconds
    least: int
    exact: bool
    unit: int

    @property
    def capacity(self) -> float:
        """Bytes of a GPU that components can fill."""
        return self.place.device.memory.value - self.place.device.reserved.value


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search.

    Attributes:
        pools: the pools; empty if nothing fits.
        gpus: addresses of each pool.
        step_seconds: duration of a step.
        value: what the objective makes small: seconds, money for a conversation, or GPUs.
        bound: no plan has a smaller value.
        examined: nodes of the search tree.
    """

    pools: tuple[PoolChoice, ...]
    gpus: tuple[tuple[Address, ...], ...]
    step_seconds: float
    value: float
    bound: float
    examined: int


def search(request: Request) -> Found | None:
    """Return the best plan, or None if none fits."""
    limit = max((_gpus_of(request, device) for device in request.cluster.devices), default=0)
    sizes = (
        list(range(1, limit + 1))
        if limit <= EXACT_GPUS
        else sorted({*coarse_sizes(limit), *fixed_sizes(request, limit)})
    )
    run = _Search(request, sizes)
    found = run.best()
    if found is None or (limit <= EXACT_GPUS and not run.grouped):
        return found
    bounds = _Search(request, sizes, bound=limit > EXACT_GPUS)
    if run.grouped:
        return replace(found, bound=min(bounds.work_bound(), found.bound))
    relaxed = bounds.best()
    return replace(found, bound=found.value if relaxed is None else min(relaxed.bound, found.value))


def coarse_sizes(limit: int) -> list[int]:
    """Return up to 8 sizes between powers of two. They do not depend on the limit, so more GPUs only add sizes."""
    sizes = list(range(1, 17))
    while sizes[-1] < limit:
        step = max(1 << (sizes[-1].bit_length() - 4), 2)
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size <= limit]


def fixed_sizes(request: Request, limit: int) -> set[int]:
    """Return the sizes of pools that the fixed numbers of a request need, up to a limit."""
    node_gpus = max(node.gpus for node in request.cluster.nodes)
    found = set()
    for component in request.components:
        if component.num_gpus is not None:
            found.add(component.num_gpus)
        for tp in tensor_parallel_sizes(component, node_gpus):
            if component.num_replicas is not None:
                found.add(tp * component.num_replicas)
            # Each of the usual sizes, rounded down to whole groups.
            unit = tp * (component.fsdp_size or 1)
            if component.fsdp_size is not None or component.tensor_parallel_size is not None:
                found |= {size // unit * unit for size in coarse_sizes(limit)}
    return {size for size in found if 0 < size <= limit}


def step_seconds(pools: Sequence[Seconds], *, asynchronous: bool) -> float:
    """Return the duration of a step.

    Phases follow each other, and each waits for the slowest pool. Asynchronous pools work one step apart, so only the
    busiest pool counts.
    """
    if asynchronous:
        return max(sum(pool) for pool in pools)
    return float(sum(max(phase) for phase in zip(*pools, strict=True)))


def partitions(names: Sequence[Part]) -> Iterator[tuple[tuple[Part, ...], ...]]:
    """Yield every way to divide names into groups, each once."""
    if not names:
        yield ()
        return
    first, *rest = names
    for groups in partitions(rest):
        yield ((first,), *groups)
        for index, group in enumerate(groups):
            yield (*groups[:index], (first, *group), *groups[index + 1 :])


def _gpus_of(request: Request, device: Device) -> int:
    return sum(node.gpus for node in request.cluster.nodes if node.device == device)


class _Search:
    """One search over given sizes."""

    def __init__(self, request: Request, sizes: Sequence[int], *, bound: bool = False) -> None:
        self.request = request
        self.components = {each.name: each for each in request.components}
        self.budgets = {device: _gpus_of(request, device) for device in request.cluster.devices}
        self.sizes, self.bound = sizes, bound
        self.asynchronous = request.workload.asynchronous
        self.examined = 0
        self.incumbent: Found | None = None
        self.key: tuple[float, float] = (math.inf, math.inf)
        self.grouped = request.pools is None and len(request.components) > MOST_COMPONENTS
        self.hosts = sum(math.inf if node.host_memory is None else node.host_memory for node in request.cluster.nodes)
        self.known: dict[tuple[str, str, Choice], Sizes] = {}
        self.awake = functools.cache(self._awake)
        self.options = functools.cache(self._options)
        self.candidates = functools.cache(self._candidates)
        self.prefixes = functools.cache(self._prefixes)

    def best(self) -> Found | None:
        """Return the best plan."""
        roots: list[tuple[tuple[float, float], int, list[list[Candidate]]]] = []
        for number, groups in enumerate(self._groupings()):
            candidates = [self.candidates(group) for group in groups]
            if all(candidates):
                candidates.sort(key=lambda each: (len(each), each[0].names))
                roots.append((self._lower(candidates, [], sum(self.budgets.values())), number, candidates))
        roots.sort(key=lambda root: root[:2])
        for lower, _, candidates in roots:
            if lower < self.key:
                self._descend(candidates, [], dict(self.budgets))
        cut = self.examined >= MOST_NODES
        if self.incumbent is None:
            if cut:
                raise ConfigError(
                    f"{self.request.name}: no plan among the first {MOST_NODES:,} combinations; fix some, such as "
                    "pools, sleeps or tensor_parallel_size."
                )
            return None
        value = min(roots[0][0][0], self.incumbent.value) if cut else self.incumbent.value
        return Found(
            self.incumbent.pools,
            self.incumbent.gpus,
            self.incumbent.step_seconds,
            self.incumbent.value,
            value,
            self.examined,
        )

    def work_bound(self) -> float:
        """Return a value that no way to divide the components into pools goes below.

        A phase takes at least as long as its slowest component on all GPUs, and at least the GPU-seconds of all its
        components over the number of GPUs. Money and GPUs are bounded by the GPU-seconds alone.
        """
        slowest, work = list(ZERO), list(ZERO)
        for name in self.components:
            alone = self.candidates((name,))
            fastest = [min(phase) for phase in zip(*(pool.seconds for pool in alone), strict=True)]
            least = [min(pool.least * pool.seconds[index] for pool in alone) for index in range(len(ZERO))]
            slowest = list(map(max, slowest, fastest))
            work = list(map(operator.add, work, least))
        sync = PHASES.index(Phase.SYNC)  # takes less time where the policy and generation are in one pool
        slowest[sync] = work[sync] = 0.0
        if self.request.goal == "cost":
            price = min(device.price.value if device.price else 0.0 for device in self.budgets)
            return sum(work) * price / 3600.0 / self.request.workload.conversations
        if self.request.goal == "smallest":
            return float(max(math.ceil(sum(work) / (self.request.step_seconds or math.inf) - 1e-9), 1))
        gpus = sum(self.budgets.values())
        if self.asynchronous:
            return max(max(slowest), sum(work) / gpus)
        return sum(max(phase, total / gpus) for phase, total in zip(slowest, work, strict=True))

    # --- groups of components ---

    def _groupings(self) -> Iterator[tuple[tuple[str, ...], ...]]:
        """Yield the partitions that the request allows. Generation on the policy's weights is in the policy's pool."""
        names = tuple(self.components)
        if self.request.pools is not None:
            yield self.request.pools
            return
        inside = {each.name for each in self.request.components if each.engine == "transformers"}
        policy = next((each.name for each in self.request.components if each.role is Role.POLICY), None)
        for groups in partitions(self._units(inside)):
            joined = [tuple(name for unit in group for name in unit) for group in groups]
            if inside:
                joined = [(*group, *inside) if policy in group else group for group in joined]
            yield tuple(sorted(tuple(sorted(group, key=names.index)) for group in joined))

    def _units(self, inside: set[str]) -> list[tuple[str, ...]]:
        """Return the components that stay together: each alone, or, if there are many, all that only score."""
        outside = [each for each in self.request.components if each.name not in inside]
        if not self.grouped:
            return [(each.name,) for each in outside]
        scoring = tuple(each.name for each in outside if each.role is Role.REWARD_MODEL)
        return [(each.name,) for each in outside if each.role is not Role.REWARD_MODEL] + [scoring]

    # --- pools ---

    def _awake(self, name: str, where: Place, together: bool) -> list[Awake]:
        component = self.components[name]
        if together and component.role is Role.POLICY:
            return [self._synced(each, where) for each in self.awake(name, where, False)]
        return awake_options(component, where, self.request, together=False, known=self.known)

    def _synced(self, awake: Awake, where: Place) -> Awake:
        """Return an option of the policy with the time in which its weights reach generation in the same pool."""
        index = PHASES.index(Phase.SYNC)
        if not awake.seconds[index]:
            return awake
        policy = next(each for each in self.components.values() if each.role is Role.POLICY)
        clock = sync_times(
            policy, awake.choice, where.site(self.request), together=True, nodes=len(self.request.cluster.nodes)
        )
        seconds = (*awake.seconds[:index], clock.total, *awake.seconds[index + 1 :])
        return replace(awake, seconds=seconds)

    def _options(self, name: str, where: Place, together: bool, alone: bool) -> tuple[Option, ...]:
        component, spans = self.components[name], where.spans and not self.bound
        if not component.role.trains:  # only training and its weights go between nodes
            where, together = replace(where, spans=False), False
        awake = self.awake(name, where, together)
        return tuple(options_of(component, where, awake, self.request, alone=alone, spans=spans))

    def _candidates(self, group: tuple[str, ...]) -> list[Candidate]:
        """Return the places for a group of components that no other one of them beats."""
        components = [self.components[name] for name in group]
        fixed = {each.num_gpus for each in components if each.num_gpus is not None}
        together = {Role.POLICY, Role.GENERATION} <= {each.role for each in components}
        found: list[Candidate] = []
        for device, budget in self.budgets.items():
            before = 0
            node_gpus = max(node.gpus for node in self.request.cluster.nodes if node.device == device)
            for size in [each for each in self.sizes if each <= budget]:
                least, before = before + 1, size
                if fixed and fixed != {size} and not (self.bound and least <= min(fixed) <= size):
                    continue
                for spans in (least > node_gpus,) if self.bound else _spans(size, node_gpus):
                    where = Place(device, size, node_gpus, spans, self.bound, least)
                    lists = tuple(self.options(name, where, together, len(group) == 1) for name in group)
                    if all(lists):
                        found.append(_candidate(group, where, lists, least if self.bound else size))
        return _undominated([each for each in found if _may_fit(each)])

    # --- plans ---

    def _key(self, step: float, gpus: int, price: float) -> tuple[float, float]:
        """Return what the search makes small: the objective, then the tie-breaker."""
        match self.request.goal:
            case "cost":
                return (step * price / 3600.0 / self.request.workload.conversations, gpus)
            case "smallest":
                late = step > (self.request.step_seconds or math.inf)
                return (math.inf if late else float(gpus), step)
        return (step, gpus)

    def _price(self, pools: Sequence[Candidate]) -> float:
        """Return the price of pools for an hour; 0 where the goal does not ask for it."""
        if self.request.goal != "cost":
            return 0.0
        return sum(pool.least * (pool.place.device.price.value if pool.place.device.price else 0.0) for pool in pools)

    def _lower(self, candidates: list[list[Candidate]], chosen: list[Candidate], left: int) -> tuple[float, float]:
        """Return a key that no plan with these pools and one of each list has a smaller one than.

        The lists are sorted by the GPUs that a pool takes.
        """
        smallest = [pools[0].least for pools in candidates]
        needed = sum(smallest)
        if needed > left:
            return (math.inf, math.inf)
        vectors = [pool.seconds for pool in chosen]
        gpus, price = sum(pool.least for pool in chosen), self._price(chosen)
        for pools, least in zip(candidates, smallest, strict=True):
            sizes, fastest, cheapest = self.prefixes(pools[0].names)
            index = bisect.bisect_right(sizes, left - needed + least) - 1
            vectors.append(fastest[index])
            gpus += least
            price += cheapest[index]
        return self._key(self._step(vectors), gpus, price)

    def _prefixes(self, group: tuple[str, ...]) -> tuple[list[int], list[Seconds], list[float]]:
        """Return the GPUs of a group's candidates, and the fastest seconds and lowest price up to each of them."""
        pools = self.candidates(group)
        fastest = itertools.accumulate((pool.seconds for pool in pools), lambda a, b: tuple(map(min, a, b)))
        cheapest = itertools.accumulate((self._price([pool]) for pool in pools), min)
        return [pool.least for pool in pools], list(fastest), list(cheapest)

    def _step(self, vectors: Sequence[Seconds]) -> float:
        return step_seconds(vectors, asynchronous=self.asynchronous)

    def _descend(self, candidates: list[list[Candidate]], chosen: list[Candidate], budgets: dict[Device, int]) -> None:
        if not candidates:
            self._consider(chosen)
            return
        first, *rest = candidates
        branches = []
        for pool in first:
            if pool.least <= budgets[pool.place.device]:
                left = sum(budgets.values()) - pool.least
                branches.append((self._lower(rest, [*chosen, pool], left), pool))
        branches.sort(key=lambda branch: branch[0])
        for lower, pool in branches:
            self.examined += 1
            if lower >= self.key or math.isinf(lower[0]) or self.examined >= MOST_NODES:
                return
            device = pool.place.device
            self._descend(rest, [*chosen, pool], {**budgets, device: budgets[device] - pool.least})

    def _consider(self, pools: list[Candidate]) -> None:
        """Choose the options of these pools, and keep them if they are better than the best plan so far."""
        gpus, price = sum(pool.least for pool in pools), self._price(pools)
        work = [
            _Work(index, part, options) for index, pool in enumerate(pools) for part, options in enumerate(pool.options)
        ]
        # The components with the most different memory first: what they choose decides what is left for the others.
        work.sort(key=lambda each: (-each.spread, each.pool, each.options[0].seconds))
        capacities = [pool.capacity for pool in pools]

        def bound(state: _State) -> tuple[float, float]:
            """Return a key that no completion of the state has a smaller one than."""
            if state.host > self.hosts:
                return (math.inf, math.inf)
            vectors, rest = list(state.seconds), list(state.resident)
            left = work[len(state.chosen) :]
            for each in left:
                rest[each.pool] += each.least_resident
            for each in left:
                fastest = each.fastest(capacities[each.pool] - rest[each.pool] + each.least_resident)
                if fastest is None:
                    return (math.inf, math.inf)
                vectors[each.pool] = tuple(map(operator.add, vectors[each.pool], fastest))
            if any(size + extra > room for size, extra, room in zip(rest, state.extra, capacities, strict=True)):
                return (math.inf, math.inf)
            return self._key(self._step(vectors), gpus, price)

        def go(state: _State, lower: tuple[float, float]) -> None:
            self.examined += 1
            if lower >= self.key or math.isinf(lower[0]) or self.examined >= MOST_NODES:
                return
            depth = len(state.chosen)
            if depth == len(work):
                self._keep(pools, work, state)
                return
            # Equal components in one pool choose in rising order, as their exchange changes nothing.
            twin = depth > 0 and work[depth].equals(work[depth - 1])
            first = state.chosen[-1] if twin else 0
            after = [state.plus(work[depth], index) for index in range(first, len(work[depth].options))]
            branches = sorted(((bound(each), each.chosen[-1], each) for each in after), key=lambda item: item[:2])
            for key, _, each in branches:
                if key >= self.key:
                    return
                go(each, key)

        zeros = (0.0,) * len(pools)
        start = _State((), (ZERO,) * len(pools), zeros, zeros, 0.0)
        go(start, bound(start))

    def _keep(self, pools: Sequence[Candidate], work: Sequence[_Work], state: _State) -> None:
        """Keep chosen options as the best plan, if there are GPUs for them."""
        chosen = {(each.pool, each.part): each.options[index] for each, index in zip(work, state.chosen, strict=True)}
        made = []
        for index, (pool, seconds) in enumerate(zip(pools, state.seconds, strict=True)):
            options = [chosen[index, part] for part in range(len(pool.names))]
            host = sum(option.host for option in options)
            made.append(PoolChoice(pool.names, tuple(each.choice for each in options), pool.place, seconds, host))
        step = self._step(state.seconds)
        key = self._key(step, sum(pool.least for pool in pools), self._price(pools))
        if math.isinf(key[0]):
            return
        gpus: tuple[tuple[Address, ...], ...] | None = tuple(() for _ in pools)
        if not self.bound:
            needs = [Need(each.place.device.name, each.place.num_gpus, each.unit) for each in made]
            gpus = place(self.request.cluster, needs)
            if gpus is None or not self._hosts_hold(made, gpus):
                return
        self.key = key
        self.incumbent = Found(tuple(made), gpus or (), step, key[0], key[0], self.examined)

    def _hosts_hold(self, pools: Sequence[PoolChoice], gpus: Sequence[Sequence[Address]]) -> bool:
        """Return whether what sleeps fits into the memory of every node."""
        used: dict[int, float] = {}
        for pool, addresses in zip(pools, gpus, strict=True):
            for address in addresses:
                used[address.node] = used.get(address.node, 0.0) + pool.host / len(addresses)
        nodes = self.request.cluster.nodes
        return all(size <= (nodes[node].host_memory or math.inf) for node, size in used.items())


def _spans(size: int, node_gpus: int) -> tuple[bool, ...]:
    """Return whether a pool may be in one node, in several, or either."""
    if size > node_gpus:
        return (True,)
    return (False,) if size == 1 else (True, False)


@dataclass(frozen=True, slots=True)
class _State:
    """Options that are chosen so far, as indices in the order of the work, and what they take of each pool."""

    chosen: tuple[int, ...]
    seconds: tuple[Seconds, ...]
    resident: tuple[float, ...]
    extra: tuple[float, ...]
    host: float

    def plus(self, work: _Work, index: int) -> _State:
        """Return the state after one more choice."""
        option, pool = work.options[index], work.pool
        return _State(
            (*self.chosen, index),
            _changed(self.seconds, pool, tuple(map(operator.add, self.seconds[pool], option.seconds))),
            _changed(self.resident, pool, self.resident[pool] + option.resident),
            _changed(self.extra, pool, max(self.extra[pool], option.extra)),
            self.host + option.host,
        )


class _Work:
    """One component of a pool in the search over options."""

    def __init__(self, pool: int, part: int, options: Sequence[Option]) -> None:
        self.pool, self.part, self.options = pool, part, options
        self.least_resident = min(option.resident for option in options)
        self.spread = max(option.resident for option in options) - self.least_resident
        # The fastest seconds of each phase among the options up to some memory, by that memory.
        ordered = sorted(options, key=lambda option: option.resident + option.extra)
        self._needs = [option.resident + option.extra for option in ordered]
        self._best = list(
            itertools.accumulate((option.seconds for option in ordered), lambda a, b: tuple(map(min, a, b)))
        )

    def equals(self, other: _Work) -> bool:
        """Return whether another component of the same pool has the same options."""
        return self.pool == other.pool and self.options == other.options

    def fastest(self, room: float) -> Seconds | None:
        """Return seconds that no option which fits into this room is faster than; None if none fits."""
        index = bisect.bisect_right(self._needs, room)
        return self._best[index - 1] if index else None


def _candidate(names: tuple[str, ...], where: Place, lists: tuple[tuple[Option, ...], ...], least: int) -> Candidate:
    """Return the candidate with its bound on seconds."""
    seconds, fastest = ZERO, []
    for options in lists:
        bound = tuple(map(min, *(option.seconds for option in options))) if len(options) > 1 else options[0].seconds
        seconds = tuple(map(operator.add, seconds, bound))
        fastest.append(next((option for option in options if option.seconds == bound), None))
    capacity = where.device.memory.value - where.device.reserved.value
    reached = [option for option in fastest if option is not None]
    fits = sum(each.resident for each in reached) + max((each.extra for each in reached), default=0.0) <= capacity
    exact = len(reached) == len(lists) and fits and not any(option.host for option in reached)
    unit = where.num_gpus
    if where.spans and exact:
        unit = math.lcm(*(option.choice.tensor_parallel_size for option in reached))
    return Candidate(names, where, lists, seconds, least, exact, unit)


def _may_fit(candidate: Candidate) -> bool:
    """Return whether the smallest options fit together; the search decides about the others."""
    resident = sum(min(option.resident for option in options) for options in candidate.options)
    extra = max(min(option.extra for option in options) for options in candidate.options)
    return resident + extra <= candidate.capacity


def _changed(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _all_less(left: Seconds, right: Seconds) -> bool:
    return all(a <= b for a, b in zip(left, right, strict=True))


def _undominated(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that no exact one on the same kind of GPUs beats in GPUs, units and seconds."""
    kept: list[Candidate] = []
    for each in sorted(candidates, key=lambda one: (one.least, sum(one.seconds), not one.exact, one.unit)):
        if not any(
            other.exact
            and other.place.device == each.place.device
            and _easier(other, each)
            and _all_less(other.seconds, each.seconds)
            for other in kept
        ):
            kept.append(each)
    return kept


def _easier(left: Candidate, right: Candidate) -> bool:
    """Return whether GPUs for the right candidate, whatever its options, are also GPUs for the left one."""
    if right.exact or not right.place.spans:
        return right.unit % left.unit == 0
    return left.unit == 1
