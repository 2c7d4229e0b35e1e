"""Lengths of prompts and replies, as a distribution."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gym_rm.checks import describe
from gym_rm.errors import ConfigError
from gym_rm.planning.quantities import Basis

STEPS = 200  # values of a distribution: half a percent of the texts each, so that p99 is inside
LONGEST = 100_000_000  # tokens; more is a mistake
_FORM = "a number of tokens, or quantiles such as {p50: 200, p95: 900, max: 2048}"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens.

    Attributes:
        values: lengths in rising order; each stands for the same share of the texts.
        basis, source: where they are from.
    """

    values: tuple[float, ...]
    basis: Basis
    source: str

    @property
    def mean(self) -> float:
        """Mean length."""
        return sum(self.values) / len(self.values)

    @property
    def maximum(self) -> float:
        """Largest length."""
        return self.values[-1]

    def quantile(self, share: float) -> float:
        """Return the length that this share of the texts does not exceed, linear between the values."""
        place = min(max(share * len(self.values) - 0.5, 0.0), len(self.values) - 1.0)
        low = int(place)
        high = min(low + 1, len(self.values) - 1)
        return self.values[low] + (place - low) * (self.values[high] - self.values[low])

    def longest_of(self, count: float) -> float:
        """Return the length that the longest of so many texts has in the median."""
        return self.quantile(0.5 ** (1 / max(count, 1)))


def constant(tokens: float) -> Lengths:
    """Return a distribution of one length."""
    return Lengths((float(tokens),), Basis.FORMULA, "given")


def parse_lengths(name: str, value: Any) -> Lengths:
    """Return the lengths of a setting: a number of tokens, or quantiles (see `from_quantiles`).

    Raises:
        ConfigError: it is neither, or a number is not possible. The message has all problems.
    """
    if isinstance(value, Mapping):
        return from_quantiles(name, value)
    if problem := _problem(name, value):
        raise ConfigError(f"{problem}; give {_FORM}.")
    return constant(value)


def from_quantiles(name: str, quantiles: Mapping[Any, Any]) -> Lengths:
    """Return the distribution with these quantiles, linear between them.

    Without `min`, it falls to one token below the lowest quantile. It has `STEPS` values: each is the middle of its
    share of the texts, except the last, which is `max`.

    Args:
        name: of the setting, for messages.
        quantiles: lengths by `min`, `p50`, `p95`, `p99.5`, ..., `max`; `max` is needed.

    Raises:
        ConfigError: a name is unknown, a quantile is missing or impossible, or lengths fall. The message has all
            problems.
    """
    places = {key: share for key in quantiles if (share := _share(key)) is not None}
    known = "quantiles are min, p1 to p99 and max, and the mean follows from the quantiles"
    problems = [f"{name}.{key} is unknown; {known}" for key in quantiles if key not in places]
    problems += [problem for key in places if (problem := _problem(f"{name}.{key}", quantiles[key]))]
    if "max" not in places:
        problems.append(f"{name}.max is missing; memory is planned for the longest text")
    rising = sorted(places, key=places.__getitem__)
    if not problems:
        for lower, upper in itertools.pairwise(rising):
            low, high = quantiles[lower], quantiles[upper]
            if high < low:
                problems.append(f"{name}.{upper} ({high:g}) is less than {name}.{lower} ({low:g})")
    if problems:
        raise ConfigError("; ".join(problems) + ".")
    shares, lengths = [places[key] for key in rising], [float(quantiles[key]) for key in rising]
    if shares[0] > 0:
        shares, lengths = [0.0, *shares], [min(1.0, lengths[0]), *lengths]
    middles = (np.arange(STEPS) + 0.5) / STEPS
    values = np.interp(middles, shares, lengths).tolist()
    return Lengths((*values[:-1], lengths[-1]), Basis.ASSUMPTION, "given quantiles, linear between them")


def _share(key: Any) -> float | None:
    """Return the share that a quantile's name stands for: 0.5 for `p50`; None for another name."""
    if key in ("min", "max"):
        return float(key == "max")
    match = re.fullmatch(r"p(\d{1,2}(?:\.\d+)?)", str(key))
    return float(match[1]) / 100 if match and float(match[1]) > 0 else None


def _problem(name: str, value: Any) -> str | None:
    """Return what is wrong with a length, or None."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and 1 <= value <= LONGEST:  # not for NaN
        return None
    return f"{name} must be a number of tokens from 1 to {LONGEST:,}, got {describe(value):.100}"
