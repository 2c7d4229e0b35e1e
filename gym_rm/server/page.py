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
    script, style = (_digest(tag) for tag in ("script", "style"))
    policy = [
        "default-src 'none'",
        f"script-src {script}",
        f"style-src {style}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ]
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _digest(tag: str) -> str:
    """Return the source expression of the content of the page's only element with this tag."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page(), re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
