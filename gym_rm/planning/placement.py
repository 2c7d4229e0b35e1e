"""Which GPUs a pool gets: tensor-parallel groups inside nodes, and pools in one node where that is faster."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from gym_rm.planning.hardware.devices import Cluster
from gym_rm.planning.plan import Address

EXACT_UNITS = 48  # more units than this are packed largest first, without trying other ways


@dataclass(frozen=True, slots=True)
class Need:
    """GPUs that a pool needs.

    Attributes:
        device: their kind.
        num_gpus: how many.
        unit: GPUs that must be in one node: the largest tensor-parallel group, or all of a pool that stays in a node.
    """

    device: str
    num_gpus: int
    unit: int


def place(cluster: Cluster, needs: Sequence[Need]) -> tuple[tuple[Address, ...], ...] | None:
    """Return the GPUs of each pool, or None if they do not fit.

    Units of equal size are divisible in practice (1, 2, 4, 8), where filling the largest first is optimal; for others
    every way to fill the nodes is tried, up to `EXACT_UNITS` units.
    """
    free = {index: list(range(node.gpus)) for index, node in enumerate(cluster.nodes)}
    found: list[list[Address]] = [[] for _ in needs]
    for device in {need.device for need in needs}:
        # Larger nodes first, and equal ones by number, so that the order in which nodes are written changes nothing.
        nodes = sorted(
            (index for index, node in enumerate(cluster.nodes) if node.device.name == device),
            key=lambda index: (-cluster.nodes[index].gpus, index),
        )
        units = [
            (need.unit, number)
            for number, need in enumerate(needs)
            if need.device == device
            for _ in range(need.num_gpus // need.unit)
        ]
        units.sort(key=lambda unit: (-unit[0], unit[1]))
        bins = _fill(tuple(size for size, _ in units), tuple(cluster.nodes[index].gpus for index in nodes))
        if bins is None:
            return None
        for (size, number), place_of in zip(units, bins, strict=True):
            node = nodes[place_of]
            found[number] += [Address(node, gpu) for gpu in free[node][:size]]
            del free[node][:size]
    return tuple(tuple(addresses) for addresses in found)


@functools.lru_cache(maxsize=65536)
def _fill(sizes: tuple[int, ...], capacities: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the bin of each size (in falling order), or None if they do not fit."""
    if sum(sizes) > sum(capacities):
        return None
    left, chosen = list(capacities), []
    for size in sizes:
        fitting = [index for index, free in enumerate(left) if free >= size]
        if not fitting:
            break
        index = min(fitting, key=lambda place: (left[place], place))
        left[index] -= size
        chosen.append(index)
    if len(chosen) == len(sizes):
        return tuple(chosen)
    chain = all(large % small == 0 for large, small in itertools.pairwise(sizes))
    if (chain and len(set(capacities)) == 1) or len(sizes) > EXACT_UNITS:
        return None
    return _try_all(sizes, capacities)


def _try_all(sizes: tuple[int, ...], capacities: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return a way to put all sizes into bins, by depth-first search without equal states."""
    failed: set[tuple[int, tuple[int, ...]]] = set()

    def go(position: int, left: tuple[int, ...]) -> tuple[int, ...] | None:
        if position == len(sizes):
            return ()
        state = (position, tuple(sorted(left)))
        if state in failed:
            return None
        tried: set[int] = set()
        for index, free in enumerate(left):
            if free < sizes[position] or free in tried:
                continue
            tried.add(free)
            rest = go(position + 1, (*left[:index], free - sizes[position], *left[index + 1 :]))
            if rest is not None:
                return (index, *rest)
        failed.add(state)
        return None

    return go(0, capacities)
