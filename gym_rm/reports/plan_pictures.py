"""Picture of a plan as SVG: the memory of one GPU in each phase, and one step in time."""

from __future__ import annotations

from html import escape
from pathlib import Path

from gym_rm.errors import ConfigError
from gym_rm.planning.plan import PhaseMemory, PhaseTime, Plan, PoolPlan, Role
from gym_rm.planning.quantities import GIB, show_seconds
from gym_rm.reports.plan_tables import budget, count, gpus_text, items_at_peak, parallelism, rate
from gym_rm.reports.svg import Chart, round_values

# Okabe and Ito's colours, which people with any sort of colour vision can tell apart; then Tol's muted ones.
OKABE_ITO = ("#0072B2", "#E69F00", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#F0E442")
COLORS = (*OKABE_ITO, "#332288", "#882255", "#999933", "#44AA99", "#AA4499", "#117733", "#DDCC77")
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #22282e; } .title { font-weight: 650; } .paper { fill: white; }
.mark { paint-order: stroke; stroke: white; stroke-width: 3px; } .grid, .waits { stroke: #eceff1; fill: #eceff1; }
.axis, .tick, .line { stroke: #22282e; fill: none; } .bar { stroke: white; } .other { fill: #b9c0c6; }
.passing { fill-opacity: 0.55; }
"""
LINE, LETTER = 17, 6.2  # height of a line of text, and width of a letter
WIDTH, BAR = 960, 112  # of the picture, and of a bar of memory at least


def plot_plan(plan: Plan, path: str | Path) -> Path:
    """Draw a plan into a `.svg` file, and return its path; see `plan_picture`.

    Raises:
        ConfigError: the file has another suffix.
    """
    path = Path(path)
    if path.suffix != ".svg":
        raise ConfigError(f"a picture of a plan is a .svg file, got {str(path)!r}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(plan_picture(plan), encoding="utf-8")
    return path


def plan_picture(plan: Plan) -> str:
    """Return the picture of a plan as SVG.

    Above: the plan in words, and where each component is. Middle: the memory of one GPU of each pool, one bar for each
    phase and component: what stays, and on it paler what the peak adds. Below: one step in time.
    """
    kinds = kinds_of(plan)
    width = max(WIDTH, BAR * (1 + sum(len(pool.memory) for pool in plan.pools)))
    y, parts = 0, []
    for words in _facts(plan):
        y += LINE
        parts.append(f'<text class="title" x="8" y="{y}">{escape(words)}</text>')
    for name, kind in kinds.items():
        y += LINE
        parts.append(f'<rect class="{kind}" x="8" y="{y - 9}" width="10" height="10"/>')
        parts.append(f'<text x="24" y="{y}">{escape(_described(plan, name))}</text>')
    for chart in (_memory_chart(plan, kinds, width), _times_chart(plan, kinds, width)):
        y += 2 * LINE
        place = f'<svg y="{y}" width="{width}" height="{chart.height}" '
        parts.append(f'<text class="title" x="8" y="{y - 4}">{escape(chart.title)}</text>')
        parts.append(chart.svg().replace("<svg ", place, 1))
        y += chart.height
    colors = "".join(f".c{number} {{ fill: {color}; }} " for number, color in enumerate(COLORS))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" role="img" aria-label="plan">'
    paper = f'<rect class="paper" width="{width}" height="{y}"/>'
    return "\n".join([head, f"<style>{STYLE}{colors}</style>", paper, *parts, "</svg>\n"])


def kinds_of(plan: Plan) -> dict[str, str]:
    """Return the class of each component's colour, by their roles: the policy has the same in all plans."""
    parts = [part for pool in plan.pools for part in pool.components]
    parts.sort(key=lambda part: (list(Role).index(part.role), part.name))
    return {part.name: f"c{number % len(COLORS)}" for number, part in enumerate(parts)}


def _facts(plan: Plan) -> tuple[str, str]:
    used = f"{plan.used_gpus:,} of {plan.num_gpus:,} {plan.processor}s of " if plan.used_gpus < plan.num_gpus else ""
    facts = [
        f"{show_seconds(plan.step_seconds)} a step",
        f"{rate(plan.conversations_per_second)} conversations/s",
        f"{rate(plan.tokens_per_second_per_gpu)} tokens/s per {plan.processor}",
        f"slowest: {plan.bottleneck.phase} of {plan.bottleneck.component}, by {plan.bottleneck.bottleneck}",
    ]
    return _cut(f"{plan.name}: {used}{plan.cluster}", WIDTH), " · ".join(facts)


def _described(plan: Plan, name: str) -> str:
    part = plan.component(name)
    size = f"{count(part.parameters)} parameters, {part.quantization or part.dtype}"
    where = gpus_text(plan, plan.pool_of(name))
    return _cut(f"{name}: {part.model}, {size}; {parallelism(part)}, {budget(part)}; {where}", WIDTH - 32)


def _cut(words: str, width: float) -> str:
    most = int(width / LETTER)
    return words if len(words) <= most else f"{words[: most - 1]}…"


def _memory_chart(plan: Plan, kinds: dict[str, str], width: int) -> Chart:
    """Return a bar for each phase and component of each pool, and a line for the memory of the pool's GPUs."""
    bars = [(pool, memory) for pool in plan.pools for memory in pool.memory]
    highest = max(max(pool.gpu_memory, pool.peak) for pool in plan.pools) / GIB
    chart = Chart(
        f"Memory of one {plan.processor} in GiB: what the peak of a phase adds is paler, grey is libraries",
        x=(0, len(bars)),
        y=(0, 1.1 * highest),
        x_ticks=[(at + 0.5, _bar_label(*bar, width / len(bars))) for at, bar in enumerate(bars)],
        y_ticks=[(value, f"{value:g}") for value in round_values(0, highest)],
        width=width,
        height=330,
        bottom=64,
    )
    order = list(kinds)
    for at, (pool, memory) in enumerate(bars):
        bottom, items = 0.0, items_at_peak(memory)
        items.sort(key=lambda pair: (pair[1], order.index(pair[0].component) if pair[0].component in order else -1))
        for item, passing in items:
            top, words = bottom + item.bytes / GIB, f"{item.name.replace('_', ' ')} {_gib(item.bytes)}"
            kind = kinds.get(item.component, "other") + (" passing" if passing else "")
            chart.bar((at + 0.04, bottom), (at + 0.96, top), kind, hint=f"{item.component}: {words}")
            if item.bytes / GIB > 0.06 * highest and len(words) * LETTER < 0.85 * width / len(bars):
                chart.words((at + 0.5, (bottom + top) / 2), words)
            bottom = top
        chart.line([(at, pool.gpu_memory / GIB), (at + 1, pool.gpu_memory / GIB)], "limit")
    return chart


def _bar_label(pool: PoolPlan, memory: PhaseMemory, width: float) -> str:
    peak = f"{_gib(memory.peak)} of {_gib(pool.gpu_memory)}"
    return "\n".join(_cut(words, width) for words in (str(memory.phase), memory.component, peak))


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


def _times_chart(plan: Plan, kinds: dict[str, str], width: int) -> Chart:
    """Return a row for each pool, with a block for each component and phase."""
    rows = len(plan.pools)
    chart = Chart(
        "One step in seconds: a row is a pool, pale is waiting" + ("; phases overlap" if plan.overlaps else ""),
        x=(0, plan.step_seconds),
        y=(rows, 0),
        x_ticks=[(value, f"{value:g}") for value in round_values(0, plan.step_seconds)],
        width=width,
        height=56 * rows + 40,
        bottom=28,
    )
    for row, pool in enumerate(plan.pools):
        gpus = f"{len(pool.gpus):,} {plan.processor}s, {plan.idle_share(pool):.0%} idle"
        chart.words((0, row + 0.2), _cut(f"{pool.name}: {gpus}", width - 80), anchor="start")
        chart.bar((0, row + 0.96), (plan.step_seconds, row + 0.34), "waits")
        for time, start in timeline(plan)[pool.name]:
            words = f"{time.component}: {time.phase} {show_seconds(time.seconds)}"
            chart.bar((start, row + 0.96), (start + time.seconds, row + 0.34), kinds[time.component], hint=words)
            if len(words) * LETTER < 0.9 * time.seconds / plan.step_seconds * (width - 80):
                chart.words((start + time.seconds / 2, row + 0.65), words)
    return chart
