"""Checks of single values. Each function returns the value to use, or raises a ConfigError with its name."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gym_rm.errors import ConfigError, nearest

LARGEST_INTEGER = 2**63 - 1  # of int64
MOST_THREADS = 1024  # torch crashes with 100,000


def integer(name: str, value: Any, *, minimum: int, maximum: int = LARGEST_INTEGER) -> int:
    """Return an integer from `minimum` to `maximum`. Booleans, floats and text are not accepted."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or value < minimum:
        raise ConfigError(f"{name} must be an integer of at least {minimum}, got {describe(value)}.")
    if value > maximum:
        raise ConfigError(f"{name} must be an integer of at most {maximum}, got {describe(value):.100}.")
    return int(value)


def boolean(name: str, value: Any) -> bool:
    """Return True or False. Text and numbers are not accepted."""
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name} must be true or false, got {describe(value)}.")
    return bool(value)


def finite(name: str, value: Any) -> float:
    """Return a finite number as a float."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    try:
        converted = float(value) if number else math.nan
    except OverflowError:  # an integer above the largest float
        converted = math.inf
    if not math.isfinite(converted):
        raise ConfigError(f"{name} must be a finite number, got {describe(value):.100}.")
    return converted


def positive(name: str, value: Any) -> float:
    """Return a finite number above 0."""
    number = finite(name, value)
    if number <= 0:
        raise ConfigError(f"{name} must be greater than 0, got {describe(value)}.")
    return number


def one_of(name: str, value: Any, known: Sequence[Any]) -> Any:
    """Return the value if it is one of the `known` values."""
    if value not in known:
        hint = nearest(str(value), [each for each in known if each is not None])
        raise ConfigError(f"{name} must be one of {list(known)}, got {value!r}.{hint}")
    return value


def load_function(name: str, value: Any) -> Callable[..., Any]:
    """Return a function, given as a function or by its name `"module:function"`."""
    if callable(value):
        return value  # type: ignore[no-any-return]
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a function or 'module:function', got {describe(value)}.")
    function = load_object(name, value)
    if not callable(function):
        raise ConfigError(
            f"{name} must be a function or 'module:function', got {value!r}: this is a {type(function).__name__}."
        )
    return function  # type: ignore[no-any-return]


def load_object(name: str, value: str) -> Any:
    """Import the object with the name `"module:name"`."""
    module, _, attribute = value.partition(":")
    expected = f"{name} must be a function or 'module:function', got {value!r}"
    try:
        found = importlib.import_module(module)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{expected}: {error}.") from error
    if not hasattr(found, attribute):
        raise ConfigError(f"{expected}: the module has no {attribute!r}.{nearest(attribute, vars(found))}")
    return getattr(found, attribute)


def describe(value: Any) -> str:
    """Return a value as text for error messages: its repr, with its type unless it is a plain number or None."""
    if type(value) in (int, float) or value is None:
        return repr(value)
    return f"{type(value).__name__} {value!r:.80}"
