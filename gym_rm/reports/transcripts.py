"""Conversations as human-readable text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.engine.text.tool_calls import calls_of
from gym_rm.types import Conversation, Message

_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]
_VISIBLE = {point: f"\\x{point:02x}" for point in _CONTROLS if chr(point) not in "\t\n"}


def visible(text: str) -> str:
    """Return the text with control characters escaped, so that a reply cannot move the cursor or change colours."""
    return text.translate(_VISIBLE)


def cut(text: str, most: int = 3000) -> str:
    """Return a text with control characters escaped; of one with more characters, the middle is left out."""
    if len(text) > most:
        half = most // 2
        text = f"{text[:half].rstrip()} […{len(text) - 2 * half:,} characters…] {text[-half:].lstrip()}"
    return visible(text)


def transcript(conversation: Conversation, *, title: str, outcome: str = "") -> str:
    """Return a title line, one paragraph per message and the outcome, if any; control characters are escaped.

    Example:
        >>> print(transcript([{"role": "user", "content": "2 + 2?"}], title="prompt 7", outcome="reward 1"))
        --- prompt 7
        user: 2 + 2?
        --- reward 1
    """
    lines = [f"--- {title}", *(line for message in conversation for line in _lines(message))]
    return visible("\n".join([*lines, f"--- {outcome}"] if outcome else lines))


def call_lines(message: Mapping[str, Any]) -> list[str]:
    """Return a line for each tool call of a message."""
    return [f"calls {name}({json.dumps(arguments, ensure_ascii=False)})" for name, arguments in calls_of(message)]


def _lines(message: Message) -> list[str]:
    """Return what a message says, and the calls that it makes."""
    who = f"{message['role']} {message['name']}" if "name" in message else message["role"]
    calls = [f"  {line}" for line in call_lines(message)]
    said = f"{who}: {message['content']}"
    return [said if message["content"] or not calls else f"{who}:", *calls]


def print_transcripts(transcripts: Sequence[str], *, most: int = 8) -> None:
    """Print the first `most` transcripts to the console, and the number of remaining ones."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for text in transcripts[:most]:
        title, _, body = text.partition("\n")
        console.print(Text.assemble((title, "bold cyan"), "\n", body))
    if len(transcripts) > most:
        console.print(Text(f"--- and {len(transcripts) - most} more", style="dim"))
