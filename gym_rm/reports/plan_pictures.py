"""Picture of a plan: its nodes and GPUs, the memory of one GPU in each phase, and one step in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_rm.errors import ConfigError
from gym_rm.planning.plan import PhaseTime, Plan, Role
from gym_rm.planning.quantities import GIB, show_seconds
from gym_rm.reports.plan_tables import budget, count, items_at_peak, parallelism, ranges, rate

# Okabe and Ito's colours, which people with any sort of colour vision can tell apart; then Tol's muted ones.
OKABE_ITO = ("#0072B2", "#E69F00", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#F0E442")
COLORS = (*OKABE_ITO, "#332288", "#882255", "#999933", "#44AA99", "#AA4499", "#117733", "#DDCC77")
PLATE = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"}  # under a text
INK, FAINT, PALE = "#22282e", "#6b747c", "#eceff1"
OTHER = "#b9c0c6"  # of what belongs to no component
_TITLE = {"loc": "left", "fontsize": 10, "weight": "bold"}
WIDTH, SIZE = 11.0, 8  # inches of the picture, points of its text
MOST_ROWS, MOST_NUMBERED = 8, 16  # rows of nodes, and GPUs of a node that are numbered


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

    colors, rows = colors_of(plan), equal_nodes(plan)[:MOST_ROWS]
    heights = [0.3 * len(rows) + 0.3, 3.2, sum(0.3 + 0.15 * len(pool.components) for pool in plan.pools) + 0.5]
    with matplotlib.rc_context({"font.size": SIZE, "text.parse_math": False}):
        figure = Figure(figsize=(WIDTH, sum(heights) + 0.25 * len(colors) + 1.6), dpi=130, layout="constrained")
        nodes, memory, times = figure.subplots(3, 1, height_ratios=heights)
        figure.suptitle(_facts(plan), x=0.01, ha="left", color=INK, fontsize=SIZE + 1)
        handles = [Patch(color=color, label=_described(plan, name)) for name, color in colors.items()]
        figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=SIZE)
        _draw_nodes(nodes, plan, rows, colors)
        _draw_memory(memory, plan, colors)
        _draw_times(times, plan, colors)
    for axes in figure.axes:
        axes.tick_params(length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
    for artist in figure.findobj():
        artist.set_clip_on(False)  # names of clips in an SVG depend on the last bit of the layout
    return figure


def colors_of(plan: Plan) -> dict[str, str]:
    """Return the colour of each component, in the order of their roles: the policy has the same in all plans."""
    parts = [part for pool in plan.pools for part in pool.components]
    parts.sort(key=lambda part: (list(Role).index(part.role), part.name))
    return {part.name: COLORS[number % len(COLORS)] for number, part in enumerate(parts)}


def _facts(plan: Plan) -> str:
    used = f"{plan.used_gpus:,} of {plan.num_gpus:,} {plan.processor}s of " if plan.used_gpus < plan.num_gpus else ""
    facts = [
        f"{show_seconds(plan.step_seconds)} a step",
        f"{rate(plan.conversations_per_second)} conversations/s",
        f"{rate(plan.tokens_per_second_per_gpu)} tokens/s per {plan.processor}",
        f"slowest: {plan.bottleneck.phase} of {plan.bottleneck.component}, by {plan.bottleneck.bottleneck}",
    ]
    return "\n".join(line[:130] for line in (f"{plan.name}: {used}{plan.cluster}", " · ".join(facts)))


def _described(plan: Plan, name: str) -> str:
    part = plan.component(name)
    size = f"{count(part.parameters)} parameters, {part.quantization or part.dtype}"
    gpus = f"{part.num_gpus:,} {plan.processor}s"
    return f"{name}: {part.model}, {size}; {gpus}, {parallelism(part)}, {budget(part)}"


def equal_nodes(plan: Plan) -> list[tuple[list[int], tuple[int | None, ...]]]:
    """Return the numbers of nodes with the same contents: for each of their GPUs its pool's number, or None."""
    contents: list[list[int | None]] = [[None] * gpus for gpus in plan.nodes]
    for number, pool in enumerate(plan.pools):
        for address in pool.gpus:
            contents[address.node][address.gpu] = number
    nodes: dict[tuple[int | None, ...], list[int]] = {}
    for node, pools in enumerate(contents):
        nodes.setdefault(tuple(pools), []).append(node)
    return [(numbers, pools) for pools, numbers in nodes.items()]


def _draw_nodes(
    axes: Any, plan: Plan, rows: list[tuple[list[int], tuple[int | None, ...]]], colors: dict[str, str]
) -> None:
    """Draw a row for each group of equal nodes, with a box for each GPU."""
    for row, (_, pools) in enumerate(rows):
        for gpu, number in enumerate(pools):
            names = [] if number is None else [part.name for part in plan.pools[number].components]
            for place, name in enumerate(names):
                share = 0.9 / len(names)
                axes.barh(row, share, left=gpu + place * share, color=colors[name], height=0.8)
            if not names:
                axes.barh(row, 0.9, left=gpu, color="white", edgecolor=FAINT, linestyle="--", height=0.8)
            if len(pools) <= MOST_NUMBERED:
                axes.text(gpu + 0.45, row, str(gpu), ha="center", va="center_baseline", bbox=PLATE)
    titles = [f"node{'s' if len(nodes) > 1 else ''} {ranges(nodes)}" for nodes, _ in rows]
    short = [
        title if len(title) < 24 else f"{len(nodes)} nodes from {nodes[0]} on"
        for title, (nodes, _) in zip(titles, rows, strict=True)
    ]
    axes.set_title(f"{plan.processor}s: several colours take turns, a dashed box is not used", **_TITLE)
    axes.set_yticks(range(len(rows)), short)
    axes.set_xlim(0, max(16, *plan.nodes))
    axes.invert_yaxis()
    axes.set_xticks([])


def _draw_memory(axes: Any, plan: Plan, colors: dict[str, str]) -> None:
    """Draw a bar for each phase and component of each pool, and a line for the memory of the pool's GPUs.

    Its items are stacked, those of the peak last; items that are tall and wide enough get a text.
    """
    labels: list[str] = []
    places: list[float] = []
    x, order = 0.0, list(colors)
    bars = sum(len(pool.memory) for pool in plan.pools)
    highest = max(max(pool.gpu_memory, pool.peak) for pool in plan.pools) / GIB
    for pool in plan.pools:
        start = x - 0.45
        for memory in pool.memory:
            bottom = 0.0
            items = items_at_peak(memory)
            items.sort(key=lambda pair: (pair[1], order.index(pair[0].component) if pair[0].component in order else -1))
            for item, passing in items:
                height, color = item.bytes / GIB, colors.get(item.component, OTHER)
                hatch = "///" if passing else ""
                axes.bar(x, height, 0.85, bottom, color=color, edgecolor="white", hatch=hatch, linewidth=0.6)
                text = f"{item.name.replace('_', ' ')} {_gib(item.bytes)}"
                if height > 0.06 * highest and 0.065 * len(text) < 8.5 / bars:
                    middle = bottom + height / 2
                    axes.text(x, middle, text, ha="center", va="center_baseline", color=INK, bbox=PLATE)
                bottom += height
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
    axes.set_xticks(places, labels, fontsize=SIZE if bars <= 8 else SIZE - 2)
    axes.set_xlim(-0.6, max(x - 0.6, 3.0))
    axes.set_ylim(0, 1.08 * highest)


def _gib(size: float) -> str:
    return f"{size / GIB:.0f}" if size >= 99.95 * GIB else f"{size / GIB:.1f}"


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
                axes.text(middle, row, "\n".join(lines), ha="center", va="center", bbox=PLATE)
        axes.text(plan.step_seconds, row, f" {plan.idle_share(pool):.0%} idle", va="center")
    title = "One step in seconds: a row is a pool, pale is waiting" + ("; phases overlap" if plan.overlaps else "")
    axes.set_title(title, **_TITLE)
    names = [pool.name.replace("+", "\n+") + f"\n{len(pool.gpus):,} {plan.processor}s" for pool in plan.pools]
    axes.set_yticks(range(len(plan.pools)), names)
    axes.set_xlim(0, 1.08 * plan.step_seconds)
    axes.invert_yaxis()
