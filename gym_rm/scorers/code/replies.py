"""Which part of a reply is code."""

from __future__ import annotations

import ast
import bisect
import functools
import itertools
import re
import textwrap

from markdown_it import MarkdownIt
from markdown_it.token import Token

MARK = re.compile("(?<!`)<code>")
MOST_TRIALS = 8
# Blocks alone, and fences in them wherever they are indented: replies indent those of lists in every way.
_MARKDOWN = MarkdownIt("commonmark").disable(["code", "html_block", "reference", "inline", "text_join"])


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and the code of every fenced block; a block without an end reaches to the end."""
    return [((token.info.split() or [""])[0].lower().strip("{}."), token.content) for token in _fences(text)]


@functools.lru_cache(maxsize=16)
def _fences(text: str) -> list[Token]:
    return [token for token in _MARKDOWN.parse(text) if token.type == "fence"]


def marks(text: str) -> list[re.Match[str]]:
    """Return the tags `<code>` of a text that are not in the code of a fenced block."""
    fenced = {line for token in _fences(text) for line in range(*(token.map or (0, 0)))}
    breaks = [match.start() for match in re.finditer("\n", text)]
    return [match for match in MARK.finditer(text) if bisect.bisect_left(breaks, match.start()) not in fenced]


def tagged_blocks(reply: str) -> list[str]:
    """Return the code of the `<code>` blocks of a reply without thoughts."""
    said = reply.replace("\r\n", "\n")
    blocks, end = list[str](), 0
    for match in marks(said):
        if match.start() < end:
            continue
        closing = itertools.islice(re.compile("</code>").finditer(said, match.end()), MOST_TRIALS)
        ends = [each.start() for each in closing] or [len(said)]
        end = next((each for each in ends if is_python(said[match.end() : each])), ends[0])
        body = said[match.end() : end].strip("\n")
        fences = "" if is_python(body) else "".join(code for _, code in fenced_blocks(body))
        blocks.append(fences or body)
    return blocks


def is_python(code: str) -> bool:
    """Return whether a text is a program."""
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def reply_blocks(reply: str) -> list[str]:
    """Return the code blocks of a reply without thoughts: `<code>` blocks, else fenced blocks of Python."""
    languages = ("", "python", "py", "python3")
    return tagged_blocks(reply) or [code for language, code in fenced_blocks(reply) if language in languages]


def extract_code(reply: str, *, name: str = "") -> str | None:
    """Return the last code block of a reply, if several then the last that defines `name`; else the reply, or None.

    The reply must be without thoughts.
    """
    reply = reply.replace("\r\n", "\n")
    blocks = [block for block in reply_blocks(reply) if block.strip()]
    if blocks:
        defines = re.compile(rf"\b(?:def|class) +{name}\b|^{name} *[:=]", re.MULTILINE)
        return next((block for block in reversed(blocks) if name and defines.search(block)), blocks[-1])
    has_marks = bool(marks(reply) or fenced_blocks(reply))
    return reply.strip("\n") if reply.strip() and not has_marks else None


def indented(body: str) -> str:
    """Indent the body of a function that was written without its indentation, or whose first line lost it."""
    body = re.sub(r"\A(?:\s*\n)+", "", body.expandtabs(4)).rstrip("\n") + "\n"
    if body.startswith("    "):
        return body
    whole = textwrap.indent(body, "    ")
    return whole if is_python("def f():\n" + whole) else "    " + body.lstrip(" ")
