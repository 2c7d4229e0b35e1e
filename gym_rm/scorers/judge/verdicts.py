"""The verdict in what a judge wrote: one score or choice, or the reason why there is none.

An answer ends with its verdict: a name, the mark if one is asked for, a colon and one value, `Score BXTRQW: 7`, or the
value in double brackets, `[[7]]`; several values are a JSON object. Only punctuation, Markdown and closing tags may
follow. Without a mark the end may also be a JSON object with the name as a key, or `[RESULT] 7`. A verdict further up
must have the same value. Every function needs linear time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

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
ENDS = re.compile(_END)
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


def read_scores(text: str, *, size: int, scale: tuple[float, float], mark: str | None) -> tuple[float, ...]:
    """Return the scores in a judge's answer, `Scores: {"1": 7, "2": 3}`, in the order of the numbers.

    Raises:
        NoVerdict: as in `read_score`, or a reply has no score.
    """
    return _read_numbered(text, "scores", size, mark, lambda value, _: number_on(scale, value))


def read_criteria(text: str, choices: Sequence[Sequence[str]], *, mark: str | None) -> tuple[float, ...]:
    """Return the values in [0, 1] of a judge's answers to criteria, `Verdicts: {"1": "yes", "2": "no"}`.

    Args:
        text: the answer without the judge's reasoning.
        choices: for each criterion, the possible answers from worst to best.
        mark: see `read_score`.

    Raises:
        NoVerdict: as in `read_score`, or a criterion has no answer, or another one.
    """

    def value(said: Any, number: int) -> float:
        known = [each.strip().casefold() for each in choices[number]]
        spelled = ("yes" if said else "no") if isinstance(said, bool) else str(said).strip().rstrip(".").casefold()
        if spelled not in known:
            raise NoVerdict(f"the verdict {said!r:.40} on criterion {number + 1} is none of {list(choices[number])}")
        return known.index(spelled) / (len(known) - 1)

    return _read_numbered(text, "verdicts", len(choices), mark, value)


def number_on(scale: tuple[float, float], value: Any) -> float:
    """Return a number of a scale, also one that is written as a text. Raises NoVerdict if it is none."""
    if isinstance(value, str) and re.fullmatch(_NUMBER, value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not scale[0] <= value <= scale[1]:
        raise NoVerdict(f"the score {value!r:.20} is not a number within {scale[0]:g} to {scale[1]:g}")
    return float(value)


def _read_numbered(
    text: str, name: str, size: int, mark: str | None, value: Callable[[Any, int], float]
) -> tuple[float, ...]:
    """Return the values of all objects behind a name. A repeated instruction, whose values are a word, is none."""
    named = rf"\b{name}\b{DECORATION}" + (f"{re.escape(mark)}\\b{DECORATION}" if mark else "") + r"[:=：]"
    begins = re.compile(named + r"[\s*_`]*+(?:json\s*+)?(?=\{\s*+\"\d+\"\s*+:\s*+(?!n\b|answer\b))", re.IGNORECASE)
    found, end = set(), 0
    for place in begins.finditer(text[:MAX_LENGTH]):
        try:
            pairs, end = json.JSONDecoder(object_pairs_hook=list).raw_decode(text, place.end())
        except (ValueError, RecursionError) as error:
            raise NoVerdict(f"the {name} {text[place.end() :][:40]!r} are no JSON object") from error
        if sorted(key for key, _ in pairs) != sorted(str(number + 1) for number in range(size)):
            raise NoVerdict(f'expected {name} of "1" to "{size}", each once, got those of {[key for key, _ in pairs]}')
        found.add(tuple(value(dict(pairs)[str(number + 1)], number) for number in range(size)))
    if len(found) != 1:
        wrong = "there are different verdicts" if found else "there is no verdict"
        raise NoVerdict(wrong + ("" if mark is None else f" with the mark {mark}"))
    if not ENDS.fullmatch(text, end):
        raise NoVerdict(f"the answer goes on after its verdict: {text[end:].strip()[:20]!r}")
    return found.pop()


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
    if not ENDS.fullmatch(text, end):
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
