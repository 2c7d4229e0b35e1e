"""Tool calls in messages: arguments as mappings or as JSON texts, and the ids that join calls and results."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gym_rm.types import Message


def decode_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its tool calls as mappings, as chat templates read them.

    OpenAI's form has the JSON text of an object. Any other text stays as it is.

    Example:
        >>> call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
        >>> decode_arguments({"role": "assistant", "content": "", "tool_calls": [call]})["tool_calls"]
        [{'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 2}}}]
    """
    return _map_arguments(message, _decode)


def encode_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its tool calls as JSON texts, as OpenAI's API has them."""
    return _map_arguments(message, lambda value: value if isinstance(value, str) else _json(value))


def renumber(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls have the ids `call00001`, ..., and whose tool results have the id and name of a call.

    A result belongs to the call with its id; without such an id, to the first one that is open, with its name if it
    has one. Some templates want ids of nine characters (Mistral), or names.
    """
    changed: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []  # calls without a result
    numbers = itertools.count(1)
    for message in messages:
        copy: dict[str, Any] = {**message}
        if calls := copy.get("tool_calls"):
            waiting, copy["tool_calls"] = [], []
            for call in calls:
                new = {**call, "id": f"call{next(numbers):05d}"}
                copy["tool_calls"].append(new)
                waiting.append({"new": new["id"], "old": call.get("id"), "name": _function(call).get("name")})
        elif copy["role"] == "tool":
            same_id = [each for each in waiting if each["old"] is not None and each["old"] == copy.get("tool_call_id")]
            same_name = [each for each in waiting if copy.get("name") in (None, each["name"])]
            for call in (same_id or same_name)[:1]:
                copy |= {"tool_call_id": call["new"], "name": call["name"]}
                waiting.remove(call)
        changed.append(copy)
    return changed  # type: ignore[return-value]


def separate(messages: Sequence[Message]) -> list[Message]:
    """Return messages with one call each, before its result; for templates without parallel calls (Llama 3.1)."""
    changed: list[Message] = []
    for message in renumber(messages):
        calls = message.get("tool_calls", [])
        if len(calls) > 1:
            contents = [message["content"], *[""] * (len(calls) - 1)]
            for content, call in zip(contents, calls, strict=True):
                changed.append({**message, "content": content, "tool_calls": [call]})
        else:
            ids = [[call["id"] for call in each.get("tool_calls", [])] for each in changed]
            is_result = message["role"] == "tool" and [message.get("tool_call_id")] in ids
            place = 1 + ids.index([message.get("tool_call_id")]) if is_result else len(changed)
            changed.insert(place, message)
    return changed


def calls_of(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the name and the arguments of each tool call of a message."""
    functions = [_function(call) for call in message.get("tool_calls") or ()]
    return [(str(function.get("name", "")), function.get("arguments", {})) for function in functions]


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def _map_arguments(message: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    def changed(call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": changed(call["function"])}
        return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call

    calls = message.get("tool_calls")
    return {**message, **({"tool_calls": list(map(changed, calls))} if isinstance(calls, list | tuple) else {})}


def _decode(arguments: Any) -> Any:
    try:
        value = json.loads(arguments, parse_constant=_refuse) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, Mapping) else arguments


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
