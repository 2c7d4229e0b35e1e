"""Conversations as text, as HTML and as pictures."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gym_rm.engine.text.tool_calls import calls_of
from gym_rm.types import Conversation, Message

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]
_VISIBLE = {point: f"\\x{point:02x}" for point in _CONTROLS if chr(point) not in "\t\n"}
_VISIBLE |= {point: f"\\u{point:x}" for point in range(0xD800, 0xE000)}  # lone surrogates, which no file can hold

# Of a picture, in pixels. A character of the font is 8 wide.
WIDTH, HEIGHT, MARGIN, LINE = 640, 480, 12, 17
COLUMNS = (WIDTH - 2 * MARGIN) // 8
ROWS = (HEIGHT - 2 * MARGIN) // LINE - 4  # the title and the outcome have two lines each
_WRAPPED = re.compile(rf"(?=.)(?:.{{0,{COLUMNS}}}(?: +|$)|.{{{COLUMNS}}})")  # at spaces, or within a long word

# Those of roles can be told from black and from white.
_BLACK, _GREY, _PALE = (24, 24, 24), (112, 112, 112), (208, 208, 208)
_ROLES = {"user": (40, 105, 205), "assistant": (20, 135, 75), "tool": (185, 95, 0)}


class Html(str):
    """HTML that notebooks show, such as `Html("<b>2</b>")`."""

    def _repr_html_(self) -> str:
        return str(self)


Frame: TypeAlias = str | NDArray[np.uint8]
"""What `render()` returns for a conversation; HTML is `Html`."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation and its reward, to be shown; control characters are escaped.

    Attributes:
        conversation: its messages, with their tool calls.
        title: what it is.
        reward: of the last reply; None if it was not scored.
        is_fallback: whether the reward stands for a missing score.
        is_over: whether the episode has ended.

    Example:
        >>> print(Transcript([{"role": "user", "content": "2 + 2?"}], title="prompt 7", reward=1.0).text())
        --- prompt 7
        user: 2 + 2?
        --- reward 1
    """

    conversation: Conversation
    title: str = ""
    reward: float | None = None
    is_fallback: bool = False
    is_over: bool = False

    @property
    def outcome(self) -> str:
        """The reward, and whether the episode is over; an empty text if there is nothing to say."""
        reward = [] if self.reward is None else [f"reward {self.reward:.6g}{' (fallback)' * self.is_fallback}"]
        return ", ".join(reward + ["episode over"] * self.is_over)

    def shown(self, mode: str) -> Frame:
        """Return what the render mode `"ansi"`, `"html"` or `"rgb_array"` shows."""
        shows: Mapping[str, Callable[[], Frame]] = {"ansi": self.text, "html": self.html, "rgb_array": self.picture}
        return shows[mode]()

    def text(self) -> str:
        """Return a title line, one paragraph per message and the outcome, if any."""
        lines = [f"--- {self.title}"]
        for message in self.conversation:
            who, content, calls = _said(message)
            lines += [f"{who}: {content}" if content or not calls else f"{who}:", *calls]
        return visible("\n".join([*lines, f"--- {self.outcome}"] if self.outcome else lines))

    def html(self) -> Html:
        """Return a block of HTML with its style inside, which loads nothing and keeps the colours of the page."""
        rows = [f'<div style="opacity:.75">{escape(visible(self.title))}</div>']
        style = "margin:.5em 0;padding:0 .7em;white-space:pre-wrap;overflow-wrap:anywhere;font:inherit;color:inherit"
        for message in self.conversation:
            who, content, calls = _said(message)
            said = escape(visible("\n".join(filter(None, [content, *calls]))))
            border = f"background:none;border:0;border-left:3px solid rgb{_ROLES.get(message['role'], _GREY)}"
            # Notebooks do not look for formulas in `<pre>`.
            rows.append(f'<pre dir="auto" style="{style};{border}"><b>{escape(visible(who))}</b>\n{said}</pre>')
        rows += [f"<div><b>{self.outcome}</b></div>"] if self.outcome else []
        return Html(f'<div style="max-width:60em;line-height:1.4;color:inherit">{"".join(rows)}</div>')

    def _repr_html_(self) -> str:
        return self.html()

    def picture(self) -> NDArray[np.uint8]:
        """Return a picture `[480, 640, 3]`; of a long conversation the end, and how many lines are above.

        A character that DejaVu Sans Mono lacks is a box.
        """
        from PIL import Image, ImageDraw

        lines: list[tuple[str, tuple[int, int, int], bool]] = []
        for message in self.conversation:
            who, content, calls = _said(message)
            lines += [("", _BLACK, False)] * bool(lines)
            lines += [(line, _ROLES.get(message["role"], _GREY), True) for line in _wrapped(who)]
            lines += [(line, _BLACK, False) for text in filter(None, [content, *calls]) for line in _wrapped(text)]
        if len(lines) > ROWS:
            left = len(lines) - ROWS + 1
            lines = [(f"… {left:,} more lines above", _GREY, False), *lines[left:]]

        image = Image.new("RGB", (WIDTH, HEIGHT), "white")
        draw = ImageDraw.Draw(image)
        rule, lines = ("─" * COLUMNS, _PALE, False), lines + [("", _BLACK, False)] * (ROWS - len(lines))
        rows = [(_wrapped(self.title)[0], _GREY, False), rule, *lines, rule, (self.outcome, _BLACK, True)]
        for row, (text, colour, bold) in enumerate(rows):
            draw.text((MARGIN, MARGIN + row * LINE), text, fill=colour, font=_font(bold))
        return np.array(image, dtype=np.uint8)


def visible(text: str) -> str:
    """Return the text with control characters escaped, so that a reply cannot move the cursor or change colours."""
    return text.translate(_VISIBLE)


def cut(text: str, most: int = 3000) -> str:
    """Return a text with control characters escaped; of one with more characters, the middle is left out."""
    if len(text) > most:
        half = most // 2
        text = f"{text[:half].rstrip()} […{len(text) - 2 * half:,} characters…] {text[-half:].lstrip()}"
    return visible(text)


def call_lines(message: Mapping[str, Any]) -> list[str]:
    """Return a line for each tool call of a message."""
    return [f"calls {name}({json.dumps(arguments, ensure_ascii=False)})" for name, arguments in calls_of(message)]


def print_transcripts(transcripts: Sequence[Transcript], *, most: int = 8) -> None:
    """Print the first `most` transcripts to the console, and the number of remaining ones."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for transcript in transcripts[:most]:
        title, _, body = transcript.text().partition("\n")
        console.print(Text.assemble((title, "bold cyan"), "\n", body))
    if len(transcripts) > most:
        console.print(Text(f"--- and {len(transcripts) - most} more", style="dim"))


def _said(message: Message) -> tuple[str, str, list[str]]:
    """Return who speaks, what the message says, and a line for each call that it makes."""
    who = f"{message['role']} {message['name']}" if "name" in message else message["role"]
    return who, message["content"], [f"  {line}" for line in call_lines(message)]


def _wrapped(text: str) -> list[str]:
    """Return the lines of a text in a picture: at least one, at most `COLUMNS` characters each."""
    paragraphs = visible(text).expandtabs(4).split("\n")
    return [line.rstrip() for each in paragraphs for line in _WRAPPED.findall(each) or [""]]


@functools.cache
def _font(bold: bool) -> FreeTypeFont:
    import matplotlib  # has the font
    from PIL import ImageFont

    path = f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSansMono{'-Bold' * bold}.ttf"
    return ImageFont.truetype(path, 13, layout_engine=ImageFont.Layout.BASIC)
