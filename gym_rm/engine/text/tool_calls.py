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
    return _map_arguments(message, lambda each: each if isinstance(each, str) else json.dumps(each, ensure_ascii=False))


def renumber(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls have the ids `call00001`, ..., and whose tool results have the id and name of a call.

    A result belongs to the call with its id, or else to the first one that has no result yet. Some templates want ids
    of nine characters (Mistral), or names.
    """
    changed: list[Any] = []
    waiting: list[tuple[Any, dict[str, Any]]] = []  # old id of a call without a result, and what its result gets
    numbers = itertools.count(1)
    for message in messages:
        if calls := message.get("tool_calls"):
            waiting, renamed = [], []
            for call in calls:
                renamed.append({**call, "id": f"call{next(numbers):05d}"})
                of_result = {"tool_call_id": renamed[-1]["id"], "name": _function(call).get("name")}
                waiting.append((call.get("id"), of_result))
            changed.append({**message, "tool_calls": renamed})
        elif message["role"] == "tool" and waiting:
            given = [old for old, _ in waiting]
            old = message.get("tool_call_id")
            changed.append({**message, **waiting.pop(given.index(old) if old in given else 0)[1]})
        else:
            changed.append(message)
    return changed


def separate(messages: Sequence[Message]) -> list[Message]:
    """Return messages with one call each, before its result; for templates without parallel calls (Llama 3.1)."""
    messages, changed = renumber(messages), list[Message]()
    results = {message.get("tool_call_id"): message for message in messages}
    ids = {call["id"] for message in messages for call in message.get("tool_calls", ())}
    for message in messages:
        calls = message.get("tool_calls", [])
        for call in calls:
            content = message["content"] if call is calls[0] else ""
            changed.append({**message, "content": content, "tool_calls": [call]})
            changed += [results[call["id"]]] if call["id"] in results else []
        if not calls and message.get("tool_call_id") not in ids:
            changed.append(message)
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
