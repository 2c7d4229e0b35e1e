"""Console tables of plans: placement, memory, time, sources, and several plans side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gym_rm.planning.hardware.devices import CPU, KINDS, Device
from gym_rm.planning.plan import MemoryItem, PhaseMemory, Plan, PoolPlan
from gym_rm.planning.quantities import GIB, Basis, Quantity, show_bytes, show_seconds
from gym_rm.reports.plan_words import budget, count, division, gpus_text, habits, items_at_peak, rate
from gym_rm.reports.transcripts import visible

LARGEST_ITEMS = 4  # of a phase's memory, in one cell
BASIS_STYLES = {Basis.MEASURED: "green", Basis.FORMULA: "", Basis.TABLE: "", Basis.ASSUMPTION: "yellow"}


def plan_report(plan: Plan, *, sources: bool = False) -> Group:
    """Return what the terminal shows of a plan: its summary and its tables."""
    parts: list[Text | Table] = [summary(plan), placement_table(plan), memory_table(plan), times_table(plan)]
    if sources:
        parts.append(sources_table(plan))
    parts += [Text(f"note: {visible(note)}", style="dim") for note in plan.notes]
    return Group(*parts)


def summary(plan: Plan) -> Text:
    """Return the answers in a few lines: what fits where, how fast it is, and what it waits for."""
    slowest, (pool, tightest) = plan.bottleneck, tightest_of(plan)
    used = f"{plan.used_gpus:,} of the GPUs of " if plan.used_gpus < plan.num_gpus else ""
    text = Text(f"{visible(plan.name)}: fits on {used}{visible(plan.cluster)}.", style="bold")
    lines = [
        f"A step takes {show_seconds(plan.step_seconds)}: {rate(plan.conversations_per_second)} conversations/s, "
        f"{rate(plan.tokens_per_second_per_gpu)} tokens/s per GPU. The first step begins after "
        f"{show_seconds(plan.load_seconds)}.",
        f"Slowest: {slowest.phase} of {slowest.component}, {slowest.seconds / plan.step_seconds:.0%} of the step, "
        f"by {slowest.bottleneck}.",
        f"Least free memory: {show_bytes(pool.gpu_memory - tightest.peak)} of {show_bytes(pool.gpu_memory)}, "
        f"in {tightest.phase} of {tightest.component}{_instant(tightest)}.",
    ]
    if (cost := cost_of(plan)) is not None:
        lines.append(f"Cost: {plan.price_per_hour:,.2f} an hour, {cost:,.3g} for 1,000 conversations.")
    lines.append(_search(plan))
    lines += _assumed(plan)
    return text.append("\n" + visible("\n".join(lines)), style="not bold")


def _search(plan: Plan) -> str:
    if plan.gap <= 0:
        return f"No placement is better, by {plan.objective}: the search was exact."
    return f"By {plan.objective}, no placement is better by more than {plan.gap:.1%}."


def _assumed(plan: Plan) -> list[str]:
    """Return a line with the names of the numbers that are assumptions; none if there are none."""
    items = [item for pool in plan.pools for memory in pool.memory for item, _ in items_at_peak(memory)]
    memory = dict.fromkeys(_plain(item.name) for item in items if item.basis is Basis.ASSUMPTION)
    times = dict.fromkeys(part.name for time in plan.times for part in time.parts if part.basis is Basis.ASSUMPTION)
    both = ((memory, "memory"), (times, "time"))
    texts = [f"{', '.join(names)} ({sort})" for names, sort in both if names]
    return [f"Assumed: {'; '.join(texts)}. --sources lists where every number is from."] if texts else []


def placement_table(plan: Plan) -> Table:
    """Return a table of the components: their GPUs, how they are divided, and what they take at a time."""
    table = _table("Placement", "component", "model", "GPUs", "division", "at a time", "")
    for pool in plan.pools:
        for number, each in enumerate(pool.components):
            model = f"{each.model} ({count(each.parameters)}, {each.dtype})"
            where = gpus_text(plan, pool) if number == 0 else "the same"
            _add(table, each.name, model, where, division(each), budget(each), habits(each))
        table.add_section()
    return table


def memory_table(plan: Plan) -> Table:
    """Return a table of the memory of one GPU: a row for each phase and component, with its largest instant."""
    table = _table("Memory of one GPU (the rows are different moments; they do not add up)")
    several = len(plan.pools) > 1
    for name in (*(["pool"] if several else []), "phase", "component"):
        table.add_column(name, overflow="fold")
    for name in ("stays", "peak", "free"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("peak in", overflow="fold")
    table.add_column("largest items, GiB")
    for pool in plan.pools:
        for number, memory in enumerate(pool.memory):
            free = pool.gpu_memory - memory.peak
            cells: list[str | Text] = [str(memory.phase), memory.component]
            cells += [show_bytes(memory.persistent_bytes), show_bytes(memory.peak)]
            cells.append(Text(show_bytes(free), style="yellow" if free < 0.05 * pool.gpu_memory else ""))
            cells += [memory.largest.name if memory.instants else "", _items(memory)]
            _add(table, *([pool.name if number == 0 else ""] if several else []), *cells)
        table.add_section()
    return table


def times_table(plan: Plan) -> Table:
    """Return a table of the work of one step, and how long the GPUs of each pool wait."""
    table = _table("Time of one step", "phase", "component")
    for name in ("time", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("spent on")
    for phase, _ in plan.phase_seconds:
        for time in (each for each in plan.times if each.phase is phase):
            parts = sorted(time.parts, key=lambda part: -part.seconds)
            shares = (f"{part.name} {part.seconds / max(time.seconds, 1e-12):.0%}" for part in parts[:3])
            share = f"{time.seconds / plan.step_seconds:.0%}"
            _add(table, str(phase), time.component, show_seconds(time.seconds), share, ", ".join(shares))
    table.add_section()
    for pool in plan.pools:
        idle = f"{max(0.0, plan.idle_share(pool)):.0%}"
        gpus = f"{len(pool.gpus):,} GPU{'s' if len(pool.gpus) > 1 else ''}"
        waits = show_seconds(max(0.0, plan.step_seconds - pool.busy_seconds))
        _add(table, "idle", pool.name, waits, idle, gpus)
    return table


def sources_table(plan: Plan) -> Table:
    """Return a table of every number with its basis and its source."""
    table = _table("Where the numbers are from", "number")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("basis", no_wrap=True)
    table.add_column("source")
    seen: set[tuple[str, str]] = set()

    def add(name: str, value: str, basis: Basis, source: str) -> None:
        if (name, value) not in seen:
            seen.add((name, value))
            _add(table, name, value, _basis(basis), source)

    for pool in plan.pools:
        for memory in pool.memory:
            for item in memory.persistent:
                add(f"{_owner(item)}{_plain(item.name)}", show_bytes(item.bytes), item.basis, item.source)
            for instant in memory.instants:
                for item in instant.items:
                    name = f"{_owner(item)}{_plain(item.name)} ({memory.phase}, {instant.name})"
                    add(name, show_bytes(item.bytes), item.basis, item.source)
    for time in plan.times:
        for part in time.parts:
            add(f"{time.component}: {time.phase}, {part.name}", show_seconds(part.seconds), part.basis, part.source)
    return table


# --- several plans ---------------------------------------------------------------------------------------------------

MEASURES: dict[str, Callable[[Plan], str]] = {
    "GPUs": lambda plan: f"{plan.used_gpus:,} of {plan.num_gpus:,}",
    "cluster": lambda plan: plan.cluster,
    "a step": lambda plan: show_seconds(plan.step_seconds),
    "conversations/s": lambda plan: rate(plan.conversations_per_second),
    "tokens/s per GPU": lambda plan: rate(plan.tokens_per_second_per_gpu),
    "price an hour": lambda plan: "-" if plan.price_per_hour is None else f"{plan.price_per_hour:,.2f}",
    "1,000 conversations cost": lambda plan: "-" if (cost := cost_of(plan)) is None else f"{cost:,.3g}",
    "slowest": lambda plan: f"{plan.bottleneck.phase} ({plan.bottleneck.component}): {plan.bottleneck.bottleneck}",
    "least free memory": lambda plan: (
        f"{_headroom(plan)}, {tightest_of(plan)[1].phase} ({tightest_of(plan)[1].component})"
    ),
    "idle, mean of GPUs": lambda plan: f"{idle_of(plan):.0%}",
    "first step begins after": lambda plan: show_seconds(plan.load_seconds),
}
NUMBERS: dict[str, Callable[[Plan], float | None]] = {
    "a step": lambda plan: plan.step_seconds,
    "conversations/s": lambda plan: plan.conversations_per_second,
    "tokens/s per GPU": lambda plan: plan.tokens_per_second_per_gpu,
    "price an hour": lambda plan: plan.price_per_hour,
    "1,000 conversations cost": lambda plan: cost_of(plan),
}


def compare_table(plans: Mapping[str, Plan | str]) -> Table:
    """Return plans side by side. What differs from the first plan is bold, with the change of numbers.

    Args:
        plans: by name; a text says why there is no plan.
    """
    table = _table("Plans side by side; what differs from the first is marked with *", "")
    for name in plans:
        table.add_column(Text(visible(name)))
    first = next((plan for plan in plans.values() if isinstance(plan, Plan)), None)
    if any(isinstance(plan, str) for plan in plans.values()):
        _add(table, "does it fit", *(plan if isinstance(plan, str) else "yes" for plan in plans.values()))
    for name, measure in MEASURES.items():
        _add(table, name, *(_compared(name, measure, plan, first) for plan in plans.values()))
    table.add_section()
    parts = [
        each.name for plan in plans.values() if isinstance(plan, Plan) for p in plan.pools for each in p.components
    ]
    for name in dict.fromkeys(parts):

        def placed(plan: Plan, name: str = name) -> str:
            return _placed(plan, name)

        _add(table, name, *(_compared(name, placed, plan, first) for plan in plans.values()))
    return table


def what_if_table(plans: Mapping[str, Plan | str]) -> Table:
    """Return a row for each change; the first entry is the plan without one. A text says why there is no plan."""
    table = _table("What if", "change")
    priced = any(isinstance(plan, Plan) and plan.price_per_hour is not None for plan in plans.values())
    names = ["GPUs", "a step", "conversations/s", *(["1,000 conversations cost"] if priced else [])]
    for name in names:
        table.add_column(name, justify="right")
    names += ["free", "slowest"]
    table.add_column("least free memory")
    table.add_column("slowest")
    first = next(iter(plans.values()))
    base = first if isinstance(first, Plan) else None
    for name, plan in plans.items():
        if isinstance(plan, str):
            _add(table, name, *("-" for _ in names[:-1]), Text(visible(plan), style="red"))
            continue
        _add(
            table,
            name,
            *(_compared(each, {**MEASURES, "free": _headroom}[each], plan, base, star=False) for each in names),
        )
    return table


def _compared(
    name: str, measure: Callable[[Plan], str], plan: Plan | str, first: Plan | None, star: bool = True
) -> Text:
    if isinstance(plan, str):
        return Text("-")
    text = measure(plan)
    if first is None or plan is first or text == measure(first):
        return Text(visible(text))
    value, before = (NUMBERS[name](each) if name in NUMBERS else None for each in (plan, first))
    if value is not None and before:
        text += f" ({value / before - 1:+.0%})"
    return Text(visible(f"* {text}" if star else text), style="bold")


def cost_of(plan: Plan) -> float | None:
    """Return the price of 1,000 conversations, or None without prices."""
    if plan.price_per_hour is None:
        return None
    return plan.price_per_hour / 3600 / plan.conversations_per_second * 1000


def idle_of(plan: Plan) -> float:
    """Return the share of a step in which the GPUs of the plan wait, on average."""
    waiting = sum(len(pool.gpus) * max(0.0, plan.idle_share(pool)) for pool in plan.pools)
    return waiting / plan.used_gpus


def tightest_of(plan: Plan) -> tuple[PoolPlan, PhaseMemory]:
    """Return the pool and the phase with the least free memory, as a share of the GPU's."""
    pairs = [(pool, memory) for pool in plan.pools for memory in pool.memory]
    return max(pairs, key=lambda pair: pair[1].peak / pair[0].gpu_memory)


def _headroom(plan: Plan) -> str:
    pool, memory = tightest_of(plan)
    free = pool.gpu_memory - memory.peak
    return f"{show_bytes(free)} ({free / pool.gpu_memory:.0%})"


def _placed(plan: Plan, name: str) -> str:
    for pool in plan.pools:
        for each in pool.components:
            if each.name == name:
                others = [other.name for other in pool.components if other.name != name]
                gpus = f"{each.num_gpus} GPU{'s' if each.num_gpus > 1 else ''}"
                return f"{gpus}: {division(each)}" + (f", with {', '.join(others)}" if others else "")
    return "-"


# --- hardware and violations -----------------------------------------------------------------------------------------

DEVICE_COLUMNS: dict[str, Callable[[Device], tuple[Quantity, str]]] = {
    "memory": lambda device: (device.memory, show_bytes(device.memory.value)),
    "bf16 TFLOP/s": lambda device: (device.flops, f"{device.flops.value / 1e12:,.4g}"),
    "memory GB/s": lambda device: (device.bandwidth, f"{device.bandwidth.value / 1e9:,.0f}"),
    "link GB/s": lambda device: (device.link, f"{device.link.value / 1e9:,.0f}"),
    "host GB/s": lambda device: (device.host_link, f"{device.host_link.value / 1e9:,.0f}"),
    "matmul": lambda device: (device.matmul, f"{device.matmul.value:.0%}"),
    "decoding": lambda device: (device.decoding, f"{device.decoding.value:.0%}"),
}


def devices_table(devices: Iterable[Device] = (*KINDS.values(), CPU)) -> Group:
    """Return a table of kinds of GPUs, what is published and the shares of it that are reached, and the sources."""
    table = _table("Kinds of GPUs (yellow: assumed)")
    table.add_column("gpu", no_wrap=True)
    for name in DEVICE_COLUMNS:
        table.add_column(name, justify="right")
    table.add_column("sources", no_wrap=True)
    letters: dict[str, str] = {}
    for device in devices:
        found = [column(device) for column in DEVICE_COLUMNS.values()]
        sources = dict.fromkeys(quantity.source.replace(device.name, "GPU") for quantity, _ in found)
        for source in sources:
            letters.setdefault(source, chr(ord("a") + len(letters)))
        cells = [Text(text, style=BASIS_STYLES[quantity.basis]) for quantity, text in found]
        _add(table, device.name, *cells, " ".join(letters[source] for source in sources))
    lines = [Text(f"  {letter}: {source}") for source, letter in letters.items()]
    text = "matmul, decoding: share of the FLOP/s and of the bandwidth that is reached. link: to GPUs of the same node."
    return Group(table, *lines, Text(f"  {text}"))


def models_table() -> Table:
    """Return a table of the known models, by size."""
    from gym_rm.planning.model.loading import known_models, load_shape

    table = _table("Known models (others: a folder, a hub id, or config: {...})")
    table.add_column("model", no_wrap=True)
    for name in ("parameters", "a token meets", "layers", "heads", "KV heads", "KV a token"):
        table.add_column(name, justify="right")
    scoring = [load_shape(name, None, num_labels=1, name=name) for name in known_models()]
    shapes = [
        each if each.bidirectional else load_shape(each.name, None, num_labels=None, name=each.name) for each in scoring
    ]
    for shape in sorted(shapes, key=lambda shape: (shape.parameters, shape.name)):
        cached = f"{2.0 * shape.cached_numbers(1) / 1024:,.0f} KiB" if not shape.bidirectional else "-"
        sizes = (count(shape.parameters), count(shape.active_parameters), str(shape.num_layers))
        _add(table, shape.name, *sizes, str(shape.heads), str(shape.kv_heads), cached)
    return table


def measured_table(rows: Sequence[tuple[str, str, str]], title: str) -> Table:
    """Return a table of names, values and sources; where all sources end alike, the title says it once."""
    ends = {source.rpartition("; ")[2] for _, _, source in rows if "; " in source}
    common = f"; {ends.pop()}" if len(ends) == 1 else ""
    table = _table(title + common.replace("; ", ", "), "number")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("source", overflow="fold")
    for name, value, source in rows:
        _add(table, name, value, source.removesuffix(common))
    return table


def violations_text(violations: Sequence[tuple[str, str]]) -> str:
    """Return all reasons why nothing fits, numbered, each with the smallest change that helps.

    Args:
        violations: pairs of what is wrong and its fix.
    """
    count_of = "1 reason" if len(violations) == 1 else f"{len(violations)} reasons"
    lines = [f"no plan fits, for {count_of}:"]
    for number, (text, fix) in enumerate(violations, start=1):
        lines.append(f"  {number}. {text}")
        lines += [f"     Fix: {fix}"] if fix else []
    return "\n".join(lines)


# --- cells -----------------------------------------------------------------------------------------------------------


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _add(table: Table, *cells: str | Text) -> None:
    """Add a row whose texts are shown as they are."""
    table.add_row(*(cell if isinstance(cell, Text) else Text(visible(cell)) for cell in cells))


def _basis(basis: Basis) -> Text:
    return Text(str(basis), style=BASIS_STYLES[basis])


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _owner(item: MemoryItem, known: str = "") -> str:
    return f"{item.component}: " if item.component not in ("", known) else ""


def _instant(memory: PhaseMemory) -> str:
    return f" (in {memory.largest.name})" if memory.instants else ""


def _items(memory: PhaseMemory) -> str:
    items = sorted((item for item, _ in items_at_peak(memory)), key=lambda item: -item.bytes)
    shown = [
        f"{_owner(item, memory.component)}{_plain(item.name)} {item.bytes / GIB:.1f}"
        for item in items[:LARGEST_ITEMS]
        if item.bytes > 0
    ]
    rest = sum(item.bytes for item in items[LARGEST_ITEMS:])
    return ", ".join(shown + ([f"other {rest / GIB:.1f}"] if rest > 0 else []))
