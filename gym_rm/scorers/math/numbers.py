"""Plain numbers in answers: read from text exactly, with units, currency and percent signs, and compared."""

from __future__ import annotations

import functools
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER_LENGTH = 2000
"""Characters of the longest answer that is read. No rule below sees more."""
MAX_EXPONENT = 1000

_CHARACTERS = {ord(each): "-" for each in "−–‐‑－﹣"} | {ord(each): " " for each in "\u00a0\u2009\u202f\u2007\u3000"}
_CHARACTERS |= {ord("٫"): ".", ord("٬"): ",", ord("％"): "%", ord("٪"): "%", ord("，"): ",", ord("．"): "."}
_CHARACTERS |= {ord("＄"): "$", ord("："): ":", ord("＝"): "=", ord("／"): "/", ord("⁄"): "/", ord("’"): "'"}

_DIGITS = r"(?:\d{1,3}(?:,\d{2,3})*,\d{3}|\d{1,3}(?:[ ']\d{3})+|\d+)(?!\d)"
_EUROPEAN = r"\d{1,3}(?:(?:\.\d{3})+|(?:[ ]\d{3})+),\d{1,2}(?!\d)|\d{1,3}(?:\.\d{3}){2,}(?![\d.])"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)\ ?(?P<currency>(?:US|A|C)?\\?\$|[€£¥₹₽₩₺฿]|(?:USD|EUR|GBP|Rs\.?)\ )?\ ?(?P<minus>-?)
    (?:\\d?t?frac(?:\{{(?P<over>-?\d+)\}}\{{(?P<under>\d+)\}}|(?P<short>\d\d))
    |(?P<european>{_EUROPEAN})
    |(?P<digits>{_DIGITS})?(?P<decimals>\.\d*)?
     (?:[eE](?P<exponent>[+-]?\d{{1,6}})(?!\w)|\ ?(?:\\times|×|\\cdot)\ ?10\^\{{?(?P<power>-?\d{{1,6}})\}}?)?
     (?:\ ?\\d?t?frac\{{(?P<mixed_over>\d+)\}}\{{(?P<mixed_under>\d+)\}}
      |\ (?P<part_over>\d+)/(?P<part_under>\d+)|\ ?/\ ?(?P<divisor>\d+)(?![\d.,]))?
    )""",
    re.VERBOSE,
)
_PERCENT = re.compile(r"\s?(?:%|(?:per ?cent|percentage points?|percentage)\b)", re.IGNORECASE)
_MULTIPLIER = re.compile(
    r"\s?-?(?P<text>\\(?:text|mathrm|mbox|textrm)\{\s?)?(?P<word>hundred|thousand|million|billion|trillion)\b"
    r"(?! (?:and|hundred|thousand))",
    re.IGNORECASE,
)
_MULTIPLIERS = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_UNIT = re.compile(
    r"""\s?(?:°\s?[CF]?|\^?\\circ\b|\^\{\\circ\}|\\degree|\\?\$|[€£¥₹₽₩₺฿]|元|円|원
    |(?:km|cm|mm|m|kg|mg|g|lbs?|oz|ml|l|hrs?|h|min|mins|sec|s|ft|in|mi|mph|cents?|am|pm)(?:\^?\{?[23]\}?|[²³])?(?:/(?:km|m|kg|hr?|s|min|day))?(?![\w(])
    )""",
    re.VERBOSE | re.IGNORECASE,
)
_TEXT_UNIT = re.compile(r"\s?\\(?:text|mathrm|mbox|textrm|operatorname)\{\s?([^{}]*)\}(?:\^\{?\d\}?)?")
_NO_UNIT = re.compile(
    r"\b(?:sqrt|pi|sin|cos|tan|log|ln|exp|mod|or|and|to|plus|minus|times|over|infinity|i)\b", re.IGNORECASE
)
_MODULUS = re.compile(r"\s*(?:\\pmod\b|\(?\\b?mod\b|\\(?:text|mathrm)\{\s*\(?mod\b).*$")
_NAME = re.compile(r"(?P<name>[A-Za-z](?:_\{?\w\}?)?|[A-Za-z]\([A-Za-z0-9]\)) ?(?:=|\\approx|≈) ?")
_ABOUT = re.compile(r"^(?:\\approx|\\simeq|≈|~) ?")
_SYMBOLS = re.compile(r"[ \u2600-\u27bf\U0001f300-\U0001faff\ufe0f]+$")  # such as a check mark
_COMMA = re.compile(r"^((?:[A-Za-z] ?= ?|€ ?)?-?\d{1,15}),(\d\d?|\d{4,15})(?![\d,.])")
_SPACING = re.compile(r"(?<!\\)\\[,;:!> ]|~|\\q?quad\b|\\(?:left|right|displaystyle)\b")
_EXCLAMATION = re.compile(r"(?<=[^\W\d_][^\W\d_])!+$")  # after a word; elsewhere it is a factorial
_WRAPPER = re.compile(r"\\(?:text|textbf|mathbf|mathrm|mbox|boxed|fbox|bm)\s?\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written.

    Attributes:
        value: exact value, of `15%` it is 15.
        places: number of decimal places that were written; 0 for integers and fractions.
        percent: whether a percent sign or word follows.
        name: variable that it was assigned to, as in `x = 5`; empty if there is none.
    """

    value: Fraction
    places: int = 0
    percent: bool = False
    name: str = ""


def ascii_digits(text: str) -> str:
    """Return the text with decimal digits of all scripts, minus signs and spaces as in ASCII."""
    if text.isascii():
        return text
    return "".join(str(unicodedata.decimal(each)) if each.isdecimal() else each for each in text.translate(_CHARACTERS))


def strip_markup(text: str) -> str:
    """Remove what surrounds an answer: dollar signs, bold, quotes, `\\text{...}`, LaTeX spaces, a final full stop."""
    text = _SPACING.sub(" ", ascii_digits(text).replace("{,}", ",").replace(",\\!", ",").replace("\\%", "%"))
    text = " ".join(text.split())
    for _ in range(8):
        before = text
        text = _SYMBOLS.sub("", _ABOUT.sub("", text))
        text = _EXCLAMATION.sub("", text.strip(' *`"“”').rstrip(".,;:。")).strip()
        for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            inner = text[len(left) : len(text) - len(right)]
            if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
                text = inner if left not in inner else text
        if match := _WRAPPER.fullmatch(text):
            text = match[1]
        if text == before:
            return text
    return text


@functools.lru_cache(maxsize=16384)
def parse_number(text: str) -> Number | None:
    """Return the number that a short text is, with or without a unit; None if it is anything else."""
    if not text or len(text) > MAX_ANSWER_LENGTH:
        return None
    text = strip_markup(text)
    named = _NAME.match(text)
    name = named["name"] if named else ""
    rest = text[named.end() :] if named else text
    match = _NUMBER.match(rest)
    if match is None or match.end() == 0:
        return None
    try:
        value = _value(match)
    except (ValueError, ZeroDivisionError):
        return None
    if value is None:
        return None
    rest = rest[match.end() :]
    if found := _MULTIPLIER.match(rest):
        value *= _MULTIPLIERS[found["word"].lower()]
        rest = rest[found.end() :]
        rest = rest.replace("}", "", 1) if found["text"] else rest
    percent = _PERCENT.match(rest)
    rest = rest[percent.end() :] if percent else rest
    if not _is_unit(rest):
        return None
    places = len(match["decimals"] or ".") - 1
    return Number(value, places, percent is not None, name)


def decimal_comma(text: str) -> Number | None:
    """Return the number that a short text is if its comma is a decimal one, as in `0,5`; otherwise None."""
    with_point, found = _COMMA.subn(r"\1.\2", strip_markup(text)[:MAX_ANSWER_LENGTH])
    return parse_number(with_point) if found else None


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the value of a match of `_NUMBER`, None if it has no digits."""
    part = match.groupdict()
    if part["over"] or part["short"]:
        over, under = (part["over"], part["under"]) if part["over"] else tuple(part["short"])
        value = Fraction(int(over), int(under))
    elif part["european"]:
        value = Fraction(part["european"].replace(".", "").replace(" ", "").replace(",", "."))
    else:
        digits = re.sub(r"[ ,']", "", part["digits"] or "") + (part["decimals"] or "")
        if not any(each.isdigit() for each in digits):
            return None
        value = Fraction(digits.rstrip(".") if digits.endswith(".") else digits)
        exponent = int(part["exponent"] or part["power"] or 0)
        if abs(exponent) > MAX_EXPONENT:
            return None
        value *= Fraction(10) ** exponent
        for over, under in (("mixed_over", "mixed_under"), ("part_over", "part_under")):
            if part[over]:
                value += Fraction(int(part[over]), int(part[under]))
        value /= int(part["divisor"] or 1)
    return -value if (part["sign"] == "-") != (part["minus"] == "-") else value


def _is_unit(rest: str) -> bool:
    """Return whether what follows a number leaves it unchanged: nothing, or units and words."""
    rest = _MODULUS.sub("", rest)
    rest = _TEXT_UNIT.sub(lambda match: " pi " if _NO_UNIT.search(match[1]) else " ", rest)
    if found := _UNIT.match(rest):
        rest = rest[found.end() :]
    rest = rest.strip(" .")
    if not rest:
        return True
    word = re.match(r"[/(-]?\s?[^\W\d_]{2,}", rest)
    return word is not None and not re.search(r"[+*=^\\<>_\d]", rest) and not _NO_UNIT.search(rest)


def same_number(gold: Number, found: Number) -> bool:
    """Return whether two numbers are equal.

    They are equal if their values are. With a percent sign on one side only, `15%` equals both 15 and 0.15. If one has
    at least six decimal places, it counts as rounded: they are equal up to 5e-7, and up to a 10,000th of the gold.
    Names count only if both have one: `x = 5` equals `5`, but not `y = 5`.
    """
    if gold.name and found.name and gold.name != found.name:
        return False
    places = max(gold.places, found.places)
    if _close(gold.value, found.value, places):
        return True
    if gold.percent == found.percent:
        return False
    share = gold.value / 100 if gold.percent else gold.value
    return _close(share, found.value / 100 if found.percent else found.value, places)


def _close(gold: Fraction, found: Fraction, places: int) -> bool:
    if gold == found:
        return True
    difference = abs(gold - found)
    return places >= 6 and difference <= Fraction(5, 10**7) and difference <= abs(gold) / 10_000
