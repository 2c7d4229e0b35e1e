"""What the seconds of a phase are spent on, and the links that its work has."""

from __future__ import annotations

from dataclasses import dataclass

from gym_rm.planning.hardware.devices import Device
from gym_rm.planning.plan import TimePart
from gym_rm.planning.quantities import Basis, Quantity, weakest


@dataclass(frozen=True, slots=True)
class Site:
    """GPUs of a pool, at least `per_node` of them in the same node; `network`: bytes/s from a GPU to other nodes."""

    device: Device
    network: Quantity
    num_gpus: int
    per_node: int

    def collective(self, size: int, *, stride: int = 1) -> Quantity:
        """Return bytes/s of collectives over this many GPUs, of which every `stride`-th of the pool is one.

        A ring over nodes passes the network once for each GPU that a node has in it: the groups between them, of which
        there are `stride`, run at the same time, have the network of their own GPUs and share the links of the node.
        """
        inside = self.device.all_reduce_bandwidth(size * stride)
        between = self.network.value * max(min(self.per_node // stride, size), 1)
        in_a_node = self.per_node == self.num_gpus or self.per_node % (size * stride) == 0
        if in_a_node or inside.value <= between:
            return inside
        return Quantity(between, self.network.basis, self.network.source)


class PhaseClock:
    """Adds up the parts of a phase; `total` has the seconds of all."""

    __slots__ = ("_parts", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self._parts: dict[str, tuple[float, Basis, str]] = {}

    def add(self, name: str, seconds: float, basis: Basis, source: str) -> None:
        """Add seconds of one sort of work."""
        self.total += seconds
        if name in self._parts:
            before, known, source = self._parts[name]
            seconds, basis = before + seconds, weakest((known, basis))
        self._parts[name] = (seconds, basis, source)

    def parts(self) -> tuple[TimePart, ...]:
        """Return the parts that take any time."""
        return tuple(TimePart(name, *values) for name, values in self._parts.items() if values[0] > 0)
