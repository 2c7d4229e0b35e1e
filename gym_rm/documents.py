"""JSON and YAML from files, requests and the command line: finite numbers, and no more levels than code can walk."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from gym_rm.errors import ConfigError

MOST_LEVELS = 100  # of lists and mappings in each other
MOST_VALUES = 1_000_000  # in one level of a YAML document, with the values of each alias
_TOO_DEEP = f"lists and mappings are nested more than {MOST_LEVELS} levels deep"


def parse_json(text: str | bytes, *, allow_nan: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        text: a text, or bytes in UTF-8.
        allow_nan: whether `NaN`, which Python and pandas write, is a number.

    Raises:
        ValueError: the text is not valid JSON, a key occurs twice, a number is not finite, or brackets are nested too
            deep.
    """

    def constant(name: str) -> float:
        if not (allow_nan and name == "NaN"):
            raise ValueError(f"{name} is not a number in JSON")
        return math.nan

    try:
        text = text.decode("utf-8", "surrogatepass") if isinstance(text, bytes) else text
        value = json.loads(text, parse_float=_finite, parse_constant=constant, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[") + text.count("{") > MOST_LEVELS:
        _check_size(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r:.80} occurs twice")
        found[key] = value
    return found


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML 1.2 document: `no` and `on` are texts, `3e-4` is a number.

    Raises:
        ValueError: the text is not valid YAML, a key occurs twice, or it is nested too deep or has too many values,
            also through aliases. The message names line and column.
    """
    parser = YAML(typ="safe", pure=True)
    parser.Constructor = _Constructor
    try:
        value = parser.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"{error.problem or error.context}{place}") from error
    except YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except (LookupError, TypeError, AttributeError) as error:  # of `!!bool maybe`
        raise ValueError(f"a value does not fit its tag: {error!r}") from error
    _check_size(value, MOST_VALUES)
    return value


def read_mapping(file: str | Path, what: str) -> dict[str, Any]:
    """Return the mapping in a JSON file (by its suffix) or a YAML file; `what` it holds is for messages.

    Raises:
        ConfigError: the file cannot be read, is not valid, or holds something else.
    """
    path = Path(os.path.expanduser(file))
    try:
        text = path.read_text(encoding="utf-8")
        values = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {what} in {str(file)!r}: {error}.") from error
    if not isinstance(values, dict | None):
        raise ConfigError(f"{str(file)!r} must be a mapping with {what}, got {type(values).__name__}: {values!r:.80}.")
    return values or {}


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file beside a path, which gets its name when it is written, or is removed after an error.

    So a full disk, or an interrupt, leaves the file that was there. Folders that are missing are made.
    """
    path = Path(os.path.realpath(path))  # a link keeps leading to its file
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            yield file
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def to_yaml(value: Any) -> str:
    """Return plain values as a YAML document, with the keys in their order."""
    writer, stream = YAML(typ="safe", pure=True), io.StringIO()
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    writer.dump(value, stream)
    return stream.getvalue()


class _Constructor(SafeConstructor):
    """Values of YAML 1.2; a date stays a text."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text:.40} is too large for a float")
    return number


def _check_size(value: Any, most_values: int | None = None) -> None:
    """Raise ValueError for too many levels, also of a value that contains itself, or too many values in one level."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        level = [each for each in level if isinstance(each, Mapping | list | tuple | set)]
        if not level:
            return
        children = (each.values() if isinstance(each, Mapping) else each for each in level)
        level = list(itertools.islice(itertools.chain.from_iterable(children), most_values))
        if len(level) == most_values:
            raise ValueError(f"the document has {most_values:,} values or more, with those of each alias")
    raise ValueError(_TOO_DEEP)
