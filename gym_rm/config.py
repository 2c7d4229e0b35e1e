"""Settings of a command: defaults in a pydantic schema, a YAML file over them, dotted overrides over both."""

from __future__ import annotations

import copy
import re
import typing
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from gym_rm.errors import ConfigError, nearest

Schema = TypeVar("Schema", bound=pydantic.BaseModel)


class Config(pydantic.BaseModel):
    """Base of all schemas: frozen, unknown keys refused, defaults validated, numbers accepted as text.

    Example:
        >>> class Optimizer(Config):
        ...     learning_rate: float = 1e-3
        >>> load_config(Optimizer, overrides=["learning_rate=3e-4"])
        Optimizer(learning_rate=0.0003)
    """

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", validate_default=True, coerce_numbers_to_str=True, arbitrary_types_allowed=False
    )


def load_config(schema: type[Schema], file: str | Path | None = None, overrides: Sequence[str] = ()) -> Schema:
    """The schema's defaults, changed by a YAML file, changed by `a.b=value` overrides.

    Mappings merge key by key, everything else replaces. Override values are YAML (`null`, `true`, `3e-4`,
    `[1, 2]`), list entries are reached by index (`scorers.0.weight=2`). The file is YAML 1.2: `no` and `on` are
    texts, `3e-4` is a number.

    Raises:
        ConfigError: the file cannot be read, or some settings are wrong; lists every problem at once.
    """
    values = _merge(_defaults(schema), _read(file) if file is not None else {})
    problems = []
    for override in overrides:
        try:
            _apply(values, override)
        except ConfigError as error:
            problems.append(str(error))
    try:
        config = schema.model_validate(values)
    except pydantic.ValidationError as error:
        problems += [_explain(problem, schema) for problem in error.errors()]
    if problems:
        source = f"{file}: " if file is not None else ""
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{source}{count} in the settings:" + "".join(f"\n  {problem}" for problem in problems))
    return config


def override_values(overrides: Sequence[str]) -> dict[str, Any]:
    """The values of `a.b=value` texts alone, nested as they say.

    Raises:
        ConfigError: a text of another form, or a value that is not YAML.
    """
    values: dict[str, Any] = {}
    for override in overrides:
        _apply(values, override)
    return values


# --- values ------------------------------------------------------------------------------------------------------


def _defaults(schema: type[pydantic.BaseModel]) -> dict[str, Any]:
    """Plain values of all defaults, so that a file or an override can change one key of a nested one."""
    values = {}
    for name, field in schema.model_fields.items():
        if not field.is_required():
            default = field.get_default(call_default_factory=True)
            values[name] = pydantic.TypeAdapter(Any).dump_python(copy.deepcopy(default))
        elif inner := _model_in(field.annotation):
            values[name] = _defaults(inner)
    return values


def _merge(base: Any, change: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return {**base, **{key: _merge(base.get(key), value) for key, value in change.items()}}


def _apply(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r}: expected the form name=value or group.name=value.")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML ({_reason(error)}); quote it.") from error
    node: Any = values
    for depth, part in enumerate(parts[:-1], start=1):
        node = _child(node, part, parts[depth], ".".join(parts[:depth]), override)
    if isinstance(node, list):
        node[_index(node, parts[-1], override)] = value
    else:
        node[parts[-1]] = value


def _child(node: Any, part: str, next_part: str, path: str, override: str) -> Any:
    """The mapping or list at `part`, made where there is none yet."""
    key: Any = _index(node, part, override) if isinstance(node, list) else part
    child = node.get(key) if isinstance(node, dict) else node[key]
    if isinstance(child, tuple):
        child = list(child)
    if child is None:
        child = {}
    if not isinstance(child, dict | list):
        raise ConfigError(f"override {override!r}: {path!r} is {child!r}, which has no {next_part!r}.")
    node[key] = child
    return child


def _index(node: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(node):
        raise ConfigError(f"override {override!r}: {part!r} is no index of a list of {len(node)} entries.")
    return int(part)


# --- the file ----------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Safe YAML with the plain scalars of YAML 1.2, and with repeated keys refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and key.value != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is there twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]{1,3})?|[-+]?[0-9]+[eE][-+]?[0-9]{1,2}"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
]:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def _read(file: str | Path) -> dict[str, Any]:
    try:
        values = yaml.load(Path(file).read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the settings in {str(file)!r}: {error}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {_reason(error)}.") from error
    if not isinstance(values, dict | None):
        raise ConfigError(f"{file}: expected a mapping of settings, got {type(values).__name__}: {values!r}.")
    return values or {}


def _reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} at line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return str(error)


# --- problems ----------------------------------------------------------------------------------------------------


def _explain(problem: Any, schema: type[pydantic.BaseModel]) -> str:
    location = problem["loc"]
    path = ".".join(str(part) for part in location)
    match problem["type"]:
        case "extra_forbidden":
            return f"{path}: unknown setting.{_nearest_setting(location, schema)}"
        case "missing":
            return f"{path}: has no default and must be given."
        case "value_error":
            reason = str(problem["ctx"]["error"])
            return f"{path}: {reason}" if path else reason
    return f"{path}: {problem['msg'].lower()}, got {type(problem['input']).__name__} {problem['input']!r}."


def _nearest_setting(location: tuple[str | int, ...], schema: type[pydantic.BaseModel]) -> str:
    """A sibling with a similar name, else a setting of that name elsewhere."""
    *parents, name = [part for part in location if isinstance(part, str)]
    paths = list(_paths(schema))
    siblings = [path[-1] for path in paths if list(path[:-1]) == parents]
    if hint := nearest(name, siblings):
        return hint
    elsewhere = [".".join(path) for path in paths if path[-1] == name]
    return f" Did you mean {elsewhere[0]!r}?" if elsewhere else f" Known here: {', '.join(siblings)}."


def _paths(
    schema: type[pydantic.BaseModel], above: tuple[type[pydantic.BaseModel], ...] = ()
) -> Iterator[tuple[str, ...]]:
    for name, field in schema.model_fields.items():
        yield (name,)
        inner = _model_in(field.annotation)
        if inner is not None and inner not in (*above, schema):
            yield from ((name, *path) for path in _paths(inner, (*above, schema)))


def _model_in(annotation: Any) -> type[pydantic.BaseModel] | None:
    """The model that a field holds: itself, `Model | None`, `list[Model]`, ..."""
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, pydantic.BaseModel) else None
    models = (_model_in(argument) for argument in typing.get_args(annotation))
    return next((model for model in models if model is not None), None)
