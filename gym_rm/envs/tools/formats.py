"""How tool calls stand in the text of a reply: the formats of Hermes and Qwen, Llama 3 and Mistral."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from gym_rm.checks import describe, load_function, one_of
from gym_rm.data.tools import LONGEST_NAME, json_fault
from gym_rm.engine.text.thinking import Thinking
from gym_rm.engine.text.tool_calls import decode_arguments
from gym_rm.errors import ConfigError
from gym_rm.types import Message

MOST_CALLS = 128
"""Calls of one reply that are read."""
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS = "[TOOL_CALLS]"

_DECODER = json.JSONDecoder(strict=False)  # models write line breaks into texts
_SPACE = re.compile(r"\s*")
_HERMES_END = re.compile(r"\s*(?:</tool_call>|(?=<tool_call>)|\Z)")
_LLAMA_ANOTHER = re.compile(r"\s*;\s*(?=\{)")
_MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[\]{}]*)?\[ARGS\]\s*")
_XML = re.compile(r"\s*<function=([^\s<>]+)>(.*?)</function>", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^\s<>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_THINKING = Thinking()


class ParsedReply(NamedTuple):
    """What a call format finds in a text.

    Attributes:
        content: the text without its calls.
        calls: `{"name": ..., "arguments": {...}}` for each call.
        problems: for each call that cannot be read, what is wrong with it.
    """

    content: str
    calls: Sequence[Mapping[str, Any]] = ()
    problems: Sequence[str] = ()


CallFormat: TypeAlias = Callable[[str], ParsedReply]


def load_format(value: Any) -> CallFormat:
    """Return the function of a call format, from its name, a function or `"module:function"`.

    Raises:
        ConfigError: there is no such format.
    """
    if isinstance(value, str) and ":" not in value:
        return FORMATS[one_of("call_format", value, [*FORMATS])]
    return load_function("call_format", value)


def read_reply(text: str, call_format: CallFormat) -> tuple[Message, list[str]]:
    """Return the message of a reply and the problems of its calls. Calls in thinking are text.

    A text without calls stays as it is. Calls that cannot be read stay in the content.

    Raises:
        ConfigError: a call format of the user returned something else than a `ParsedReply`.

    Example:
        >>> read_reply('Let us see. <tool_call>{"name": "now", "arguments": {}}</tool_call>', hermes)[0]["tool_calls"]
        [{'type': 'function', 'function': {'name': 'now', 'arguments': {}}}]
    """
    plain = Message(role="assistant", content=text)
    thinking, answer = _THINKING.split(plain)
    if answer is None:
        return plain, []
    parsed: Any = call_format(answer)
    match parsed:
        case (str(content), list() | tuple() as found, list() | tuple() as given):
            problems = [str(problem) for problem in given]
        case _:
            raise ConfigError(f"call_format must return (content, calls, problems), got {describe(parsed)}.")
    try:
        calls = [{"type": "function", "function": _checked(call)} for call in found]
    except (ValueError, RecursionError) as error:
        return plain, [*problems, _reason(error)]
    if not calls:
        return plain, problems
    said = text.rstrip()
    if said.endswith(answer):
        content = (said.removesuffix(answer) + content).rstrip()
        return Message(role="assistant", content=content, tool_calls=calls), problems
    # Thoughts between calls: only a field can keep them apart from what is said.
    return Message(role="assistant", content=content.strip(), reasoning_content=thinking, tool_calls=calls), problems


def hermes(text: str) -> ParsedReply:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes, Qwen and many others.

    The XML of Qwen3-Coder and Nemotron 3 in such a block is read too.
    """

    def read(position: int) -> tuple[list[Any], int]:
        if match := _XML.match(text, position):
            value: Any = {"name": match[1], "arguments": dict(_XML_PARAMETER.findall(match[2]))}
            position = match.end()
        else:
            value, position = _json(text, position)
        end = _HERMES_END.match(text, position)
        if end is None:
            raise ValueError(f"expected </tool_call> after the JSON, got {text[position : position + 40]!r}")
        return [value], end.end()

    return _scan(text, "<tool_call>", read)


def llama3(text: str) -> ParsedReply:
    """Read `<|python_tag|>{"name": ..., "parameters": {...}}`, and the same JSON as the whole reply; `;` joins several.

    JSON that names no function is text.
    """

    def read(position: int) -> tuple[list[Any], int]:
        value, position = _json(text, position)
        values = [value]
        while (another := _LLAMA_ANOTHER.match(text, position)) and len(values) < MOST_CALLS:
            value, position = _json(text, another.end())
            values.append(value)
        return values, position

    if PYTHON_TAG in text:
        return _scan(text, PYTHON_TAG, read)
    try:
        values, end = read(0)
        calls = [_checked(value) for value in values]
    except (ValueError, RecursionError):
        return ParsedReply(text)
    is_call = not text[end:].strip() and all({"parameters", "arguments"} & value.keys() for value in values)
    return ParsedReply("", calls) if is_call else ParsedReply(text)


def mistral(text: str) -> ParsedReply:
    """Read `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and the newer `[TOOL_CALLS]name[ARGS]{...}`."""

    def read(position: int) -> tuple[list[Any], int]:
        if header := _MISTRAL_NAME.match(text, position):
            value, position = _json(text, header.end())
            return [{"name": header[1], "arguments": value}], position
        value, position = _json(text, position)
        return value if isinstance(value, list) else [value], position

    return _scan(text, TOOL_CALLS, read)


FORMATS: dict[str, CallFormat] = {"hermes": hermes, "llama3": llama3, "mistral": mistral}


def _scan(text: str, mark: str, read: Callable[[int], tuple[list[Any], int]]) -> ParsedReply:
    """Read the calls after every mark. A block that cannot be read is a problem, and stays in the content."""
    kept, calls, problems = list[str](), list[Mapping[str, Any]](), list[str]()
    position = 0
    while (start := text.find(mark, position)) >= 0:
        kept.append(text[position:start])
        position = start
        if len(calls) + len(problems) >= MOST_CALLS:
            problems.append(f"a reply may have {MOST_CALLS} calls, and this one has more")
            break
        try:
            values, end = read(start + len(mark))
            calls += [_checked(value) for value in values]
            position = end
        except (ValueError, RecursionError) as error:
            problems.append(_reason(error))
            kept.append(mark)
            position = start + len(mark)
    kept.append(text[position:])
    return ParsedReply("".join(kept), calls, problems)


def _json(text: str, position: int) -> tuple[Any, int]:
    """Return the JSON value at a position, and where it ends."""
    start = cast(re.Match[str], _SPACE.match(text, position)).end()
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"the JSON is not valid: {error.msg}, at {text[error.pos : error.pos + 40]!r}") from None


def _checked(value: Any) -> dict[str, Any]:
    """Return the name and the decoded arguments of a call. Raises ValueError."""
    function = value.get("function", value) if isinstance(value, Mapping) else value
    if not isinstance(function, Mapping):
        raise ValueError(f"expected a JSON object with 'name' and 'arguments', got {value!r:.80}")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise ValueError(f"'name' must be the name of a tool, got {name!r:.80}")
    arguments = function.get("arguments", function.get("parameters"))
    whole = {"name": name, "arguments": {} if arguments is None else arguments}
    call: dict[str, Any] = decode_arguments({"tool_calls": [whole]})["tool_calls"][0]
    if not isinstance(call["arguments"], dict | str):
        raise ValueError(f"'arguments' of {name} must be a JSON object, got {arguments!r:.80}")
    if fault := json_fault(call):
        raise ValueError(f"the call of {name!r:.80} {fault}")
    return call


def _reason(error: Exception) -> str:
    return "the JSON is nested too deeply" if isinstance(error, RecursionError) else str(error)
