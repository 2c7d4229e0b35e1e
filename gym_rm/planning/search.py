"""The best placement: partitions of the components into pools, times sizes of the pools, times choices within them.

Up to `EXACT_GPUS` GPUs every size is tried, so the result is the best plan of this space. Above, sizes grow in steps.

HybridFlow (arXiv 2409.19256, section 6) enumerates the same space without time-shared memory; here branches whose bound
is no better than the best plan so far are cut.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gym_rm.errors import ConfigError
from gym_rm.planning.component_options import (
    EXACT_GPUS,
    PHASES,
    ZERO,
    KnownSizes,
    Layout,
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
from gym_rm.planning.pool_layouts import (
    MOST_NODES,
    NEVER,
    Incumbent,
    Key,
    PoolCandidate,
    PoolChoice,
    PoolLayouts,
    added,
    running_least,
)
from gym_rm.planning.step_times import sync_times


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best pools that a search found, with the GPUs of each; `exact`: whether no plan is better."""

    pools: tuple[PoolChoice, ...]
    gpus: tuple[tuple[Address, ...], ...]
    step_seconds: float
    exact: bool


def search(request: PlanRequest, *, best: bool = True) -> SearchResult | None:
    """Return the best plan, or any, which is faster to find; None if none fits.

    Raises:
        ConfigError: the search was cut before it met a plan that fits.
    """
    return _Search(request, best=best).result()


def _some_experts(request: PlanRequest) -> bool:
    """Return whether an engine runs experts: few conversations read fewer of them, so that more may be slower."""
    engines = [part for part in request.components if part.engine == "vllm" and part.max_num_seqs is None]
    return any(layer.experts for part in engines for layer, _ in part.shape.layers)


def pool_sizes(request: PlanRequest) -> Sequence[int]:
    """Return the numbers of GPUs that a pool may have; in a large cluster some, and those that fixed numbers need."""
    limit = request.cluster.num_gpus
    if limit <= EXACT_GPUS:
        return range(1, limit + 1)
    coarse = coarse_sizes(limit)
    sizes = {*coarse, *(each.num_gpus for each in request.components if each.num_gpus is not None)}
    for component in request.components:
        for tp in tensor_parallel_sizes(component, request.cluster.node_gpus):
            if component.num_replicas is not None:
                sizes.add(tp * component.num_replicas)
            if component.fsdp_size is not None or component.tensor_parallel_size is not None:
                unit = tp * (component.fsdp_size or 1)  # of the usual sizes, those of whole groups
                sizes |= {size // unit * unit for size in coarse}
    return sorted(size for size in sizes if 0 < size <= limit)


class _Search:
    """One search for the pools, by branch and bound."""

    def __init__(self, request: PlanRequest, *, best: bool) -> None:
        self.request, self.sizes, self.incumbent = request, pool_sizes(request), Incumbent(request, best)
        self.components = {component.name: component for component in request.components}
        device = request.cluster.device
        self.capacity = device.memory.value - device.reserved.value
        self.crossing = self._crossing()
        self.known: KnownSizes = {}
        self.awake, self.waiting = functools.cache(self._awake), functools.cache(self._waiting)
        self.candidates = functools.cache(self._candidates)
        self.fastest = functools.cache(self._fastest)

    def result(self) -> SearchResult | None:
        """Return the best plan, or the first."""
        gpus, found = self.request.cluster.num_gpus, self.incumbent
        roots: list[tuple[Key, int, list[list[PoolCandidate]]]] = []
        for number, groups in enumerate(self._groupings()):
            candidates = [self.candidates(group) for group in groups]
            if all(candidates):
                candidates.sort(key=lambda pools: (len(pools), pools[0].names))
                roots.append((self._lower(candidates, [], gpus), number, candidates))
        roots.sort(key=lambda root: root[:2])
        for lower, _, candidates in roots:
            if lower < found.key:
                self._descend(candidates, [], gpus)
        cut = found.examined >= MOST_NODES
        if found.pools is None and cut:
            raise ConfigError(
                f"{self.request.name}: no plan among the first {MOST_NODES:,} combinations; fix some, such as "
                "pools, sleeps or tensor_parallel_size."
            )
        if found.pools is None:
            return None
        step = step_seconds([pool.seconds for pool in found.pools], asynchronous=self.request.workload.asynchronous)
        exact = found.best and not cut and gpus <= EXACT_GPUS and not _some_experts(self.request)
        return SearchResult(found.pools, self._gpus(found.pools), step, exact)

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

    def _roles(self, names: Sequence[str]) -> set[Role]:
        return {self.components[name].role for name in names}

    # --- candidates ---

    def _awake(self, name: str, where: PoolPlace, together: bool) -> list[Layout]:
        return layouts(self.components[name], where, self.request, together=together, known=self.known)

    def _waiting(self, name: str, where: PoolPlace, together: bool, alone: bool) -> list[Layout]:
        found = with_sleeping(self.components[name], self.awake(name, where, together), self.request, alone=alone)
        return sorted(found, key=lambda layout: sum(layout.best.seconds))

    def _layouts(self, name: str, where: PoolPlace, together: bool, alone: bool) -> tuple[Layout, ...]:
        component = self.components[name]
        found = self.waiting(name, where.of(component), together and component.role is Role.POLICY, alone)
        return tuple(each for each in found if where.need([each.choice.unit]).unit <= where.node_gpus)

    def _candidates(self, group: tuple[str, ...]) -> list[PoolCandidate]:
        """Return the places for a group of components, by the GPUs that they take."""
        given = {self.components[name].num_gpus for name in group} - {None}
        together = {Role.POLICY, Role.GENERATION} <= self._roles(group)
        sends = Role.POLICY in self._roles(group) and not together
        candidates = []
        for size in (size for size in self.sizes if not given or given == {size}):
            for where in places(size, self.request.cluster.node_gpus):
                found = tuple(self._layouts(name, where, together, len(group) == 1) for name in group)
                if all(found) and self._may_fit(found):
                    fastest = [running_least([layout.best.seconds for layout in each])[-1] for each in found]
                    always = self.crossing if sends and where.spans else ZERO
                    candidates.append(PoolCandidate(group, where, found, functools.reduce(added, fastest, always)))
        return sorted(candidates, key=lambda one: (one.place.num_gpus, sum(one.seconds)))

    def _may_fit(self, found: Sequence[Sequence[Layout]]) -> bool:
        """Return whether the smallest layouts fit together; the search decides about the others."""
        resident = sum(min(layout.resident for layout in each) for each in found)
        return resident + max(min(layout.extra for layout in each) for each in found) <= self.capacity

    # --- pools ---

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
        return self.incumbent.key_of(vectors, sum(pool.place.num_gpus for pool in chosen) + sum(smallest))

    def _fastest(self, group: tuple[str, ...]) -> tuple[list[int], list[Seconds]]:
        """Return the GPUs of a group's candidates, and the fastest seconds up to each of them."""
        pools = self.candidates(group)
        return [pool.place.num_gpus for pool in pools], running_least([pool.seconds for pool in pools])

    def _descend(self, candidates: list[list[PoolCandidate]], chosen: list[PoolCandidate], left: int) -> None:
        if not candidates:
            self._choose_layouts(chosen)
            return
        first, *rest = candidates
        fitting = [pool for pool in first if pool.place.num_gpus <= left]
        branches = [(self._lower(rest, [*chosen, pool], left - pool.place.num_gpus), pool) for pool in fitting]
        branches.sort(key=lambda branch: branch[0])
        for lower, pool in branches:
            self.incumbent.examined += 1
            if self.incumbent.cuts(lower):
                return
            self._descend(rest, [*chosen, pool], left - pool.place.num_gpus)

    def _choose_layouts(self, pools: list[PoolCandidate]) -> None:
        """Choose the layouts of these pools, and keep them if they are better than the best plan so far.

        The policy and generation are in one node if they can be; else new weights take longer.
        """
        ends = self._ends(pools)
        near = len(ends) == 2 and not any(pools[index].place.spans for index in ends)
        nodes = self.request.cluster.nodes

        def crosses(needs: Sequence[Need]) -> bool | None:
            if len(ends) < 2 or (near and fits(nodes, needs, together=ends)):
                return False if len(ends) == 2 or fits(nodes, needs) else None
            return True if fits(nodes, needs) else None

        sender = next((index for index in ends if Role.POLICY in self._roles(pools[index].names)), -1)
        known = {"capacity": self.capacity, "sender": sender, "crossing": self.crossing}
        PoolLayouts(pools, self.incumbent, crosses=crosses, **known).search()  # type: ignore[arg-type]

    def _ends(self, pools: Sequence[PoolCandidate | PoolChoice]) -> list[int]:
        """Return the pools of the policy and of generation, by their number."""
        return [index for index, pool in enumerate(pools) if {Role.POLICY, Role.GENERATION} & self._roles(pool.names)]

    def _gpus(self, pools: Sequence[PoolChoice]) -> tuple[tuple[Address, ...], ...]:
        """Return the GPUs of pools for which there is room."""
        ends = self._ends(pools)
        near = ends if len(ends) == 2 and not any(pool.crosses for pool in pools) else ()
        found = place(self.request.cluster.nodes, [pool.need for pool in pools], together=near)
        assert found is not None, "the search keeps only what fits"
        return found
