"""Console table of several plans, one in a row, with the changes from the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.table import Table
from rich.text import Text

from gym_rm.planning.plan import Plan
from gym_rm.planning.quantities import show_bytes, show_seconds
from gym_rm.reports.plan_tables import add_row, division, plain_table, rate, tightest_of
from gym_rm.reports.transcripts import visible

Column = tuple[Callable[[Plan], str], Callable[[Plan], float | None]]  # the text, and the number if changes are shown


def compare_table(plans: Mapping[str, Plan | str], title: str) -> Table:
    """Return a row for each plan. What differs from the first is bold, with the change of numbers.

    Args:
        plans: by name; a text says why there is no plan.
        title: title of the table.
    """
    table = plain_table(title, "")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in TEXTS else "right", overflow="fold")
    first = next(iter(plans.values()))
    for name, plan in plans.items():
        if isinstance(plan, str):
            add_row(table, name, *("-" for _ in list(COLUMNS)[:-1]), Text(visible(plan), style="red"))
        else:
            cells = (_cell(column, plan, first if isinstance(first, Plan) else plan) for column in COLUMNS.values())
            add_row(table, name, *cells)
    return table


def placements(plans: Mapping[str, Plan | str]) -> Text:
    """Return a line for each plan that says how its components are divided; those of a pool are in brackets."""
    lines = []
    for name, plan in plans.items():
        pools = plan.pools if isinstance(plan, Plan) else ()
        parts = ("[" + ", ".join(f"{each.name}: {division(each)}" for each in pool.components) + "]" for pool in pools)
        lines.append(visible(f"  {name}: {' '.join(parts) or '-'}"))
    return Text("\n".join(lines))


def _cell(column: Column, plan: Plan, first: Plan) -> Text:
    show, number = column
    text = show(plan)
    if text == show(first):
        return Text(visible(text))
    value, before = number(plan), number(first)
    change = f" ({value / before - 1:+.0%})" if value is not None and before else ""
    return Text(visible(text + change), style="bold")


def _headroom(plan: Plan) -> str:
    pool, memory = tightest_of(plan)
    free = pool.gpu_memory - memory.peak
    return f"{show_bytes(free)} ({free / pool.gpu_memory:.0%})"


def _nothing(plan: Plan) -> None:
    return None


TEXTS = ("least free memory", "slowest")
COLUMNS: dict[str, Column] = {
    "GPUs": (lambda plan: f"{plan.used_gpus:,} of {plan.num_gpus:,}", _nothing),
    "a step": (lambda plan: show_seconds(plan.step_seconds), lambda plan: plan.step_seconds),
    "conversations/s": (
        lambda plan: rate(plan.conversations_per_second),
        lambda plan: plan.conversations_per_second,
    ),
    "least free memory": (_headroom, _nothing),
    "slowest": (lambda plan: f"{plan.bottleneck.phase}: {plan.bottleneck.bottleneck}", _nothing),
}
