"""Picture of a plan: its nodes and GPUs, the memory of one GPU in each phase, and one step in time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_rm.errors import ConfigError
from gym_rm.planning.plan import PhaseMemory, PhaseTime, Plan, Role
from gym_rm.planning.quantities import GIB, show_seconds
from gym_rm.reports.plan_tables import budget, count, division, items_at_peak, ranges, rate

# Okabe and Ito's colours, which people with any sort of colour vision can tell apart; then Tol's muted ones.
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
COLORS = (*OKABE_ITO, "#332288", "#882255", "#999933", "#44AA99", "#AA4499", "#117733", "#DDCC77")
PLATE = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"}  # under a text
INK, FAINT, PALE = "#22282e", "#6b747c", "#eceff1"
OTHER = "#b9c0c6"  # of what belongs to no component
_TITLE = {"loc": "left", "fontsize": 10, "weight": "bold"}
WIDTH, SIZE = 11.0, 8  # inches of the picture, points of its text
SEPARATE_NODES, MOST_ROWS = 4, 8  # nodes that are drawn one by one, and rows of nodes


def plot_plan(plan: Plan, path: str | Path) -> Path:
    """Draw a plan into a `.svg` or `.png` file, and return its path.

    Above: every node with its GPUs, coloured by component; a GPU with several colours is used by them in turn. Middle:
    the memory of one GPU of each pool, one bar for each phase and component: what stays, and on it hatched what the
    peak adds. Below: one step in time.

    Raises:
        ConfigError: the file has another suffix.
    """
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"a picture of a plan is a .svg or .png file, got {str(path)!r}.")
    import matplotlib

    figure = figure_of(plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gym_rm"}):  # text stays text; equal files
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def figure_of(plan: Plan) -> Any:
    """Return the matplotlib figure of a plan: axes for the GPUs, the memory and the time."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colors, groups = colors_of(plan), node_groups(plan)[:MOST_ROWS]
    heights = [0.3 * len(groups) + 0.3, 3.2, sum(0.3 + 0.15 * len(pool.components) for pool in plan.pools) + 0.5]
    with matplotlib.rc_context({"font.size": SIZE}):
        figure = Figure(figsize=(WIDTH, sum(heights) + 0.25 * len(colors) + 1.6), dpi=130, layout="constrained")
        nodes, memory, times = figure.subplots(3, 1, height_ratios=heights)
        figure.suptitle(_facts(plan), x=0.01, ha="left", color=INK, fontsize=SIZE + 1)
        handles = [Patch(color=color, label=_described(plan, name)) for name, color in colors.items()]
        figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=SIZE)
        _draw_nodes(nodes, plan, groups, colors)
        _draw_memory(memory, plan, colors)
        _draw_times(times, plan, colors)
    for artist in figure.findobj():
        artist.set_clip_on(False)  # names of clips in an SVG depend on the last bit of the layout
    return figure


def colors_of(plan: Plan) -> dict[str, str]:
    """Return the colour of each component. Those of the policy and of generation are the same in all plans."""
    fixed = {Role.POLICY: 0, Role.GENERATION: 1, Role.REFERENCE: 4, Role.CRITIC: 5}
    roles = {part.name: part.role for pool in plan.pools for part in pool.components}
    taken = {name: fixed[role] for name, role in roles.items() if role in fixed}
    others = [number for number in range(len(COLORS)) if number not in taken.values()]
    rest = sorted(name for name in roles if name not in taken)
    taken |= {name: others[number % len(others)] for number, name in enumerate(rest)}
    return {name: COLORS[taken[name]] for name in sorted(taken, key=lambda name: (list(Role).index(roles[name]), name))}


def _facts(plan: Plan) -> str:
    used = f"{plan.used_gpus:,} of {plan.num_gpus:,} {plan.processor}s of " if plan.used_gpus < plan.num_gpus else ""
    facts = [
        f"{show_seconds(plan.step_seconds)} a step",
        f"{rate(plan.conversations_per_second)} conversations/s",
        f"{rate(plan.tokens_per_second_per_gpu)} tokens/s per {plan.processor}",
        f"slowest: {plan.bottleneck.phase} of {plan.bottleneck.component}, by {plan.bottleneck.bottleneck}",
    ]
    return _plain("\n".join(line[:130] for line in (f"{plan.name}: {used}{plan.cluster}", " · ".join(facts))))


def _described(plan: Plan, name: str) -> str:
    part = plan.component(name)
    size = f"{count(part.parameters)} parameters, {part.quantization or part.dtype}"
    return _plain(
        f"{name}: {part.model}, {size}; {part.num_gpus:,} {plan.processor}s, {division(part)}, {budget(part)}"
    )


def _plain(text: str) -> str:
    """Return text in which a dollar sign does not begin a formula."""
    return text.replace("$", r"\$")


# --- nodes -----------------------------------------------------------------------------------------------------------


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
        text = f"node{'s' if len(self.nodes) > 1 else ''} {ranges(self.nodes)}"
        return text if len(text) < 24 else f"{len(self.nodes)} nodes from {self.nodes[0]} on"

    @property
    def runs(self) -> list[tuple[list[int], int | None]]:
        """Each GPU with the number of its pool; in a node of more than 16, those of a pool that follow each other."""
        if len(self.pools) <= 16:
            return [([gpu], pool) for gpu, pool in enumerate(self.pools)]
        runs = itertools.groupby(range(len(self.pools)), key=self.pools.__getitem__)
        return [(list(gpus), pool) for pool, gpus in runs]


def node_groups(plan: Plan) -> list[NodeGroup]:
    """Return the nodes, those of a large cluster with the same contents together."""
    contents: list[list[int | None]] = [[None] * gpus for gpus in plan.nodes]
    for number, pool in enumerate(plan.pools):
        for address in pool.gpus:
            contents[address.node][address.gpu] = number
    if len(contents) <= SEPARATE_NODES:
        return [NodeGroup((node,), tuple(pools)) for node, pools in enumerate(contents)]
    nodes: dict[tuple[int | None, ...], list[int]] = {}
    for node, pools in enumerate(contents):
        nodes.setdefault(tuple(pools), []).append(node)
    return [NodeGroup(tuple(numbers), pools) for pools, numbers in nodes.items()]


def _draw_nodes(axes: Any, plan: Plan, groups: list[NodeGroup], colors: dict[str, str]) -> None:
    """Draw a row for each group of nodes, with a box for each GPU, or for each run of GPUs in a large node."""
    for row, group in enumerate(groups):
        for gpus, number in group.runs:
            names = [] if number is None else [part.name for part in plan.pools[number].components]
            width, left = len(gpus) - 0.1, gpus[0]
            for place, name in enumerate(names):
                share = width / len(names)
                axes.barh(row, share, left=left + place * share, color=colors[name], height=0.8)
            if not names:
                axes.barh(row, width, left=left, color="white", edgecolor=FAINT, linestyle="--", height=0.8)
            axes.text(left + width / 2, row, ranges(gpus), ha="center", va="center_baseline", bbox=PLATE)
    axes.set_title(f"{plan.processor}s: several colours take turns, a dashed box is not used", **_TITLE)
    axes.set_yticks(range(len(groups)), [group.title for group in groups])
    axes.set_xlim(0, max(16, *plan.nodes))
    axes.invert_yaxis()
    axes.set_xticks([])
    _finish(axes)


# --- memory ----------------------------------------------------------------------------------------------------------


def _draw_memory(axes: Any, plan: Plan, colors: dict[str, str]) -> None:
    """Draw a bar for each phase and component of each pool, and a line for the memory of the pool's GPUs."""
    labels, places, x = [], [], 0.0
    bars = sum(len(pool.memory) for pool in plan.pools)
    highest = max(max(pool.gpu_memory, pool.peak) for pool in plan.pools) / GIB
    for pool in plan.pools:
        start = x - 0.45
        for memory in pool.memory:
            _draw_bar(axes, x, memory, colors, highest, width=10.0 / bars)
            peak = f"peak: {memory.peak_instant.name}\n{_gib(memory.peak)} of {_gib(pool.gpu_memory)}"
            labels.append(f"{memory.phase}\n{memory.component}\n{peak}")
            places.append(x)
            x += 1.0
        limit = pool.gpu_memory / GIB
        axes.hlines(limit, start, x - 0.55, color=INK, linewidth=1.2)
        axes.text(start, limit + 0.012 * highest, f"{pool.gpu}: {_gib(pool.gpu_memory)}", va="bottom")
        x += 0.3
    title = f"Memory of one {plan.processor} in GiB: hatched is what the peak of a phase adds, grey is libraries"
    axes.set_title(title, **_TITLE)
    axes.set_xticks(places, [_plain(label) for label in labels], fontsize=SIZE if bars <= 8 else SIZE - 2)
    axes.set_xlim(-0.6, max(x - 0.6, 3.0))
    axes.set_ylim(0, 1.08 * highest)
    _finish(axes)


def _draw_bar(
    axes: Any, x: float, memory: PhaseMemory, colors: dict[str, str], highest: float, *, width: float
) -> None:
    """Stack the items of a bar, those of the peak last; items that are tall and wide enough get a text."""
    bottom, order = 0.0, {name: number for number, name in enumerate(colors)}
    items = sorted(items_at_peak(memory), key=lambda pair: (pair[1], order.get(pair[0].component, -1)))
    for item, passing in items:
        height, color = item.bytes / GIB, colors.get(item.component, OTHER)
        axes.bar(x, height, 0.85, bottom, color=color, edgecolor="white", hatch="///" if passing else "", linewidth=0.6)
        text = f"{item.name.replace('_', ' ')} {_gib(item.bytes)}"
        if height > 0.06 * highest and 0.065 * len(text) < 0.85 * width:
            axes.text(x, bottom + height / 2, text, ha="center", va="center_baseline", color=INK, bbox=PLATE)
        bottom += height


def _gib(size: float) -> str:
    return f"{size / GIB:.0f}" if size >= 99.95 * GIB else f"{size / GIB:.1f}"


# --- time ------------------------------------------------------------------------------------------------------------


def timeline(plan: Plan) -> dict[str, list[tuple[PhaseTime, float]]]:
    """Return the blocks of work of each pool, with the seconds from the start of the step at which they begin.

    All pools begin a phase together, and components of one pool follow each other. If phases overlap, each pool does
    its work without waiting.
    """
    blocks: dict[str, list[tuple[PhaseTime, float]]] = {pool.name: [] for pool in plan.pools}
    free = dict.fromkeys(blocks, 0.0)
    begin = 0.0
    for phase, seconds in plan.phase_seconds:
        for time in (each for each in plan.times if each.phase is phase and each.seconds > 0):
            start = free[time.pool] if plan.overlaps else max(begin, free[time.pool])
            blocks[time.pool].append((time, start))
            free[time.pool] = start + time.seconds
        begin += seconds
    return blocks


def _draw_times(axes: Any, plan: Plan, colors: dict[str, str]) -> None:
    """Draw a row for each pool, with a block for each component and phase; blocks that are wide enough get a text."""
    blocks = timeline(plan)
    for row, pool in enumerate(plan.pools):
        axes.barh(row, plan.step_seconds, color=PALE, height=0.8)
        for time, start in blocks[pool.name]:
            color = colors[time.component]
            axes.barh(row, time.seconds, left=start, color=color, edgecolor="white", height=0.8, linewidth=0.6)
            lines = (time.component, f"{time.phase} {show_seconds(time.seconds)}")
            if 0.075 * max(map(len, lines)) < 8.5 * time.seconds / plan.step_seconds:
                middle = start + time.seconds / 2
                axes.text(middle, row, _plain("\n".join(lines)), ha="center", va="center", bbox=PLATE)
        axes.text(plan.step_seconds, row, f" {plan.idle_share(pool):.0%} idle", va="center")
    title = "One step in seconds: a row is a pool, pale is waiting" + ("; phases overlap" if plan.overlaps else "")
    axes.set_title(title, **_TITLE)
    names = [pool.name.replace("+", "\n+") + f"\n{len(pool.gpus):,} {plan.processor}s" for pool in plan.pools]
    axes.set_yticks(range(len(plan.pools)), [_plain(name) for name in names])
    axes.set_xlim(0, 1.08 * plan.step_seconds)
    axes.invert_yaxis()
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
