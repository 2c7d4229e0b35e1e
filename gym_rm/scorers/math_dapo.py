"""Answers as DAPO compares them: the last line `Answer: ...`, normalised, as text."""

from __future__ import annotations

import re

LENGTH = 300
"""Characters at the end of a reply that are searched."""

_REPLACED = {
    "an ": "",
    "a ": "",
    ".$": "$",
    "\\$": "",
    "\\ ": "",
    " ": "",
    "mbox": "text",
    ",\\text{and}": ",",
    "\\text{and}": ",",
    "\\text{m}": "\\text{}",
}
_REMOVED = [
    *[
        "square",
        "ways",
        "integers",
        "dollars",
        "mph",
        "inches",
        "hours",
        "km",
        "units",
        "\\ldots",
        "sue",
        "points",
        "feet",
        "minutes",
        "digits",
        "cents",
    ],
    *[
        "degrees",
        "cm",
        "gm",
        "pounds",
        "meters",
        "meals",
        "edges",
        "students",
        "childrentickets",
        "multiples",
        "\\text{s}",
        "\\text{.}",
    ],
    *("\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}"),
    *(r"\;", r",\!", "{,}", '"', "\\dots"),
]
_PATTERNS = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"^[^$]*\$([^$]*)\$.*", r"$\1$"),
        (r"\\(?:text|textbf|overline)\{([^}]*)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),
        (r"sqrt([^{])", r"sqrt{\1}"),
        (r"\$", ""),
    )
]


def dapo_answer(text: str) -> str | None:
    """Return the normalised answer of the last line `Answer: ...` in the last 300 characters."""
    found = re.findall(r"(?i)answer\s{0,8}:[^\S\n]{0,8}([^\n]+)", text[-LENGTH:])
    return dapo_normal(found[-1]) if found else None


def dapo_normal(answer: str) -> str:
    """Return an answer in the form that DAPO compares as text.

    The rules are those of Minerva (Lewkowycz et al. 2022, appendix D.1), which DAPO (Yu et al. 2025) uses.
    """
    answer = answer.rpartition("=")[2]
    for old, new in _REPLACED.items():
        answer = answer.replace(old, new)
    for old in _REMOVED:
        answer = answer.replace(old, "")
    for pattern, new in _PATTERNS:
        answer = pattern.sub(new, answer)
    bare = answer.replace(",", "")
    return (bare if bare.isdigit() else answer).strip()
