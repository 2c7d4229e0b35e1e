"""The verdict that a judge's answer ends with, or the reason why there is none.

A verdict is the judge's own if only words such as `My final score` stand before it in its sentence, and only
punctuation, Markdown and closing tags behind it. `Style score: 9`, `The loser is [[B]]` and `It says "Score: 10"` are
none. Nor is what stands in a fence with other text, or after a line that introduces something else. Two verdicts with
different values are none either, unless only the last one is called final. Every function needs linear time.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import regex

from gym_rm.errors import GymRMError

Choice: TypeAlias = Literal["A", "B", "tie"]
Value = TypeVar("Value")

MAX_LENGTH = 100_000
"""Characters of the longest answer that is read."""
READING_SECONDS = 1.0
_MOST_FAILURES = 200  # each can be a JSON object of any depth

_WORDS = (
    "a|all|an|analysis|and|are|as follows|assessment|based|but|clear|conclusion|corrected|decision|draw|end|evaluation"
    "|feedback|final|finally|hence|here|in|is|it is a (?:draw|tie)|json(?: format)?|judge?ment|my|no(?=[,:])|on"
    "|overall|ratings?|results?|revised|scores?|so|summary|that is|the|the above analysis|therefore|these|this|thus|tie"
    "|total|updated|verdict|winner|i (?:would )?(?:choose|give|grade|pick|rate|select)(?: it)?"
    "|the better (?:assistant|one|reply|response)"
    "|bewertung|endgültige[rs]?|gesamt|mein|punktzahl|urteil|mon|ma|finale|mi|calificación|puntuación|veredicto"
    "|оценка|моя|итоговая|(?:最[终終]|[总總]|综合|総合|[评評]分|得分|分[数數]|判[决定]|[结結][论論]|我的|[评評][价価]|점수|최종|평가)+"
)
_TAG = r"</?(?i:final[_-]?)?(?i:answer|verdict|score|result|rating|grade|judge?ment|decision|choice)>"
_SECTION = r"\[The (?:Begin|End) of [\w ]+\]"
_OWN = (  # the beginning of a sentence, and words before a verdict
    r"(?:\A|\n|[.!?;](?<!\b[a-z]\.)[*_)\]\"'”]*(?:\s+|(?=\[))|[。！？]|</\w+>)(?:[ \t]*\d+[.)] )?"
    rf"(?:[ \t*_`#$(,:：-]|(?i:{_WORDS})(?!\w)|{_TAG}|{_SECTION})*"
)
_FINAL = regex.compile(r"(?i:\b(?:final|overall|revised|corrected|updated)\b|最[终終]|최종)")
ENDS = regex.compile(rf"(?:[\s*_`.)\]$]|{_TAG}|{_SECTION})*+")
_FENCE = regex.compile(r"^[ \t]*(```+|~~~+)[^\n]*\n(.*?)(?:\n[ \t]*\1[ \t]*$|\Z)", regex.MULTILINE | regex.DOTALL)
_INTRODUCES = regex.compile(
    r"([:：]|```\w*|\b(?:as|has|had|get|is|of|reads|say|says|states|that|was|with|write|writes|wrote))[*_]*[ \t]*\n\s*"
)
_QUOTED = regex.compile(r"\A\s*\"(\[\[\w+\]\])\"\Z")  # as some prompts write it

SCORES, VERDICTS = "score|rating|grade|result", "verdict|winner|decision|result"
_GAP = r"[ \t*_`()\[\]$]*+"
_MARK = r"(?P<mark>[^\W_]++)"
_NUMBER = r"-?[0-9]{1,9}(?:\.[0-9]{1,9})?"
_SCORE = regex.compile(
    rf"{_GAP}(?P<quote>[\"']?)(?P<value>{_NUMBER})(?:[ \t(*]*+(?:/|out of\b)[ \t]*+(?P<most>{_NUMBER}))?(?P=quote)"
)
_CHOICE = regex.compile(
    rf"{_GAP}(?P<quote>[\"']?)(?:(?:Reply|Response|Assistant) )?(?P<value>A|B|(?<=\[\[)C|[Tt]ie|TIE)(?P=quote)"
)


class NoVerdict(GymRMError):
    """A judge's answer has no verdict, or no clear one."""


def read_last(text: str, opener: str, read: Callable[[Any], tuple[Value, int]], *, mark: str | None = None) -> Value:
    """Return the verdict that an answer ends with.

    Args:
        text: the answer without the judge's reasoning.
        opener: regular expression of the beginning of a verdict.
        read: returns the value that begins with a match, and where it ends; raises NoVerdict if there is none.
        mark: what the group `mark` of the opener must be, so that no quotation can be one; None without.

    Raises:
        NoVerdict: there is no verdict, there are different ones, or the answer goes on after it.
    """
    if len(text) > MAX_LENGTH:
        raise NoVerdict(f"the answer has {len(text)} characters, more than the {MAX_LENGTH} that are read")
    text = text if mark else _without_quotations(text)
    found, failures = list[tuple[Value, int, Any]](), list[str]()
    try:
        for match in regex.finditer(f"{_OWN}(?:{opener})", text, timeout=READING_SECONDS):
            is_inside = found and match.start() < found[-1][1]  # of a JSON object
            if is_inside or (mark is not None and match["mark"].casefold() != mark.casefold()):
                continue
            try:
                found.append((*read(match), match))
            except NoVerdict as error:
                failures.append(str(error))
            if len(failures) > _MOST_FAILURES:
                raise NoVerdict(f"the answer begins more than {_MOST_FAILURES} verdicts without a value")
    except TimeoutError as error:
        raise NoVerdict(f"the answer takes more than {READING_SECONDS:g} s to read") from error
    if not found:
        wanted = "there is no verdict" + (f" with the mark {mark}" if mark else "")
        raise NoVerdict(": ".join([wanted, *failures[-1:]]))
    value, end, last = found[-1]
    sentence = text[last.start() :]
    closes_more = any(sentence.count(close) > sentence.count(opens) for opens, close in ("()", "[]"))
    if closes_more or not ENDS.fullmatch(text, end):
        raise NoVerdict(f"the answer goes on after its verdict: {text[end:].strip()[:20]!r}")
    rivals = {str(other) for other, _, match in found if bool(_FINAL.search(match[0])) >= bool(_FINAL.search(last[0]))}
    if len(rivals) > 1:
        raise NoVerdict(f"there are different verdicts, {sorted(rivals)}")
    return value


def _without_quotations(text: str) -> str:
    """Return a text without what is in fences, but for a verdict, and with introductions in the line after them."""
    text = _QUOTED.sub(r"\1", text.rstrip())

    def shown(fence: Any) -> str:
        inside: str = fence[2].strip()
        is_line = fence.end() == len(text) and "\n" not in inside
        return inside if is_line or inside.startswith("{") else "code.\n"

    return str(_INTRODUCES.sub(r"\1 ", _FENCE.sub(shown, text)))


def read_score(text: str, *, scale: tuple[float, float], mark: str | None) -> float:
    """Return the score in a judge's answer: `Score: 7`, `{"score": 7}` or `[[7]]`.

    A scale may follow: `7/10`, `7 out of 10`. The form in JSON is only read without a mark.

    Args:
        text: the answer without the judge's reasoning.
        scale: lowest and highest score.
        mark: word that must stand beside the verdict (`Score BXTRQW: 7`); verdicts without it are ignored, because the
            judge may have copied them from what it judges. None if no mark is asked for.

    Raises:
        NoVerdict: as in `read_last`, or the score is no number of the scale.
    """

    def read(match: Any) -> tuple[float, int]:
        found, end = _value(match, _SCORE, SCORES)
        if found["most"] is not None and float(found["most"]) != scale[1]:
            raise NoVerdict(f"the score {found[0].strip()!r} has another scale than {scale[0]:g} to {scale[1]:g}")
        return number_on(scale, found["value"]), end

    return read_last(text, _opener(SCORES, mark), read, mark=mark)


def read_choice(text: str, *, mark: str | None) -> Choice:
    """Return the choice in a judge's answer: `Verdict: A`, `{"verdict": "A"}` or `[[A]]`; see `read_score`.

    Raises:
        NoVerdict: as in `read_last`.
    """

    def read(match: Any) -> tuple[Choice, int]:
        found, end = _value(match, _CHOICE, VERDICTS)
        return ("A" if found["value"] == "A" else "B" if found["value"] == "B" else "tie"), end

    return read_last(text, _opener(VERDICTS, mark), read, mark=mark)


def read_scores(text: str, *, size: int, scale: tuple[float, float], mark: str | None) -> tuple[float, ...]:
    """Return the scores in a judge's answer, `Scores: {"1": 7, "2": 3}`, in the order of the numbers.

    Raises:
        NoVerdict: as in `read_score`, or a reply has no score.
    """
    return _read_numbered(text, "scores", size, mark, functools.partial(number_on, scale))


def read_criterion(text: str, choices: Sequence[str], *, mark: str | None) -> tuple[float, ...]:
    """Return the value in [0, 1] of a judge's answer to a criterion, `Verdicts: {"1": "yes"}`.

    Args:
        text: the answer without the judge's reasoning.
        choices: the possible answers from worst to best.
        mark: see `read_score`.

    Raises:
        NoVerdict: as in `read_score`, or there is another answer.
    """
    known = [each.strip().casefold() for each in choices]

    def value(said: Any) -> float:
        spelled = ("yes" if said else "no") if isinstance(said, bool) else str(said).strip().rstrip(".").casefold()
        if spelled not in known:
            raise NoVerdict(f"the verdict {said!r:.40} on the criterion is none of {list(choices)}")
        return known.index(spelled) / (len(known) - 1)

    return _read_numbered(text, "verdicts", 1, mark, value)


def number_on(scale: tuple[float, float], value: Any) -> float:
    """Return a number of a scale, also one that is written as a text. Raises NoVerdict if it is none."""
    number = float(value) if isinstance(value, str) and regex.fullmatch(_NUMBER, value.strip()) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not scale[0] <= number <= scale[1]:
        raise NoVerdict(f"the score {value!s:.20} is not a number within {scale[0]:g} to {scale[1]:g}")
    return float(number)


def object_at(text: str, start: int) -> tuple[Mapping[str, Any], int]:
    """Return the JSON object that begins at a place, and its end. Raises NoVerdict if there is none, or a key twice."""
    try:
        found, end = json.JSONDecoder(object_pairs_hook=_without_duplicates).raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise NoVerdict(f"{text[start:][:40]!r} is no JSON object") from error
    return found, end


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise NoVerdict(f"a key is given twice: {[key for key, _ in pairs]}")
    return dict(pairs)


def _read_numbered(
    text: str, name: str, size: int, mark: str | None, value: Callable[[Any], float]
) -> tuple[float, ...]:
    numbers = [str(number + 1) for number in range(size)]

    def read(match: Any) -> tuple[tuple[float, ...], int]:
        said, end = object_at(match.string, match.end())
        if set(said) != set(numbers):
            raise NoVerdict(f'expected {name} of "1" to "{size}", each once, got those of {list(said)}')
        return tuple(value(said[number]) for number in numbers), end

    opener = rf"{_named(name, mark is not None)}[\s*_`]*+(?:json\s*+)?(?=\{{)"
    return read_last(text, opener, read, mark=mark)


def _named(names: str, marked: bool) -> str:
    return rf"(?i:{names})\b{_GAP}{_MARK + _GAP if marked else ''}[:=：]"


def _opener(names: str, mark: str | None) -> str:
    others = rf"\[\[\s*+{_MARK}[ \t:,]*+" if mark else r"\[(?i:RESULT)\]|\[\[|\{(?=\s*\")"
    return f"{_named(names, mark is not None)}|{others}"


def _value(match: Any, pattern: Any, names: str) -> tuple[Any, int]:
    """Return what an opener opens as a match of a pattern, and its end: behind it, or in the JSON object there."""
    if not match[0].endswith("{"):
        found = pattern.match(match.string, match.end())
        end = found.end() if found else 0
        shown = match.string[match.end() :]
    else:
        said, end = object_at(match.string, match.end() - 1)
        keys = [key for key in said if regex.fullmatch(rf"(?i:(?:final_|overall_)?(?:{names}))", key)]
        values = [said[key] for key in keys]
        shown = str(values[0]) if len(values) == 1 and not isinstance(values[0], bool | list | dict) else ""
        most = next((f"/{said[key]}" for key in ("max_score", "out_of", "max") if key in said), "")
        found = pattern.fullmatch(shown + most)
    if found is None:
        raise NoVerdict(f"{shown.strip()[:20]!r} is no {names.partition('|')[0]}")
    return found, end
