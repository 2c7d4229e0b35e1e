"""Records and columns as plain values for JSON, and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from gym_rm.checks import describe
from gym_rm.errors import ConfigError, nearest

Record = TypeVar("Record")


def to_plain(value: Any) -> Any:
    """Return a value that `json.dumps` accepts: NaN becomes None, and other objects become texts."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray | list | tuple | set | frozenset):
        return [to_plain(each) for each in value]
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def numbers(name: str, values: Any) -> list[float]:
    """Return a list of finite numbers and None as floats; None becomes NaN.

    Raises:
        ConfigError: this is not a list, or an entry is a text, a boolean, NaN or infinite.
    """
    return [_number(f"{name}[{row}]", value) for row, value in enumerate(_list(name, values))]


def counts(name: str, values: Any) -> list[int]:
    """Return a list of integers of at least 0. Raises ConfigError for anything else."""
    return _checked(name, values, "an integer of at least 0", lambda each: type(each) is int and 0 <= each < 2**63)


def flags(name: str, values: Any) -> list[bool]:
    """Return a list of booleans. Raises ConfigError for anything else."""
    return _checked(name, values, "true or false", lambda each: isinstance(each, bool))


def texts(name: str, values: Any) -> list[str | None]:
    """Return a list of texts and None. Raises ConfigError for anything else."""
    return _checked(name, values, "a text or null", lambda each: isinstance(each, str | None))


def number_lists(name: str, values: Any) -> list[list[float]]:
    """Return a list of lists of numbers; see `numbers`."""
    return [numbers(f"{name}[{row}]", value) for row, value in enumerate(_list(name, values))]


def by_name(name: str, values: Any, read: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return the columns of a mapping, each read by this function."""
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{name} must be a mapping from names to lists, got {describe(values)}.")
    return {key: read(f"{name}[{key!r}]", each) for key, each in values.items()}


def infos(name: str, values: Any) -> Any:
    """Return a column of any values: an array if all are numbers of one type, otherwise the list itself."""
    values = _list(name, values)
    if any(type(each) is float for each in values) and all(type(each) in (float, int, type(None)) for each in values):
        return np.array([math.nan if each is None else each for each in values], dtype=np.float64)
    if values and all(isinstance(each, list) for each in values):
        kinds = {type(leaf) for leaf in _leaves(values)}
        if kinds in ({float}, {int}, {bool}):
            try:
                array = np.array(values)
            except ValueError:  # lists of different lengths
                return values
            return array if array.dtype.kind in "fib" else values
    return values


def record(name: str, record_class: type[Record], values: Any) -> Record:
    """Return a dataclass from a mapping of its fields.

    Raises:
        ConfigError: a field is unknown or missing, or has another type than its default.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} must be a mapping, got {describe(values)}.")
    known = {each.name: each for each in dataclasses.fields(record_class)}  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{name} has the unknown field {key!r}.{nearest(str(key), known)}")
        kind = str(known[key].type)
        expected: Any = {"int": int, "float": float | int}.get(kind, Mapping if "Mapping" in kind else str | None)
        if isinstance(value, bool) or not isinstance(value, expected) or (kind == "str" and value is None):
            raise ConfigError(f"{name}.{key} must have the type {kind}, got {describe(value)}.")
    try:
        return record_class(**values)
    except TypeError as error:
        raise ConfigError(f"{name} is not complete: {error}.") from error


def _number(name: str, value: Any) -> float:
    if value is None:
        return math.nan
    try:
        if isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer above the largest float
        pass
    raise ConfigError(f"{name} must be a finite number or null, got {describe(value)}.")


def _list(name: str, values: Any) -> list[Any]:
    if not isinstance(values, list):
        raise ConfigError(f"{name} must be a list, got {describe(values)}.")
    return values


def _checked(name: str, values: Any, expected: str, accepts: Callable[[Any], bool]) -> list[Any]:
    for row, value in enumerate(_list(name, values)):
        if not accepts(value):
            raise ConfigError(f"{name}[{row}] must be {expected}, got {describe(value)}.")
    return list(values)


def _leaves(values: list[Any]) -> Iterator[Any]:
    for each in values:
        if isinstance(each, list):
            yield from _leaves(each)
        else:
            yield each
