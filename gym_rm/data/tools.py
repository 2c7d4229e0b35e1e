"""Tool schemas of data rows, and the checks of what stands in a tool call."""

from __future__ import annotations

import json
import math
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
LARGEST_BITS = 8192  # Python writes integers of up to 4,300 digits


def canonical_tools(value: Any, where: str = "tools") -> tuple[dict[str, Any], ...]:
    """Return schemas in the form of `Prompt.tools`, from a list or its JSON text.

    A schema may also be flat, as in the Responses API: `{"type": "function", "name": ..., "parameters": {...}}`.

    Raises:
        ConfigError: the value is no list of such schemas.

    Example:
        >>> canonical_tools('[{"name": "now", "description": "The time."}]')[0]["function"]["name"]
        'now'
    """
    given = value
    if isinstance(value, str):
        try:
            given = json.loads(value) if value.strip() else ()
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} must be a list of tool schemas or its JSON text: {error}.") from error
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


def json_fault(value: Any, depth: int = DEEPEST) -> str:
    """Return why a value is no JSON that survives being written and read; `""` if it does."""
    if depth < 0:
        return f"is nested more than {DEEPEST} levels deep"
    if isinstance(value, dict):
        keys = (f"has the key {key!r:.80}, which is no text" for key in value if not isinstance(key, str))
        return (
            next(keys, "")
            or next(filter(None, (json_fault(part, depth) for part in value)), "")
            or next(filter(None, (json_fault(part, depth - 1) for part in value.values())), "")
        )
    if isinstance(value, list):
        return next(filter(None, (json_fault(part, depth - 1) for part in value)), "")
    if isinstance(value, str):
        return "" if is_encodable(value) else "has a lone surrogate, which UTF-8 cannot encode"
    if isinstance(value, int):
        return "" if value.bit_length() <= LARGEST_BITS else "has an integer that is too long"
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"has the number {value}"
    return "" if value is None else f"has a value of the type {type(value).__name__}"


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
        mark = f"\n[... {len(text) - most + 60:,} characters are left out ...]\n"
        half = max(0, (most - len(mark)) // 2)
        mark = f"\n[... {len(text) - 2 * half:,} characters are left out ...]\n"
        text = (text[:half] + mark + text[len(text) - half :])[:most]
    return text if is_encodable(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
