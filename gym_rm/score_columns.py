"""Columns of `Scores`: their types, conversion, missing values, and rows taken from them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gym_rm.checks import describe, in_order
from gym_rm.errors import ConfigError

Key: TypeAlias = tuple[str, str | None]
Column: TypeAlias = "NDArray[Any] | tuple[Any, ...]"
DTYPES: dict[str, Any] = {
    "rewards": np.float64,
    "num_tokens": np.int64,
    "truncated_tokens": np.int64,
    "terminations": np.bool_,
}
LISTS: dict[str, Any] = {"turn_rewards": np.float64, "step_rewards": np.float64, "step_ends": np.int64}


def absent(key: Key, like: Column, size: int) -> Column:
    """Return a column of `size` missing values, for a column like this one."""
    if not isinstance(like, np.ndarray):
        return (None if key[0] == "errors" else np.empty(0, dtype=LISTS[key[0]]),) * size
    if key[0] == "infos" and like.dtype.kind != "f":
        return np.full((size, *like.shape[1:]), None, dtype=object)
    return np.full((size, *like.shape[1:]), np.nan if like.dtype.kind == "f" else 0, dtype=like.dtype)


def taken(column: Column, index: list[int]) -> Column:
    """Return the rows of these indices."""
    return column[index] if isinstance(column, np.ndarray) else tuple(column[row] for row in index)


def join(columns: Sequence[Column]) -> Column:
    """Return one column of the rows of all."""
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    return tuple(value for column in columns for value in column)


def indices(rows: Iterable[int], size: int) -> list[int]:
    """Return row indices from indices or from a mask of `size` rows."""
    listed = np.asarray(rows if hasattr(rows, "__array__") else list(rows))
    if listed.dtype == np.bool_:
        if listed.shape != (size,):
            raise IndexError(f"a mask must have one entry for each of the {size} scores, got {len(listed)}.")
        return [int(row) for row in np.flatnonzero(listed)]
    return [operator.index(row) for row in listed]


def array(name: str, values: Any, dtype: Any) -> NDArray[Any]:
    """Convert a column to an array; None is not accepted."""
    try:
        if values is None:
            raise TypeError("None is not a list")
        return np.asarray(values, dtype=dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{name} of Scores must be a list of {np.dtype(dtype)} numbers, got {describe(values)}: {error}."
        ) from error


def info_array(values: Any) -> NDArray[Any]:
    """Convert to an array of float64, int64, bool or objects, the dtypes that Gymnasium's vector infos use."""
    if not isinstance(values, np.ndarray):
        if (listed := in_order(values)) is None:
            raise ConfigError(f"infos of Scores must be lists or arrays, got {describe(values)}.")
        if all(isinstance(each, bool | int | float | np.number | np.bool_) for each in listed):
            values = np.array(listed)
        else:
            values = np.empty(len(listed), dtype=object)
            for row, each in enumerate(listed):
                values[row] = each
    dtypes = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}
    return np.asarray(values, dtype=dtypes.get(values.dtype.kind, object))


def item(value: Any) -> Any:
    """Return a number of numpy as one of Python, and any other value as it is."""
    return value.item() if isinstance(value, np.generic) else value
