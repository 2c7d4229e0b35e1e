"""A Python function as a tool: its schema for the policy, and the check of the arguments of a call."""

from __future__ import annotations

import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NotRequired, Required

import pydantic
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from gym_rm.config import Config, Finite, PositiveInt
from gym_rm.errors import ConfigError

HIDDEN = ("conversation", "prompt")
"""Keyword-only parameters that the environment fills, and that the policy does not see."""


class ToolOptions(Config):
    """How the tools of an environment are called."""

    call_format: Any = "hermes"
    """How calls stand in the text of a reply: `"hermes"` (Qwen and many others), `"llama3"`, `"mistral"`, or a function
    (or its name `"module:function"`) of the text that returns `(content, calls, problems)`, see `ParsedReply`."""
    max_calls: PositiveInt = 16
    """Calls of an episode that are executed; the answer to each further one is an error."""
    timeout: Finite = pydantic.Field(default=10.0, gt=0)
    """Seconds for all calls of one reply."""
    max_result_length: PositiveInt = pydantic.Field(default=10_000, ge=200)
    """Characters of a result; the middle of a longer one is left out."""


class ArgumentsError(ValueError):
    """Arguments of a call that do not fit the parameters of the tool."""


class Tool:
    """A function that the policy may call.

    The schema comes from the type hints and the docstring: its first paragraph describes the tool, a section `Args:`
    the parameters. Arguments are converted as pydantic does (`"3"` to 3, mappings to dataclasses and models). The
    keyword-only parameters `conversation` and `prompt` are not in the schema: they get the messages up to this call
    and the data row. What the function returns is the result: a text, or a value that is written as JSON.

    Args:
        function: a function with type hints, also an async one.
        name: name of the tool; None for that of the function.
        description: what the tool does; None for the docstring.

    Raises:
        ConfigError: a parameter has no type hint, or is not passed by name (`*args`, `**kwargs`), or a type has no
            JSON schema.

    Example:
        >>> def add(a: int, b: int = 1) -> int:
        ...     '''Add two numbers.'''
        ...     return a + b
        >>> Tool(add).schema["function"]["parameters"]["required"], Tool(add).arguments({"a": "2"})
        (['a'], {'a': 2})
    """

    def __init__(
        self, function: Callable[..., Any], *, name: str | None = None, description: str | None = None
    ) -> None:
        self.function = function
        self.name = str(name or getattr(function, "__name__", type(function).__name__))
        self._given = {"name": name, "description": description}
        if not callable(function) or not re.fullmatch(r"[\w-]{1,64}", self.name):
            raise ConfigError(
                f"tools: {function!r:.100} must be a function with a name of letters, digits, _ and -; write "
                "Tool(function, name='...')."
            )
        self.is_async = inspect.iscoroutinefunction(function)
        text = inspect.getdoc(function) or ""
        described = _parameter_texts(text)
        try:
            hints = typing.get_type_hints(function, include_extras=True)
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError, NameError) as error:
            raise ConfigError(f"tools: the type hints of {self.name} cannot be read: {error}.") from error
        fields: dict[str, Any] = {}
        self.hidden = []
        for name, parameter in parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and name in HIDDEN:
                self.hidden.append(name)
                continue
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or name not in hints:
                raise ConfigError(
                    f"tools: the parameter {str(parameter)!r} of {self.name} must have a type hint, for example "
                    f"{name}: str, and be passed by name."
                )
            info = pydantic.Field(description=described.get(name))
            required = Required if parameter.default is parameter.empty else NotRequired
            fields[name] = required[Annotated[hints[name], info]]
        try:
            shape = TypedDict("Arguments", fields)  # type: ignore[misc]
            self._adapter: Any = pydantic.TypeAdapter(pydantic.with_config(pydantic.ConfigDict(extra="forbid"))(shape))
            schema = self._adapter.json_schema(schema_generator=_Untitled)
        except pydantic.errors.PydanticUserError as error:
            raise ConfigError(f"tools: {self.name} has a parameter without a JSON schema: {error}") from error
        schema.pop("title", None)
        about = text.partition("\n\n")[0].strip() if description is None else description
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {"name": self.name, "description": " ".join(about.split()), "parameters": schema},
        }

    def __repr__(self) -> str:
        return f"Tool({self.name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Tool, self.function, **self._given), ()

    def arguments(self, given: Any) -> dict[str, Any]:
        """Return the arguments of a call as the function takes them.

        Raises:
            ArgumentsError: they do not fit the parameters.
        """
        if not isinstance(given, Mapping):
            raise ArgumentsError(f"expected a JSON object, got {given!r:.80}")
        try:
            return dict(self._adapter.validate_python(dict(given)))
        except pydantic.ValidationError as error:
            problems = error.errors(include_url=False, include_context=False)
        try:  # many models write nested values as JSON texts
            return dict(self._adapter.validate_python({key: _decoded(value) for key, value in given.items()}))
        except pydantic.ValidationError:
            shown = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in problems]
            raise ArgumentsError("; ".join(shown)) from None


class _Untitled(GenerateJsonSchema):
    """Schemas without the titles that pydantic makes from names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _decoded(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _parameter_texts(text: str) -> dict[str, str]:
    """Return the descriptions of the parameters in the section `Args:` of a docstring."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", text, re.MULTILINE)
    found = re.findall(r"^( +)(\w+)(?: \([^)]*\))?: *(.*(?:\n\1 +.*)*)", section[1] if section else "", re.MULTILINE)
    return {name: " ".join(words.split()) for _, name, words in found}
