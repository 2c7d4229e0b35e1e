"""Answers in replies: where the answer of a reply is, and which part of a sentence it is. Every function is linear."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias, get_args

import regex

from gym_rm.scorers.math.denials import MARGIN, is_denied, is_listed
from gym_rm.scorers.math.numbers import (
    CHANGING_WORDS,
    MAX_ANSWER_LENGTH,
    ascii_digits,
    multiplier,
    parse_number,
    strip_markup,
)

Style = Literal["auto", "boxed", "gsm8k", "answer", "last", "choice"]
STYLES: tuple[str, ...] = get_args(Style)
Kind: TypeAlias = Literal["number", "formula", "words", "letter"]
"""What a reference is, and so what is searched for."""

DENIED = "\0denied"  # instead of an answer that the words around it deny
_MARKED_LENGTH = 20_000  # characters at the end in which "Answer:" is searched
_MAX_STATEMENTS = 16  # from the end that are tried for an answer
_BRACES = re.compile(r"\\(?P<box>boxed|fbox|framebox)\s{0,3}\{|\\.|(?P<brace>[{}])", re.DOTALL)
_BARE_BOX = re.compile(r"\\boxed\s{0,3}([^\s{}$\\.,;]{1,50})")
_TAG = re.compile(r"<answer>\s*|(</answer>)", re.IGNORECASE)
_HASHES = re.compile(r"####+[ \t]{0,8}([^\n#]*+)")
_APART = re.compile(  # between two boxes that are not one answer
    r"\n\s*\n|[.!?]\s|=>|\\implies|\\Rightarrow|[→⇒]|\b(?:so|thus|hence|therefore|then|answer|final\w*|total|sum|result"
    r"|gives?|implies|not|but|wait|instead|which|overall)\b",
    re.IGNORECASE,
)
_TOGETHER = re.compile(r"[,;&、，]|\b(?:and|or|und|oder|et|ou|y|o|e)\b|\\quad|[和或]")
_CORRECTION = re.compile(
    r"(?:^|[.!?\n}]|--|—)[\s*$]{0,6}+(?:but |no, |oh,? |hmm,? )?(?:wait|actually|correction|oops|sorry|scratch that|on second thought"
    r"|i made an? (?:mistake|error)|let me (?:correct|fix))\b",
    re.IGNORECASE,
)

# "Answer" in the languages of multilingual benchmarks; as a whole word where the script separates words.
_WORDS = (
    "answers?|ans|respuesta|réponse|antwort|risposta|resposta|antwoord|ответ|відповідь|odpowiedź|cevap|"
    "yanıt|jawaban(?:nya)?|jawapan|jibu|ìdáhùn|απάντηση|odpověď|odpoveď|svar(?:et)?|vastaus|răspuns|válasz|sagot|"
    "پاسخ|جواب|الجواب|الإجابة|תשובה|उत्तर|जवाब|উত্তর|సమాధానం|பதில்|ഉത്തരം|ಉತ್ತರ|ਜਵਾਬ|જવાબ"
)
_UNSPACED = "đáp án|câu trả lời|trả lời|答案|答え|答|回答|解答|정답|답변|답|คำตอบ"
_IS = "is|are|be|was|equals|es|est|ist|è|é|jest|är|er|är|on|là|adalah|ni|هو|هي|है|হল|হলো|είναι"
_IS_UNSPACED = "是|为|為|は|은|는|คือ"
_FINAL = r"(?:final|correct|right|best|final correct)"
_MARK = re.compile(
    rf"(?:\b(?:{_WORDS})(?![^\W\d_])|{_UNSPACED})"
    rf"(?P<of>[ \t](?:to|of|for)[ \t][^\n.:=]{{1,60}}?)?[ \t*_\"'`)]{{0,6}}"
    rf"(?:[:：=]|(?:\b(?:(?:would|should|must)[ \t])?(?:(?:{_IS})(?!\w))|{_IS_UNSPACED})(?:[ \t*_]{{0,4}}[:：]?))"
    r"|\b(?:answer|ans)[ ][-–—](?=[ ])",
    re.IGNORECASE,
)
_HEADING = re.compile(
    rf"^[#*_ \t]{{1,8}}(?:{_FINAL}[ \t])?(?:answer|{_UNSPACED})[*_ \t]{{0,6}}$", re.IGNORECASE | re.MULTILINE
)
_SHORT_MARK = re.compile(r"^[ \t>*_]{0,6}(?:A|Ans)[*_]{0,2}[ \t]{0,2}[:：]", re.MULTILINE)
_IT_IS = re.compile(r"\b(?:it|this|that|answer|value|result)(?:['’]s| is| must be| should be| would be| equals)\b:?|\bnot [^.\n]{1,40}? but(?= [$\\\d-])", re.IGNORECASE)
_MATH = (
    r"\$\$(?:\\[\s\S]|[^$\\]){1,2000}+\$\$|(?<![\\\w])\$(?:\\.|[^$\\\n]){1,999}+\$(?!\d)"
    r"|\\\((?:[^\\\n]|\\(?!\))){0,400}+\\\)|\\\[(?:[^\\]|\\(?!\])){0,600}+\\\]"
)
_SIGN = r"[-+*/^_=<>|≤≥≠≈×÷·±∪∩∈]"
_NAME = r"(?:sqrt|pi|sin|cos|tan|log|ln|exp|lcm|gcd|min|max|infty)(?![A-Za-z])"
_LETTER = r"(?<![A-Za-z'’])[A-Za-zα-ωΑ-Ω]['′]?(?![A-Za-z'’])"
_ATOM = rf"""(?:{_MATH}|\\(?:[A-Za-z]++|[%$,;:!{{}}|\\&])
    |\{{(?:[^{{}}\n]|\{{(?:[^{{}}\n]|\{{[^{{}}\n]*+\}})*+\}})*+\}}
    |[(\[](?:[\d\s.,;:%°π√∞!_{{}}$']|{_SIGN}|\\[A-Za-z,;!]++|{_NAME}|{_LETTER}|[(\[][^()\[\]\n]{{0,80}}[)\]])++[)\]]
    |(?<![\d.,])\d{{1,3}}(?:[ ]\d{{3}})++(?:,\d\d?)?(?![\d.,]?\d)
    |\.?\d(?:[.,:']?\d)*+(?:[eE][+-]?\d+)?[A-Za-z]*+|[A-Za-z]{{1,4}}(?=[\d(_^$]|[ ]?=)|{_NAME}|{_LETTER}
    |per[ ]?cent\b|(?i:[ap]\.?m\b)|{_SIGN}|[!%°√π∞∅⁰-₉²³½¼¾⅐-⅞‰′&$€£¥₹∠])"""
_SPACE = rf"""(?:(?<={_SIGN})[ ]++|[ ]++(?={_SIGN}[ ]?(?:[-\d\\({{√π$.]|{_LETTER}))|[ ]++(?=\\(?!q?quad|text|mathrm|mbox)[A-Za-z%,])
    |(?<=\\[A-Za-z]+(?:_\w|_\{{\w+\}})?)[ ](?=[\d\\({{√π]|{_LETTER})|(?<=\d)[ ](?=[√π%½¼¾€]|pi\b|per[ ]?cent\b|(?i:[ap]\.?m\b))
    |(?<=\d)[ ](?:and[ ])?(?=\d++/\d)|(?<=\d)[ ](?:x[ ](?=\d)|(?=[a-z]{{1,3}}\^))|(?<=\d)[ ](?![aI]\b)(?={_LETTER}(?![\w.])))"""
_ITEM = regex.compile(rf"(?<![A-Za-z\d_\\.])(?:{_ATOM})++(?:{_SPACE}(?:{_ATOM})++)*+", regex.VERBOSE)
_LIST = re.compile(r"\s*(?:,|;|,? ?(?:and|or)\b|,?\s*\\text\{\s*(?:and|or)\s*\})\s*")
_VALUE = re.compile(r"\d|\\(?:d?frac|sqrt|pi|infty|emptyset|varnothing|begin)|[π√∞∅½]")
_LEAD = re.compile(r"(?:(?:about|approximately|roughly|exactly|simply|just|therefore|thus|that|equal to|equals|a total of|only)[ ,:]*)*", re.IGNORECASE)
_CLAUSE = re.compile(
    r"[.;:!]\s|,? \(|[ ][-–—][ ]|,?[ ](?:because|since|as|for|where|when|which|who|whose|after|so that|found|obtained|using|given|by|with|while|but)\b"
    r"|,[ ](?=(?:found|it|this|that|the|a|in|so|and|not|is|being|thus)\b)",
    re.IGNORECASE,
)
_CHANGED = re.compile(
    rf"(?:[ -]\w+)?[ -](?:{CHANGING_WORDS})\b|-[A-Za-z]|[ ](?:(?!because|since|as\b|i[nfs]\b|o[nfr]\b|at\b|for|from|by|after|with|per\b|to\b|when)[^\W\d_]+,?[ ](?:and[ ])?)?\d|[ ]?(?:\d|分之|[点點倍半成割]|个半|[的之]|의|平方$|次方)",
    re.IGNORECASE,
)
_YES = re.compile(r"(?:yes|no|true|false)\b(?=[*_`$}]{0,4}[,.;:!])", re.IGNORECASE)
_ORDINAL = re.compile(r"\d+(?:st|nd|rd|th)", re.IGNORECASE)
_EQUALS = re.compile(r"(?<![\\<>!:=≠])=(?!=)")
_APPROXIMATELY = re.compile(r"(?<=\S)\s*(?:\\approx(?![a-z])|≈)")
_QUANTITY = re.compile(  # what may stand before the equals sign of a value
    r"(?:\\?[A-Za-z]{1,10}(?:_\{?\w{1,9}\}?)?'?|\|?[A-Z]{1,4}\|?|(?:\\angle|\\triangle|∠|\\overline|\\text|\\mathrm)\s?\{?[\w\s]{1,40}\}?"
    r"|[A-Za-z]\w?\([^()=]{1,30}\)|\[[A-Z]{2,6}\]|[a-dm-qk](?:\+[a-dm-qk])+)"
)

_OPEN = (
    r"(?:\\(?:text|mathrm|textbf|mathbf|boxed)\{|(?:la )?(?:option|opción)\b|choice\b|letter\b"
    r"|[\s*_(\[{$\"'`“«（【:：])"
)
_OPTION = re.compile(
    r"\b(?:correct|right|best) (?:option|choice|letter) (?:is|would be)\b|[故应應]选择?"
    r"|\b(?:respuesta|opción|réponse|risposta|resposta|opção) (?:correct[ae]|corretta|correta) (?:est?|è|é)\b(?: la\b)?"
    r"|\b(?:option|choice)\b(?=[ *_(]{1,5}[A-J][*_)]{0,3} is (?:the )?(?:correct|right|best)\b)"
    r"|\b(?:choose|pick|select|go with)\b|(?:^|[.\n]\s{0,3})(?=[*(]{0,3}[A-J][*)]{0,3} is (?:the )?(?:correct|right|best)\b)"
    r"|\b(?:it|this)(?:['’]s| is| must be| should be)\b(?= [*(]{0,3}[A-J]\b)",
    re.IGNORECASE,
)
_EAST_ASIAN = "가-힣ぁ-ヿ一-鿿"  # words of these scripts follow a Latin letter without a space
_CHOICE = re.compile(
    rf"{_OPEN}{{0,10}}+(?:(?P<letter>[A-J])(?![\w'’])|(?P<joined>[A-J])(?=[{_EAST_ASIAN}]))", re.IGNORECASE
)
_GAP = r"(?:\\[a-z]{2,8}\b|[^\w\n:.]){0,12}"
_ANOTHER = re.compile(
    rf"{_GAP}(?:\b(?:or|and|oder|und|ou|et|o|y|e)\b)?{_GAP}[A-J](?!\w){_GAP}\.?"
    rf"(?:$|\n|(?:or|and)\b|[A-J](?!\w))"
)
_IN_BRACKETS = re.compile(r"[(（\[]\s?(?P<letter>[A-J])\s?[)）\]]")
_GOLD_CHOICE = re.compile(
    r"(?:\\(?:text|textbf|mathrm|mathbf)\{)?\s?(?:\(([A-J])\)|([A-J])(?:[).]|:(?=\s)|(?=\}?$)))\s?\}?(?:\\ |[\s:.])*(.*)", re.DOTALL
)


def extract(text: str, style: str = "auto", *, kind: Kind = "number") -> str | None:
    """Return the answer in a reply, None if there is none.

    The style `auto` takes what the reply states last in a box, `<answer>`, after `####`, `Answer:` or `The answer is`
    (also in other languages, and a line `A: ...`); what follows a correction (`Wait, ...`) counts more. Without any of
    these it is the last formula or number, or the letter that the reply names.

    Args:
        text: a reply, without its reasoning.
        style: one of `STYLES`.
        kind: what the reference is. Marks that no number follows are skipped for a number.
    """
    text = _plain(text)
    if style == "choice" or (kind == "letter" and style in ("auto", "answer")):
        return choice(text)
    corrections = [each.end() for each in _CORRECTION.finditer(text, max(0, len(text) - _MARKED_LENGTH))]
    if style == "auto" and corrections:
        after = text[corrections[-1] :]
        found = _stated(after, style, kind) or _corrected(after, kind) or _last(after, kind)
        if found is not None or is_denied(after, 0, 0):
            return None if found == DENIED else found
        text = text[: corrections[-1]]
    found = _stated(text, style, kind)
    if found is None and style in ("auto", "last"):
        found = _last(text, kind)
    return None if found == DENIED else found


def _plain(text: str) -> str:
    """Return a text with digits and thousands as in ASCII, and with tags as lines that begin with `Answer:`."""
    text = _TAG.sub(lambda tag: "\n\n" if tag[1] else "\nAnswer: ", text) if "nswer>" in text.casefold() else text
    return ascii_digits(text).rstrip()


def _stated(text: str, style: str, kind: Kind) -> str | None:
    """Return what the last explicit statement says, `DENIED` if it denies what it names."""
    wanted = ("boxed", "gsm8k", "answer") if style == "auto" else (style,)
    places: list[tuple[int, str, str]] = []
    if "boxed" in wanted:
        places += [(start, "box", content) for start, content in _boxes(text)[-1:]]
    if "gsm8k" in wanted:
        places += [(place, "hashes", content) for place, content in _hashes(text, kind)]
    if "answer" in wanted:
        places += [(place, "mark", "") for place in _marks(text)]
    for place, what, content in sorted(places)[: -_MAX_STATEMENTS - 1 : -1]:
        found: str | None = _clause(strip_markup(content)) if kind == "words" and content != DENIED else content
        if what == "mark":
            line = _line(text[place : place + MAX_ANSWER_LENGTH + 1].lstrip(" \t\n*_`:："))
            found = _content(text[max(0, place - MARGIN) : place], line, kind)
            if found == DENIED and style == "auto":
                return _corrected(text[place:], kind) or DENIED
        if found is not None and found.strip():
            return found.strip()
    return None


def _corrected(text: str, kind: Kind) -> str | None:
    """Return what follows the last `it is` of a text."""
    for match in list(_IT_IS.finditer(text[:MAX_ANSWER_LENGTH]))[:-5:-1]:
        found = _content("", _line(text[match.end() :].lstrip()), kind)
        if found is not None:
            return found
    return None


def boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` or `\\fbox{...}` with balanced braces, of nested the innermost.

    Several boxes in one sentence are one answer, a list. `\\boxed 5` counts if there is none with braces.
    """
    found = _boxes(text)
    return None if not found or found[-1][1] == DENIED else found[-1][1]


def _boxes(text: str) -> list[tuple[int, str]]:
    """Return where the boxes of the last sentence that has one begin, and their content; `DENIED` if words deny it."""
    if "box" not in text:
        return []
    opened: list[tuple[bool, int, int]] = []
    closed: list[tuple[int, int, str]] = []
    for match in _BRACES.finditer(text):
        if match["brace"] != "}" and (match["box"] or match["brace"]):
            opened.append((match["box"] is not None, match.start(), match.end()))
        elif match["brace"] and opened:
            is_box, start, inside = opened.pop()
            if is_box and not (closed and closed[-1][0] > start):  # of nested boxes the innermost
                closed.append((start, match.end(), text[inside : match.start()]))
            elif is_box:
                closed[-1] = (start, match.end(), closed[-1][2])
    if not closed:
        bare = [(each.start(), each[1]) for each in _BARE_BOX.finditer(text)]
        cut = [(start, text[start:]) for is_box, start, _ in opened if is_box]  # the text of an open box is no answer
        return cut[-1:] or bare[-1:]
    group = closed[-1:]
    for box in reversed(closed[-32:-1]):
        gap = text[box[1] : group[0][0]]
        joined = not gap.strip(" $\\(){}") or (len(gap) <= 60 and _TOGETHER.search(gap) and not _APART.search(gap))
        if not joined:
            break
        group.insert(0, box)
    if is_denied(text, group[-1][0], group[-1][1]):
        return [(group[-1][0], DENIED)]
    return [(group[-1][0], ", ".join(dict.fromkeys(each[2].strip() for each in group)))]


def _hashes(text: str, kind: Kind) -> Iterator[tuple[int, str]]:
    """Yield where `####` stands before an answer, and the answer; a heading of a text is none."""
    for match in _HASHES.finditer(text):
        content = match[1].strip(" \t*!")
        is_last = not text[match.end() :].strip(" \n\t#*-")
        named = is_last and (kind != "number" or _VALUE.search(content)) and not _HEADING.match(match[0])
        if content and (named or (parse_number(content) is not None and not re.match(r"\d+[.)]\s", content))):
            yield match.start(1), content


def _marks(text: str) -> list[int]:
    """Return where the marks such as `Answer:` end."""
    start = max(0, len(text) - _MARKED_LENGTH)
    return sorted({each.end() for mark in (_MARK, _HEADING, _SHORT_MARK) for each in mark.finditer(text, start)})


def _line(text: str) -> str:
    """Return the first line, or a displayed formula that begins there."""
    for left, right in (("$$", "$$"), (r"\[", r"\]")):
        end = text.find(right, len(left)) if text.startswith(left) else -1
        if end >= 0:
            return text[: end + len(right)]
    return text.partition("\n")[0]


def _content(before: str, line: str, kind: Kind) -> str | None:
    """Return the answer in the line after a mark, without the words of a sentence around it."""
    line = line.strip(" \t*_`")
    if not line or len(line) > MAX_ANSWER_LENGTH or kind == "words":
        return _clause(line) or None
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
    return _clause(line) if found is None and kind != "number" else found


def _clause(line: str) -> str:
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
        valued = _VALUE.search(written) or (kind != "number" and re.search(rf"{_SIGN}|\$|\\[(\[]", written))
        if not valued or _ORDINAL.fullmatch(written):
            continue
        if spans and _LIST.fullmatch(text, spans[-1][1], begin):
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((begin, end))
    with_value = [each for each in spans if _VALUE.search(text, *each)]
    return with_value or spans


def _asserted(text: str, spans: Sequence[tuple[int, int]]) -> str | None:
    """Return the last of some answers that the words around it do not deny; `DENIED` if all are denied."""
    for start, end in reversed(spans[-4:]):
        _, length = multiplier(text[end : end + 60]) if text[end - 1 : end].isdigit() else (1, 0)
        end += length
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


def _last(text: str, kind: Kind) -> str | None:
    """Return the last number or formula of a text, in a language whose denials are known."""
    if kind == "words":
        line = text.strip().rpartition("\n")[2]
        return (_YES.match(line) and _clause(line)) or _clause(re.split(r"\b(?:is|are|was)\b", line)[-1]) or None
    tail = text[-2 * MAX_ANSWER_LENGTH - 2 :]
    spans = _lists(tail, 0, kind)
    if not spans:
        return None
    sentence = max(tail.rfind(end, 0, spans[-1][0]) for end in (". ", "! ", "? ", "\n")) + 1
    words = re.sub(r"\\[A-Za-z]+|\$[^$]*\$", " ", tail[sentence:])
    if not is_listed(words) and parse_number(words) is None:
        return None
    return _asserted(tail, [each for each in spans if each[0] >= sentence])


def value_side(text: str, rounded: bool) -> str:
    """Return what an equation says that a quantity is, such as `x`, `AB`, `f(2)` or `3 + 4`; else the whole text.

    Of `x = 10/3 \\approx 3.33` it is the exact value, or the rounded one if that is wanted. A name of one letter stays.
    """
    exactly, *about = _APPROXIMATELY.split(text, maxsplit=1)
    sides = _EQUALS.split(exactly)
    if len(sides) == 2 and re.fullmatch(r"\s*[A-Za-z]\s*", sides[1]):  # 5 = x
        sides.reverse()
    name = re.sub(r"\\(?:left|right)\b|\\[,;! ]|[\s$]", "", sides[0])
    is_constant = not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", name))
    if re.search(r"[,;]|\\text\{|\b(?:and|or)\b", re.sub(r"\([^()]*\)", "", text)) or not (is_constant or _QUANTITY.fullmatch(name)):
        return text
    value = about[0] if about and (rounded or (len(sides) == 1 and not is_constant)) else sides[-1]
    is_assigned = (len(sides) > 1 or about) and len(name) == 1 and name.isalpha()
    return f"{name} = {value.strip()}" if is_assigned else value.strip()


def is_equation(text: str) -> bool:
    """Return whether an answer is an equation or an inequality, and not the value of a letter."""
    text = re.sub(r"^[A-Za-z] = ", "", text)
    return _EQUALS.search(text) is not None or re.search(r"[<>≤≥≠]|\\(?:[lg]eq?|[lg]t|neq?)(?![a-z])", text) is not None


def choice(text: str) -> str | None:
    """Return the letter of the choice that a reply names last, as one of A to J.

    It is in a box, after a mark such as `Answer:` in one of many languages, in brackets, or all of a line.
    """
    for before, candidate in _candidates(text):
        match = _CHOICE.match(candidate)
        if match is None:
            continue
        if match["letter"] and _ANOTHER.match(candidate, match.end()):
            return None  # several letters
        letter = match["letter"] or match["joined"]
        # A lower-case letter, or the article "A", begins a word of a sentence unless nothing else follows.
        rest = candidate[match.end() :].lstrip()
        alone = not rest or not (rest[0].isalnum() or rest[0] in "=+^<>") or match["joined"] is not None
        if is_denied(before + candidate, len(before), len(before) + match.end()):
            continue
        if alone or (letter.isupper() and letter not in "AI" and rest[0].isalnum()):
            return letter.upper()
    tail = text[-MAX_ANSWER_LENGTH:]
    found = [one for one in _IN_BRACKETS.finditer(tail) if not is_denied(tail, *one.span())]
    return found[-1]["letter"] if found else None


def _candidates(text: str) -> Iterator[tuple[str, str]]:
    """Yield what stands before and at the places where a letter may be, the most certain first."""
    start = max(0, len(text) - _MARKED_LENGTH)
    places = [(place, text[place : place + 100]) for place in _marks(text)]
    places += [(match.end(), text[match.end() : match.end() + 100]) for match in _OPTION.finditer(text, start)]
    places += [(place, content[:MAX_ANSWER_LENGTH]) for place, content in _boxes(text)]
    for place, candidate in sorted(places)[: -_MAX_STATEMENTS - 1 : -1]:
        yield text[max(0, place - MARGIN) : place], candidate
    lines = text[-MAX_ANSWER_LENGTH:].strip().splitlines()
    for line in (lines[-1:] + lines[:1]) if lines else []:
        bare = re.sub(r"^(?:option|choice) ", "", line.strip(" \t*_().[]`$#"), flags=re.IGNORECASE).strip("()")
        if len(bare) == 1:
            yield "", bare
        elif re.match(r"(?:\\(?:text|textbf|mathrm|mathbf)\{|[*($]){0,4}[A-J][)}.:]", line.strip()):
            yield "", line.strip()


def choice_of_gold(gold: str) -> tuple[str | None, str]:
    """Return the letter that a reference is, None if it is not a letter; and what stands behind it, as in `(D) 5`."""
    match = _GOLD_CHOICE.fullmatch(gold.strip(" $*."))
    return (match[1] or match[2], match[3].strip()) if match else (None, "")


_BASES = dict(zip("two three four five six seven eight nine ten eleven twelve".split(), "2 3 4 5 6 7 8 9 10 11 12".split()))
_BASES |= {"sixteen": "16"}
_OPERATIONS = re.compile(
    r"(?<![A-Za-z])(?:min|max|gcd|lcm|sum|prod|i*int|lim|lfloor|lceil|floor|ceil|det|bmod|mod|arg(?:min|max)|frac\{d\}\{d[a-z]\})(?![A-Za-z])"
)


def normal_text(text: str) -> str:
    """Return a text for comparison of words and formulas as they are written: no markup, spaces or case of words."""
    text = strip_markup(text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\varnothing(?![a-z])|∅", r"\\emptyset", text)
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s?\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"(?<=\d)\s*([ap])\.?m\b", lambda half: f"{half[1]}m".lower(), text, flags=re.IGNORECASE)  # 9:15 a.m.
    text = re.sub(r"\(?(\d\w*)\)?_\{?([^\W_]+)\}?$", lambda base: f"{base[1]}_{_BASES.get(base[2], base[2])}", text)
    bare = "".join(text.split())
    return " ".join(text.split()).casefold() if is_words(text) else bare


def has_base(normal: str) -> bool:
    """Return whether a normal text is a number in another base, as `2516_8`."""
    return re.fullmatch(r"-?[\dA-F]+_\d+", normal) is not None


def operations(latex: str) -> set[str]:
    """Return the operations of a formula that somebody has yet to carry out."""
    return set(_OPERATIONS.findall(latex))


def is_words(text: str) -> bool:
    """Return whether a text is words: letters, spaces and hyphens only; `ab` is a product, and `no` a word."""
    words = r"(?:[^\W\d_]{3,}|[^\W\d_A-Za-z]{2}|(?i:no|on|up|we|he|it))(?:[ '\-,][^\W\d_]+)*"
    return re.fullmatch(words, text.strip()) is not None


def is_changed(text: str) -> bool:
    """Return whether words or more work change a number, as in `5 squared`, `5\\text{ or more}` and `5(3)`."""
    digit = re.search(r"\d", text)
    changed = digit is not None and _CHANGES.search(text, digit.start()) is not None
    return changed or _WORK.search(text) is not None or text.count("\\div") > 1


_CHANGES = re.compile(rf"(?<!\\)\b(?:{CHANGING_WORDS})\b", re.IGNORECASE)
_WORK = re.compile(
    r"\\text\{[^{}]{0,80}\b(?:or|not|is|was|if|but|never|except|wrong|error)\b|\d\s?(?:\\left)?\(|\)\s?(?:\\left)?[(\d]",
    re.IGNORECASE,
)
_LATEX = {r"\langle": "(", r"\rangle": ")", r"\log_e": r"\ln ", r"\log_{e}": r"\ln ", "½": r"\frac{1}{2}"}
_LATEX |= {"°": r"^{\circ}", "π": r"\pi ", "√": r"\sqrt ", "×": r"\times ", "÷": r"\div "}
_LATEX |= {r"\mathrm{e}": "{e}", r"\text{e}": "{e}", "·": r"\cdot ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∞": r"\infty "}
_LATEX |= {"∪": r"\cup ", "∈": r"\in "}
_CHAIN = re.compile(r"([^<>=]+)>\s*(=?)([^<>=]+)>\s*(=?)([^<>=]+)")  # 2 > x > 1
_PLAIN = (
    (re.compile(r"(?<![\w.])(\d{1,20}(?:\.\d{1,20})?)[eE]([+-]?\d{1,3})(?!\w)"), r"\1*10^{\2}"),
    (re.compile(r"(?<=\d) x (?=\d)"), r"\\times "),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\*"), r" \\cdot "),
    (re.compile(r"\bsqrt\s?\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\^\(?(-?\w{2,})\)?"), r"^{\1}"),
    (re.compile(r"(?<![A-Za-z\\])(pi|sqrt|sin|cos|tan|log|ln|infty)\b"), r"\\\1 "),
)


def to_latex(text: str) -> str | None:
    """Return an answer as LaTeX without markup; None if its braces are not balanced, or it is empty or too long."""
    if len(text) > MAX_ANSWER_LENGTH:
        return None
    text = re.sub(r"\\?\$|\\[()\[\]]", "", strip_markup(text))
    text = "".join(each if each.isprintable() else " " for each in text)
    if "\\" not in text:
        for pattern, new in _PLAIN:
            text = pattern.sub(new, text)
    for old, new in _LATEX.items():
        text = text.replace(old, new)
    if chain := _CHAIN.fullmatch(re.sub(r"\\geq?(?![a-z])|\\gt(?![a-z])", lambda g: ">" + "=" * ("e" in g[0]), text)):
        text = f"{chain[5]}<{chain[4]}{chain[3]}<{chain[2]}{chain[1]}".replace("<=", r"\le ")
    depth = 0
    for match in _BRACES.finditer(text):
        depth += -1 if match["brace"] == "}" else 1 if match["brace"] or match["box"] else 0
        if depth < 0:
            return None
    return text if depth == 0 and text.strip() else None


def gold_answer(text: str) -> str:
    """Return the answer in a reference: what it states last as a reply would; otherwise all of it."""
    text = _plain(text).strip()
    kind: Kind = "number" if re.search(r"\d", text) else "formula"
    found = _stated(text, "auto", kind)
    letter = re.match(r"[\s*_(]*([A-J])[)*_.]*\s*$", text[_marks(text)[-1] :]) if _marks(text) else None
    return letter[1] if letter else text if found in (None, DENIED) else str(found)
