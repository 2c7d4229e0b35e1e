import time

import pytest

from gym_rm.scorers.math.answers import to_latex
from gym_rm.scorers.math.numbers import parse_number
from gym_rm.scorers.math.replies import STYLES, choice_of_gold, extract


@pytest.mark.parametrize(
    "text",
    [
        *["", "5x", "5 x", "5\\sqrt{2}", "1,2", "5,50", "1,234,56", "1/0", "10^5", "10**9", "²", "9 (mod 8)", "1.2.3"],
        "1e9999",
        *["5!", "5\\text{ or }6", "5 apples, 6 pears"],
    ],
)
def test_other_texts_are_not_plain_numbers(text):
    assert parse_number(text) is None


def test_an_open_box_is_not_an_answer():
    assert parse_number(extract("so 5 is \\boxed{51")) is None
    assert to_latex(extract("so 5 is \\boxed{51")) is None


@pytest.mark.parametrize(
    ("style", "answer"), [("boxed", "1"), ("gsm8k", "2"), ("answer", "3"), ("last", "4"), ("choice", None)]
)
def test_a_style_reads_only_its_own_answers(style, answer):
    assert extract("\\boxed{1}\n#### 2\nAnswer: 3\nso 4", style) == answer


def test_a_reference_may_be_a_letter():
    golds = ("C", "(C)", "\\text{(C)}", "C.", "(C) 5", "\\textbf{(C)}\\ 5", "c", "Cat", "4")
    assert [choice_of_gold(each)[0] for each in golds] == [*"CCCCCC", *[None] * 3]
    assert [choice_of_gold(each)[1] for each in golds[4:6]] == ["5", "5"]


HOSTILE = [
    "9", "9,", "9,999", "-", "- ", " ", "\n", "{", "}", "{}", "\\boxed{", "\\boxed{}", "\\boxed ", "\\fbox {", "$",
    "$ ", "\\(", "\\[", "\\", "####", "#### ", "# ", "answer", "answer ", "answer is ", "answer: ", "answer to a ",
    "the answer of ", "Answer:\n", "A: ", "A", "(A", "(A)", "*", "**", "`", "=", "1=", "1/", "1 /", ".", "...", "1.",
    "답", "答案", "٣", "</think>", "<think>", "\\frac{", "\\text{", "\x00", "\u202e", "é", "a1", "$-$",
]  # fmt: skip


def seconds(text, style):
    began = time.process_time()
    found = extract(text, style, kind="letter" if style == "choice" else "number")
    if found is not None:
        parse_number(found[:2000])
        to_latex(found[:2000])
    return time.process_time() - began


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_a_reply_of_a_megabyte_is_read_in_less_than_two_seconds(style):
    """What is quadratic needs minutes."""
    for unit in HOSTILE:
        assert seconds("Answer: " + unit * (10**6 // len(unit)), style) < 2, unit


def test_a_reply_of_a_megabyte_of_marks_or_braces_is_read_in_less_than_two_seconds():
    for unit in ("{", "\\boxed{", "9,", "answer is ", "Answer:\n", " ", "$"):
        assert seconds(unit * (10**6 // len(unit)), "auto") < 2, unit
