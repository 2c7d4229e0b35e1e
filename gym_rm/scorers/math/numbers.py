"""Plain numbers in answers: read from text exactly, with units, currency and percent signs, and compared.

A number is `[sign] [currency] digits [power of ten] [fraction] [multiplier word] [percent] [units or words]`. None of
the words may change or deny it (`CHANGING_WORDS`, `not`, `wrong`, ...); otherwise the text is no number.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from babel import localedata

from gym_rm.scorers.math.denials import is_denied

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
    |(?P<digits>{_DIGITS})?(?P<decimals>\.\d*)?(?:\\(?:overline|bar|dot)\ ?\{{?(?P<cycle>\d+)\}}?)?
     (?:[eE](?P<exponent>[+-]?\d{{1,6}})(?!\w)|\ ?(?:\\times|×|\\cdot|[*x])\ ?10\^\{{?(?P<power>-?\d{{1,6}})\}}?)?
     (?:\ ?\\d?t?frac\{{(?P<mixed_over>\d+)\}}\{{(?P<mixed_under>\d+)\}}
      |\ (?:and\ )?(?P<part_over>\d+)/(?P<part_under>\d+)|\ ?/\ ?(?P<divisor>\d+)(?![\d.,]))?
    )""",
    re.VERBOSE,
)
_PERCENT = re.compile(r"\s?(?:%|(?:per ?cent|percentage points?|percentage)\b)", re.IGNORECASE)
_ENGLISH = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "lakh": 10**5, "million": 10**6, "crore": 10**7}
_ENGLISH |= {"billion": 10**9, "trillion": 10**12, "quadrillion": 10**15}
_WORDS_BEHIND = re.compile(
    r"\s?-?(?P<text>\\(?:text|mathrm|mbox|textrm)\{\s?)?(?P<words>(?=[^\W\d_])[^\s\d\\$_{}()[\],;:!?/+*=<>^%-]+(?:\s[^\s\d\\$_{}()[\],;:!?/+*=<>^%-]+){0,2})"
)
_PATTERN = re.compile(r"[^0]{0,2}(0+)[\s\u200f]*([^0;]+?)[\s\u200f]*")
_NO_MULTIPLIERS = {"min", "mile"}  # units, and in some languages words for a thousand
_CJK = "ぁ-ヿ一-鿿가-힣"
_COUNTER = re.compile(rf"\s?(?![半的倍之分点點百十成割打]|平方$|[二三四]?次方)[{_CJK}]{{1,6}}")
_SYMBOL = (
    r"(?:(?-i:[kcdmnμ]?m)|[kmμ]?g|m?l|lbs?|oz|hrs?|h|mins?|secs?|m?s|ft|in|yd|mi|mph|kph|kmh|days?|cents?|[ap]\.?m|units?"
    r"|(?-i:[kMG]?(?:Hz|Pa|Wh?|J|N|V)|mol|eV|rad)|\\Omega|Ω)(?![^\W_])(?:\^?\{?-?\d\}?|[²³])?"
)
_UNIT = re.compile(
    r"\s?(?:°\s?[CF]?|\^?\\circ\b|\^\{\\circ\}|\\degree|\\?\$|[€£¥₹₽₩₺฿]|元|円|원"
    rf"|{_SYMBOL}(?:\s?(?:[/·*]|\\cdot)?\s?{_SYMBOL})*(?!\())",
    re.IGNORECASE,
)
_TEXT_UNIT = re.compile(
    r"\s?\\(?:text|mathrm|mbox|textrm|operatorname)\{\s?((?:[^{}]|\{-?\d\})*)\}(?:\^(?:\{-?\d\}|-?\d))?"
)
_FRACTION_OF_UNITS = re.compile(r"\s?\\[dt]?frac\{\s*\}\{\s*\}")
_POWER_OF_UNIT = re.compile(
    r"\b(?P<unit>\w*met(?:er|re)s?|feet|foot|inch(?:es)?|yards?|miles?|units?|seconds?|[kcm]?m|ft|in|s)"
    r" (?:squared|cubed)\b",
    re.IGNORECASE,
)
_ORDINALS = (
    r"(?:third|fourth|quarter|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|\w+teenth|\w+tieth"
    r"|\w*hundredth|\w*thousandth|\w*illionth)s?"
)
CHANGING_WORDS = (
    r"squared|cubed|factorial|half|halves|below|negative|minus|choose|modulo|mod|raised|power|root|score|gross"
    r"|doubled|tripled|halved|inverse|inverted|reciprocal|myriad|grand|per mille|bn|mn|base \d+"
    rf"|(?:{'|'.join(_ENGLISH)})s?|\w*illions?|{_ORDINALS}|less than (?:zero|nothing)|and a"
)
"""Words behind a number that change its value."""
_NO_UNIT = re.compile(
    rf"^(?:st|nd|rd|th)\b|\b(?:{CHANGING_WORDS}|sqrt|pi|sin|cos|tan|log|ln|exp|or|and|to|plus|times|divided|multiplied|over|infinity|i|not"
    r"|never|no|nor|but|except|wrong|incorrect|false|untrue|mistaken|impossible|instead|rather)\b|n['’]t\b|\?",
    re.IGNORECASE,
)
_MODULUS = re.compile(
    r"\s*(?:\\p?b?mod\b|\(\s?mod\b|mod\b|\\(?:text|mathrm)\{\s*\(?mod\b)[\s{}]*(?P<modulus>\d{1,9})[\s{})]*$"
)
_CONTINUED = re.compile(r"(\.\d{0,20}?)(\d{1,6}?)\2{2,}(?:\.\.\.|…|\\[lc]?dots)[\s$]*$")  # 0.333...
_NAME = re.compile(r"(?P<name>[A-Za-z](?:_\{?\w\}?)?|[A-Za-z]\([A-Za-z0-9]\)) ?(?:=|\\approx|≈|\\equiv|≡) ?")
_ABOUT = re.compile(r"^(?:\\approx|\\simeq|≈|~) ?")
_SYMBOLS = re.compile(r"[ \u2600-\u27bf\U0001f300-\U0001faff\ufe0f]+$")  # such as a check mark
_COMMA = re.compile(r"^((?:[A-Za-z] ?= ?|€ ?)?-?\d{1,15}),(\d\d?|\d{4,15})(?![\d,.])")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}\s?|,\\!\s?|\\,)(?=\d{3}(?!\d))")
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
    """Return the text with decimal digits of all scripts, minus signs, spaces, `⅔` and `2\\,500` as in ASCII."""
    text = _THOUSANDS.sub(",", text)
    if text.isascii():
        return text
    text = re.sub("[²³¹⁰-⁹⁺⁻]+", lambda each: "^{" + unicodedata.normalize("NFKC", each[0]) + "}", text)
    text = re.sub("[¼-¾⅐-⅞]", lambda each: " " + unicodedata.normalize("NFKC", each[0]), text)
    return re.sub(r"(?![0-9])\d", lambda each: str(unicodedata.decimal(each[0])), text.translate(_CHARACTERS))


@functools.cache
def _multipliers() -> dict[str, int]:
    """Return what words behind a number multiply it by, in every language of CLDR; 0 where languages disagree."""
    found: dict[str, int] = {}
    for name in localedata.locale_identifiers():
        lengths = (
            localedata.load(name, merge_inherited=False).get("compact_decimal_formats", {}) if "_" not in name else {}
        )
        plurals = [each for plurals in lengths.values() for each in plurals.values() if isinstance(each, dict)]
        for power, pattern in (item for each in plurals for item in each.items()):
            match = _PATTERN.fullmatch(pattern.pattern.replace("'", ""))
            word = match[2].casefold() if match else ""
            if match and (not word.isascii() or len(word) > 2) and word not in _NO_MULTIPLIERS:
                factor = int(power) // 10 ** (len(match[1]) - 1)
                found[word] = factor if found.get(word, factor) == factor else 0
    short = {word.rstrip("."): factor for word, factor in found.items()}  # `mil.` is a million in Czech, `mil` 1,000
    return short | found | _ENGLISH | {f"{word}s": factor for word, factor in _ENGLISH.items()}


def multiplier(text: str) -> tuple[int, int]:
    """Return the factor and the length of the multiplier that a text begins with, such as ` mil` or `万`; else 1, 0."""
    words = _WORDS_BEHIND.match(text)
    if words is None:
        return 1, 0
    start = words.start("words")
    ends = {each.end() for each in re.finditer(r"\S(?=\s|$)", text[: words.end()])}
    if re.match(rf"[{_CJK}\u0e00-\u109f\u1780-\u17ff]", text[start]):  # scripts without spaces
        ends |= set(range(start + 1, min(start + 8, len(text)) + 1))
    for end in sorted(ends, reverse=True):
        factor = _multipliers().get(text[start:end].casefold().rstrip("."))
        if factor is not None:
            return factor, end
    return 1, 0


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
    text = strip_markup(_CONTINUED.sub(r"\1\\overline{\2}", text))
    named = _NAME.match(text)
    name = named["name"] if named else ""
    rest = text[named.end() :] if named else text
    match = _NUMBER.match(rest)
    assert match is not None  # all of its parts are optional
    try:
        value = _value(match)
    except (ValueError, ZeroDivisionError):
        return None
    rest = rest[match.end() :]
    factor, length = multiplier(rest)
    if length:
        value *= factor
        rest = rest[length:].replace("}", "", 1) if "{" in rest[:length] else rest[length:]
    percent = _PERCENT.match(rest)
    rest = rest[percent.end() :] if percent else rest
    if modulus := _MODULUS.fullmatch(rest):
        if not 0 <= value < int(modulus["modulus"]):  # not a remainder, but a number to be divided
            return None
    elif not _is_unit(rest) or (length and not factor):
        return None
    return Number(value, len(match["decimals"] or ".") - 1, percent is not None, name)


def decimal_comma(text: str) -> Number | None:
    """Return the number that a short text is if its comma is a decimal one, as in `0,5`; otherwise None."""
    with_point, found = _COMMA.subn(r"\1.\2", strip_markup(text)[:MAX_ANSWER_LENGTH])
    return parse_number(with_point) if found else None


def _value(match: re.Match[str]) -> Fraction:
    """Return the value of a match of `_NUMBER`. Raises ValueError if it has no digits, or is too large or small."""
    part = match.groupdict()
    if part["over"] or part["short"]:
        over, under = (part["over"], part["under"]) if part["over"] else tuple(part["short"])
        value = Fraction(int(over), int(under))
    elif part["european"]:
        value = Fraction(part["european"].replace(".", "").replace(" ", "").replace(",", "."))
    else:
        digits = re.sub(r"[ ,']", "", part["digits"] or "") + (part["decimals"] or "")
        value = Fraction(digits.removesuffix("."))
        if part["cycle"]:
            fixed = len(part["decimals"] or ".") - 1
            value += Fraction(int(part["cycle"]), (10 ** len(part["cycle"]) - 1) * 10**fixed)
        exponent = int(part["exponent"] or part["power"] or 0)
        if abs(exponent) > MAX_EXPONENT:
            raise ValueError(f"the exponent {exponent}")
        value *= Fraction(10) ** exponent
        for over, under in (("mixed_over", "mixed_under"), ("part_over", "part_under")):
            if part[over]:
                value += Fraction(int(part[over]), int(part[under]))
        value /= int(part["divisor"] or 1)
    return -value if (part["sign"] == "-") != (part["minus"] == "-") else value


def _is_unit(rest: str) -> bool:
    """Return whether what follows a number leaves its value: units, or words of which none changes or denies it."""
    rest = _POWER_OF_UNIT.sub(r"\g<unit>", rest)
    if _NO_UNIT.search(rest) or is_denied(rest, 0, 0):
        return False
    rest = _FRACTION_OF_UNITS.sub(" ", _TEXT_UNIT.sub(" ", rest))
    if found := _UNIT.match(rest):
        rest = rest[found.end() :]
    rest = rest.strip(" .")
    return (
        not rest
        or _COUNTER.fullmatch(rest) is not None
        or re.fullmatch(r"[/(-]?\s?[^\W\d_]{2,}[^+*=^\\<>_\d]*", rest) is not None
    )


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
