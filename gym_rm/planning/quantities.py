"""Numbers that say where they are from."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from gym_rm import checks
from gym_rm.checks import describe
from gym_rm.errors import ConfigError

GIB = 2**30
_BYTES = {f"{letter}B": 1000.0**power for power, letter in enumerate(("", *"KMGTPE"))}
_BYTES |= {f"{letter}iB": 1024.0**power for power, letter in enumerate("KMGTPE", 1)}
_BITS = {f"{letter}{bit}": 1000.0**power / 8 for power, letter in enumerate("KMGT", 1)
         for bit in ("b/s", "bit/s", "bps")}  # fmt: skip
UNITS = {
    "size": _BYTES,
    "bandwidth": {f"{unit}/s": size for unit, size in _BYTES.items()} | _BITS,
    "speed": {f"{letter}{word}": 1000.0**power for power, letter in enumerate(("", *"KMGTPE"))
              for word in ("FLOPS", "FLOP/s")},
    "time": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
}  # fmt: skip
EXAMPLES = {
    "size": "'80 GiB' or a number of bytes",
    "bandwidth": "'50 GB/s', '400 Gb/s' (bits), or a number of bytes/s",
    "speed": "'989 TFLOPS' or a number of FLOP/s",
    "time": "'5 us' or a number of seconds",
}
_NUMBER = re.compile(r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*(\S.*?)?\s*")


class Basis(enum.StrEnum):
    """Where a number is from, from the most to the least reliable."""

    MEASURED = "measured"
    """Measured on this machine, or counted in the user's own data or model."""
    TABLE = "table"
    """Published or measured elsewhere, for this hardware or model."""
    FORMULA = "formula"
    """Computed exactly from a configuration."""
    ASSUMPTION = "assumption"
    """Neither measured nor published for this case; the text says why it was chosen."""


_RANK = {Basis.MEASURED: 0, Basis.FORMULA: 1, Basis.TABLE: 2, Basis.ASSUMPTION: 3}


def weakest(bases: Iterable[Basis]) -> Basis:
    """Return the least reliable basis, which is the basis of a number computed from all of them."""
    return max(bases, key=_RANK.__getitem__, default=Basis.FORMULA)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its source.

    Attributes:
        value: the number, in bytes, seconds, FLOP/s, bytes/s or a share; the name of the field says which.
        basis: what kind of source it has.
        source: the source in words.
    """

    value: float
    basis: Basis
    source: str


def assumed(value: float, source: str) -> Quantity:
    """Return an assumption."""
    return Quantity(value, Basis.ASSUMPTION, source)


def parse_quantity(name: str, value: object, kind: str) -> float:
    """Return a number of bytes, bytes/s, FLOP/s or seconds from a number, or a text such as `"80 GiB"`.

    Args:
        name: of the setting, for messages.
        value: the number or text; a small b behind a prefix is a bit, a capital one a byte.
        kind: `size`, `bandwidth`, `speed` or `time`.

    Raises:
        ConfigError: it is neither, has the unit of something else, or is not positive.
    """
    number, wrong = value, ""
    if isinstance(value, str) and (match := _NUMBER.fullmatch(value)):
        number, unit = float(match[1]), match[2]
        if unit and unit not in UNITS[kind]:
            others = [f", which is a {other}" for other, units in UNITS.items() if unit in units]
            wrong = others[0] if others else ", whose unit is unknown"
        elif unit:
            number *= UNITS[kind][unit]
    if wrong or isinstance(number, bool) or not isinstance(number, int | float):
        raise ConfigError(f"{name} must be a {kind} such as {EXAMPLES[kind]}; got {describe(value)}{wrong}.")
    return checks.positive(name, number)


def show_bytes(value: float) -> str:
    """Return a size in GiB, or MiB below a tenth of one."""
    return f"{value / GIB:.1f} GiB" if value >= GIB / 10 else f"{value / 2**20:.0f} MiB"


def show_seconds(value: float) -> str:
    """Return a duration for people: `3.2 ms`, `41 s`, `12 min`, `3.0 h`; below what matters, `0 ms`."""
    if value < 1e-6:
        return "0 ms"
    if value < 1:
        return f"{value * 1000:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
