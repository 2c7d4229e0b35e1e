"""Checks of single values. Each function returns the value to use, or raises a ConfigError with its name."""

from __future__ import annotations

import ast
import importlib
import importlib.resources
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from gym_rm.errors import ConfigError, brief, nearest

LARGEST_INTEGER = 2**63 - 1  # of int64
EMBEDDED = ("policy", "reward_model", "judge")  # models that are part of the package
MOST_THREADS = 1024  # torch crashes with 100,000


def integer(name: str, value: Any, *, minimum: int, maximum: int = LARGEST_INTEGER) -> int:
    """Return an integer from `minimum` to `maximum`. Booleans, floats and text are not accepted."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or value < minimum:
        raise refusal(name, f"an integer of at least {minimum}", value)
    if value > maximum:
        raise refusal(name, f"an integer of at most {maximum}", value)
    return int(value)


def boolean(name: str, value: Any) -> bool:
    """Return True or False. Text and numbers are not accepted."""
    if not isinstance(value, bool | np.bool_):
        raise refusal(name, "true or false", value)
    return bool(value)


def finite(name: str, value: Any) -> float:
    """Return a finite number as a float."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    try:
        converted = float(value) if number else math.nan
    except OverflowError:  # an integer above the largest float
        converted = math.inf
    if not math.isfinite(converted):
        raise refusal(name, "a finite number", value)
    return converted


def positive(name: str, value: Any) -> float:
    """Return a finite number above 0."""
    number = finite(name, value)
    if number <= 0:
        raise refusal(name, "greater than 0", value)
    return number


def one_of(name: str, value: Any, known: Sequence[Any]) -> Any:
    """Return the value if it is one of the `known` values."""
    if value not in known:
        hint = nearest(str(value), [each for each in known if each is not None])
        raise ConfigError(f"{name} must be one of {list(known)}, got {value!r}.{hint}")
    return value


def refusal(name: str, expected: str, value: Any) -> ConfigError:
    """Return the error of a value that is not what is expected; settings of several types join what each expects."""
    error = ConfigError(f"{name} must be {expected}, got {describe(value):.100}.")
    error.expected = expected
    return error


def in_order(value: Any) -> list[Any] | None:
    """Return the values of a list, tuple, array, tensor or Series by position, whatever its labels are.

    None for what has no positions: a text, a mapping, a set, an iterator, a table, an array without a dimension.
    """
    has_positions = hasattr(value, "__len__") and hasattr(value, "__getitem__") and getattr(value, "ndim", 1) > 0
    is_table = hasattr(value, "columns") and getattr(value, "ndim", 2) > 1
    if not has_positions or is_table or isinstance(value, str | bytes | bytearray | Mapping | Set):
        return None
    return list(value.to_pylist() if callable(getattr(value, "to_pylist", None)) else value)


def load_function(name: str, value: Any) -> Callable[..., Any]:
    """Return a function, given as a function or by its name, see `load_object`."""
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
    """Return the object with the name `"module:object"` or `"path/file.py:object"`.

    A module is looked for on `sys.path`, then in the current folder. The folder of the file is appended to `sys.path`:
    the file is then one module by either name, which other processes find too.

    Raises:
        ConfigError: there is no such module, file or object, or its import raised an exception.
    """
    module, _, attribute = value.partition(":")
    expected = f"{name} must be a function or 'module:function', got {value!r}"
    path = Path(os.path.expanduser(module)) if module.endswith(".py") else None
    if path is not None and not os.path.isfile(path):
        raise ConfigError(f"{expected}: there is no file {str(path.absolute())!r}.")
    if not attribute:
        raise ConfigError(f"{expected}.{offer_functions(module if path else f'{module}.py')}")
    module, folder = (path.stem, path.parent.resolve()) if path else (module, Path.cwd())
    if folder not in (looked_at := [Path(each).resolve() for each in sys.path if Path(each).is_dir()]):
        sys.path.append(str(folder))
    importlib.invalidate_caches()  # the file may be newer than what is remembered of its folder
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever the file raises
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            folders = ", ".join(dict.fromkeys(map(str, [*looked_at, folder])))
            hint = nearest(module, [each.stem for each in folder.glob("*.py")])
            raise ConfigError(f"{expected}: {error} in {folders}.{hint}") from error
        *_, last = traceback.extract_tb(error.__traceback__)
        raise ConfigError(f"{expected}: {brief(error)} ({last.filename}, line {last.lineno}).") from error
    if path is not None and not path.samefile(file := getattr(found, "__file__", None) or "/"):
        raise ConfigError(f"{expected}: the name {module!r} belongs to another module, {file!r}; rename the file.")
    if not hasattr(found, attribute):
        public = [each for each in vars(found) if not each.startswith("_")]
        file = getattr(found, "__file__", None) or module
        raise ConfigError(f"{expected}: {file} has no {attribute!r}.{nearest(attribute, public)}")
    return getattr(found, attribute)


def model_source(name: str, value: str) -> str:
    """Return the folder of a model that is part of the package, `"embedded:policy"`; other values as they are."""
    kind, colon, model = value.partition(":")
    if kind != "embedded" or not colon:
        return value
    if model not in EMBEDDED:
        raise ConfigError(f"{name}={value!r}: the embedded models are embedded:{', embedded:'.join(EMBEDDED)}.")
    return str(importlib.resources.files("gym_rm") / "assets" / model)


def keep_inputs(inputs: Any, outputs: Iterable[str | os.PathLike[str]]) -> None:
    """Check that nothing which is read is overwritten: no file, under any of its names, and no folder of a model.

    Args:
        inputs: what is read: values in which every text may be a path, such as settings of a reward model.
        outputs: files that are written, also working files, and folders that are replaced.

    Raises:
        ConfigError: an output is an input, lies in a folder of a model that is read, or is a folder that has an input.
    """
    read = [path for each in _texts(inputs) for path in (each, each.rpartition(":")[0], each.partition("#")[0])]
    read = [file for path in read for file in _files(os.path.expanduser(path))]
    for output in [os.fspath(each) for each in outputs]:
        for path in read:
            if _is_within(output, path) or _is_within(path, output):
                raise ConfigError(
                    f"output must not be the input {path!r}, which {output!r} would replace; choose another one."
                )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str | os.PathLike):
        yield os.fspath(value)
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)


def _files(path: str) -> list[str]:
    """Return a file, or the folder of a model and its files; nothing for another path."""
    if not os.path.isdir(path):
        return [path] if os.path.isfile(path) else []
    names = os.listdir(path)
    is_model = any(name.endswith("config.json") for name in names)
    return [path, *(os.path.join(path, name) for name in names)] if is_model else []


def _is_within(path: str, place: str) -> bool:
    """Return whether a path is this file or folder, also by a link or in other letters, or lies in it."""
    above = (path, *map(str, Path(os.path.realpath(path)).parents))
    return os.path.exists(place) and any(os.path.exists(each) and os.path.samefile(each, place) for each in above)


def offer_functions(file: str) -> str:
    """Return how to write a function of a Python file, which is not imported; empty if it has none."""
    try:
        body = ast.parse(Path(os.path.expanduser(file)).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return ""
    names = [each.name for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    return f" To use a function, write {file}:{names[0]} (functions of the file: {', '.join(names)})." if names else ""


def describe(value: Any) -> str:
    """Return a value as text for error messages: its repr, with its type unless it is a plain number or None."""
    if type(value) in (int, float) or value is None:
        return repr(value)
    return f"{type(value).__name__} {value!r:.80}"
