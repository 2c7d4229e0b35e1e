"""Lengths of prompts and replies, as a distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gym_rm.errors import ConfigError
from gym_rm.planning.quantities import Basis

STEPS = 64  # values of a distribution that is given by quantiles


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

    def longest_of(self, count: int) -> float:
        """Return the length that the longest of so many texts has in the median."""
        return self.quantile(0.5 ** (1 / max(count, 1)))


def constant(tokens: float, source: str = "given") -> Lengths:
    """Return a distribution of one length."""
    return Lengths((float(tokens),), Basis.FORMULA, source)


def from_quantiles(name: str, quantiles: Mapping[str, float], source: str = "given quantiles") -> Lengths:
    """Return the distribution with these quantiles, linear between them.

    Args:
        name: of the setting, for messages.
        quantiles: lengths by `min`, `p50`, `p95`, ..., `max`; `max` is needed.

    Raises:
        ConfigError: a quantile is missing, or lengths fall.
    """
    raise NotImplementedError


def from_values(values: Sequence[float], *, basis: Basis, source: str) -> Lengths:
    """Return the distribution of measured lengths, thinned out to `STEPS` values that keep mean and maximum."""
    raise NotImplementedError(ConfigError)
