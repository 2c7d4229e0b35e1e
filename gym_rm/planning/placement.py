"""Which GPUs a pool gets: tensor-parallel groups inside nodes, and pools in one node where that is faster."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from gym_rm.planning.plan import Address

EXACT_UNITS = 48  # more units than this are packed largest first, without trying other ways


@dataclass(frozen=True, slots=True)
class Need:
    """GPUs that a pool needs, of which `unit` must be in one node: a tensor-parallel group, or all of its GPUs."""

    num_gpus: int
    unit: int


def place(
    nodes: Sequence[int], needs: Sequence[Need], *, together: Sequence[int] = ()
) -> tuple[tuple[Address, ...], ...] | None:
    """Return the GPUs of each pool, or None if they do not fit.

    Args:
        nodes: number of GPUs of each node.
        needs: what each pool needs.
        together: pools, by their number, that must be in the same node.
    """
    if together:
        size = sum(needs[pool].num_gpus for pool in together)
        others = [pool for pool in range(len(needs)) if pool not in together]
        found = place(nodes, [Need(size, size), *(needs[pool] for pool in others)])
        if found is None:
            return None
        left, given = list(found[0]), dict(zip(others, found[1:], strict=True))
        for pool in together:
            given[pool], left = tuple(left[: needs[pool].num_gpus]), left[needs[pool].num_gpus :]
        return tuple(given[pool] for pool in range(len(needs)))
    # Larger nodes first, and equal ones by number, so that the order in which nodes are written changes nothing.
    order = sorted(range(len(nodes)), key=lambda node: (-nodes[node], node))
    units = [(need.unit, pool) for pool, need in enumerate(needs) for _ in range(need.num_gpus // need.unit)]
    units.sort(key=lambda unit: (-unit[0], unit[1]))
    bins = pack(tuple(size for size, _ in units), tuple(nodes[node] for node in order))
    if bins is None:
        return None
    free = [list(range(gpus)) for gpus in nodes]
    placed: list[list[Address]] = [[] for _ in needs]
    for (size, pool), index in zip(units, bins, strict=True):
        node = order[index]
        placed[pool] += [Address(node, gpu) for gpu in free[node][:size]]
        del free[node][:size]
    return tuple(tuple(addresses) for addresses in placed)


@functools.lru_cache(maxsize=65536)
def pack(sizes: tuple[int, ...], capacities: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the bin of each size (in falling order), or None if they do not fit.

    The fullest bin that has room is tried first, which is enough for sizes that divide each other (1, 2, 4, 8) in equal
    bins; for others every way to fill the bins is tried, up to `EXACT_UNITS` sizes.
    """
    if sum(sizes) > sum(capacities):
        return None
    if len(sizes) > EXACT_UNITS:
        return _best_fit(sizes, capacities)
    failed: set[tuple[int, tuple[int, ...]]] = set()

    def put(position: int, left: tuple[int, ...]) -> tuple[int, ...] | None:
        if position == len(sizes):
            return ()
        state = (position, tuple(sorted(left)))
        if state in failed:
            return None
        fitting = {free: index for index, free in reversed(list(enumerate(left))) if free >= sizes[position]}
        for free in sorted(fitting):
            index = fitting[free]
            rest = put(position + 1, (*left[:index], free - sizes[position], *left[index + 1 :]))
            if rest is not None:
                return (index, *rest)
        failed.add(state)
        return None

    return put(0, capacities)


def _best_fit(sizes: tuple[int, ...], capacities: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return for each size the fullest bin that has room when its turn comes, the first of equally full ones."""
    by_room: dict[int, list[int]] = {}
    for index, room in enumerate(capacities):
        by_room.setdefault(room, []).append(index)  # in rising order, which is a heap
    bins = []
    for size in sizes:
        room = min((room for room, there in by_room.items() if room >= size and there), default=None)
        if room is None:
            return None
        bins.append(heapq.heappop(by_room[room]))
        heapq.heappush(by_room.setdefault(room - size, []), bins[-1])
    return tuple(bins)
