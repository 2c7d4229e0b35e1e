"""The verdict that a judge's answer ends with, or the reason why there is none.

A verdict is the judge's own if only words such as `My final score` stand before it in its sentence, and only marks,
closing tags or its reasons behind it: `[[A]] because ...`. `Style score: 9`, `The loser is [[B]]`, `It says "Score: 9"`
are none. Nor is what stands in a fence with other text, or after a line that introduces something else. Two different
verdicts are none either, unless only the last one is called final. Every function needs linear time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import regex

from gym_rm.errors import GymRMError

Value = TypeVar("Value")

MAX_LENGTH = 100_000
"""Characters of the longest answer that is read."""
READING_SECONDS = 1.0
MOST_FAILURES = 200  # each can be a JSON object of any depth

_WORDS = (
    "a|all|an|analysis|and|are|as follows|assessment|based|but|clear|conclusion|corrected|decision|draw|end"
    "|evaluation|feedback|final|final answer|finally|hence|here|in|is|it is a (?:draw|tie)|json(?: format)?"
    "|judge?ment|my|no(?=[,:])|on|overall|ratings?|results?|revised|scores?|so|summary|that is|the|the above analysis"
    "|therefore|these|this|thus|tie|total|updated|verdict|winner"
    "|i (?:would )?(?:choose|consider|give|grade|pick|rate|select)(?: it| this)?"
    "|the better (?:assistant|one|reply|response)|relatively the same(?=[ :.,*_]*\\[\\[A=)"
    "|bewertung|endgültige[rs]?|gesamt|mein|punktzahl|urteil|mon|ma|finale|mi|calificación|puntuación|veredicto"
    "|оценка|моя|итоговая|(?:最[终終]|[总總]|综合|総合|[评評]分|得分|分[数數]|判[决定]|[结結][论論]|我的|[评評][价価]|점수|최종|평가)+"
)
_SAYS = "|".join(  # what Arena-Hard asks for, before a verdict that says the same
    rf"(?:that [*_]*)?assistant {side}[*_]*(?:'s (?:answer|response))? (?:is|as) (?:\w+ly )?better"
    rf"(?=[ \t:.,*_]*\[\[{side}>)"
    for side in "ab"
)
_TAG = r"</?(?i:final[_-]?)?(?i:answer|verdict|score|result|rating|grade|judge?ment|decision|choice)>"
_SECTION = r"\[The (?:Begin|End) of [\w ]+\]"
_OWN = (  # the beginning of a sentence, and words before a verdict
    r"(?:\A|\n|[.!?;](?<!(?<!['’])\b[a-z]\.)[*_)\]\"'”]*(?:\s+|(?=\[))|[。！？]|</\w+>|,\s+so\s+(?=my .{0,6}verdict)|"
    r"(?<=[.!?]\s|\n|\A)(?i:(?:however, )?(?:considering|given|since)\b)[^.!?:;\n\"“”«»<>]{0,300}?,\s+(?=(?:my|I)\b))"
    rf"(?:[ \t]*\d+[.)] )?(?:[ \t*_`#$(,:：-]|(?i:{_WORDS}|{_SAYS})(?!\w)|{_TAG}|{_SECTION})*"
)
_FINAL = regex.compile(r"(?i:\b(?:final|overall|revised|corrected|updated)\b|最[终終]|최종)")
ENDS = regex.compile(rf"(?:[\s*_`.)\]$]|{_TAG}|{_SECTION})*+")
_BECAUSE = regex.compile(r"[*_`]*+[,.;:]?[*_`]*+[ \t]++(?i:because|since|due to|given that)\b")
_ANNOUNCED = regex.compile(r"(?i:\b(?:verdict|judge?ment|decision|winner|better|tie|scores?|ratings?)\b)")
_EXPLAINS = regex.compile(  # on a line of its own; or the answer that a question asks for, such as BBBBB
    r"[*_`.)\]]*+[ \t]*+\n[\s*_#-]*+(?i:(?:the (?:key |main )?)?(?:explanation|evaluation|reason(?:ing)?|rationale|"
    r"difference|factor)s?\b|(?:in conclusion, )?(?:while )?(?:both |the )?assistants?\b|both\b|([a-z])\1{2,}\s*\Z)"
)
_TAKES_BACK = regex.compile(  # or speaks of somebody else's
    r"(?im:(?:^|[.!?])[ \t*_]*(?:no|wait|actually|or rather|on second thought|correction|sorry)\b|</"
    r"|\b(?:(?<!for (?:my|this) )verdict|disagree|inject\w*|quot\w+|forged|fake|copied|says|claims|wrote|asks)\b)"
)
_FENCE = regex.compile(r"^[ \t]*(```+|~~~+)[^\n]*\n(.*?)(?:\n[ \t]*\1[ \t]*$|\Z)", regex.MULTILINE | regex.DOTALL)
_INTRODUCES = regex.compile(
    r"([:：]|```\w*|\b(?:as|has|had|get|is|of|reads|say|says|states|that|was|with|write|writes|wrote))[*_]*[ \t]*\n\s*"
)
_QUOTED = regex.compile(  # as some prompts write it
    r"(?m)((?:\A|^[#*_ ]*(?i:(?:my )?final verdict))[\s:*_]*)\"([^\"\n]*\[\[[\w<>=]+\]\][*_.]*)\"[.*]*\Z"
)

GAP = r"[ \t*_`()\[\]$]*+"
NUMBER = r"-?[0-9]{1,9}(?:\.[0-9]{1,9})?"


class NoVerdict(GymRMError):
    """A judge's answer has no verdict, or no clear one."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.kind = getattr(reason, "kind", "failed")


def read_last(text: str, opener: str, read: Callable[[Any], tuple[Value, int]], *, mark: str = "") -> Value:
    """Return the verdict that an answer ends with.

    Args:
        text: the answer without the judge's reasoning.
        opener: regular expression of the beginning of a verdict.
        read: returns the value that begins with a match, and where it ends; raises NoVerdict if there is none.
        mark: the word that every match has, so that no quotation can be one; empty without.

    Raises:
        NoVerdict: there is no verdict, there are different ones, or the answer goes on after it.
    """
    if len(text) > MAX_LENGTH:
        raise NoVerdict(f"the answer has {len(text)} characters, more than the {MAX_LENGTH} that are read")
    text = text if mark else _without_quotations(text)
    found, failures = list[tuple[Value, int, Any]](), list[str]()
    try:
        places = [each.end() for each in regex.finditer(opener, text, timeout=READING_SECONDS)]
        for match in regex.finditer(f"{_OWN}(?:{opener})", text, timeout=READING_SECONDS):
            if found and match.start() < found[-1][1]:  # inside of a JSON object
                continue
            try:
                found.append((*read(match), match))
            except NoVerdict as error:
                failures.append(str(error))
            if len(failures) > MOST_FAILURES:
                raise NoVerdict(f"the answer begins more than {MOST_FAILURES} verdicts without a value")
    except TimeoutError as error:
        raise NoVerdict(f"the answer takes more than {READING_SECONDS:g} s to read") from error
    if not found:
        wanted = "there is no verdict" + (f" with the mark {mark}" if mark else "")
        raise NoVerdict(": ".join([wanted, *failures[-1:]]))
    value, end, last = found[-1]
    rest, said = text[end:], last[0] + text[text.rfind("\n", 0, end) + 1 : end]
    explained = _BECAUSE.match(rest) or (_ANNOUNCED.search(said) and _EXPLAINS.match(rest))
    explained = explained and not _TAKES_BACK.search(rest) and max(places) <= end
    behind = rest.split("\n", 1)[0] if explained else rest
    sentence = (text[last.start() : end] + behind).lstrip(".!?;*_)]\"'”")  # of which the last one ended with
    closes_more = any(sentence.count(close) > sentence.count(opens) for opens, close in ("()", "[]"))
    if closes_more or not (explained or ENDS.fullmatch(text, end)):
        raise NoVerdict(f"the answer goes on after its verdict: {text[end:].strip()[:20]!r}")
    rivals = {str(other) for other, _, match in found if bool(_FINAL.search(match[0])) >= bool(_FINAL.search(last[0]))}
    if len(rivals) > 1:
        raise NoVerdict(f"there are different verdicts, {sorted(rivals)}")
    return value


def _without_quotations(text: str) -> str:
    """Return a text without what is in fences, but for a verdict, and with introductions in the line after them."""
    text = _QUOTED.sub(r"\1\2", text.rstrip())

    def shown(fence: Any) -> str:
        inside: str = fence[2].strip()
        is_line = fence.end() == len(text) and "\n" not in inside
        return inside if is_line or inside.startswith("{") else "code.\n"

    return str(_INTRODUCES.sub(r"\1 ", _FENCE.sub(shown, text)))


def line_of(name: str, mark: str) -> str:
    """Return the regular expression of the beginning of a line `NAME MARK: `, up to its value."""
    marked = rf"(?i:{regex.escape(mark)})\b{GAP}" if mark else ""
    return rf"(?i:{regex.escape(name)})\b{GAP}{marked}[:=：]{GAP}"


def number_on(scale: tuple[float, float], value: Any) -> float:
    """Return a number of a scale, also one that is written as a text. Raises NoVerdict if it is none."""
    number = float(value) if isinstance(value, str) and regex.fullmatch(NUMBER, value.strip()) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not scale[0] <= number <= scale[1]:
        raise NoVerdict(f"the score {value!s:.20} is not a number within {scale[0]:g} to {scale[1]:g}")
    return float(number)


def object_at(text: str, start: int) -> tuple[Mapping[str, Any], int]:
    """Return the JSON object that begins at a place, and its end. Raises NoVerdict if there is none, or a key twice."""
    try:
        found, end = json.JSONDecoder(object_pairs_hook=_without_duplicates).raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise NoVerdict(f"{text[start : start + 40]!r} is no JSON object") from error
    return found, end


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise NoVerdict(f"a key is given twice: {[key for key, _ in pairs]}")
    return dict(pairs)
