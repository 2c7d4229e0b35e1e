"""Which GPUs a pool gets: tensor-parallel groups inside nodes, and pools in one node where that is faster."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gym_rm.planning.plan import Address

Part = TypeVar("Part")
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
        return _unpacked(sizes, capacities)
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


def fits(nodes: Sequence[int], needs: Sequence[Need], *, together: Sequence[int] = ()) -> bool:
    """Return whether `place` finds GPUs, without saying which: the time does not depend on how many there are."""
    near = sum(needs[pool].num_gpus for pool in together)
    units = Counter({near: 1} if together else {})
    for pool, need in enumerate(needs):
        if pool not in together:
            units[need.unit] += need.num_gpus // need.unit
    rooms = Counter(nodes)
    if units.total() > EXACT_UNITS:
        return _best_fit(units, rooms) is not None
    bins = sorted((room for room, count in rooms.items() for _ in range(min(count, units.total()))), reverse=True)
    return pack(tuple(sorted(units.elements(), reverse=True)), tuple(bins)) is not None


def _best_fit(units: Mapping[int, int], rooms: Mapping[int, int]) -> list[tuple[int, int, int, int]] | None:
    """Fill the fullest bins that have room, the largest units first, from numbers of units and of bins by their size.

    Return (size, room, number, bins) one after the other: so many bins with this room get so many units of this size;
    None if the units do not fit.
    """
    left, steps = Counter(rooms), []
    for size, count in sorted(units.items(), reverse=True):
        for room in sorted(room for room, bins in left.items() if room >= size and bins):
            while count and left[room]:
                number = min(room // size, count)
                bins = min(left[room], count // number)
                steps.append((size, room, number, bins))
                left[room] -= bins
                left[room - number * size] += bins
                count -= number * bins
        if count:
            return None
    return steps


def _unpacked(sizes: Sequence[int], capacities: Sequence[int]) -> tuple[int, ...] | None:
    """Return the bin of each size as `_best_fit` fills them, the first of equally full bins first."""
    if (steps := _best_fit(Counter(sizes), Counter(capacities))) is None:
        return None
    by_room: dict[int, list[int]] = {}
    for index, room in enumerate(capacities):
        by_room.setdefault(room, []).append(index)
    found: list[int] = []
    for size, room, number, bins in steps:
        filled, by_room[room] = by_room[room][:bins], by_room[room][bins:]
        by_room.setdefault(room - number * size, []).extend(filled)
        found += [index for index in filled for _ in range(number)]
    return tuple(found)


def coarse_sizes(limit: int) -> list[int]:
    """Return up to 8 sizes between powers of two. They do not depend on the limit, so more GPUs only add sizes."""
    sizes = list(range(1, 17))
    while sizes[-1] < limit:
        step = max(1 << (sizes[-1].bit_length() - 4), 2)
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size <= limit]


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
