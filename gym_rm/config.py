"""Settings as pydantic schemas, filled from keywords, YAML files and overrides such as `a.b=value`.

The options of the package (`load_scorer`, `RewardModel-v0`), of the commands and of the agents are all validated here,
so that an unknown or invalid setting gets the same error everywhere.
"""

from __future__ import annotations

import json
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import pydantic

from gym_rm import checks
from gym_rm.checks import describe
from gym_rm.documents import parse_yaml, read_mapping
from gym_rm.errors import ConfigError, nearest
from gym_rm.plain_values import to_plain

Schema = TypeVar("Schema", bound=pydantic.BaseModel)


class Config(pydantic.BaseModel):
    """Base class of all schemas. They are frozen, reject unknown settings, and validate their defaults.

    The docstring under a field is its help text.

    Example:
        >>> class Optimizer(Config):
        ...     learning_rate: float = 1e-3
        >>> load_config(Optimizer, overrides=["learning_rate=3e-4"])
        Optimizer(learning_rate=0.0003)
    """

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", validate_default=True, coerce_numbers_to_str=True, use_attribute_docstrings=True
    )


def one_of(kinds: Callable[[Any], str], **schemas: Any) -> Any:
    """Return the annotation of a setting that is one of several schemas, chosen by a function of the value.

    Messages then name the problems of this one schema, not of all.

    Args:
        kinds: returns the name of a schema for a value.
        schemas: annotations by name.
    """
    tagged = [Annotated[schema, pydantic.Tag(f"<{name}>")] for name, schema in schemas.items()]
    return Annotated[typing.Union[tuple(tagged)], pydantic.Discriminator(lambda value: f"<{kinds(value)}>")]  # noqa: UP007


def _checked(check: Callable[..., Any], **limits: int) -> pydantic.BeforeValidator:
    """Return the validator of one of the functions of `gym_rm.checks`, which need the name of the field."""

    def checked(value: Any, info: pydantic.ValidationInfo) -> Any:
        return check(str(info.field_name), value, **limits)

    return pydantic.BeforeValidator(checked)


PositiveInt: TypeAlias = Annotated[int, _checked(checks.integer, minimum=1)]
NonNegativeInt: TypeAlias = Annotated[int, _checked(checks.integer, minimum=0)]
ThreadCount: TypeAlias = Annotated[int, _checked(checks.integer, minimum=1, maximum=checks.MOST_THREADS)]
Flag: TypeAlias = Annotated[bool, _checked(checks.boolean)]
Finite: TypeAlias = Annotated[float, _checked(checks.finite)]


def load_config(
    schema: type[Schema], file: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> Schema:
    """Fill a schema from its defaults, then a YAML file or a mapping, then `a.b=value` overrides.

    Mappings are merged key by key; other values are replaced. The value of an override is YAML (`null`, `true`, `3e-4`,
    `[1, 2]`); a text needs no quotes, also with ` #`, and names of columns are always texts. A list entry is addressed
    by its index (`scorers.0.weight=2`). The file is YAML 1.2: `no` and `on` are texts, `3e-4` is a number.

    Raises:
        ConfigError: the file cannot be read, or settings are invalid. The message lists all problems.
    """
    given = _at_home(read_mapping(file, "the settings")) if isinstance(file, str | Path) else file or {}
    values = _merge(_defaults(schema), dict(given))
    problems = []
    for override in overrides:
        try:
            _apply(values, override, schema)
        except ConfigError as error:
            problems.append(str(error))
    config, invalid = _validate(schema, values)
    problems += invalid
    if problems or config is None:
        source = f"{file}: " if isinstance(file, str | Path) else ""
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{source}{count} in the settings:" + "".join(f"\n  {problem}" for problem in problems))
    return config


def shipped_folder(name: str) -> Path:
    """Return the folder `agents` or `configs`: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parent
    return package / name if (package / name).is_dir() else package.parent / name


def settings_file(name: str | Path, group: str) -> Path:
    """Return a file of settings: a path, or the name of one of the package's in `configs/GROUP`, such as `math`.

    Raises:
        ConfigError: there is no such file; the message lists the package's.
    """
    path = Path(os.path.expanduser(name))
    if os.path.exists(path) and not os.path.isdir(path):
        return path
    shipped = {file.stem: file for file in sorted((shipped_folder("configs") / group).glob("*.yaml"))}
    if str(name) in shipped:
        return shipped[str(name)]
    raise ConfigError(
        f"there is no file {str(name)!r} with settings.{nearest(Path(name).stem, shipped)} These come with the "
        f"package: {', '.join(shipped)}. A single setting is written name=value."
    )


def parse_settings(schema: type[Schema], values: Mapping[str, Any]) -> Schema:
    """Fill a schema from keywords.

    Raises:
        ConfigError: settings are unknown or invalid. The message lists all problems.
    """
    config, problems = _validate(schema, dict(values))
    if config is None:
        raise ConfigError(" ".join(problems))
    return config


def divide_settings(
    values: Mapping[str, Any],
    *schemas: type[pydantic.BaseModel],
    owner: str,
    others: Sequence[type[pydantic.BaseModel]] = (),
) -> tuple[Any, ...]:
    """Fill each schema from the keywords that are its fields.

    Args:
        values, schemas: the keywords, and the schemas to fill. The results have the same order.
        owner: name of the object with these options, for error messages.
        others: schemas whose options were taken from the keywords before; error messages list them too.

    Raises:
        ConfigError: a keyword is not a field of any schema, or a value is invalid.
    """
    known = [name for schema in schemas for name in schema.model_fields]
    unknown = [name for name in values if name not in known]
    if unknown:
        known += [name for schema in others for name in schema.model_fields]
        raise ConfigError(
            f"unknown option {unknown[0]!r} for {owner}.{nearest(unknown[0], known)} "
            f"Known options: {', '.join(sorted(set(known)))}."
        )
    return tuple(
        parse_settings(schema, {name: values[name] for name in schema.model_fields if name in values})
        for schema in schemas
    )


def override_values(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of `a.b=value` overrides as nested mappings.

    Raises:
        ConfigError: an override has another form, or its value is not valid YAML.
    """
    values: dict[str, Any] = {}
    for override in overrides:
        _apply(values, override)
    return values


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a schema, as text for help pages: name, type (`"int or null"`), default as YAML, and docstring."""

    name: str
    type: str
    default: str
    text: str


def settings_of(schema: type[pydantic.BaseModel]) -> list[Setting]:
    """Return the settings of a schema for a help page.

    Example:
        >>> class Optimizer(Config):
        ...     learning_rate: float | None = 1e-3
        >>> settings_of(Optimizer)
        [Setting(name='learning_rate', type='float or null', default='0.001', text='')]
    """
    settings = []
    for name, field in schema.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "required" if field.is_required() else json.dumps(to_plain(default))
        settings.append(Setting(name, _type_name(field.annotation), shown, " ".join((field.description or "").split())))
    return settings


# --- values ------------------------------------------------------------------------------------------------------


def _validate(schema: type[Schema], values: dict[str, Any]) -> tuple[Schema | None, list[str]]:
    """Return the filled schema (None if it is invalid) and all problems."""
    try:
        return schema.model_validate(values), []
    except pydantic.ValidationError as error:
        return None, _explain_all(error.errors(), values, schema)


def _type_name(annotation: Any) -> str:
    """Return the values that a field accepts, in words of YAML: `"int or null"`, `"'last' or 'hf'"`."""
    if annotation is Any:
        return "any value"
    if annotation is None or annotation is type(None):
        return "null"
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    arguments = [argument for argument in typing.get_args(annotation) if argument is not ...]
    match typing.get_origin(annotation):
        case typing.Literal:
            return " or ".join(repr(value) for value in arguments)
        case typing.Annotated:
            return _type_name(arguments[0])
        case typing.Union | types.UnionType:
            return " or ".join(dict.fromkeys(_type_name(argument) for argument in arguments))
        case type() as origin:
            name = "mapping" if issubclass(origin, Mapping) else "list"
            return f"{name} of {', '.join(_type_name(argument) for argument in arguments)}"
    return str(annotation).removeprefix("typing.")


def _defaults(schema: type[pydantic.BaseModel]) -> dict[str, Any]:
    """Return all defaults as plain values, so that a file or an override can change one key of a nested schema."""
    values = {}
    for name, field in schema.model_fields.items():
        if not field.is_required():
            default = field.get_default(call_default_factory=True)
            values[name] = pydantic.TypeAdapter(Any).dump_python(default)
        elif inner := _model_in(field.annotation):
            values[name] = _defaults(inner)
    return values


def _merge(base: Any, change: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return {**base, **{key: _merge(base.get(key), value) for key, value in change.items()}}


def _apply(values: dict[str, Any], override: str, schema: Any = None) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{override!r}: expected the form name=value or group.name=value.")
    try:
        value = _override_value(text.strip(), _annotation(schema, parts))
    except ValueError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML ({error}); quote it.") from error
    node: Any = values
    for depth, part in enumerate(parts[:-1], start=1):
        node = _child(node, part, parts[depth], ".".join(parts[:depth]), override)
    if isinstance(node, list):
        node[_index(node, parts[-1], override)] = value
    else:
        node[parts[-1]] = value


def _override_value(text: str, annotation: Any) -> Any:
    """Return the value of an override: YAML, but a text without quotes is kept whole, such as a name with ` #`."""
    if annotation is None:
        return text
    value = _at_home(parse_yaml(text))
    if isinstance(value, int | float) and not isinstance(value, bool):
        types = _type_name(annotation).split(" or ")
        return text if "str" in types and not {"int", "float"} & {*types} else value
    is_plain = isinstance(value, str) and text[:1] not in ("'", '"', "!", "&", "|", ">")
    return _at_home(text) if is_plain or text[:1] == "#" else value


def _annotation(schema: Any, parts: Sequence[str]) -> Any:
    """Return the annotation of the setting at a place, or of what it is in; None for a text of a mapping of texts."""
    annotation: Any = Any
    for part in parts:
        if schema is not None and part in schema.model_fields:
            annotation = schema.model_fields[part].annotation
            schema = _model_in(annotation)
        elif annotation == dict[str, str]:
            return None
    return annotation


def _at_home(value: Any) -> Any:
    """Return a value in which `~/` at the start of texts, at any depth, is the home folder."""
    if isinstance(value, dict):
        return {key: _at_home(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_at_home(each) for each in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def _child(node: Any, part: str, next_part: str, above: str, override: str) -> Any:
    """Return the mapping or list at `part`. Create a mapping if there is none."""
    key: Any = _index(node, part, override) if isinstance(node, list) else part
    child = node.get(key) if isinstance(node, dict) else node[key]
    if child is None or child is False:  # `reference: false` leaves out what `reference.model` sets
        child = {}
    if not isinstance(child, Mapping | list | tuple):
        raise ConfigError(f"override {override!r}: {above!r} is {child!r}, which has no {next_part!r}.")
    # A copy: defaults and the places that a YAML alias shares keep their values.
    node[key] = dict(child) if isinstance(child, Mapping) else list(child)
    return node[key]


def _index(node: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(node):
        raise ConfigError(f"override {override!r}: {part!r} is not an index into a list of {len(node)} entries.")
    return int(part)


# --- problems ----------------------------------------------------------------------------------------------------

EXPECTED = {
    "string_type": "a text",
    "dict_type": "a mapping",
    "model_type": "a mapping of settings",
    "model_attributes_type": "a mapping of settings",
    "tuple_type": "a list",
    "list_type": "a list",
    "float_type": "a number",
    "float_parsing": "a number",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "bool_type": "true or false",
}


def _explain_all(problems: Sequence[Any], values: Any, schema: type[pydantic.BaseModel]) -> list[str]:
    """Return a text for each setting that is wrong.

    Where a setting can be of several types, pydantic reports one problem for each: they become one text. What is wrong
    inside of a mapping or list says more than that it is not of the other types.
    """
    by_place: dict[tuple[str | int, ...], list[Any]] = {}
    for problem in problems:
        by_place.setdefault(_place(problem, values), []).append(problem)
    inner = {place[:length] for place in by_place for length in range(len(place))}
    return [
        _explain_types(place, group) if len(group) > 1 else _explain(place, group[0], schema)
        for place, group in by_place.items()
        if place not in inner
    ]


def _place(problem: Any, values: Any) -> tuple[str | int, ...]:
    """Return the path of a setting: pydantic's location without its names of types, which are no keys of the values."""
    place: list[str | int] = []
    for part in problem["loc"]:
        is_index = isinstance(values, list | tuple) and isinstance(part, int) and part < len(values)
        if is_index or (isinstance(values, Mapping) and part in values):
            values = values[part]
            place.append(part)
    return (*place, problem["loc"][-1]) if problem["type"] == "missing" else tuple(place)


def _explain_types(place: Sequence[str | int], problems: Sequence[Any]) -> str:
    """Return one text for a setting that is none of what it can be."""
    expected, choices = [], []
    for problem in problems:
        error = problem.get("ctx", {}).get("error", "")
        if problem["type"] in ("literal_error", "enum"):
            expected.append(problem["ctx"]["expected"])
            choices += re.findall("'([^']*)'", problem["ctx"]["expected"])
        else:
            known = getattr(error, "expected", None) or EXPECTED.get(problem["type"])
            expected.append(known or str(error) or problem["msg"].lower().removeprefix("input should be "))
    value = problems[0]["input"]
    hint = nearest(value, choices) if isinstance(value, str) else ""
    joint = ", or " if any(" or " in words for words in expected) else " or "
    got = repr(value) if choices and len(problems) == 1 else describe(value)
    return f"{_key(place)} must be {joint.join(dict.fromkeys(expected))}, got {got}.{hint}"


def _explain(place: tuple[str | int, ...], problem: Any, schema: type[pydantic.BaseModel]) -> str:
    key, value = _key(place), problem["input"]
    match problem["type"]:
        case "extra_forbidden":
            return f"{key}: unknown setting.{_nearest_setting(place, schema)}"
        case "missing":
            return f"{key}: missing; this setting has no default."
        case "value_error":
            reason = str(problem["ctx"]["error"])
            # Messages of `gym_rm.checks` already start with the name of the field; the key adds its groups.
            name, _, rest = reason.partition(" ")
            return f"{key} {rest}" if name in place else f"{key}: {reason}" if key else reason
        case "model_type" | "dict_type" if isinstance(value, str) and any(
            (path[0], path[-1]) == (place[0], "model") for path in _keys(schema)
        ):
            where = key if problem["type"] == "model_type" else f"{key}.NAME"
            return f"{key} must be a mapping of settings, got {describe(value)}. Write {where}.model={value}."
        case "literal_error" | "enum" | "dict_type" | "model_type" | "tuple_type" | "list_type":
            return _explain_types(place, [problem])
    return f"{key}: {problem['msg'].lower()}, got {describe(value)}."


def _key(place: Sequence[str | int]) -> str:
    return ".".join(map(str, place))


def _nearest_setting(location: tuple[str | int, ...], schema: type[pydantic.BaseModel]) -> str:
    """Return a hint: a setting of the group with a similar name, or the same name in another group."""
    *parents, name = [part for part in location if isinstance(part, str)]
    keys = list(_keys(schema))
    siblings = [key[-1] for key in keys if list(key[:-1]) == parents]
    if hint := nearest(name, siblings):
        return hint
    elsewhere = [".".join(key) for key in keys if key[-1] == name]
    return f" Did you mean {elsewhere[0]!r}?" if elsewhere else f" Known settings: {', '.join(siblings)}."


def _keys(
    schema: type[pydantic.BaseModel], above: tuple[type[pydantic.BaseModel], ...] = ()
) -> Iterator[tuple[str, ...]]:
    for name, field in schema.model_fields.items():
        yield (name,)
        inner = _model_in(field.annotation)
        if inner is not None and inner not in (*above, schema):
            yield from ((name, *key) for key in _keys(inner, (*above, schema)))


def _model_in(annotation: Any) -> type[pydantic.BaseModel] | None:
    """Return the schema in the annotation of a field (`Schema`, `Schema | None`, `list[Schema]`, ...), or None."""
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, pydantic.BaseModel) else None
    models = (_model_in(argument) for argument in typing.get_args(annotation))
    return next((model for model in models if model is not None), None)
