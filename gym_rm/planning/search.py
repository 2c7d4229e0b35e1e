"""The best placement: partitions of the components into pools, times sizes of the pools, times choices within them.

Up to `EXACT_GPUS` GPUs every size is tried, so the result is the best plan of this space. Above, sizes grow in steps.

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
from typing import Any, TypeAlias

from gym_rm.errors import ConfigError
from gym_rm.planning.component_options import (
    EXACT_GPUS,
    PHASES,
    ZERO,
    KnownSizes,
    Layout,
    Option,
    PoolPlace,
    Seconds,
    layouts,
    places,
    step_seconds,
    tensor_parallel_sizes,
    with_sleeping,
)
from gym_rm.planning.placement import Need, coarse_sizes, fits, partitions, place
from gym_rm.planning.plan import Address, Phase, Role
from gym_rm.planning.plan_request import Choice, PlanRequest
from gym_rm.planning.step_times import sync_times

MOST_NODES = 100_000  # of the search tree; a search that is cut here is not exact

Key: TypeAlias = tuple[float, float]
"""What the search makes small: the objective, then the tie-breaker."""
NEVER: Key = (math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """A pool of a plan: its components with a choice for each; `crosses`: whether its new weights go to other nodes."""

    names: tuple[str, ...]
    choices: tuple[Choice, ...]
    place: PoolPlace
    seconds: Seconds
    crosses: bool = False

    @property
    def need(self) -> Need:
        """The GPUs that it needs, and how many of them in one node."""
        return Need(self.place.num_gpus, math.lcm(self.place.per_node, *(choice.unit for choice in self.choices)))


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best pools that a search found, with the GPUs of each; `exact`: whether no plan is better."""

    pools: tuple[PoolChoice, ...]
    step_seconds: float
    gpus: tuple[tuple[Address, ...], ...] = ()
    exact: bool = True


def search(request: PlanRequest, *, best: bool = True) -> SearchResult | None:
    """Return the best plan, or any, which is faster to find; None if none fits.

    Raises:
        ConfigError: the search was cut before it met a plan that fits.
    """
    result = _Search(request, pool_sizes(request), best=best).result()
    exact = best and request.cluster.num_gpus <= EXACT_GPUS and not _some_experts(request)
    return None if result is None else replace(result, exact=result.exact and exact)


def _some_experts(request: PlanRequest) -> bool:
    """Return whether an engine runs experts: few conversations read fewer of them, so that more may be slower."""
    engines = [part for part in request.components if part.engine == "vllm" and part.max_num_seqs is None]
    return any(layer.experts for part in engines for layer, _ in part.shape.layers)


def pool_sizes(request: PlanRequest) -> Sequence[int]:
    """Return the numbers of GPUs that a pool may have."""
    limit = request.cluster.num_gpus
    if limit <= EXACT_GPUS:
        return range(1, limit + 1)
    return sorted({*coarse_sizes(limit), *fixed_sizes(request, limit)})


def fixed_sizes(request: PlanRequest, limit: int) -> set[int]:
    """Return the sizes of pools that the fixed numbers of a request need, up to a limit."""
    sizes = {component.num_gpus for component in request.components if component.num_gpus is not None}
    for component in request.components:
        for tp in tensor_parallel_sizes(component, request.cluster.node_gpus):
            if component.num_replicas is not None:
                sizes.add(tp * component.num_replicas)
            if component.fsdp_size is not None or component.tensor_parallel_size is not None:
                unit = tp * (component.fsdp_size or 1)  # of the usual sizes, those of whole groups
                sizes |= {size // unit * unit for size in coarse_sizes(limit)}
    return {size for size in sizes if 0 < size <= limit}


@dataclass(frozen=True, slots=True)
class PoolCandidate:
    """GPUs for components whose layouts are not chosen yet; no choice is faster than `seconds` in any phase."""

    names: tuple[str, ...]
    place: PoolPlace
    layouts: tuple[tuple[Layout, ...], ...]
    seconds: Seconds


class _Search:
    """One search over given sizes."""

    def __init__(self, request: PlanRequest, sizes: Sequence[int], *, best: bool) -> None:
        self.request, self.sizes, self.best = request, sizes, best
        self.components = {component.name: component for component in request.components}
        device = request.cluster.device
        self.capacity = device.memory.value - device.reserved.value
        self.crossing = self._crossing()
        self.examined = 0
        self.incumbent: SearchResult | None = None
        self.key = NEVER
        self.known: KnownSizes = {}
        self.awake = functools.cache(self._awake)
        self.waiting = functools.cache(self._waiting)
        self.layouts = functools.cache(self._layouts)
        self.candidates = functools.cache(self._candidates)
        self.fastest = functools.cache(self._fastest)

    def result(self) -> SearchResult | None:
        """Return the best plan, or the first."""
        roots: list[tuple[Key, int, list[list[PoolCandidate]]]] = []
        for number, groups in enumerate(self._groupings()):
            candidates = [self.candidates(group) for group in groups]
            if all(candidates):
                candidates.sort(key=lambda pools: (len(pools), pools[0].names))
                roots.append((self._lower(candidates, [], self.request.cluster.num_gpus), number, candidates))
        roots.sort(key=lambda root: root[:2])
        for lower, _, candidates in roots:
            if lower < self.key:
                self._descend(candidates, [], self.request.cluster.num_gpus)
        cut = self.examined >= MOST_NODES
        if self.incumbent is None:
            if cut:
                raise ConfigError(
                    f"{self.request.name}: no plan among the first {MOST_NODES:,} combinations; fix some, such as "
                    "pools, sleeps or tensor_parallel_size."
                )
            return None
        return replace(self.incumbent, gpus=self._gpus(self.incumbent.pools), exact=not cut)

    def _groupings(self) -> Iterator[tuple[tuple[str, ...], ...]]:
        """Yield the partitions that the request allows. Generation on the policy's weights is in the policy's pool."""
        if self.request.pools is not None:
            yield self.request.pools
            return
        names = tuple(self.components)
        inside = {name for name, component in self.components.items() if component.engine == "transformers"}
        policy = next((name for name, component in self.components.items() if component.role is Role.POLICY), None)
        for groups in partitions([name for name in names if name not in inside]):
            joined = [(*group, *inside) if policy in group else group for group in groups]
            yield tuple(sorted(tuple(sorted(group, key=names.index)) for group in joined))

    def _crossing(self) -> Seconds:
        """Return the seconds that new weights take longer to generation in another node."""
        policy = next((each for each in self.components.values() if each.role is Role.POLICY), None)
        if policy is None:
            return ZERO
        site = PoolPlace(1, 1, 1).site(self.request.cluster)
        ways = [sync_times(policy, Choice(), site, together=False, crosses=crosses).total for crosses in (True, False)]
        return tuple(ways[0] - ways[1] if phase is Phase.SYNC else 0.0 for phase in PHASES)

    # --- pools ---

    def _awake(self, name: str, where: PoolPlace, together: bool) -> list[Layout]:
        return layouts(self.components[name], where, self.request, together=together, known=self.known)

    def _waiting(self, name: str, where: PoolPlace, together: bool, alone: bool) -> list[Layout]:
        found = with_sleeping(self.components[name], self.awake(name, where, together), self.request, alone=alone)
        return sorted(found, key=lambda layout: sum(_fastest(layout)))

    def _layouts(self, name: str, where: PoolPlace, together: bool, alone: bool) -> tuple[Layout, ...]:
        component = self.components[name]
        found = self.waiting(name, where.of(component), together and component.role is Role.POLICY, alone)
        return tuple(each for each in found if math.lcm(where.per_node, each.choice.unit) <= where.node_gpus)

    def _candidates(self, group: tuple[str, ...]) -> list[PoolCandidate]:
        """Return the places for a group of components, by the GPUs that they take."""
        given = {self.components[name].num_gpus for name in group} - {None}
        together = {Role.POLICY, Role.GENERATION} <= self._roles(group)
        sends = Role.POLICY in self._roles(group) and not together
        candidates = []
        for size in (size for size in self.sizes if not given or given == {size}):
            for where in places(size, self.request.cluster.node_gpus):
                found = tuple(self.layouts(name, where, together, len(group) == 1) for name in group)
                if all(found) and self._may_fit(found):
                    fastest = [_running_least([_fastest(layout) for layout in each])[-1] for each in found]
                    always = self.crossing if sends and where.spans else ZERO
                    candidates.append(PoolCandidate(group, where, found, functools.reduce(_added, fastest, always)))
        return sorted(candidates, key=lambda one: (one.place.num_gpus, sum(one.seconds)))

    def _roles(self, names: Sequence[str]) -> set[Role]:
        return {self.components[name].role for name in names}

    def _may_fit(self, found: Sequence[Sequence[Layout]]) -> bool:
        """Return whether the smallest layouts fit together; the search decides about the others."""
        resident = sum(min(layout.resident for layout in each) for each in found)
        return resident + max(min(layout.extra for layout in each) for each in found) <= self.capacity

    # --- plans ---

    def _key(self, vectors: Sequence[Seconds], gpus: int) -> Key:
        step = step_seconds(vectors, asynchronous=self.request.workload.asynchronous)
        if self.request.step_seconds is not None:
            return (math.inf if step > self.request.step_seconds else float(gpus), step)
        return (step, gpus)

    def _lower(self, candidates: list[list[PoolCandidate]], chosen: list[PoolCandidate], left: int) -> Key:
        """Return a key that no plan with these pools and one of each list has a smaller one than."""
        smallest = [pools[0].place.num_gpus for pools in candidates]
        room = left - sum(smallest)
        if room < 0:
            return NEVER
        vectors = [pool.seconds for pool in chosen]
        for pools, least in zip(candidates, smallest, strict=True):
            sizes, fastest = self.fastest(pools[0].names)
            vectors.append(fastest[bisect.bisect_right(sizes, room + least) - 1])
        return self._key(vectors, sum(pool.place.num_gpus for pool in chosen) + sum(smallest))

    def _fastest(self, group: tuple[str, ...]) -> tuple[list[int], list[Seconds]]:
        """Return the GPUs of a group's candidates, and the fastest seconds up to each of them."""
        pools = self.candidates(group)
        return [pool.place.num_gpus for pool in pools], _running_least([pool.seconds for pool in pools])

    def _descend(self, candidates: list[list[PoolCandidate]], chosen: list[PoolCandidate], left: int) -> None:
        if not candidates:
            self._choose_layouts(chosen)
            return
        first, *rest = candidates
        fitting = [pool for pool in first if pool.place.num_gpus <= left]
        branches = [(self._lower(rest, [*chosen, pool], left - pool.place.num_gpus), pool) for pool in fitting]
        branches.sort(key=lambda branch: branch[0])
        for lower, pool in branches:
            self.examined += 1
            if self._is_cut(lower):
                return
            self._descend(rest, [*chosen, pool], left - pool.place.num_gpus)

    def _is_cut(self, lower: Key) -> bool:
        return lower >= self.key or math.isinf(lower[0]) or self.examined >= MOST_NODES

    def _choose_layouts(self, pools: list[PoolCandidate]) -> None:
        """Choose the layouts of these pools, and keep them if they are better than the best plan so far."""
        if (found := self._placed([PoolChoice(pool.names, (), pool.place, ZERO) for pool in pools])) is None:
            return
        gpus = sum(pool.place.num_gpus for pool in pools)
        work = [_Work(index, part, each) for index, pool in enumerate(pools) for part, each in enumerate(pool.layouts)]
        # The components with the most different memory first: what they choose decides what is left for the others.
        work.sort(key=lambda one: (-one.spread, one.pool, one.part))

        def bound(state: _State) -> Key:
            """Return a key that no completion of the state has a smaller one than."""
            vectors, resident = list(state.seconds), list(state.resident)
            left = work[len(state.chosen) :]
            for one in left:
                resident[one.pool] += one.least_resident
            for one in left:
                fastest = one.fastest(self.capacity - resident[one.pool] + one.least_resident)
                if fastest is None:
                    return NEVER
                vectors[one.pool] = _added(vectors[one.pool], fastest)
            if any(size + extra > self.capacity for size, extra in zip(resident, state.extra, strict=True)):
                return NEVER
            return self._key(vectors, gpus)

        def descend(state: _State, lower: Key) -> None:
            self.examined += 1
            if self._is_cut(lower):
                return
            depth = len(state.chosen)
            if depth == len(work):
                self._choose_sizes(pools, work, state)
                return
            # Equal components in one pool choose in rising order, as their exchange changes nothing.
            twin = depth > 0 and work[depth].equals(work[depth - 1])
            first = state.chosen[-1] if twin else 0
            after = [state.plus(work[depth], index) for index in range(first, len(work[depth].layouts))]
            for key, _, next_state in sorted(((bound(one), one.chosen[-1], one) for one in after), key=lambda b: b[:2]):
                if key >= self.key:
                    return
                descend(next_state, key)

        zeros = (0.0,) * len(pools)
        start = _State((), tuple(pool.seconds for pool in found), zeros, zeros)
        descend(start, bound(start))

    def _choose_sizes(self, pools: Sequence[PoolCandidate], work: Sequence[_Work], state: _State) -> None:
        """Choose the sizes of batches for chosen layouts, and keep them if they are better than the best plan so far.

        Each component takes what is left beside all that stays. An engine that is awake keeps a cache: the more
        conversations it has room for, the faster it is, and the less is left for the others.
        """
        chosen = [(one, one.layouts[index]) for one, index in zip(work, state.chosen, strict=True)]
        made = []
        for index, pool in enumerate(pools):
            parts = {one.part: layout.choice for one, layout in chosen if one.pool == index}
            made.append(PoolChoice(pool.names, tuple(parts[part] for part in range(len(parts))), pool.place, ZERO))
        if (placed := self._placed(made)) is None:
            return
        gpus = sum(pool.place.num_gpus for pool in pools)
        engine = next((layout for _, layout in chosen if layout.grows), None)

        def sized(one: _Work, layout: Layout, least: int, most: int) -> Option | None:
            """Return the fastest option where an engine that is awake has from least to most conversations."""
            room = self.capacity - state.resident[one.pool]
            if engine is not None and any(other is engine and where.pool == one.pool for where, other in chosen):
                room -= engine.option(least).resident - engine.resident
            if layout is not engine:
                return layout.within(room)
            return layout.option(most) if layout.option(least).extra <= room else None

        def halve(least: int, most: int) -> None:
            found = [(one, sized(one, layout, least, most)) for one, layout in chosen]
            options = {(one.pool, one.part): option for one, option in found if option is not None}
            if len(options) < len(found):
                return
            full = []
            for index, pool in enumerate(placed):
                mine = [options[index, part] for part in range(len(pool.names))]
                seconds = functools.reduce(_added, (option.seconds for option in mine), pool.seconds)
                full.append(replace(pool, choices=tuple(option.choice for option in mine), seconds=seconds))
            key = self._key([pool.seconds for pool in full], gpus)
            if key >= self.key or math.isinf(key[0]):
                return
            if least < most:
                middle = (least + most) // 2
                halve(middle + 1, most)
                halve(least, middle)
                return
            step = step_seconds([pool.seconds for pool in full], asynchronous=self.request.workload.asynchronous)
            self.key = key if self.best else (-math.inf, -math.inf)
            self.incumbent = SearchResult(tuple(full), step)

        most = _fastest_option(engine).choice.max_num_seqs if engine else 0
        halve(engine.spans[0][0] if engine else 0, most)

    def _ends(self, pools: Sequence[PoolChoice]) -> list[int]:
        """Return the pools of the policy and of generation, by their number."""
        return [index for index, pool in enumerate(pools) if {Role.POLICY, Role.GENERATION} & self._roles(pool.names)]

    def _placed(self, pools: list[PoolChoice]) -> list[PoolChoice] | None:
        """Return the pools with the seconds that their place costs, or None if there is no room.

        The policy and generation are in one node if they can be; else new weights take longer.
        """
        nodes, needs, ends = self.request.cluster.nodes, [pool.need for pool in pools], self._ends(pools)
        if len(ends) == 2:
            if not any(pools[index].place.spans for index in ends) and fits(nodes, needs, together=ends):
                return pools
            end = next(index for index in ends if Role.POLICY in self._roles(pools[index].names))
            slower = replace(pools[end], crosses=True, seconds=_added(pools[end].seconds, self.crossing))
            pools = [*pools[:end], slower, *pools[end + 1 :]]
        return pools if fits(nodes, needs) else None

    def _gpus(self, pools: Sequence[PoolChoice]) -> tuple[tuple[Address, ...], ...]:
        """Return the GPUs of pools for which there is room."""
        ends = self._ends(pools)
        near = ends if len(ends) == 2 and not any(pool.crosses for pool in pools) else ()
        found = place(self.request.cluster.nodes, [pool.need for pool in pools], together=near)
        assert found is not None, "the search keeps only what fits"
        return found


@dataclass(frozen=True, slots=True)
class _State:
    """Layouts that are chosen so far, as indices in the order of the work, and what they take of each pool."""

    chosen: tuple[int, ...]
    seconds: tuple[Seconds, ...]
    resident: tuple[float, ...]
    extra: tuple[float, ...]

    def plus(self, work: _Work, index: int) -> _State:
        """Return the state after one more choice."""
        layout, pool = work.layouts[index], work.pool
        return _State(
            (*self.chosen, index),
            _changed(self.seconds, pool, _added(self.seconds[pool], _fastest(layout))),
            _changed(self.resident, pool, self.resident[pool] + layout.resident),
            _changed(self.extra, pool, max(self.extra[pool], layout.extra)),
        )


class _Work:
    """One component of a pool in the search over layouts."""

    def __init__(self, pool: int, part: int, found: Sequence[Layout]) -> None:
        self.pool, self.part, self.layouts = pool, part, found
        self.least_resident = min(layout.resident for layout in found)
        self.spread = max(layout.resident for layout in found) - self.least_resident
        ordered = sorted(found, key=_least_peak)
        self._peaks = [_least_peak(layout) for layout in ordered]
        self._best = _running_least([_fastest(layout) for layout in ordered])

    def equals(self, other: _Work) -> bool:
        """Return whether another component of the same pool has the same layouts."""
        mine, others = ([(each.resident, each.extra, each.fastest) for each in one.layouts] for one in (self, other))
        return self.pool == other.pool and mine == others

    def fastest(self, room: float) -> Seconds | None:
        """Return seconds that no layout which fits into this room is faster than; None if none fits."""
        index = bisect.bisect_right(self._peaks, room)
        return self._best[index - 1] if index else None


def _fastest_option(layout: Layout) -> Option:
    assert layout.fastest is not None, "layouts that do not fit are no candidates"
    return layout.fastest


def _fastest(layout: Layout) -> Seconds:
    return _fastest_option(layout).seconds


def _least_peak(layout: Layout) -> float:
    return layout.resident + layout.extra


def _added(left: Seconds, right: Seconds) -> Seconds:
    return tuple(map(operator.add, left, right))


def _changed(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _running_least(vectors: Sequence[Seconds]) -> list[Seconds]:
    """Return for each vector the least of every number so far."""
    return list(itertools.accumulate(vectors, lambda a, b: tuple(map(min, a, b))))
