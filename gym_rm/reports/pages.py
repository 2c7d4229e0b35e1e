"""HTML pages that load nothing: one head and style for all of them, and texts that are safe to show."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from gym_rm.documents import replaced_file
from gym_rm.reports.transcripts import call_lines, cut, visible


def render(template: str, **values: Any) -> str:
    """Return the HTML of a page from a template beside this file; all texts are escaped."""
    return _environment().get_template(template).render(**values)


def write_page(page: str, path: str | Path) -> Path:
    """Write a page, with folders that are missing; return the path."""
    with replaced_file(Path(path)) as file:
        # A lone surrogate, which UTF-8 cannot encode, is written as its escape.
        file.write(page.encode("utf-8", errors="backslashreplace"))
    return Path(path)


def message_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the role and the text of a message, with its tool calls, as a page shows them."""
    text = "\n".join([message.get("content") or "", *call_lines(message)]).removeprefix("\n")
    return {"role": visible(str(message["role"])), "text": cut(text)}


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("gym_rm", "reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = _code
    return environment


def _code(text: str) -> Markup:
    """Return a text with what is between backticks as code."""
    parts = [f"<code>{escape(part)}</code>" if i % 2 else escape(part) for i, part in enumerate(text.split("`"))]
    return Markup("".join(parts))
