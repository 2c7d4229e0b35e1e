"""Numbers and formulas in sentences, each with all that touches it, and which of them is the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

import regex

from gym_rm.scorers.math.denials import is_denied, is_listed
from gym_rm.scorers.math.numbers import CHANGING_WORDS, MAX_ANSWER_LENGTH, multiplier, parse_number, strip_markup

Kind: TypeAlias = Literal["number", "formula", "words", "letter"]
"""What a reference is, and so what is searched for."""
DENIED = "\0denied"  # instead of an answer that the words around it deny

_MATH = (
    r"\$\$(?:\\[\s\S]|[^$\\]){1,2000}+\$\$|(?<![\\\w])\$(?:\\.|[^$\\\n]){1,999}+\$(?!\d)"
    r"|\\\((?:[^\\\n]|\\(?![()])){0,999}+\\\)|\\\[(?:[^\\]|\\(?![\[\]])){0,999}+\\\]"
)
_SIGN = r"[-+*/^_=<>|≤≥≠≈×÷·±∪∩∈]"
_NAME = r"(?:sqrt|pi|sin|cos|tan|log|ln|exp|lcm|gcd|min|max|infty)(?![A-Za-z])"
_LETTER = r"(?<![A-Za-z'’])[A-Za-zα-ωΑ-Ω]['′]?(?![A-Za-z'’])"
_ATOM = rf"""(?:{_MATH}
    |\\(?:[A-Za-z]++|[%$,;:!{{}}|\\&])
    |\{{(?:[^{{}}\n]|\{{(?:[^{{}}\n]|\{{[^{{}}\n]*+\}})*+\}})*+\}}
    |[(\[](?:[\d\s.,;:%°π√∞!_{{}}$']|{_SIGN}|\\[A-Za-z,;!]++|{_NAME}|{_LETTER}|[(\[][^()\[\]\n]{{0,80}}[)\]])++[)\]]
    |(?<![\d.,])\d{{1,3}}(?:[ ]\d{{3}})++(?:,\d\d?)?(?![\d.,]?\d)   # 1 234,5
    |\.?\d(?:[.,:']?\d)*+(?:[eE][+-]?\d+)?[A-Za-z]*+                # 1.5, 3x, 18km
    |[A-Za-z]{{1,4}}(?=[\d(_^$]|[ ]?=)|{_NAME}|{_LETTER}            # f(2), AB = 5, x
    |per[ ]?cent\b|(?i:[ap]\.?m\b)|{_SIGN}|[!%°√π∞∅⁰-₉²³½¼¾⅐-⅞‰′&$€£¥₹∠])"""
_SPACE = rf"""(?:(?<={_SIGN})[ ]++|[ ]++(?={_SIGN}[ ]?(?:[-\d\\({{√π$.]|{_LETTER}))       # 3 + 4
    |[ ]++(?=\\(?!q?quad|text|mathrm|mbox)[A-Za-z%,])|(?<=\\[A-Za-z]+(?:_\w|_\{{\w+\}})?)[ ](?=[\d\\({{√π]|{_LETTER})
    |(?<=\d)[ ](?:and[ ])?(?=\d++/\d)|(?<=\d)[ ](?=[√π%½¼¾€]|pi\b|per[ ]?cent\b|(?i:[ap]\.?m\b))  # 2 2/3, 36 π
    |(?<=\d)[ ](?:x[ ](?=\d)|(?=[a-z]{{1,3}}\^)|(?![aI]\b)(?={_LETTER}(?![\w.]))))"""  # 6 x 10, 5 cm^2, 3 x
_ITEM = regex.compile(rf"(?<![A-Za-z\d_\\.])(?:{_ATOM})++(?:{_SPACE}(?:{_ATOM})++)*+", regex.VERBOSE)
_LIST = re.compile(r"\s*(?:,|;|,? ?(?:and|or)\b|,?\s*\\text\{\s*(?:and|or)\s*\})\s*")
HAS_VALUE = re.compile(r"\d|\\(?:d?frac|sqrt|pi|infty|emptyset|varnothing|begin)|[π√∞∅½]")
_LEAD = re.compile(
    r"(?:(?:about|approximately|roughly|exactly|simply|just|therefore|thus|that|equal to|a total of|only)[ ,:]*)*",
    re.IGNORECASE,
)
_CLAUSE = re.compile(
    r"[.;:!]\s|,? \(|[ ][-–—][ ]|,[ ](?=(?:found|it|this|that|the|a|in|so|and|not|is|being|thus)\b)"
    r"|,?[ ](?:because|since|as|for|where|when|which|who(?:se)?|after|so that|found|obtained|using|given)\b"
    r"|,?[ ](?:by|with|while|but)\b",
    re.IGNORECASE,
)
_NO_NOUN = r"because|since|as|i[nfs]|o[nfr]|at|for|from|by|after|with|per|to|when"
_CHANGED = re.compile(  # 5 squared, 5-gon, 5 feet 6 inches, 5分之2
    rf"(?:[ -]\w+)?[ -](?:{CHANGING_WORDS})\b|-[A-Za-z]|[ ](?:(?!(?:{_NO_NOUN})\b)[^\W\d_]+,?[ ](?:and[ ])?)?\d"
    r"|[ ]?(?:\d|分之|[点點倍半成割]|个半|[的之]|의|平方$|次方)",
    re.IGNORECASE,
)
_YES = re.compile(r"(?:yes|no|true|false)\b(?=[*_`$}]{0,4}[,.;:!])", re.IGNORECASE)
_ORDINAL = re.compile(r"\d+(?:st|nd|rd|th)", re.IGNORECASE)


def line_answer(before: str, line: str, kind: Kind) -> str | None:
    """Return the answer in the line after a mark, without the words of a sentence around it."""
    line = line.strip(" \t*_`")
    if not line or len(line) > MAX_ANSWER_LENGTH or kind == "words":
        return clause(line) or None
    text = f"{before} {line}"
    start = len(text) - len(line)
    if parse_number(line) is not None:
        return _asserted(text, [(start, len(text))])
    lists = _lists(text, start, kind)
    lead = _LEAD.match(text, start)
    if lists and lead and lists[0][0] <= lead.end():
        return _asserted(text, lists[:1])
    end = _CLAUSE.search(text, start)
    first = [each for each in lists if end is None or each[1] <= end.start()]
    if re.match(r"(?:if|when|since|as|because|for|we|with|after|let)\b", line, re.IGNORECASE):
        first = lists
    found = _asserted(text, first or lists)
    return clause(line) if found is None and kind != "number" else found


def clause(line: str) -> str:
    """Return the first clause of a line, or its `Yes` or `No`."""
    line = line.lstrip(" \t*_`")
    answer = _YES.match(line)
    return answer[0] if answer else strip_markup(_CLAUSE.split(line, maxsplit=1)[0])


def _lists(text: str, start: int, kind: Kind) -> list[tuple[int, int]]:
    """Return where the numbers and formulas of a text are; what `,`, `and` or `or` joins is one."""
    spans: list[tuple[int, int]] = []
    for item in _ITEM.finditer(text, start):
        begin, end = item.span()
        end = begin + len(item[0].rstrip("-+*/_=<>|:\\$&" if not item[0].endswith(("$", "\\)", "\\]")) else ""))
        written = text[begin:end]
        valued = HAS_VALUE.search(written) or (kind != "number" and re.search(rf"{_SIGN}|\$|\\[(\[]", written))
        if not valued or _ORDINAL.fullmatch(written):
            continue
        if spans and _LIST.fullmatch(text, spans[-1][1], begin):
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((begin, end))
    with_value = [each for each in spans if HAS_VALUE.search(text, *each)]
    return with_value or spans


def _asserted(text: str, spans: Sequence[tuple[int, int]]) -> str | None:
    """Return the last of some answers that the words around it do not deny; `DENIED` if all are denied."""
    for start, end in reversed(spans[-4:]):
        end += multiplier(text[end : end + 60])[1] if text[end - 1].isdigit() else 0
        if not is_denied(text, start, end):
            return DENIED if _CHANGED.match(text, end) else _unwrapped(text[start:end])
    return DENIED if spans else None


def _unwrapped(text: str) -> str:
    """Return an answer without markup, dollar signs of formulas, and brackets around one number."""
    if regex.fullmatch(_MATH, text):
        text = text[2:-2] if text[:2] in ("$$", "\\(", "\\[") else text[1:-1]
    text = strip_markup(text if text.count("$") < 2 else text.replace("$", ""))
    text = re.sub(r",?\s+(?:and|or)\s+(?!\d+/\d)", ", ", text)
    return text[1:-1] if text[:1] == "(" and text[-1:] == ")" and parse_number(text[1:-1]) else text.strip()


def last_answer(text: str, kind: Kind) -> str | None:
    """Return the last number or formula of a text, in a language whose denials are known."""
    if kind == "words":
        line = text[-MAX_ANSWER_LENGTH:].strip().rpartition("\n")[2]
        return (_YES.match(line) and clause(line)) or clause(re.split(r"\b(?:is|are|was)\b", line)[-1]) or None
    tail = text[-2 * MAX_ANSWER_LENGTH - 2 :]
    spans = _lists(tail, 0, kind)
    if not spans:
        return None
    sentence = max(tail.rfind(end, 0, spans[-1][0]) for end in (". ", "! ", "? ", "\n")) + 1
    formulas = r"\\(?:begin|end)\{\w+\*?\}|\\[A-Za-z]+|\$[^$]*\$"
    if not any(is_listed(re.sub(formulas, " ", tail[sentence:end])) for end in (spans[-1][0], len(tail))):
        return None
    return _asserted(tail, [each for each in spans if each[0] >= sentence])
