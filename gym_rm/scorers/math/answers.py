"""Answers in replies: where the answer of a reply is, and what it says. Every function needs linear time."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from gym_rm.scorers.math.denials import MARGIN, is_denied
from gym_rm.scorers.math.numbers import (
    CHANGING_WORDS,
    MAX_ANSWER_LENGTH,
    MULTIPLIER_WORDS,
    ascii_digits,
    parse_number,
    strip_markup,
)

Style = Literal["auto", "boxed", "gsm8k", "answer", "last", "choice"]
STYLES: tuple[str, ...] = get_args(Style)

DENIED = "\0denied"  # instead of an answer that the words around it deny
_MARKED_LENGTH = 20_000  # characters at the end in which "Answer:" is searched
_MAX_MARKS = 16  # marks from the end that are tried for an answer
_BRACES = re.compile(r"\\(?P<box>boxed|fbox|framebox)\s{0,3}\{|\\.|(?P<brace>[{}])", re.DOTALL)
_BARE_BOX = re.compile(r"\\boxed\s{0,3}([^\s{}$\\.,;]{1,50})")
_HASHES = re.compile(r"####+[ \t]{0,8}([^\n#]*+)")

# "Answer" in the languages of multilingual benchmarks; as a whole word where the script separates words.
_WORDS = (
    "answers?|ans|respuesta|réponse|antwort|risposta|resposta|antwoord|ответ|відповідь|odpowiedź|cevap|"
    "yanıt|jawaban|jawapan|jibu|ìdáhùn|απάντηση|odpověď|odpoveď|svar|vastaus|răspuns|válasz|sagot|"
    "پاسخ|جواب|الجواب|الإجابة|תשובה|उत्तर|जवाब|উত্তর|సమాధానం|பதில்|ഉത്തരം|ಉತ್ತರ|ਜਵਾਬ|જવાબ"
)
_UNSPACED = "đáp án|câu trả lời|trả lời|答案|答え|答|回答|解答|정답|답변|답|คำตอบ"
_IS = "is|are|be|was|equals|es|est|ist|è|é|jest|är|er|är|on|là|adalah|ni|هو|هي|है|হল|হলো|είναι"
_IS_UNSPACED = "是|为|為|は|은|는|คือ"
_FINAL = r"(?:final|correct|right|best|final correct)"
_MARK = re.compile(
    rf"(?:\b(?:{_WORDS})(?![^\W\d_])|{_UNSPACED})"
    rf"(?P<of>[ \t](?:to|of|for)[ \t][^\n.:=]{{1,60}}?)?[ \t*_\"'`)]{{0,6}}"
    rf"(?:[:：=]|(?:\b(?:(?:would|should)[ \t])?(?:(?:{_IS})(?!\w))|{_IS_UNSPACED})(?:[ \t*_]{{0,4}}[:：]?))",
    re.IGNORECASE,
)
_HEADING = re.compile(
    rf"^[#*_ \t]{{1,8}}(?:{_FINAL}[ \t])?(?:answer|{_UNSPACED})[*_ \t]{{0,6}}$", re.IGNORECASE | re.MULTILINE
)
_SHORT_MARK = re.compile(r"^[ \t>*_]{0,6}(?:A|Ans)[*_]{0,2}[ \t]{0,2}[:：]", re.MULTILINE)
_FORMULA = re.compile(
    r"\$\$(?P<double>(?:\\[\s\S]|[^$\\])++)\$\$|(?<![\\\w])\$(?P<dollar>(?:\\.|[^$\\\n])++)\$(?!\d)"
    r"|\\\((?P<round>(?:[^\\\n]|\\(?!\)))*+)\\\)|\\\[(?P<square>(?:[^\\]|\\(?!\]))*+)\\\]"
)
_TOKEN = re.compile(
    r"(?<![\w.])-?[ ]?(?:\\?\$|[€£¥₹])?[ ]?-?\.?(?:\d{1,3}(?:[ ]\d{3})++(?:,\d\d?)?(?![\d.,]?\d)|\d(?:[,.]?\d)*+)"
    r"(?:[eE][+-]?\d{1,3}(?!\w))?(?:[ ]?/[ ]?\d++)?(?:[ ]?(?:\\?%|per ?cent\b|€))?"
    rf"(?:[ -](?:{MULTIPLIER_WORDS})s?\b)?"
)
_CHANGED = re.compile(rf"(?:[ -]\w+)?[ -](?:{CHANGING_WORDS})\b", re.IGNORECASE)
_REMARK = re.compile(r"(?P<answer>[^()]{1,100}) \((?=[^\W\d_]{2})")
_ASSIGNED = re.compile(r"(?:.*[^\\<>!:]|^)=\s?(?=[^=])", re.DOTALL)

_OPEN = (
    r"(?:\\(?:text|mathrm|textbf|mathbf|boxed)\{|(?:la )?(?:option|opción)\b|choice\b|letter\b"
    r"|[\s*_(\[{$\"'`“«（【:：])"
)
_OPTION = re.compile(
    r"\b(?:correct|right|best) (?:option|choice|letter) (?:is|would be)\b|[故应應]选择?"
    r"|\b(?:respuesta|opción|réponse|risposta|resposta|opção) (?:correct[ae]|corretta|correta) (?:est?|è|é)\b(?: la\b)?"
    r"|\b(?:option|choice)\b(?=[ *_(]{1,5}[A-J][*_)]{0,3} is (?:the )?(?:correct|right|best)\b)",
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


def extract(text: str, style: str = "auto", *, letter: bool = False, numeric: bool = True) -> str | None:
    """Return the answer in a reply, None if there is none.

    The style `auto` takes the first of these that the reply has: the last `\\boxed{...}`, the last `#### ...`, the last
    `Answer: ...` or `The answer is ...` (also in other languages, and a line `A: ...`), the last formula or number. If
    the reference is a letter, the last two are those of `choice`.

    Args:
        text: a reply, without its reasoning.
        style: one of `STYLES`.
        letter: whether the reference is the letter of a multiple choice.
        numeric: whether the reference is a number; marks that no number follows are then skipped.
    """
    text = text.rstrip()
    finders = {
        "boxed": lambda: _box(text),
        "gsm8k": lambda: _after_hashes(text),
        "answer": lambda: choice(text) if letter else _after_mark(text, numeric),
        "last": lambda: _last(text) if not letter else None,
        "choice": lambda: choice(text),
    }
    for name in ("boxed", "gsm8k", "answer", "last") if style == "auto" else (style,):
        found = finders[name]()
        if found == DENIED:
            return None
        if found is not None and found.strip():
            return found.strip()
    return None


def boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` or `\\fbox{...}` with balanced braces, of nested the innermost.

    `\\boxed 5` counts if there is none with braces.
    """
    found = _box(text)
    return None if found == DENIED else found


def _box(text: str) -> str | None:
    """Return the content of the last box, `DENIED` if the words around it deny it."""
    if "box" not in text:
        return None
    opened: list[tuple[bool, int]] = []
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        if match["box"]:
            opened.append((True, match.end()))
        elif match["brace"] == "{":
            opened.append((False, match.end()))
        elif match["brace"] == "}" and opened:
            is_box, start = opened.pop()
            if is_box:
                last = (start, match.start())
    if last is None:
        if any(is_box for is_box, _ in opened):  # cut off; the text of an open box is not an answer
            return text[next(start for is_box, start in reversed(opened) if is_box) - len("\\boxed{") :]
        return _last_group(_BARE_BOX, text)
    if is_denied(text, last[0], last[1] + 1):
        return DENIED
    content = text[last[0] : last[1]]
    if len(content) > MAX_ANSWER_LENGTH or "box" not in content:
        return content
    inner = boxed(content) if re.match(r"\s*\\(?:boxed|fbox)", content) else None
    return content if inner is None else inner


def _after_hashes(text: str) -> str | None:
    found = _last_group(_HASHES, text)
    return found and found.rstrip(" !")


def _last_group(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the first group of the last match that has one."""
    last = deque((match[1] for match in pattern.finditer(text) if match[1].strip()), maxlen=1)
    return last[0] if last else None


def _after_mark(text: str, numeric: bool) -> str | None:
    """Return what the last mark such as `Answer:` is followed by."""
    text = text[-_MARKED_LENGTH:]
    places = [match.end() for pattern in (_MARK, _HEADING, _SHORT_MARK) for match in pattern.finditer(text)]
    for place in sorted(places)[: -_MAX_MARKS - 1 : -1]:
        line = text[place : place + MAX_ANSWER_LENGTH + 1].lstrip(" \t\n*_`:：")
        found = _content(text[max(0, place - MARGIN) : place], _line(line), numeric)
        if found is not None:
            return found
    return None


def _line(text: str) -> str:
    """Return the first line, or a displayed formula that begins there."""
    for left, right in (("$$", "$$"), (r"\[", r"\]")):
        end = text.find(right, len(left)) if text.startswith(left) else -1
        if end >= 0:
            return text[: end + len(right)]
    return text.partition("\n")[0]


def _content(before: str, line: str, numeric: bool) -> str | None:
    """Return the answer in the line after a mark, without the words of a sentence around it."""
    line = line.strip(" \t*_`!" if numeric else " \t*_`")
    if not line or len(line) > MAX_ANSWER_LENGTH:
        return line or None
    text = f"{before} {line}"
    start = len(text) - len(line)
    if parse_number(line) is not None:
        return _asserted(text, [(start, len(text))])
    if formulas := _formulas(text, start):
        return _asserted(text, formulas)
    remark = _REMARK.match(line)  # 18 (as 20 - 2 = 18)
    if remark is not None and parse_number(remark["answer"]) is not None:
        return _asserted(text, [(start, start + remark.end("answer"))])
    sides = _ASSIGNED.match(line)
    if sides and parse_number(line[sides.end() :]) is not None:
        return strip_markup(line[sides.end() :])
    if not numeric:
        return strip_markup(re.split(r"(?<=\w)\.\s", line, maxsplit=1)[0])
    prose = re.search(r"[^\W\d_]{3,}.*[^\W\d_]{3,}|[^\W\d_]{3,} \(", line)
    if prose or not any(each.isdigit() for each in line):
        text = ascii_digits(text)
        return _asserted(text, [one.span() for one in _TOKEN.finditer(text, start)])
    return DENIED if is_denied(text, start, len(text)) or line.endswith("?") else line


def _asserted(text: str, spans: Sequence[tuple[int, int]]) -> str | None:
    """Return the last of some answers that the words around it do not deny; `DENIED` if all are denied."""
    for start, end in reversed(spans[-4:]):
        if not is_denied(text, start, end):
            formula = _FORMULA.fullmatch(text[start:end])
            found = next(filter(None, formula.groups())).strip() if formula else strip_markup(text[start:end])
            return DENIED if _CHANGED.match(text, end) else found
    return DENIED if spans else None


def _formulas(text: str, start: int = 0) -> list[tuple[int, int]]:
    """Return where the formulas of a text are."""
    return [one.span() for one in _FORMULA.finditer(text, start) if "".join(filter(None, one.groups())).strip()]


def _last(text: str) -> str | None:
    """Return the last number or formula of a text, without what is before its equals sign."""
    tail = ascii_digits(text[-2 * MAX_ANSWER_LENGTH - 2 :])
    formulas = _formulas(tail)
    spans = formulas + [one.span() for one in _TOKEN.finditer(tail) if not formulas or one.start() >= formulas[-1][1]]
    sentence = max(tail.rfind(end, 0, spans[-1][0]) for end in (". ", "! ", "? ", "\n")) if spans else 0
    found = _asserted(tail, [each for each in spans if each[0] >= sentence])
    sides = _ASSIGNED.match(found) if found is not None and spans[-1] in formulas else None
    return found if sides is None or found is None else found[sides.end() :]


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
        alone = not rest or not rest[0].isalnum() or match["joined"] is not None
        if is_denied(before + candidate, len(before), len(before) + match.end()):
            return None
        if alone or (letter.isupper() and letter not in "AI"):
            return letter.upper()
    tail = text[-MAX_ANSWER_LENGTH:]
    found = [one for one in _IN_BRACKETS.finditer(tail) if not is_denied(tail, *one.span())]
    return found[-1]["letter"] if found else None


def _candidates(text: str) -> Iterator[tuple[str, str]]:
    """Yield what stands before and at the places where a letter may be, the most certain first."""
    inside = boxed(text)
    if inside is not None:
        yield "", inside[:MAX_ANSWER_LENGTH]
    text = text[-_MARKED_LENGTH:]
    places = [match.end() for pattern in (_MARK, _HEADING, _OPTION) for match in pattern.finditer(text)]
    for place in sorted(places)[: -_MAX_MARKS - 1 : -1]:
        yield text[max(0, place - MARGIN) : place], text[place : place + 100]
    lines = text[-MAX_ANSWER_LENGTH:].strip().splitlines()
    for line in (lines[-1:] + lines[:1]) if lines else []:
        bare = line.strip(" \t*_().[]`$")
        if len(bare) == 1:
            yield "", bare
        elif re.match(r"[*(]{0,3}[A-J][).:]", line.strip()):
            yield "", line.strip()


def choice_of_gold(gold: str) -> str | None:
    """Return the letter that a reference is, None if it is not a letter."""
    bare = strip_markup(gold).strip("() .")
    return bare if len(bare) == 1 and "A" <= bare <= "J" else None


def normal_text(text: str) -> str:
    """Return a text for comparison of words and formulas as they are written: no markup, spaces or case of words."""
    text = strip_markup(text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\varnothing(?![a-z])|∅", r"\\emptyset", text)
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s?\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"(?<=\d)\s*([ap])\.?m\b", lambda half: f"{half[1]}m".lower(), text, flags=re.IGNORECASE)  # 9:15 a.m.
    bare = "".join(text.split())
    return " ".join(text.split()).casefold() if is_words(text) else bare


def is_words(text: str) -> bool:
    """Return whether a text is words: letters, spaces and hyphens only; `ab` is a product, and `no` a word."""
    words = r"(?:[^\W\d_]{3,}|[^\W\d_A-Za-z]{2}|(?i:no|on|up|we|he|it))(?:[ '\-,][^\W\d_]+)*"
    return re.fullmatch(words, text.strip()) is not None


def is_changed(text: str) -> bool:
    """Return whether words or a base change or deny a number, as in `5 squared`, `5\\text{ or more}` and `5_8`."""
    denial = r"\\text\{[^{}]*\b(?:or|not|is|was|if|but|never|except|wrong|error)\b|\d_\{?\w"
    return re.search(rf"\d.*(?<!\\)\b(?:{CHANGING_WORDS})\b|{denial}", text, re.IGNORECASE) is not None


_LATEX = {r"\langle": "(", r"\rangle": ")", r"\log_e": r"\ln ", r"\log_{e}": r"\ln ", "½": r"\frac{1}{2}"}
_LATEX |= {"²": "^{2}", "³": "^{3}", "°": r"^{\circ}", "π": r"\pi ", "√": r"\sqrt ", "×": r"\times ", "÷": r"\div "}
_LATEX |= {"·": r"\cdot ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∞": r"\infty "}
_LATEX |= {"∪": r"\cup ", "∈": r"\in "}
_CHAIN = re.compile(r"([^<>=]+)>\s*(=?)([^<>=]+)>\s*(=?)([^<>=]+)")  # 2 > x > 1
_PLAIN = (
    (re.compile(r"(?<![\w.])(\d{1,20}(?:\.\d{1,20})?)[eE]([+-]?\d{1,3})(?!\w)"), r"\1*10^{\2}"),
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
    text = strip_markup(text).replace("\\$", "").replace("$", "")
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
    """Return the answer in a reference: in a box, after `####` or after `Answer:`; otherwise all of it."""
    text = text.strip()
    found = boxed(text) or _after_hashes(text)
    if found is None and "\n" in text:
        found = _after_mark(text, numeric=True)
    return (found or text).strip()
