"""Which GPUs a pool gets: tensor-parallel groups inside nodes, and pools in one node where that is faster."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
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
        nodes: number of GPUs of each node, all equal.
        needs: what each pool needs.
        together: pools, by their number, that must be in the same node.
    """
    filled = _filled(nodes, needs, together)
    if filled is None:
        return None
    # What lies in one node, by its size: pairs of a pool and its GPUs. Pools that are together are one of them.
    waiting: dict[int, deque[list[tuple[int, int]]]] = {size: deque() for sizes in filled for size in sizes}
    if together:
        near = [(pool, needs[pool].num_gpus) for pool in together]
        waiting[sum(size for _, size in near)].append(near)
    for pool, need in enumerate(needs):
        if pool not in together:
            waiting[need.unit].extend([(pool, need.unit)] for _ in range(need.num_gpus // need.unit))
    placed: list[list[Address]] = [[] for _ in needs]
    for node, sizes in enumerate(filled):
        gpu = 0
        for pool, size in (each for unit in sizes for each in waiting[unit].popleft()):
            placed[pool] += [Address(node, number) for number in range(gpu, gpu + size)]
            gpu += size
    return tuple(map(tuple, placed))


def fits(nodes: Sequence[int], needs: Sequence[Need], *, together: Sequence[int] = ()) -> bool:
    """Return whether `place` finds GPUs."""
    return _filled(nodes, needs, together) is not None


def _filled(nodes: Sequence[int], needs: Sequence[Need], together: Sequence[int]) -> Sequence[Sequence[int]] | None:
    units = Counter({sum(needs[pool].num_gpus for pool in together): 1} if together else {})
    for pool, need in enumerate(needs):
        if pool not in together:
            units[need.unit] += need.num_gpus // need.unit
    return fill(tuple(sorted(units.items(), reverse=True)), nodes[0], len(nodes))


@functools.lru_cache(maxsize=65536)
def fill(units: tuple[tuple[int, int], ...], gpus: int, nodes: int) -> tuple[tuple[int, ...], ...] | None:
    """Return the sizes of the units in each of the nodes, or None if they do not fit.

    `units` are sizes in falling order with their numbers, `gpus` those of a node. The fullest node that has room is
    taken first, which is enough for sizes that divide each other (1, 2, 4, 8); for others every way to fill the nodes
    is tried, up to `EXACT_UNITS` units.
    """
    total = sum(count for _, count in units)
    if sum(size * count for size, count in units) > gpus * nodes:
        return None
    filled: list[list[int]] = [[] for _ in range(nodes)]
    if total <= EXACT_UNITS:
        sizes = [size for size, count in units for _ in range(count)]
        if (found := _every_way(sizes, gpus, min(nodes, total))) is None:
            return None
        for size, node in zip(sizes, found, strict=True):
            filled[node].append(size)
        return tuple(map(tuple, filled))
    rooms: dict[int, deque[int]] = {gpus: deque(range(nodes))}
    for size, count in units:
        for room in sorted(room for room in rooms if room >= size):
            while count and rooms[room]:
                node, number = rooms[room].popleft(), min(room // size, count)
                filled[node] += [size] * number
                rooms.setdefault(room - number * size, deque()).append(node)
                count -= number
        if count:
            return None
    return tuple(map(tuple, filled))


def _every_way(sizes: Sequence[int], gpus: int, nodes: int) -> tuple[int, ...] | None:
    """Return the node of each size, or None if no way to fill the nodes has room for all."""
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

    return put(0, (gpus,) * nodes)


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
