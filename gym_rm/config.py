"""Settings as pydantic schemas, filled from keywords, YAML files and overrides such as `a.b=value`.

The options of the package (`load_scorer`, `RewardModel-v0`), of the commands and of the agents are all validated here,
so that an unknown or invalid setting gets the same error everywhere.
"""

from __future__ import annotations

import copy
import json
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import pydantic
import yaml

from gym_rm import checks
from gym_rm.errors import ConfigError, nearest

Schema = TypeVar("Schema", bound=pydantic.BaseModel)


class Config(pydantic.BaseModel):
    """Base class of all schemas. They are frozen, reject unknown settings and sets, and validate their defaults.

    The docstring under a field is its help text.

    Example:
        >>> class Optimizer(Config):
        ...     learning_rate: float = 1e-3
        >>> load_config(Optimizer, overrides=["learning_rate=3e-4"])
        Optimizer(learning_rate=0.0003)
    """

    model_config = pydantic.ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        coerce_numbers_to_str=True,
        use_attribute_docstrings=True,
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_sets(cls, values: Any) -> Any:
        """Raise ConfigError for a set: its order changes from process to process, and with it what the setting does."""
        for name, value in values.items() if isinstance(values, Mapping) else ():
            if found := _set_in(value):
                raise ConfigError(f"{name} must have an order, got the set {found!r:.80}; pass a list.")
        return values


def _integer_from(minimum: int) -> pydantic.BeforeValidator:
    def check(value: Any, info: pydantic.ValidationInfo) -> int:
        return checks.integer(str(info.field_name), value, minimum=minimum)

    return pydantic.BeforeValidator(check)


def one_of(kinds: Callable[[Any], str], **schemas: Any) -> Any:
    """Return the annotation of a setting that is one of several schemas, chosen by a function of the value.

    Messages then name the problems of this one schema, not of all.

    Args:
        kinds: returns the name of a schema for a value.
        schemas: annotations by name.
    """
    tagged = [Annotated[schema, pydantic.Tag(f"<{name}>")] for name, schema in schemas.items()]
    return Annotated[typing.Union[tuple(tagged)], pydantic.Discriminator(lambda value: f"<{kinds(value)}>")]  # noqa: UP007


def _boolean(value: Any, info: pydantic.ValidationInfo) -> bool:
    return checks.boolean(str(info.field_name), value)


def _finite(value: Any, info: pydantic.ValidationInfo) -> float:
    return checks.finite(str(info.field_name), value)


PositiveInt: TypeAlias = Annotated[int, _integer_from(1)]
NonNegativeInt: TypeAlias = Annotated[int, _integer_from(0)]
Flag: TypeAlias = Annotated[bool, pydantic.BeforeValidator(_boolean)]
Finite: TypeAlias = Annotated[float, pydantic.BeforeValidator(_finite)]


def load_config(
    schema: type[Schema], file: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> Schema:
    """Fill a schema from its defaults, then a YAML file or a mapping, then `a.b=value` overrides.

    Mappings are merged key by key; other values are replaced. The value of an override is YAML (`null`, `true`, `3e-4`,
    `[1, 2]`). A list entry is addressed by its index (`scorers.0.weight=2`). The file is YAML 1.2: `no` and `on` are
    texts, `3e-4` is a number.

    Raises:
        ConfigError: the file cannot be read, or settings are invalid. The message lists all problems.
    """
    given = file if isinstance(file, Mapping) else _read(file) if file is not None else {}
    values = _merge(_defaults(schema), _copied(given))
    problems = []
    for override in overrides:
        try:
            _apply(values, override)
        except ConfigError as error:
            problems.append(str(error))
    config, invalid = _validate(schema, values)
    problems += invalid
    if problems or config is None:
        source = f"{file}: " if isinstance(file, str | Path) else ""
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{source}{count} in the settings:" + "".join(f"\n  {problem}" for problem in problems))
    return config


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
        values: the keywords.
        schemas: the schemas to fill. The results have the same order.
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
    """One setting of a schema, as text for help pages.

    Attributes:
        name: its name.
        type: its type, such as `"int or null"`.
        default: its default as YAML.
        text: its docstring.
    """

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
        shown = "required" if field.is_required() else json.dumps(default, default=str)
        settings.append(Setting(name, _type_name(field.annotation), shown, " ".join((field.description or "").split())))
    return settings


# --- values ------------------------------------------------------------------------------------------------------


def _validate(schema: type[Schema], values: dict[str, Any]) -> tuple[Schema | None, list[str]]:
    """Return the filled schema (None if it is invalid) and all problems."""
    try:
        return schema.model_validate(values), []
    except pydantic.ValidationError as error:
        return None, _explain_all(error.errors(), schema)


def _set_in(value: Any) -> Any:
    """Return a set in a value, at any depth of mappings and lists; None if there is none."""
    if isinstance(value, set | frozenset):
        return value or None
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((found for each in inside if (found := _set_in(each))), None)


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
            values[name] = pydantic.TypeAdapter(Any).dump_python(copy.deepcopy(default))
        elif inner := _model_in(field.annotation):
            values[name] = _defaults(inner)
    return values


def _copied(value: Any) -> Any:
    """Return a copy in which no two places share a mapping or a list, as they do after a YAML alias."""
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else copy.deepcopy(value)


def _merge(base: Any, change: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return {**base, **{key: _merge(base.get(key), value) for key, value in change.items()}}


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r}: expected the form name=value or group.name=value.")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"override {override!r}: the value is not valid YAML ({_reason(error)}); quote it."
        ) from error
    node: Any = values
    for depth, part in enumerate(parts[:-1], start=1):
        node = _child(node, part, parts[depth], ".".join(parts[:depth]), override)
    if isinstance(node, list):
        node[_index(node, parts[-1], override)] = value
    else:
        node[parts[-1]] = value


def _child(node: Any, part: str, next_part: str, above: str, override: str) -> Any:
    """Return the mapping or list at `part`. Create a mapping if there is none."""
    key: Any = _index(node, part, override) if isinstance(node, list) else part
    child = node.get(key) if isinstance(node, dict) else node[key]
    if isinstance(child, tuple):
        child = list(child)
    if child is None or child is False:  # `reference: false` leaves out what `reference.model` sets
        child = {}
    if not isinstance(child, dict | list):
        raise ConfigError(f"override {override!r}: {above!r} is {child!r}, which has no {next_part!r}.")
    node[key] = child
    return child


def _index(node: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(node):
        raise ConfigError(f"override {override!r}: {part!r} is not an index into a list of {len(node)} entries.")
    return int(part)


# --- the file ----------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that reads plain scalars as in YAML 1.2, and rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a text", key.start_mark)
            if key.value in seen and key.value != "<<":
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
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


def _explain_all(problems: Sequence[Any], schema: type[pydantic.BaseModel]) -> list[str]:
    """Return a text for each setting that is wrong.

    Where a setting can be of several types, pydantic reports one problem for each. What is wrong inside of a mapping or
    list says more than that it is not of the other types; problems of the setting itself become one text.
    """
    found = [(*_place(problem["loc"], schema), problem) for problem in problems]
    texts: list[str] = []
    several: dict[tuple[str | int, ...], list[Any]] = {}
    for place, of_union, problem in found:
        if of_union and any(len(other) > len(place) and other[: len(place)] == place for other, _, _ in found):
            continue
        if of_union:
            several.setdefault(place, []).append(problem)
            if len(several[place]) == 1:
                texts.append("")  # written below, when all of its problems are known
        else:
            texts.append(_explain({**problem, "loc": place}, schema))
    merged = iter(_explain_types(place, each) for place, each in several.items())
    return [text or next(merged) for text in texts]


def _place(location: Sequence[str | int], schema: Any) -> tuple[tuple[str | int, ...], bool]:
    """Return the path of a setting without pydantic's names of types, and whether it can be of several types."""
    place: list[str | int] = []
    annotation, of_union = schema, False
    for part in location:
        members = _members(annotation)
        if str(part).startswith("<"):  # of `one_of`
            tags = {
                tag.tag: each for each in members for tag in getattr(each, "__metadata__", ()) if hasattr(tag, "tag")
            }
            annotation = tags.get(part, Any)
            continue
        of_union = len(members) > 1
        if of_union:
            annotation = next((each for each in members if str(part).startswith(_name(each))), Any)
            continue
        place.append(part)
        (annotation,) = members or (Any,)
        arguments = [each for each in typing.get_args(annotation) if each is not ...]
        if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
            field = annotation.model_fields.get(str(part))
            annotation = field.annotation if field is not None else Any
        else:
            annotation = arguments[-1] if arguments else Any
    return tuple(place), of_union


def _members(annotation: Any) -> list[Any]:
    """Return the types of a union other than None; a single type is alone."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return [annotation]
    return [each for each in typing.get_args(annotation) if each is not type(None)]


def _name(annotation: Any) -> str:
    return str(getattr(typing.get_origin(annotation) or annotation, "__name__", annotation))


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


def _explain_types(place: Sequence[str | int], problems: Sequence[Any]) -> str:
    """Return one text for a setting that is of none of the types that it can be of."""
    expected, choices = [], []
    for problem in problems:
        match problem["type"]:
            case "literal_error":
                expected.append(problem["ctx"]["expected"])
                choices += re.findall("'([^']*)'", problem["ctx"]["expected"])
            case "value_error":
                reason = str(problem["ctx"]["error"])
                said = re.search(r" must be (.+?), got ", reason)
                expected.append(said[1] if said else reason)
            case known:
                expected.append(EXPECTED.get(known) or problem["msg"].lower().removeprefix("input should be "))
    value = problems[0]["input"]
    hint = nearest(value, choices) if isinstance(value, str) else ""
    key = ".".join(map(str, place))
    joint = ", or " if any(" or " in each for each in expected) else " or "
    return f"{key} must be {joint.join(dict.fromkeys(expected))}, got {type(value).__name__} {value!r:.200}.{hint}"


def _explain(problem: Any, schema: type[pydantic.BaseModel]) -> str:
    location = problem["loc"]
    key = ".".join(str(part) for part in location)
    value = problem["input"]
    match problem["type"]:
        case "extra_forbidden":
            return f"{key}: unknown setting.{_nearest_setting(location, schema)}"
        case "missing":
            return f"{key}: missing; this setting has no default."
        case "literal_error":
            expected = problem["ctx"]["expected"]
            hint = nearest(str(value), re.findall("'([^']*)'", expected))
            return f"{key} must be {expected}, got {value!r}.{hint}"
        case "value_error":
            reason = str(problem["ctx"]["error"])
            # Messages of `gym_rm.checks` already start with the name of the field; add the names of its groups.
            named = bool(location) and reason.startswith(f"{location[-1]} ")
            return key.removesuffix(str(location[-1])) + reason if named else f"{key}: {reason}" if key else reason
    if problem["type"] in ("dict_type", "model_type", "tuple_type", "list_type"):
        names_model = problem["type"] == "model_type" and isinstance(value, str) and _has_model(location, schema)
        hint = f" Write {key}.model={value}." if names_model else ""
        return f"{key} must be {EXPECTED[problem['type']]}, got {type(value).__name__} {value!r:.200}.{hint}"
    return f"{key}: {problem['msg'].lower()}, got {type(value).__name__} {value!r:.200}."


def _has_model(location: Sequence[str | int], schema: type[pydantic.BaseModel]) -> bool:
    """Return whether the setting at a location has a setting `model`."""
    inner: Any = schema
    for part in location:
        inner = _model_in(inner.model_fields[part].annotation) if part in getattr(inner, "model_fields", ()) else inner
    return inner is not None and "model" in inner.model_fields


def _nearest_setting(location: tuple[str | int, ...], schema: type[pydantic.BaseModel]) -> str:
    """Return a hint: a setting of the group with a similar name, or the same name in another group."""
    *parents, name = [part for part in location if isinstance(part, str)]
    keys = list(_keys(schema))
    siblings = [key[-1] for key in keys if list(key[:-1]) == parents]
    if hint := nearest(name, siblings):
        return hint
    if short := [key for key in siblings if "".join(word[0] for word in key.split("_")) == name]:
        return f" Did you mean {short[0]!r}?"  # lr for learning_rate
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
