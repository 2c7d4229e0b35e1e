"""The verdict in what a judge wrote: one score or choice, or the reason why there is none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias, TypeVar

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

    The form in JSON is only read without a mark.

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
        match = SCORE.match(spelled)
        if match is None:
            return None
        value = float(match[1])
        if GOES_ON.match(spelled, match.end()) or (match[2] is not None and float(match[2]) != high):
            raise NoVerdict(f"the score {spelled[:20]!r} is not one number")
        if not low <= value <= high:
            raise NoVerdict(f"the score {match[1]} is not within {low:g} to {high:g}")
        return value

    return _only(_spelled(text, "score", mark), read, mark)


def read_choice(text: str, *, mark: str | None) -> Choice:
    """Return the choice in a judge's answer: `Verdict: A`, `{"verdict": "A"}` or `[[A]]`; see `read_score`.

    Raises:
        NoVerdict: there is no choice, or there are different ones.
    """

    def read(spelled: str) -> Choice | None:
        match = CHOICE.match(spelled)
        if match is None:
            return None
        if GOES_ON.match(spelled, match.end()):
            raise NoVerdict(f"the verdict {spelled[:20]!r} is not one of A, B and tie")
        return "A" if match[0] == "A" else "B" if match[0] == "B" else "tie"

    return _only(_spelled(text, "verdict", mark), read, mark)


def _only(spelled: Iterator[str], read: Callable[[str], Value | None], mark: str | None) -> Value:
    """Return the value that all readable verdicts have; others, such as `n` in a repeated instruction, are skipped."""
    values = {value for one in spelled if (value := read(one)) is not None}
    if len(values) > 1:
        raise NoVerdict(f"there are different verdicts, {sorted(map(str, values))}")
    if not values:
        raise NoVerdict("there is no verdict" + ("" if mark is None else f" with the mark {mark}"))
    (value,) = values
    return value


def _spelled(text: str, name: str, mark: str | None) -> Iterator[str]:
    """Yield what stands where a verdict belongs."""
    beside = "" if mark is None else rf"{re.escape(mark)}\b{DECORATION}"
    for match in re.finditer(rf"\b{name}\b{DECORATION}{beside}[:=：]{DECORATION}([^\n]*)", text, re.IGNORECASE):
        yield match[1]
    within = "" if mark is None else rf"{re.escape(mark)}\b[\s:,]*"
    for match in re.finditer(rf"\[\[\s*{within}([^\[\]\n]*?)\s*\]\]", text, re.IGNORECASE):
        yield "tie" if match[1] == "C" and name == "verdict" else match[1]
