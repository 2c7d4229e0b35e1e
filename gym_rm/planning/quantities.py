"""Numbers that say where they are from."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from gym_rm import checks
from gym_rm.errors import ConfigError

GIB = 2**30
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


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


def parse_bytes(name: str, value: object) -> float:
    """Return a number of bytes, from a number or a text such as `"80 GiB"`.

    Raises:
        ConfigError: it is neither, or not positive.
    """
    number = value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?)\s*([KMGT]?I?B)?\s*", value, re.IGNORECASE)
        number = float(match[1]) * UNITS[(match[2] or "B").upper()] if match else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ConfigError(f"{name} must be a size such as '80 GiB' or a number of bytes, got {value!r}.")
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
