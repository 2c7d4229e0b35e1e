"""Checks of single values: each function returns the value to use, or raises a `ConfigError` that names it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gym_rm.errors import ConfigError, nearest


def integer(name: str, value: Any, *, minimum: int) -> int:
    """An integer of at least `minimum`; neither a bool nor a float nor text counts as one."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or value < minimum:
        raise ConfigError(f"{name} must be an integer of at least {minimum}, got {describe(value)}.")
    return int(value)


def boolean(name: str, value: Any) -> bool:
    """True or False; text and numbers do not count."""
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name} must be true or false, got {describe(value)}.")
    return bool(value)


def finite(name: str, value: Any) -> float:
    """A finite number as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, got {describe(value)}.")
    return float(value)


def one_of(name: str, value: Any, known: Sequence[Any]) -> Any:
    """One of the `known` values."""
    if value not in known:
        hint = nearest(str(value), [each for each in known if each is not None])
        raise ConfigError(f"{name} must be one of {list(known)}, got {value!r}.{hint}")
    return value


def load_function(name: str, value: Any) -> Callable[..., Any]:
    """A function, or the function that the text `"module:function"` names."""
    if callable(value):
        return value  # type: ignore[no-any-return]
    function = load_object(name, str(value))
    if not callable(function):
        raise ConfigError(f"{name}={value!r} names a {type(function).__name__}, expected a function.")
    return function  # type: ignore[no-any-return]


def load_object(name: str, value: str) -> Any:
    """What the text `"module:name"` names."""
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
    """A value as errors show it: its type and the beginning of its repr; just the repr of a plain number."""
    if type(value) in (int, float) or value is None:
        return repr(value)
    return f"{type(value).__name__} {value!r:.80}"
