"""Console tables of plans: placement, memory and time, several side by side, and the known GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gym_rm.planning.hardware.devices import CPU, KINDS, Device
from gym_rm.planning.plan import ComponentPlan, MemoryItem, PhaseMemory, Plan, PoolPlan
from gym_rm.planning.quantities import GIB, Basis, show_bytes, show_seconds, weakest
from gym_rm.planning.simulation import SimulationResult
from gym_rm.reports.tables import plain_table
from gym_rm.reports.transcripts import visible

LARGEST_ITEMS = 4  # of a phase's memory, in one cell


def plan_report(plan: Plan) -> Group:
    """Return what the terminal shows of a plan: its summary and its tables."""
    parts: list[Text | Table] = [summary(plan), placement_table(plan), memory_table(plan), times_table(plan)]
    parts += [Text(f"note: {visible(note)}", style="dim") for note in plan.notes]
    return Group(*parts)


def summary(plan: Plan) -> Text:
    """Return the answers in a few lines: what fits where, how fast it is, and what it waits for."""
    slowest, (pool, tightest) = plan.bottleneck, tightest_of(plan)
    used = f"{plan.used_gpus:,} of the {plan.processor}s of " if plan.used_gpus < plan.num_gpus else ""
    text = Text(f"{visible(plan.name)}: fits on {used}{visible(plan.cluster)}.", style="bold")
    lines = [
        f"A step takes {show_seconds(plan.step_seconds)}: {rate(plan.conversations_per_second)} conversations/s, "
        f"{rate(plan.tokens_per_second_per_gpu)} tokens/s per {plan.processor}. The first step begins after "
        f"{show_seconds(plan.load_seconds)}.",
        f"Slowest: {slowest.phase} of {slowest.component}, {slowest.seconds / plan.step_seconds:.0%} of the step, "
        f"by {slowest.bottleneck}.",
        f"Least free memory: {show_bytes(pool.gpu_memory - tightest.peak)} of {show_bytes(pool.gpu_memory)}, "
        f"in {tightest.phase} of {tightest.component} (in {tightest.peak_instant.name}).",
    ]
    if plan.exact:
        lines.append(f"No placement is better, by {plan.objective}: the search was exact, over batch sizes too.")
    else:
        lines.append(
            f"The best that was found, by {plan.objective}; numbers of {plan.processor}s and of conversations at a "
            "time were tried in steps."
        )
    lines += _assumed(plan)
    return text.append("\n" + visible("\n".join(lines)), style="not bold")


def _assumed(plan: Plan) -> list[str]:
    """Return a line with the names of the numbers that are assumptions; none if there are none."""
    items = [item for pool in plan.pools for memory in pool.memory for item, _ in items_at_peak(memory)]
    parts = [part for time in plan.times for part in time.parts]
    texts = []
    for sort, numbers in (("memory", items), ("time", parts)):
        names = dict.fromkeys(number.name.replace("_", " ") for number in numbers if number.basis is Basis.ASSUMPTION)
        texts += [f"{', '.join(names)} ({sort})"] if names else []
    return [f"Assumed: {'; '.join(texts)}. --json has where every number is from."] if texts else []


def placement_table(plan: Plan) -> Table:
    """Return a table of the components: their GPUs, how they are divided, and what they take at a time."""
    table = plain_table("Placement", "component", "model", f"{plan.processor}s", "parallelism", "at a time", "")
    for pool in plan.pools:
        for number, each in enumerate(pool.components):
            model = f"{each.model} ({count(each.parameters)}, {each.quantization or each.dtype})"
            where = gpus_text(plan, pool) if number == 0 else "the same"
            add_row(table, each.name, model, where, parallelism(each), budget(each), habits(each))
        table.add_section()
    return table


def memory_table(plan: Plan) -> Table:
    """Return a table of the memory of one GPU: a row for each phase and component, with its peak."""
    several, numbers = len(plan.pools) > 1, ("stays", "peak", "free")
    columns = (*(["pool"] if several else []), "phase", "component", *numbers, "peak in", "largest items, GiB")
    title = f"Memory of one {plan.processor} (the rows are different moments; they do not add up)"
    table = plain_table(title, *columns, numbers=numbers)
    for pool in plan.pools:
        for number, memory in enumerate(pool.memory):
            free = pool.gpu_memory - memory.peak
            cells: list[str | Text] = [str(memory.phase), memory.component]
            cells += [show_bytes(memory.persistent_bytes), show_bytes(memory.peak)]
            cells.append(Text(show_bytes(free), style="yellow" if free < 0.05 * pool.gpu_memory else ""))
            cells += [memory.peak_instant.name, _items(memory)]
            add_row(table, *([pool.name if number == 0 else ""] if several else []), *cells)
        table.add_section()
    return table


def times_table(plan: Plan) -> Table:
    """Return a table of the work of one step, and how long the GPUs of each pool wait."""
    columns = ("phase", "component", "time", "share", "spent on")
    table = plain_table("Time of one step", *columns, numbers=("time", "share"))
    for phase, _ in plan.phase_seconds:
        for time in (each for each in plan.times if each.phase is phase):
            parts = sorted(time.parts, key=lambda part: -part.seconds)
            shares = (f"{part.name} {part.seconds / max(time.seconds, 1e-12):.0%}" for part in parts[:3])
            share = f"{time.seconds / plan.step_seconds:.0%}"
            add_row(table, str(phase), time.component, show_seconds(time.seconds), share, ", ".join(shares))
    table.add_section()
    for pool in plan.pools:
        idle = f"{max(0.0, plan.idle_share(pool)):.0%}"
        gpus = f"{len(pool.gpus):,} {plan.processor}{'s' if len(pool.gpus) > 1 else ''}"
        waits = show_seconds(max(0.0, plan.step_seconds - pool.busy_seconds))
        add_row(table, "idle", pool.name, waits, idle, gpus)
    return table


def tightest_of(plan: Plan) -> tuple[PoolPlan, PhaseMemory]:
    """Return the pool and the phase with the least free memory, as a share of the GPU's."""
    pairs = [(pool, memory) for pool in plan.pools for memory in pool.memory]
    return max(pairs, key=lambda pair: pair[1].peak / pair[0].gpu_memory)


# --- words -----------------------------------------------------------------------------------------------------------


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
        some = f"{plan.processor}{'s' if len(gpus) > 1 else ''} {ranges(gpus)}"
        shown = f"all {size}" if len(gpus) == size > 1 else some
        parts.append(f"{where}: {shown}")
    return "; ".join(parts)


def parallelism(component: ComponentPlan) -> str:
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
    """Return the items at the peak; True for those that it adds. Items of one name and owner are one."""
    found: dict[tuple[str, str, bool], list[MemoryItem]] = {}
    for passing, all_items in ((False, memory.persistent), (True, memory.peak_instant.items)):
        for item in all_items:
            found.setdefault((item.name, item.component, passing), []).append(item)
    together = []
    for (_, _, passing), items in found.items():
        size, basis = sum(item.bytes for item in items), weakest(item.basis for item in items)
        sources = "; ".join(dict.fromkeys(item.source for item in items))
        together.append((replace(items[0], bytes=size, basis=basis, source=sources), passing))
    return together


# --- several plans, and the known GPUs --------------------------------------------------------------------------------


def compare_table(plans: Mapping[str, Plan | str]) -> Table:
    """Return a row for each plan, with the changes from the first.

    Args:
        plans: by name; a text says why there is no plan.
    """
    kinds = sorted({plan.processor for plan in plans.values() if isinstance(plan, Plan)}) or ["GPU"]
    numbers = ("/".join(f"{kind}s" for kind in kinds), "a step", "conversations/s")
    table = plain_table("Plans side by side", "", *numbers, "least free memory", "slowest", numbers=numbers)
    first = next((plan for plan in plans.values() if isinstance(plan, Plan)), None)
    for name, plan in plans.items():
        if isinstance(plan, str):
            add_row(table, name, "-", "-", "-", "-", Text(visible(plan), style="red"))
        else:
            add_row(table, name, *_compared(plan, first or plan))
    return table


def _compared(plan: Plan, first: Plan) -> list[str]:
    def change(value: float, before: float) -> str:
        return "" if value == before else f" ({value / before - 1:+.0%})"

    pool, memory = tightest_of(plan)
    free = pool.gpu_memory - memory.peak
    return [
        f"{plan.used_gpus:,} of {plan.num_gpus:,}",
        show_seconds(plan.step_seconds) + change(plan.step_seconds, first.step_seconds),
        rate(plan.conversations_per_second) + change(plan.conversations_per_second, first.conversations_per_second),
        f"{show_bytes(free)} ({free / pool.gpu_memory:.0%})",
        f"{plan.bottleneck.phase}: {plan.bottleneck.bottleneck}",
    ]


def devices_table(measured: Sequence[Device] = ()) -> Table:
    """Return a table of the known kinds of GPUs, as their makers publish them, after what was measured."""
    numbers = ("memory", "bf16 TFLOP/s", "memory GB/s", "GB/s to GPUs of the node")
    table = plain_table("Kinds of GPUs (a CPU: assumed)", "gpu", *numbers, numbers=numbers)
    for device in (*measured, *KINDS.values(), CPU):
        rates = (device.flops.value / 1e12, device.bandwidth.value / 1e9, device.link.value / 1e9)
        add_row(table, device.name, show_bytes(device.memory.value), *(f"{value:,.4g}" for value in rates))
    return table


# --- cells -----------------------------------------------------------------------------------------------------------


def add_row(table: Table, *cells: str | Text) -> None:
    """Add a row whose texts are shown as they are."""
    table.add_row(*(cell if isinstance(cell, Text) else Text(visible(cell)) for cell in cells))


def _items(memory: PhaseMemory) -> str:
    items = sorted((item for item, _ in items_at_peak(memory)), key=lambda item: -item.bytes)
    shown = []
    for item in items[:LARGEST_ITEMS]:
        owner = "" if item.component in ("", memory.component) else f"{item.component}: "
        shown += [f"{owner}{item.name.replace('_', ' ')} {item.bytes / GIB:.1f}"] if item.bytes > 0 else []
    rest = sum(item.bytes for item in items[LARGEST_ITEMS:])
    return ", ".join(shown + ([f"other {rest / GIB:.1f}"] if rest > 0 else []))


def simulation_table(plan: Plan, result: SimulationResult) -> Table:
    """Return a table of a simulated job, beside what the plan says without failures and slow GPUs."""
    table = plain_table(f"{len(result.step_seconds):,} steps, simulated", "", "")
    change = result.conversations_per_second / plan.conversations_per_second - 1
    rows = {
        "conversations/s": f"{rate(result.conversations_per_second)} ({change:+.1%} of the plan)",
        "time of the job": show_seconds(result.seconds),
        "a step": f"half below {show_seconds(result.step_quantile(0.5))}, 95 % below "
        f"{show_seconds(result.step_quantile(0.95))}; in the plan {show_seconds(plan.step_seconds)}",
        "failures": f"{result.failures:,}",
        "steps done again": f"{result.repeated_steps:,}, with a checkpoint every {result.checkpoint_every:,} steps",
        f"{plan.processor}s idle": f"{result.idle_share:.1%}",
        f"{plan.processor}s down or loading": f"{result.down_share:.1%}",
        "lost with a replica": f"{result.redone_share:.1%}",
        "writing checkpoints": f"{result.checkpoint_share:.1%}",
    }
    for name, value in rows.items():
        add_row(table, name, value)
    return table
