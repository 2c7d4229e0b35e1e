"""The layouts and batch sizes of the components in given pools, by branch and bound."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from gym_rm.planning.component_options import ZERO, Layout, Option, PoolPlace, Seconds, step_seconds
from gym_rm.planning.placement import Need
from gym_rm.planning.plan_request import PlanRequest

MOST_NODES = 100_000  # of the search tree; a search that is cut here is not exact

Key: TypeAlias = tuple[float, float]
"""What the search makes small: the objective, then the tie-breaker."""
NEVER: Key = (math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class PoolCandidate:
    """GPUs for components whose layouts are not chosen yet; no choice is faster than `seconds` in any phase."""

    names: tuple[str, ...]
    place: PoolPlace
    layouts: tuple[tuple[Layout, ...], ...]
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """A pool with an option for each of its components; `crosses`: whether its new weights go to other nodes."""

    names: tuple[str, ...]
    options: tuple[Option, ...]
    place: PoolPlace
    seconds: Seconds
    crosses: bool = False

    @property
    def need(self) -> Need:
        """The GPUs that it needs, and how many of them in one node."""
        return self.place.need([option.choice.unit for option in self.options])


@dataclass(slots=True)
class Incumbent:
    """The best plan so far: its pools, its key, and how many branches were examined.

    Where not the `best` is wanted, the first plan cuts all others.
    """

    request: PlanRequest
    best: bool
    pools: tuple[PoolChoice, ...] | None = None
    key: Key = NEVER
    examined: int = 0

    def key_of(self, vectors: Sequence[Seconds], gpus: int) -> Key:
        """Return the key of a step with these seconds of each pool."""
        step = step_seconds(vectors, asynchronous=self.request.workload.asynchronous)
        if self.request.step_seconds is not None:
            return (math.inf if step > self.request.step_seconds else float(gpus), step)
        return (step, gpus)

    def cuts(self, lower: Key) -> bool:
        """Return whether a branch is not examined that has no smaller key than this one."""
        return lower >= self.key or math.isinf(lower[0]) or self.examined >= MOST_NODES

    def keep(self, pools: Sequence[PoolChoice], key: Key) -> None:
        """Take a better plan."""
        self.pools, self.key = tuple(pools), key if self.best else (-math.inf, -math.inf)


@dataclass(frozen=True, slots=True)
class _State:
    """Layouts that are chosen so far, as indices in the order of the parts, and what they take of each pool."""

    chosen: tuple[int, ...]
    seconds: tuple[Seconds, ...]
    resident: tuple[float, ...]
    extra: tuple[float, ...]

    def plus(self, part: _Part, index: int) -> _State:
        """Return the state after one more choice."""
        layout, pool = part.layouts[index], part.pool
        return _State(
            (*self.chosen, index),
            _changed(self.seconds, pool, added(self.seconds[pool], layout.best.seconds)),
            _changed(self.resident, pool, self.resident[pool] + layout.resident),
            _changed(self.extra, pool, max(self.extra[pool], layout.extra)),
        )


class PoolLayouts:
    """The search for the layouts of these pools.

    `crosses` returns, for what the pools need, whether new weights go to other nodes, or None if there is no room;
    `crossing` are the seconds that the pool of the number `sender` then takes longer.
    """

    def __init__(
        self,
        pools: Sequence[PoolCandidate],
        incumbent: Incumbent,
        *,
        capacity: float,
        sender: int,
        crossing: Seconds,
        crosses: Callable[[Sequence[Need]], bool | None],
    ) -> None:
        self._pools, self._incumbent, self._capacity = pools, incumbent, capacity
        self._sender, self._crossing, self._crosses = sender, crossing, crosses
        self._gpus = sum(pool.place.num_gpus for pool in pools)
        parts = [_Part(pool, part, each) for pool, one in enumerate(pools) for part, each in enumerate(one.layouts)]
        # The components with the most different memory first: what they choose decides what is left for the others.
        self._parts = sorted(parts, key=lambda one: (-one.spread, one.pool, one.part))

    def search(self) -> None:
        """Keep the best layouts and sizes if they are better than the best plan so far."""
        crosses = self._crosses([pool.place.need() for pool in self._pools])
        if crosses is not None:
            zeros = (0.0,) * len(self._pools)
            start = _State((), self._longer(crosses), zeros, zeros)
            self._descend(start, self._bound(start))

    def _longer(self, crosses: bool) -> tuple[Seconds, ...]:
        """Return the seconds that new weights take longer, by pool."""
        return tuple(self._crossing if crosses and pool == self._sender else ZERO for pool in range(len(self._pools)))

    def _bound(self, state: _State) -> Key:
        """Return a key that no completion of the state has a smaller one than."""
        vectors, resident = list(state.seconds), list(state.resident)
        left = self._parts[len(state.chosen) :]
        for one in left:
            resident[one.pool] += one.least_resident
        for one in left:
            fastest = one.fastest(self._capacity - resident[one.pool] + one.least_resident)
            if fastest is None:
                return NEVER
            vectors[one.pool] = added(vectors[one.pool], fastest)
        if any(size + extra > self._capacity for size, extra in zip(resident, state.extra, strict=True)):
            return NEVER
        return self._incumbent.key_of(vectors, self._gpus)

    def _descend(self, state: _State, lower: Key) -> None:
        self._incumbent.examined += 1
        if self._incumbent.cuts(lower):
            return
        depth, parts = len(state.chosen), self._parts
        if depth == len(parts):
            self._choose_sizes(state)
            return
        # Equal components in one pool choose in rising order, as their exchange changes nothing.
        twin = depth > 0 and parts[depth].equals(parts[depth - 1])
        first = state.chosen[-1] if twin else 0
        after = [state.plus(parts[depth], index) for index in range(first, len(parts[depth].layouts))]
        bounds = ((self._bound(one), one.chosen[-1], one) for one in after)
        for key, _, next_state in sorted(bounds, key=lambda bound: bound[:2]):
            if key >= self._incumbent.key:
                return
            self._descend(next_state, key)

    def _choose_sizes(self, state: _State) -> None:
        """Choose the sizes of batches for chosen layouts, and keep them if they are better than the best plan so far.

        Each component takes what is left beside all that stays. An engine that is awake keeps a cache: the more
        conversations it has room for, the faster it is, and the less is left for the others.
        """
        chosen = [(one, one.layouts[index]) for one, index in zip(self._parts, state.chosen, strict=True)]
        units: list[list[int]] = [[] for _ in self._pools]
        for one, layout in chosen:
            units[one.pool].append(layout.choice.unit)
        crosses = self._crosses([pool.place.need(each) for pool, each in zip(self._pools, units, strict=True)])
        if crosses is None:
            return
        engine = next((pair for pair in chosen if pair[1].grows), None)
        least = 0 if engine is None else engine[1].spans[0][0]
        most = 0 if engine is None else engine[1].best.choice.max_num_seqs
        self._halve(chosen, state, engine, crosses, least, most)

    def _halve(
        self,
        chosen: Sequence[tuple[_Part, Layout]],
        state: _State,
        engine: tuple[_Part, Layout] | None,
        crosses: bool,
        least: int,
        most: int,
    ) -> None:
        """Keep the best sizes where an engine that is awake has from `least` to `most` conversations."""
        options: dict[tuple[int, int], Option] = {}
        for one, layout in chosen:
            room = self._capacity - state.resident[one.pool]
            if engine is not None and engine[0].pool == one.pool:
                room -= engine[1].option(least).resident - engine[1].resident
            if engine is None or layout is not engine[1]:
                option = layout.within(room)
            else:
                option = layout.option(most) if layout.option(least).extra <= room else None
            if option is None:
                return
            options[one.pool, one.part] = option
        pools = []
        for index, (pool, longer) in enumerate(zip(self._pools, self._longer(crosses), strict=True)):
            mine = tuple(options[index, part] for part in range(len(pool.names)))
            seconds = functools.reduce(added, (option.seconds for option in mine), longer)
            pools.append(PoolChoice(pool.names, mine, pool.place, seconds, crosses and index == self._sender))
        key = self._incumbent.key_of([pool.seconds for pool in pools], self._gpus)
        if key >= self._incumbent.key or math.isinf(key[0]):
            return
        if least == most:
            self._incumbent.keep(pools, key)
            return
        middle = (least + most) // 2
        self._halve(chosen, state, engine, crosses, middle + 1, most)
        self._halve(chosen, state, engine, crosses, least, middle)


class _Part:
    """One component of a pool in the search over layouts."""

    def __init__(self, pool: int, part: int, found: Sequence[Layout]) -> None:
        self.pool, self.part, self.layouts = pool, part, found
        self.least_resident = min(layout.resident for layout in found)
        self.spread = max(layout.resident for layout in found) - self.least_resident
        ordered = sorted(found, key=lambda layout: layout.peak)
        self._peaks = [layout.peak for layout in ordered]
        self._best = running_least([layout.best.seconds for layout in ordered])

    def equals(self, other: _Part) -> bool:
        """Return whether another component of the same pool has the same layouts."""
        mine, others = ([(each.resident, each.extra, each.best) for each in one.layouts] for one in (self, other))
        return self.pool == other.pool and mine == others

    def fastest(self, room: float) -> Seconds | None:
        """Return seconds that no layout which fits into this room is faster than; None if none fits."""
        index = bisect.bisect_right(self._peaks, room)
        return self._best[index - 1] if index else None


def added(left: Seconds, right: Seconds) -> Seconds:
    """Return the sum of each phase."""
    return tuple(map(operator.add, left, right))


def running_least(vectors: Sequence[Seconds]) -> list[Seconds]:
    """Return for each vector the least of every number so far."""
    return list(itertools.accumulate(vectors, lambda a, b: tuple(map(min, a, b))))


def _changed(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])
