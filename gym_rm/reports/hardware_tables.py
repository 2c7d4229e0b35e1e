"""Console tables of what the planner knows: kinds of GPUs, models, and what was measured on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gym_rm.planning.hardware.devices import CPU, KINDS, Device
from gym_rm.planning.quantities import Quantity, show_bytes
from gym_rm.reports.plan_tables import BASIS_STYLES, add_row, count, plain_table

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
    table = plain_table("Kinds of GPUs (yellow: assumed)", "gpu")
    for name in DEVICE_COLUMNS:
        table.add_column(name, justify="right")
    sources: dict[str, None] = {}
    for device in devices:
        cells = [column(device) for column in DEVICE_COLUMNS.values()]
        sources |= dict.fromkeys(quantity.source.replace(device.name, "GPU") for quantity, _ in cells)
        add_row(table, device.name, *(Text(text, style=BASIS_STYLES[quantity.basis]) for quantity, text in cells))
    text = "matmul, decoding: share of the FLOP/s and of the bandwidth that is reached. link: to GPUs of the same node."
    return Group(table, Text(f"  {text}"), Text("  Sources:"), *(Text(f"  - {source}") for source in sources))


def models_table() -> Table:
    """Return a table of the known models, by size."""
    from gym_rm.planning.model.known_models import known_models, load_shape

    table = plain_table("Known models (others: a folder, a hub id, or config: {...})")
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
        add_row(table, shape.name, *sizes, str(shape.heads), str(shape.kv_heads), cached)
    return table


def measured_table(rows: Sequence[tuple[str, str, str]], title: str) -> Table:
    """Return a table of names, values and sources; where all sources end alike, the title says it once."""
    ends = {source.rpartition("; ")[2] for _, _, source in rows if "; " in source}
    common = f"; {ends.pop()}" if len(ends) == 1 else ""
    table = plain_table(title + common.replace("; ", ", "), "number")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("source", overflow="fold")
    for name, value, source in rows:
        add_row(table, name, value, source.removesuffix(common))
    return table
