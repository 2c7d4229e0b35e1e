"""Which part of a reply is code."""

from __future__ import annotations

import ast
import re
import textwrap


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and the code of every fenced block; a block without an end reaches to the end."""
    blocks: list[tuple[str, str]] = []
    fence, language, lines = "", "", list[str]()
    for line in text.splitlines(keepends=True):
        stripped = line.strip()
        if not fence:
            mark = re.match(r"(`{3,}|~{3,})([^`]*)$", stripped)
            if mark:
                fence, language, lines = mark[1], (mark[2].split() or [""])[0].lower(), []
        elif stripped.startswith(fence) and not stripped.strip(fence[0]):
            blocks.append((language, "".join(lines)))
            fence = ""
        else:
            lines.append(line)
    return [*blocks, (language, "".join(lines))] if fence else blocks


def reply_blocks(reply: str) -> list[str]:
    """Return the code blocks of a reply after its thoughts: `<code>` blocks, else fenced blocks of Python."""
    said = reply.rpartition("</think>")[2]
    if "<think>" in said:
        said = said.partition("<think>")[0]
    tagged = [part.partition("</code>")[0] for part in said.split("<code>")[1:]]
    if tagged:
        return ["".join(code for _, code in fenced_blocks(each)) or each.strip("\n") for each in tagged]
    blocks = fenced_blocks(said)
    return [code for language, code in blocks if language in ("", "python", "py", "python3")]


def extract_code(reply: str, *, name: str = "") -> str | None:
    """Return the last code block of a reply, if several then the last that defines `name`; else the reply, or None."""
    blocks = [block for block in reply_blocks(reply) if block.strip()]
    if blocks:
        defines = re.compile(rf"\b(?:def|class) +{name}\b|^{name} *[:=]", re.MULTILINE)
        return next((block for block in reversed(blocks) if name and defines.search(block)), blocks[-1])
    said = reply.rpartition("</think>")[2]
    has_marks = "```" in said or "<code>" in said or "<think>" in said
    return said.strip("\n") if said.strip() and not has_marks else None


def indented(body: str) -> str:
    """Indent the body of a function that was written without its indentation, or whose first line lost it."""
    body = re.sub(r"\A(?:\s*\n)+", "", body.expandtabs(4)).rstrip("\n") + "\n"
    if body.startswith("    "):
        return body
    whole = textwrap.indent(body, "    ")
    try:
        ast.parse("def f():\n" + whole)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "    " + body.lstrip(" ")
    return whole
