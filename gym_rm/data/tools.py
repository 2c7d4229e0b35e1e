"""Tool schemas of data rows, and the checks of what stands in a tool call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.checks import describe
from gym_rm.errors import ConfigError

NOT_EXECUTED = "Error: not executed: "
NOT_FINISHED = "Error: not finished: "
UNREADABLE = "Error: a tool call could not be read: "
"""How the answers to calls begin that had no effect."""

LONGEST_NAME = 128
DEEPEST = 64


def canonical_tools(value: Any, where: str = "tools") -> tuple[dict[str, Any], ...]:
    """Return schemas in the form of `Prompt.tools`, from a list or its JSON text.

    A schema may also be flat, as in the Responses API: `{"type": "function", "name": ..., "parameters": {...}}`.

    Raises:
        ConfigError: the value is no list of such schemas.

    Example:
        >>> canonical_tools('[{"name": "now", "description": "The time."}]')[0]["function"]["name"]
        'now'
    """
    try:
        given = json.loads(value or "[]") if isinstance(value, str) else value
    except (ValueError, RecursionError):
        given = value
    if given is None:
        return ()
    if isinstance(given, Mapping | str) or not isinstance(given, Sequence):
        raise ConfigError(f"{where} must be a list of tool schemas or its JSON text, got {describe(value)}.")
    return tuple(_canonical(schema, f"{where}[{index}]") for index, schema in enumerate(given))


def _canonical(schema: Any, where: str) -> dict[str, Any]:
    function = schema.get("function", schema) if isinstance(schema, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise ConfigError(
            f"{where} must be a tool schema {{'type': 'function', 'function': {{'name', 'description', 'parameters'}}}}"
            f", got {describe(schema)}."
        )
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    known = {"name": name, "description": function.get("description") or "", "parameters": parameters}
    if fault := json_fault(known):
        raise ConfigError(f"{where} {fault}; a tool schema must be plain JSON.")
    return {"type": "function", "function": known}


def json_fault(value: Any) -> str:
    """Return why a value is no JSON that survives being written and read; `""` if it does."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        if json.loads(text) != value:
            return "changes when it is written as JSON and read again"
        return f"is nested more than {DEEPEST} levels deep" if _depth(value) > DEEPEST else ""
    except RecursionError:
        return "is nested too deeply"
    except (TypeError, ValueError) as error:  # also lone surrogates, NaN and integers of thousands of digits
        return f"cannot be written as JSON: {error}"


def _depth(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, parts)) if parts else 0


def is_encodable(text: str) -> bool:
    """Return whether UTF-8 can encode `text`, that is, whether it has no lone surrogate (half of a surrogate pair)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def cut_middle(text: str, most: int) -> str:
    """Return a text of at most this length that UTF-8 can encode; the middle of a longer one is left out."""
    if len(text) > most:
        half = max(0, most - 60) // 2  # 60 characters are enough for the mark
        mark = f"\n[... {len(text) - 2 * half:,} characters are left out ...]\n"
        text = (text[:half] + mark + text[len(text) - half :])[:most]
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
