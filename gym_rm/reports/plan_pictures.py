"""Picture of a plan: its nodes and GPUs, the memory of each phase, and the timeline of one step."""

from __future__ import annotations

from pathlib import Path

from gym_rm.errors import ConfigError
from gym_rm.planning.plan import MemoryItem, PhaseMemory, Plan, PoolPlan, Role
from gym_rm.planning.quantities import GIB, show_seconds, weakest
from gym_rm.reports.plan_drawing import FAINT, INK, LINE, PALE, Box, Drawing, Label, Stroke, shorten, spread, width_of
from gym_rm.reports.plan_words import (
    Block,
    NodeGroup,
    budget,
    count,
    division,
    habits,
    items_at_peak,
    node_groups,
    overlaps,
    rate,
    timeline,
)

# Okabe and Ito's colours, which people with any sort of colour vision can tell apart; then Tol's muted ones.
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
COLORS = (*OKABE_ITO, "#332288", "#882255", "#999933", "#44AA99", "#AA4499", "#117733", "#DDCC77")
OTHER = "#b9c0c6"  # of what belongs to no component
WIDTH, MARGIN = 10.5, 0.3
GPU, NODE_GAP, MOST_NODES = 0.36, 0.35, 18
SEPARATE_NODES = 4  # so few are drawn one by one
SLOT, WIDEST_SLOT, SLOT_GAP, BAR_HEIGHT = 1.16, 1.75, 0.16, 2.9  # of the memory bars
ROW = 0.5


def plot_plan(plan: Plan, path: str | Path) -> Path:
    """Draw a plan into a `.svg` or `.png` file, and return its path.

    Above: every node with its numbered GPUs, coloured by component; a GPU with several colours is used by them in turn.
    Middle: the memory of one GPU of each pool, one bar for each phase and component: what stays, and on it hatched what
    the largest instant adds. Below: one step in time.

    Raises:
        ConfigError: the file has another suffix.
    """
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"a picture of a plan is a .svg or .png file, got {str(path)!r}.")
    drawing = picture_of(plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.save(path)
    return path


def picture_of(plan: Plan) -> Drawing:
    """Return the drawing of a plan."""
    drawing = Drawing(WIDTH)
    colors = colors_of(plan)
    y = _header(drawing, plan)
    y = _legend(drawing, plan, colors, y)
    y = _nodes(drawing, plan, colors, y + 0.22)
    y = _memory(drawing, plan, colors, y + 0.3)
    y = _times(drawing, plan, colors, y + 0.3)
    memory = weakest(phase.basis for pool in plan.pools for phase in pool.memory)
    times = weakest(time.basis for time in plan.times)
    text = f"Least certain number in the memory: {memory}; in the times: {times}. --sources lists where each is from."
    drawing.labels.append(Label(MARGIN, y + 0.12, text, color=FAINT))
    drawing.height = y + 0.35
    return drawing


def colors_of(plan: Plan) -> dict[str, str]:
    """Return the colour of each component. Those of the policy and of generation are the same in all plans."""
    roles = {each.name: each.role for pool in plan.pools for each in pool.components}
    fixed = {Role.POLICY: 0, Role.GENERATION: 1, Role.REFERENCE: 4, Role.CRITIC: 5}
    taken = {name: fixed[role] for name, role in roles.items() if role in fixed}
    others = [i for i in range(len(COLORS)) if i not in taken.values()]
    rest = sorted(name for name in roles if name not in taken)
    order = {**taken, **{name: others[i % len(others)] for i, name in enumerate(rest)}}
    return {name: COLORS[order[name]] for name in sorted(order, key=lambda name: (list(Role).index(roles[name]), name))}


# --- header and legend -----------------------------------------------------------------------------------------------


def _header(drawing: Drawing, plan: Plan) -> float:
    room = WIDTH - 2 * MARGIN
    slowest = plan.bottleneck
    facts = [
        f"{show_seconds(plan.step_seconds)} a step",
        f"{rate(plan.conversations_per_second)} conversations/s",
        f"{rate(plan.tokens_per_second_per_gpu)} tokens/s per GPU",
        f"slowest: {slowest.phase} of {slowest.component}, by {slowest.bottleneck}",
    ]
    if plan.price_per_hour is not None:
        facts.insert(3, f"{plan.price_per_hour:,.2f} an hour")
    title = f"{plan.name}: {plan.used_gpus:,} of {plan.num_gpus:,} GPUs of {plan.cluster}"
    if plan.used_gpus == plan.num_gpus:
        title = f"{plan.name}: {plan.cluster}"
    drawing.labels += [
        Label(MARGIN, 0.32, shorten(title, room, 14, True), size=14, bold=True),
        Label(MARGIN, 0.62, shorten(" · ".join(facts), room, 9.5), size=9.5),
    ]
    return 0.82


def _legend(drawing: Drawing, plan: Plan, colors: dict[str, str], y: float) -> float:
    """Draw a row for each component: its colour, model, division and budget."""
    rows = []
    for each in map(plan.component, colors):
        model = f"{each.model}, {count(each.parameters)} parameters, {each.dtype}"
        gpus = f"{each.num_gpus:,} GPU{'s' if each.num_gpus > 1 else ''}"
        parts = [gpus, division(each), budget(each), habits(each)]
        rows.append((each.name, model, ", ".join(part for part in parts if part)))
    wide = min(1.9, max(width_of(name, bold=True) for name, _, _ in rows))
    middle = min(4.2, max(width_of(model) for _, model, _ in rows))
    for name, model, how in rows:
        y += 0.21
        left = MARGIN + 0.25
        drawing.boxes.append(Box(MARGIN, y - 0.065, 0.15, 0.13, colors[name]))
        for text, room, bold in ((name, wide, True), (model, middle, False), (how, WIDTH, False)):
            room = min(room, WIDTH - MARGIN - left)
            drawing.labels.append(Label(left, y, shorten(text, room, bold=bold), bold=bold))
            left += room + 0.25
    return y + 0.1


# --- nodes -----------------------------------------------------------------------------------------------------------


def _nodes(drawing: Drawing, plan: Plan, colors: dict[str, str], y: float) -> float:
    """Draw the nodes in rows; nodes with the same contents are one."""
    left = MARGIN
    groups = node_groups(plan, together=len(plan.nodes) > SEPARATE_NODES)
    for group in groups[:MOST_NODES]:
        gpus, title = _gpus(group), shorten(group.title, WIDTH - 2 * MARGIN, bold=True)
        width = max(sum(size for _, size, _ in gpus), width_of(title, bold=True))
        if left > MARGIN and left + width > WIDTH - MARGIN:
            left, y = MARGIN, y + GPU + 0.42
        drawing.labels.append(Label(left, y + 0.06, title, bold=True))
        at = left
        for text, size, pool in gpus:
            _gpu(drawing, plan, colors, (at, y + 0.2, size), text, pool)
            at += size
        left += width + NODE_GAP
    y += 0.2 + GPU
    if len(groups) > MOST_NODES:
        drawing.labels.append(Label(MARGIN, y + 0.2, f"and {len(groups) - MOST_NODES} more nodes", color=FAINT))
        y += 0.25
    return y


def _gpus(group: NodeGroup) -> list[tuple[str, float, int | None]]:
    """Return text, width and pool of the boxes of a node: one for each GPU, or for each run in a large node."""
    if len(group.pools) <= 16:
        return [(str(gpu), GPU, pool) for gpu, pool in enumerate(group.pools)]
    texts = [(f"{first} to {last}" if last > first else str(first), pool) for first, last, pool in group.runs]
    return [(text, max(GPU, width_of(text) + 0.5), pool) for text, pool in texts]


def _gpu(
    drawing: Drawing,
    plan: Plan,
    colors: dict[str, str],
    place: tuple[float, float, float],
    text: str,
    pool: int | None,
) -> None:
    x, y, width = place
    inner = width - 0.05
    if pool is None:
        drawing.boxes.append(Box(x, y, inner, GPU, "white", edge=FAINT, dashed=True))
    else:
        names = [each.name for each in plan.pools[pool].components]
        for i, name in enumerate(names):
            drawing.boxes.append(Box(x + i * inner / len(names), y, inner / len(names), GPU, colors[name]))
    drawing.labels.append(Label(x + inner / 2, y + GPU / 2, text, side="center", plate=True))


# --- memory ----------------------------------------------------------------------------------------------------------


def _heading(drawing: Drawing, text: str, note: str, y: float) -> None:
    left = MARGIN + width_of(text, 10.5, True) + 0.2
    drawing.labels.append(Label(MARGIN, y, text, size=10.5, bold=True))
    drawing.labels.append(Label(left, y, shorten(note, WIDTH - MARGIN - left), color=FAINT))


def _memory(drawing: Drawing, plan: Plan, colors: dict[str, str], y: float) -> float:
    note = "A bar is one moment: what stays in its phase, hatched what its largest instant adds. Bars never add up."
    note += " Grey: libraries."
    _heading(drawing, "Memory of one GPU, in GiB", note, y)
    y += 0.28
    left, room = MARGIN, WIDTH - 2 * MARGIN
    total = sum(len(pool.memory) for pool in plan.pools)
    slot = min(max((room - 0.3 * len(plan.pools)) / total, SLOT), WIDEST_SLOT)
    per_row = int(room / slot)
    for pool in plan.pools:
        for first in range(0, len(pool.memory), per_row):
            bars = pool.memory[first : first + per_row]
            title = f"{pool.name} ({len(pool.gpus)} x {pool.gpu})"
            width = max(len(bars) * slot, min(width_of(title, bold=True), 2 * slot))
            if left > MARGIN and left + width > WIDTH - MARGIN:
                left, y = MARGIN, y + BAR_HEIGHT + 1.35
            drawing.labels.append(Label(left, y, shorten(title, width, bold=True), bold=True))
            _bars(drawing, pool, bars, colors, (left, y + 0.28, width, slot))
            left += width + 0.3
    return y + BAR_HEIGHT + 1.05


def _bars(
    drawing: Drawing,
    pool: PoolPlan,
    bars: tuple[PhaseMemory, ...],
    colors: dict[str, str],
    place: tuple[float, float, float, float],
) -> None:
    """Draw the bars of a pool under a line for the memory of its GPUs."""
    left, top, width, slot = place
    highest = max(pool.gpu_memory, pool.peak)
    scale = BAR_HEIGHT / highest
    floor = top + BAR_HEIGHT + 0.1
    line = floor - pool.gpu_memory * scale
    drawing.strokes += [Stroke(left, floor, left + width - 0.1, floor)]
    drawing.strokes += [Stroke(left, line, left + width - 0.1, line, INK, 1.2)]
    drawing.labels.append(Label(left, line - 0.1, shorten(f"{pool.gpu}: {_gib(pool.gpu_memory)}", width)))
    for i, memory in enumerate(bars):
        x, wide = left + i * slot, slot - SLOT_GAP
        end = _bar(drawing, memory, colors, (x, floor, wide, scale))
        free = pool.gpu_memory - memory.peak
        drawing.boxes.append(Box(x, line, wide, max(0.0, end - line), "none", edge=PALE))
        if end - line > 0.36:
            drawing.labels.append(Label(x + wide / 2, line + 0.12, f"{_gib(free)} free", color=FAINT, side="center"))
        texts = (str(memory.phase), memory.component, f"peak: {memory.largest.name}" if memory.instants else "")
        for row, text in enumerate(texts):
            label = Label(x, floor + 0.13 + row * LINE, shorten(text, slot - 0.06, bold=row == 0), bold=row == 0)
            drawing.labels.append(label)
        shown = f"{_gib(memory.peak)} of {_gib(pool.gpu_memory)}"
        drawing.labels.append(Label(x, floor + 0.13 + 3 * LINE, shown))


def _bar(
    drawing: Drawing, memory: PhaseMemory, colors: dict[str, str], place: tuple[float, float, float, float]
) -> float:
    """Stack the items of a bar from its floor up, and return where it ends. Items too thin for a text are together."""
    x, y, wide, scale = place
    for item, passing in _readable(items_at_peak(memory), scale, list(colors)):
        height = item.bytes * scale
        y -= height
        color = colors.get(item.component, OTHER)
        hatch = "///" if passing else ""
        drawing.boxes.append(Box(x, y, wide, height, color, edge="white", hatch=hatch))
        size, text = _gib(item.bytes), item.name.replace("_", " ")
        texts = [f"{text} {size}", f"other {size}" if "+" in text else text, size]
        fitting = [text for text in texts if width_of(text) < wide - (0.16 if passing else 0.06)]
        if height > LINE * (1.25 if passing else 1) and fitting:
            ink = INK if passing else contrast(color)
            drawing.labels.append(
                Label(x + wide / 2, y + height / 2, fitting[0], color=ink, side="center", plate=passing)
            )
    return y


def _readable(items: list[tuple[MemoryItem, bool]], scale: float, owners: list[str]) -> list[tuple[MemoryItem, bool]]:
    """Return the items by owner, the passing ones last; those of an owner that are too thin for a text are together."""
    order = {name: i for i, name in enumerate(owners)}
    found: list[tuple[MemoryItem, bool]] = []
    thin: dict[tuple[str, bool], list[MemoryItem]] = {}
    for item, passing in items:
        if item.bytes * scale > LINE * (1.25 if passing else 1):
            found.append((item, passing))
        elif item.bytes > 0:
            thin.setdefault((item.component, passing), []).append(item)
    for (owner, passing), each in thin.items():
        name = " + ".join(item.name for item in each) if len(each) < 3 else "other"
        total = sum(item.bytes for item in each)
        found.append((MemoryItem(name, owner, total, each[0].basis, each[0].source), passing))
    return sorted(found, key=lambda pair: (pair[1], order.get(pair[0].component, -1)))


def contrast(color: str) -> str:
    """Return black or white, whichever is easier to read on a colour (WCAG 2.2, relative luminance)."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def _gib(size: float) -> str:
    return f"{size / GIB:.0f}" if size >= 99.95 * GIB else f"{size / GIB:.1f}"


# --- time ------------------------------------------------------------------------------------------------------------


def _times(drawing: Drawing, plan: Plan, colors: dict[str, str], y: float) -> float:
    note = "A row is a pool, a block is the work of a component, pale is waiting."
    if overlaps(plan):
        note += " Phases overlap: each pool works on its own step."
    _heading(drawing, "One step in time", note, y)
    left, right = MARGIN + 1.65, WIDTH - MARGIN - 0.85
    blocks = timeline(plan)
    scale = (right - left) / plan.step_seconds
    y += 0.12
    for pool in plan.pools:
        y = _row(drawing, plan, pool, blocks[pool.name], colors, (left, right, y, scale))
    for second in _ticks(plan.step_seconds):
        x = left + second * scale
        drawing.strokes.append(Stroke(x, y + 0.02, x, y + 0.08))
        drawing.labels.append(Label(x, y + 0.17, f"{second:g} s", color=FAINT, side="center"))
    return y + 0.3


def _row(
    drawing: Drawing,
    plan: Plan,
    pool: PoolPlan,
    blocks: list[Block],
    colors: dict[str, str],
    place: tuple[float, float, float, float],
) -> float:
    """Draw the blocks of a pool; names of thin blocks stand above them. Return the lower end."""
    left, right, y, scale = place
    rows = _above([block for block in blocks if not _texts(block, scale)], left, right, scale)
    y += 0.08 + LINE * len(rows)
    drawing.boxes.append(Box(left, y, right - left, ROW, "#eceff1"))
    gpus = f"{len(pool.gpus):,} GPU{'s' if len(pool.gpus) > 1 else ''}"
    names = _lines_of(pool.name, 1.55)
    for i, text in enumerate([*names, gpus]):
        name = i < len(names)
        height = y + ROW / 2 + (i - len(names) / 2) * LINE
        drawing.labels.append(Label(MARGIN, height, text, color=INK if name else FAINT, bold=name))
    idle = f"{max(0.0, plan.idle_share(pool)):.0%} idle"
    drawing.labels.append(Label(WIDTH - MARGIN, y + ROW / 2, idle, side="right"))
    for block in blocks:
        x, width = left + block.start * scale, block.time.seconds * scale
        color = colors[block.time.component]
        drawing.boxes.append(Box(x, y, width, ROW, color, edge="white" if width > 0.03 else "none"))
        lines = _texts(block, scale)
        for i, text in enumerate(lines):
            height = y + ROW / 2 + (i - (len(lines) - 1) / 2) * LINE
            drawing.labels.append(Label(x + width / 2, height, text, color=contrast(color), side="center"))
    for number, row in enumerate(rows):
        for block, at in row:
            middle = left + (block.start + block.time.seconds / 2) * scale
            height = y - 0.08 - number * LINE
            label = Label(at, height, _short(block), color=FAINT)
            drawing.labels.append(label)
            drawing.strokes.append(
                Stroke(min(max(middle, at), label.extent[2]), height + 0.065, middle, y, thickness=0.5)
            )
    return y + ROW + 0.06


def _lines_of(name: str, room: float) -> list[str]:
    """Return the name of a pool in at most two lines, broken before a plus sign."""
    first, *others = name.split("+")
    while others and width_of(f"{first}+{others[0]}", bold=True) <= room:
        first += f"+{others.pop(0)}"
    lines = [first, f"+{'+'.join(others)}"] if others else [first]
    return [shorten(line, room, bold=True) for line in lines]


def _texts(block: Block, scale: float) -> list[str]:
    """Return the lines of text that fit into a block."""
    room = block.time.seconds * scale - 0.08
    time = f"{block.time.phase} {show_seconds(block.time.seconds)}"
    for lines in ([block.time.component, time], [block.time.phase, show_seconds(block.time.seconds)]):
        if max(width_of(line) for line in lines) < room:
            return [str(line) for line in lines]
    return []


def _short(block: Block) -> str:
    return f"{block.time.component}: {block.time.phase} {show_seconds(block.time.seconds)}"


def _above(blocks: list[Block], left: float, right: float, scale: float) -> list[list[tuple[Block, float]]]:
    """Return rows of blocks with the left ends of their names, as few rows as there is room for."""
    widths = {id(block): width_of(_short(block)) for block in blocks}
    for number in range(1, len(blocks) + 1):
        rows = [blocks[i::number] for i in range(number)]
        placed = []
        for row in rows:
            middles = [left + (block.start + block.time.seconds / 2) * scale for block in row]
            places = spread(middles, [widths[id(block)] for block in row], left, right)
            if places is None:
                break
            placed.append(list(zip(row, places, strict=True)))
        if len(placed) == number:
            return placed
    return []


def _ticks(seconds: float) -> list[float]:
    """Return about five round times from 0 on."""
    size: float = 10.0 ** len(str(int(seconds)))
    while seconds / size < 4:
        size /= 2 if str(size)[0] == "1" else 2.5 if str(size)[0] == "5" else 2
    return [i * size for i in range(int(seconds / size) + 1)]
