"""The verdict in what a judge wrote: one score or choice, or the reason why there is none.

An answer ends with its verdict: a name, the mark if one is asked for, a colon and one value, `Score BXTRQW: 7`, or the
value in double brackets, `[[7]]`. Only punctuation, Markdown and closing tags may follow. Without a mark the end may
also be a JSON object with the name as a key, or `[RESULT] 7`. A verdict further up must have the same value.
Every function needs linear time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

from gym_rm.errors import GymRMError
from gym_rm.scorers.math.denials import MARGIN, is_denied

Choice: TypeAlias = Literal["A", "B", "tie"]
Value = TypeVar("Value", float, Choice)

MAX_LENGTH = 100_000
"""Characters of the longest answer that is read."""
_MAX_OBJECTS = 16  # braces from the end at which the JSON object may begin

DECORATION = r"[\s*_`\"'()\[\]$]*+"
_NUMBER = r"-?[0-9]{1,9}(?:\.[0-9]{1,9})?"
_END = r"(?:[\s*_`\"')\].$]|</\w{1,20}>)*+"
_ENDS = re.compile(_END)
_SCORE = re.compile(rf"{DECORATION}({_NUMBER})(?:[\s(*]*+(?:/|out of\b)\s*+({_NUMBER}))?{_END}")
_CHOICE = re.compile(rf"{DECORATION}(A|B|[Tt]ie|TIE){_END}")
_BEGINS = re.compile(rf"{DECORATION}(?:[-+]?[0-9]|[AB]|[Tt]ie|TIE)")


class NoVerdict(GymRMError):
    """A judge's answer has no verdict, or no clear one."""


def read_score(text: str, *, scale: tuple[float, float], mark: str | None) -> float:
    """Return the score in a judge's answer: `Score: 7`, `{"score": 7}` or `[[7]]`, alone or several times the same.

    A scale may follow: `7/10`, `7 out of 10`. The form in JSON is only read without a mark.

    Args:
        text: the answer without the judge's reasoning.
        scale: lowest and highest score.
        mark: word that must stand beside the verdict (`Score BXTRQW: 7`); verdicts without it are ignored, because the
            judge may have copied them from what it judges. None if no mark is asked for.

    Raises:
        NoVerdict: there is no score, there are different ones, it is not a number of the scale, text follows it, or the
            answer is longer than `MAX_LENGTH`.
    """
    low, high = scale

    def read(spelled: str) -> float:
        match = _SCORE.fullmatch(spelled)
        if match is None or (match[2] is not None and float(match[2]) != high):
            raise NoVerdict(f"the score {spelled[:20]!r} is not one number")
        value = float(match[1])
        if not low <= value <= high:
            raise NoVerdict(f"the score {match[1]} is not within {low:g} to {high:g}")
        return value

    return _only(text, "score", mark, read)


def read_choice(text: str, *, mark: str | None) -> Choice:
    """Return the choice in a judge's answer: `Verdict: A`, `{"verdict": "A"}` or `[[A]]`; see `read_score`.

    Raises:
        NoVerdict: there is no choice, there are different ones, or text follows it.
    """

    def read(spelled: str) -> Choice:
        match = _CHOICE.fullmatch(spelled)
        if match is None:
            raise NoVerdict(f"the verdict {spelled[:20]!r} is not one of A, B and tie")
        return "A" if match[1] == "A" else "B" if match[1] == "B" else "tie"

    return _only(text, "verdict", mark, read)


def _only(text: str, name: str, mark: str | None, read: Callable[[str], Value]) -> Value:
    """Return the value of all verdicts. What begins with no value, such as `n` in a repeated instruction, is none."""
    if len(text) > MAX_LENGTH:
        raise NoVerdict(f"the answer has {len(text)} characters, more than the {MAX_LENGTH} that are read")
    spelled, end = [], 0
    if mark is None and (in_json := _in_json(text, name)):
        text, value = in_json
        spelled, end = [value], len(text)
    for start, stop, content in _places(text, name, mark):
        if not _BEGINS.match(content):
            continue
        line = text[max(0, start - MARGIN) : start].rpartition("\n")[2]
        if is_denied(line, len(line), len(line)):
            raise NoVerdict(f"the {name} {content[:20]!r} is denied")
        spelled.append(content)
        end = max(end, stop)
    values = {read(one) for one in spelled}
    if len(values) > 1:
        raise NoVerdict(f"there are different verdicts, {sorted(map(str, values))}")
    if not values:
        raise NoVerdict("there is no verdict" + ("" if mark is None else f" with the mark {mark}"))
    if not _ENDS.fullmatch(text, end):
        raise NoVerdict(f"the answer goes on after its verdict: {text[end:].strip()[:20]!r}")
    (only,) = values
    return only


def _places(text: str, name: str, mark: str | None) -> list[tuple[int, int, str]]:
    """Return where a verdict may be: start, end and what stands there."""
    if mark is None:
        named = rf"(?:\b(?:{name}|result)\b{DECORATION}[:=：]|\[RESULT\])"
        within = ""
    else:
        named = rf"\b{name}\b{DECORATION}{re.escape(mark)}\b{DECORATION}[:=：]"
        within = rf"\s*+{re.escape(mark)}\b[\s:,]*+"
    places = [(one.start(), one.end(), one[1]) for one in re.finditer(rf"{named}([^\n]*+)", text, re.IGNORECASE)]
    for one in re.finditer(rf"\[\[{within}([^\[\]\n]*+)\]\]", text, re.IGNORECASE):
        tie = name == "verdict" and one[1].strip() == "C"
        places.append((one.start(), one.end(), "tie" if tie else one[1]))
    return places


def _in_json(text: str, name: str) -> tuple[str, str] | None:
    """Return the text before the JSON object that an answer ends with, and the value of a name in it."""
    text = text.rstrip(" \t\r\n`")
    braces = [match.start() for match in re.finditer(r"\{", text)] if text.endswith("}") else []
    for start in braces[-_MAX_OBJECTS:]:
        try:
            pairs = json.loads(text[start:], object_pairs_hook=list)
        except (ValueError, RecursionError):
            continue
        values = [value for key, value in pairs if key.casefold() in (name, "result")]
        if len(values) != 1 or isinstance(values[0], bool | list):
            return None
        return text[:start], str(values[0])
    return None
