"""Where the answer of a reply is: in a box, `<answer>`, after `####` or `Answer:`, or last. All needs linear time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, get_args

from gym_rm.scorers.math.answers import BRACES
from gym_rm.scorers.math.denials import MARGIN, is_denied
from gym_rm.scorers.math.expressions import DENIED, HAS_VALUE, Kind, clause, last_answer, line_answer
from gym_rm.scorers.math.numbers import MAX_ANSWER_LENGTH, ascii_digits, parse_number, strip_markup

Style = Literal["auto", "boxed", "gsm8k", "answer", "last", "choice"]
STYLES: tuple[str, ...] = get_args(Style)

_MARKED_LENGTH = 20_000  # characters at the end in which "Answer:" is searched
_MAX_STATEMENTS = 16  # from the end that are tried for an answer
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
    r"(?:^|[.!?\n}]|--|—)[\s*$]{0,6}+(?:but |no, |oh,? |hmm,? )?(?:wait|actually|correction|oops|sorry|scratch that"
    r"|on second thought|i made an? (?:mistake|error)|let me (?:correct|fix))\b",
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
_IT_IS = re.compile(
    r"\b(?:it|this|that|answer|value|result)(?:['’]s| is| must be| should be| would be| equals)\b:?"
    r"|\bnot [^.\n]{1,40}? but(?= [$\\\d-])",
    re.IGNORECASE,
)

_OPEN = (
    r"(?:\\(?:text|mathrm|textbf|mathbf|boxed)\{|(?:la )?(?:option|opción)\b|choice\b|letter\b"
    r"|[\s*_(\[{$\"'`“«（【:：])"
)
_OPTION = re.compile(
    r"\b(?:correct|right|best) (?:option|choice|letter) (?:is|would be)\b|[故应應]选择?"
    r"|\b(?:respuesta|opción|réponse|risposta|resposta|opção) (?:correct[ae]|corretta|correta) (?:est?|è|é)\b(?: la\b)?"
    r"|\b(?:option|choice)\b(?=[ *_(]{1,5}[A-J][*_)]{0,3} is (?:the )?(?:correct|right|best)\b)"
    r"|\b(?:choose|pick|select|go with)\b"
    r"|(?:^|[.\n]\s{0,3})(?=[*(]{0,3}[A-J][*)]{0,3} is (?:the )?(?:correct|right|best)\b)"
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
    r"(?:\\(?:text|textbf|mathrm|mathbf)\{)?\s?(?:\(([A-J])\)|([A-J])(?:[).]|:(?=\s)|(?=\}?$)))\s?\}?"
    r"(?:\\ |[\s:.])*(.*)",
    re.DOTALL,
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
        found = _stated(after, style, kind) or _corrected(after, kind) or last_answer(after, kind)
        if found is not None or is_denied(after, 0, 0):
            return None if found == DENIED else found
        text = text[: corrections[-1]]
    found = _stated(text, style, kind)
    if found is None and style in ("auto", "last"):
        found = last_answer(text, kind)
    return None if found == DENIED else found


def _plain(text: str) -> str:
    """Return a text with digits and thousands as in ASCII, and with tags as lines that begin with `Answer:`."""
    text = _TAG.sub(lambda tag: "\n\n" if tag[1] else "\nAnswer: ", text) if "nswer>" in text.casefold() else text
    text = re.sub(r"<<[^<>\n]{0,99}>>", "", text)  # the calculator of GSM8K
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
        found: str | None = (
            clause(strip_markup(content[:MAX_ANSWER_LENGTH])) if kind == "words" and content != DENIED else content
        )
        if what == "mark":
            line = _line(text[place : place + MAX_ANSWER_LENGTH + 1].lstrip(" \t\n*_`:："))
            found = line_answer(text[max(0, place - MARGIN) : place], line, kind)
            if found == DENIED and style == "auto":
                return _corrected(text[place:], kind) or DENIED
        if found is not None and found.strip():
            return found.strip()
    return None


def _corrected(text: str, kind: Kind) -> str | None:
    """Return what follows the last `it is` of a text."""
    for match in list(_IT_IS.finditer(text[:MAX_ANSWER_LENGTH]))[:-5:-1]:
        found = line_answer("", _line(text[match.end() :].lstrip()), kind)
        if found is not None:
            return found
    return None


def _boxes(text: str) -> list[tuple[int, str]]:
    """Return where the last box begins, and its content; `DENIED` if words deny it.

    Of nested boxes it is the innermost. Several boxes in one sentence are one answer, a list. `\\boxed 5` counts if
    there is none with braces.
    """
    if "box" not in text:
        return []
    opened: list[tuple[bool, int, int]] = []
    closed: list[tuple[int, int, str]] = []
    for match in BRACES.finditer(text):
        if match["brace"] != "}" and (match["box"] or match["brace"]):
            opened.append((match["box"] is not None, match.start(), match.end()))
        elif match["brace"] and opened:
            is_box, start, inside = opened.pop()
            if is_box and not (closed and closed[-1][0] > start):  # of nested boxes the innermost
                closed.append((start, match.end(), text[inside : match.start()]))
            elif is_box:
                closed[-1] = (start, match.end(), closed[-1][2])
    if not closed:
        cut = [start for is_box, start, _ in opened if is_box]  # the text of an open box is no answer
        bare = [(each.start(), each[1]) for each in _BARE_BOX.finditer(text)]
        return [(cut[-1], text[cut[-1] :])] if cut else bare[-1:]
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
    end = len(text.rstrip(" \n\t#*-"))
    for match in _HASHES.finditer(text, max(0, len(text) - _MARKED_LENGTH)):
        content = match[1].strip(" \t*!")
        is_last = match.end() >= end
        named = is_last and (kind != "number" or HAS_VALUE.search(content)) and not _HEADING.match(match[0])
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


def gold_answer(text: str) -> str:
    """Return the answer in a reference: what it states last as a reply would; otherwise all of it."""
    text = _plain(text).strip()
    kind: Kind = "number" if re.search(r"\d", text) else "formula"
    found = _stated(text, "auto", kind)
    letter = re.match(r"[\s*_(]*([A-J])[)*_.]*\s*$", text[_marks(text)[-1] :]) if _marks(text) else None
    return letter[1] if letter else text if found in (None, DENIED) else str(found)
