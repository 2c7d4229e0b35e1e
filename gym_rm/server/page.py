"""The page at `/`: score a conversation in a browser. One file, no build step, nothing from other hosts."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import re


@functools.cache
def page() -> str:
    """Return the page as HTML."""
    return importlib.resources.files("gym_rm.server").joinpath("page.html").read_text(encoding="utf-8")


@functools.cache
def headers() -> dict[str, str]:
    """Return the headers to send with the page: only its own script and style run, and it talks only to its server."""
    return {
        "Content-Security-Policy": f"default-src 'none'; script-src {_digest('script')}; style-src {_digest('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        "frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _digest(tag: str) -> str:
    """Return the source expression for the content of the page's only element with this tag."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page(), re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
