"""The verdict in what a judge wrote: one score or choice, or the reason why there is none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias, TypeVar

from gym_rm.errors import GymRMError

Choice: TypeAlias = Literal["A", "B", "tie"]
Value = TypeVar("Value", float, Choice)

DECORATION = r"[\s*_`\"'()\[\]$]*"
NUMBER = r"-?[0-9]{1,9}(?:\.[0-9]{1,9})?"
SCORE = re.compile(rf"({NUMBER})(?:\s*(?:/|out of\b)\s*({NUMBER}))?")
CHOICE = re.compile(r"A|B|[Tt]ie|TIE")
# Not a whole verdict: `7%`, `7,5`, `7-8`, `7 out of 12`, `A or B`.
GOES_ON = re.compile(r"[\w%+]|[.,][0-9]|\s*or\b|\s*(?:[-–—~/,&]|to\b|and\b|out of\b)\s*(?:[0-9]|[AB]\b|[Tt]ie\b)")


class NoVerdict(GymRMError):
    """A judge's answer has no verdict, or no clear one."""


def read_score(text: str, *, scale: tuple[float, float], mark: str | None) -> float:
    """Return the score in a judge's answer: `Score: 7`, `{"score": 7}` or `[[7]]`, alone or several times the same.

    Args:
        text: the answer without the judge's reasoning.
        scale: lowest and highest score.
        mark: word that must stand beside the verdict (`Score BXTRQW: 7`); verdicts without it are ignored, because the
            judge may have copied them from what it judges. None if no mark is asked for.

    Raises:
        NoVerdict: there is no score, there are different ones, or it is not a number of the scale.
    """
    low, high = scale

    def read(spelled: str) -> float | None:
        found = SCORE.match(spelled)
        if found is None:
            return None
        value = float(found[1])
        if GOES_ON.match(spelled, found.end()) or (found[2] is not None and float(found[2]) != high):
            raise NoVerdict(f"the score {spelled[:20]!r} is not one number")
        if not low <= value <= high:
            raise NoVerdict(f"the score {found[1]} is not within {low:g} to {high:g}")
        return value

    return _only(_spelled(text, "score", mark), read, mark)


def read_choice(text: str, *, mark: str | None) -> Choice:
    """Return the choice in a judge's answer: `Verdict: A`, `{"verdict": "A"}` or `[[A]]`; see `read_score`.

    Raises:
        NoVerdict: there is no choice, or there are different ones.
    """

    def read(spelled: str) -> Choice | None:
        found = CHOICE.match(spelled)
        if found is None:
            return None
        if GOES_ON.match(spelled, found.end()):
            raise NoVerdict(f"the verdict {spelled[:20]!r} is not one of A, B and tie")
        return "A" if found[0] == "A" else "B" if found[0] == "B" else "tie"

    return _only(_spelled(text, "verdict", mark), read, mark)


def _only(spelled: Iterator[str], read: Callable[[str], Value | None], mark: str | None) -> Value:
    """Return the value that all readable verdicts have; others, such as `n` in a repeated instruction, are skipped."""
    found = {value for each in spelled if (value := read(each)) is not None}
    if len(found) > 1:
        raise NoVerdict(f"there are different verdicts, {sorted(map(str, found))}")
    if not found:
        raise NoVerdict("there is no verdict" + ("" if mark is None else f" with the mark {mark}"))
    (value,) = found
    return value


def _spelled(text: str, name: str, mark: str | None) -> Iterator[str]:
    """Yield what stands where a verdict belongs."""
    beside = "" if mark is None else rf"{re.escape(mark)}\b{DECORATION}"
    for match in re.finditer(rf"\b{name}\b{DECORATION}{beside}[:=：]{DECORATION}([^\n]*)", text, re.IGNORECASE):
        yield match[1]
    within = "" if mark is None else rf"{re.escape(mark)}\b[\s:,]*"
    for match in re.finditer(rf"\[\[\s*{within}([^\[\]\n]*?)\s*\]\]", text, re.IGNORECASE):
        yield "tie" if match[1] == "C" and name == "verdict" else match[1]
    if mark is not None:  # without a mark, the first pattern finds them
        for match in re.finditer(r"\{\s*\"", text):
            yield from _in_object(text, match.start(), name, mark)


def _in_object(text: str, start: int, name: str, mark: str) -> Iterator[str]:
    def of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key.lower() for key, _ in pairs}) < len(pairs):
            raise NoVerdict(f"{text[start : start + 60]!r} has a key twice")
        return {key.lower(): value for key, value in pairs}

    try:
        values, _ = json.JSONDecoder(object_pairs_hook=of_pairs).raw_decode(text, start)
    except (ValueError, RecursionError):
        return
    if str(values.get("mark", "")).lower() == mark.lower() and type(values.get(name)) in (int, float, str):
        yield str(values[name])
