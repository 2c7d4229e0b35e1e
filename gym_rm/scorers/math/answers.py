"""Forms of an answer in which it is compared: words without markup, LaTeX, the value that an equation gives."""

from __future__ import annotations

import re

from gym_rm.scorers.math.numbers import CHANGING_WORDS, MAX_ANSWER_LENGTH, strip_markup

BRACES = re.compile(r"\\(?P<box>boxed|fbox|framebox)\s{0,3}\{|\\.|(?P<brace>[{}])", re.DOTALL)
_EQUALS = re.compile(r"(?<![\\<>!:=≠])=(?!=)")
_APPROXIMATELY = re.compile(r"(?<=\S)\s*(?:\\approx(?![a-z])|≈)")
_QUANTITY = re.compile(  # what may stand before the equals sign of a value
    r"(?:\\?[A-Za-z]{1,10}(?:_\{?\w{1,9}\}?)?'?|\|?[A-Z]{1,4}\|?|(?:\\angle|\\triangle|∠|\\overline|\\text|\\mathrm)\s?\{?[\w\s]{1,40}\}?"
    r"|[A-Za-z]\w?\([^()=]{1,30}\)|\[[A-Z]{2,6}\]|[a-dm-qk](?:\+[a-dm-qk])+)"
)
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_BASES |= {"twelve": 12, "sixteen": 16}
_OPERATIONS = re.compile(
    r"(?<![A-Za-z])(?:min|max|gcd|lcm|sum|prod|i*int|lim|lfloor|lceil|floor|ceil|det|bmod|mod|arg(?:min|max)|frac\{d\}\{d[a-z]\})(?![A-Za-z])"
)


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
    if re.search(r",(?!\d{3})|;|\\text\{|\b(?:and|or)\b", re.sub(r"\([^()]*\)", "", text)) or not (
        is_constant or _QUANTITY.fullmatch(name)
    ):
        return text
    value = about[0] if about and (rounded or (len(sides) == 1 and not is_constant)) else sides[-1]
    is_assigned = (len(sides) > 1 or about) and len(name) == 1 and name.isalpha()
    return f"{name} = {value.strip()}" if is_assigned else value.strip()


def is_equation(text: str) -> bool:
    """Return whether an answer is an equation or an inequality, and not the value of a letter."""
    text = re.sub(r"^[A-Za-z] = ", "", text)
    return (
        _EQUALS.search(text) is not None or re.search(r"[<>≤≥≠]|!=|\\(?:[lg]eq?|[lg]t|neq?)(?![a-z])", text) is not None
    )


def normal_text(text: str) -> str:
    """Return a text for comparison of words and formulas as they are written: no markup, spaces or case of words."""
    text = strip_markup(text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\varnothing(?![a-z])|∅", r"\\emptyset", text)
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s?\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"(?<=\d)\s*([ap])\.?m\b", lambda half: f"{half[1]}m".lower(), text, flags=re.IGNORECASE)  # 9:15 a.m.
    text = re.sub(
        r"(?<!\w)\(?([\dA-F]{1,60})\)?_\{?([^\W_]{1,9})\}?$",
        lambda base: f"{base[1]}_{_BASES.get(base[2], base[2])}",
        text,
    )
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
_LATEX |= {
    r"\mathrm{e}": "{e}",
    r"\text{e}": "{e}",
    "·": r"\cdot ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "±": r"\pm ",
    "∞": r"\infty ",
}
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
    for match in BRACES.finditer(text):
        depth += -1 if match["brace"] == "}" else 1 if match["brace"] or match["box"] else 0
        if depth < 0:
            return None
    return text if depth == 0 and text.strip() else None
