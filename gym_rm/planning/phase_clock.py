"""What the seconds of a phase are spent on, and the links that its work has."""

from __future__ import annotations

from dataclasses import dataclass

from gym_rm.planning.hardware.devices import Device
from gym_rm.planning.plan import TimePart
from gym_rm.planning.quantities import Basis, Quantity, weakest


@dataclass(frozen=True, slots=True)
class Site:
    """Where a component runs.

    Attributes:
        device: kind of the GPUs.
        network: bytes/s from a GPU to other nodes.
        spans: whether the GPUs of the pool are in more than one node.
        beside: GPUs of the pool in each node; they send at the same time.
    """

    device: Device
    network: Quantity
    spans: bool
    beside: int = 1

    def collective(self, size: int, *, tensor_parallel: bool = False) -> Quantity:
        """Return bytes/s of collectives over this many GPUs; tensor-parallel groups never leave a node.

        A ring over nodes passes each link between two nodes once for each GPU that a node has in it.
        """
        inside = self.device.all_reduce_bandwidth(size)
        between = self.network.value * min(self.beside, size)
        if tensor_parallel or not self.spans or inside.value <= between:
            return inside
        return Quantity(between, self.network.basis, self.network.source)


class PhaseClock:
    """Adds up the parts of a phase.

    Attributes:
        total: seconds of all parts.
    """

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
