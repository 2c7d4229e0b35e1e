"""How tables and pictures say the parts of a plan: GPUs, nodes, divisions, and when each block of work begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gym_rm.planning.plan import ComponentPlan, MemoryItem, PhaseMemory, PhaseTime, Plan, PoolPlan
from gym_rm.planning.quantities import weakest


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers in short form.

    Example:
        >>> ranges([0, 1, 2, 5, 7, 8])
        '0 to 2, 5, 7, 8'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes with the same contents.

    Attributes:
        nodes: their numbers.
        pools: for each GPU of such a node, the number of its pool, or None for a GPU that nothing uses.
    """

    nodes: tuple[int, ...]
    pools: tuple[int | None, ...]

    @property
    def title(self) -> str:
        """The nodes in words: `node 0`, `nodes 2 to 63`."""
        if len(self.nodes) == 1:
            return f"node {self.nodes[0]}"
        text = ranges(self.nodes)
        return f"nodes {text}" if len(text) < 40 else f"{len(self.nodes)} nodes: {text[:32].rpartition(',')[0]}, ..."

    @property
    def runs(self) -> list[tuple[int, int, int | None]]:
        """First and last GPU of each run of GPUs of the same pool, and the number of the pool."""
        found: list[tuple[int, int, int | None]] = []
        for gpu, pool in enumerate(self.pools):
            if found and found[-1][2] == pool:
                found[-1] = (found[-1][0], gpu, pool)
            else:
                found.append((gpu, gpu, pool))
        return found


def node_groups(plan: Plan, *, together: bool = True) -> list[NodeGroup]:
    """Return the nodes, by default those with the same contents together, by the number of their first node."""
    contents: list[list[int | None]] = [[None] * count for count in plan.nodes]
    for number, pool in enumerate(plan.pools):
        for address in pool.gpus:
            contents[address.node][address.gpu] = number
    if not together:
        return [NodeGroup((node,), tuple(pools)) for node, pools in enumerate(contents)]
    found: dict[tuple[int | None, ...], list[int]] = {}
    for node, pools in enumerate(contents):
        found.setdefault(tuple(pools), []).append(node)
    return [NodeGroup(tuple(nodes), pools) for pools, nodes in found.items()]


def gpus_text(plan: Plan, pool: PoolPlan) -> str:
    """Return the GPUs of a pool in words: `nodes 0 to 2: all 8; node 3: 0 to 3`."""
    of_node: dict[int, list[int]] = {}
    for address in pool.gpus:
        of_node.setdefault(address.node, []).append(address.gpu)
    nodes: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for node, used in of_node.items():
        nodes.setdefault((tuple(sorted(used)), plan.nodes[node]), []).append(node)
    parts = []
    for (gpus, size), numbers in nodes.items():
        where = f"node{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"
        shown = f"all {size}" if len(gpus) == size > 1 else f"GPU{'s' if len(gpus) > 1 else ''} {ranges(gpus)}"
        parts.append(f"{where}: {shown}")
    return "; ".join(parts)


def division(component: ComponentPlan) -> str:
    """Return how a component is divided: `TP 2 x FSDP 4 x 1 replica`."""
    parts = [f"TP {component.tensor_parallel_size}"] if component.tensor_parallel_size > 1 else []
    parts += [f"FSDP {component.fsdp_size}"] if component.fsdp_size > 1 else []
    parts += [f"{component.num_replicas} replica{'s' if component.num_replicas != 1 else ''}"]
    return " x ".join(parts)


def budget(component: ComponentPlan) -> str:
    """Return how much work a replica takes at a time."""
    if component.max_num_seqs:
        return f"{component.max_num_seqs:,} conversations at a time"
    return f"{component.max_num_batched_tokens:,} tokens a forward"


def habits(component: ComponentPlan) -> str:
    """Return whether it sleeps and computes activations again."""
    again = {True: ["recomputes activations"], False: ["keeps activations"], None: []}
    return ", ".join(["sleeps"] * component.sleeps + again[component.gradient_checkpointing])


def count(number: float) -> str:
    """Return a large number for people: `8.2 B`, `350 M`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def rate(value: float) -> str:
    """Return a rate with three digits: `12.7`, `1,530`, `0.0123`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def items_at_peak(memory: PhaseMemory) -> list[tuple[MemoryItem, bool]]:
    """Return the items at the largest instant; True for those of the instant. Items of one name and owner are one."""
    found: dict[tuple[str, str, bool], list[MemoryItem]] = {}
    instant = memory.largest.items if memory.instants else ()
    for item, passing in [(each, False) for each in memory.persistent] + [(each, True) for each in instant]:
        found.setdefault((item.name, item.component, passing), []).append(item)
    return [(_together(items), passing) for (_, _, passing), items in found.items()]


def _together(items: Sequence[MemoryItem]) -> MemoryItem:
    first = items[0]
    source = "; ".join(dict.fromkeys(item.source for item in items))
    return MemoryItem(
        first.name, first.component, sum(item.bytes for item in items), weakest(i.basis for i in items), source
    )


@dataclass(frozen=True, slots=True)
class Block:
    """Work in the timeline of a step, from `start` on, in seconds."""

    time: PhaseTime
    start: float


def overlaps(plan: Plan) -> bool:
    """Return whether phases of one step run at the same time, as generation and training one step apart."""
    return plan.step_seconds < 0.999 * sum(seconds for _, seconds in plan.phase_seconds)


def timeline(plan: Plan) -> dict[str, list[Block]]:
    """Return the blocks of work of each pool.

    All pools begin a phase together, and components of one pool follow each other. If phases overlap, each pool does
    its work without waiting.
    """
    found: dict[str, list[Block]] = {pool.name: [] for pool in plan.pools}
    free = dict.fromkeys(found, 0.0)
    begin = 0.0
    together = not overlaps(plan)
    for phase, seconds in plan.phase_seconds:
        for time in (each for each in plan.times if each.phase is phase and each.seconds > 0):
            start = max(begin, free[time.pool]) if together else free[time.pool]
            found[time.pool].append(Block(time, start))
            free[time.pool] = start + time.seconds
        begin += seconds
    return found
