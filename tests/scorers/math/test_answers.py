import time

import pytest

from gym_rm.scorers.math.answers import to_latex, value_side
from gym_rm.scorers.math.numbers import parse_number, same_number
from gym_rm.scorers.math.replies import STYLES, choice, choice_of_gold, extract


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("5", "5"), ("-5", "-5"), (".5", "1/2"), ("5.", "5"), ("1e5", "100000"), ("2 \\times 10^{3}", "2000")],
        *[("$1,234.50", "2469/2"), ("\\$70{,}000", "70000"), ("1 234 567", "1234567"), ("1.234,56", "30864/25")],
        *[("1 234,5", "2469/2"), ("7 \\pmod{8}", "7"), ("8 ✅", "8")],
        *[("\\approx 2.5", "5/2"), ("x \\approx 2.5", "5/2"), ("≈ 3", "3")],
        *[("18 dollars", "18"), ("5\\text{ cm}^2", "5"), ("90^\\circ", "90"), ("12 km/h", "12"), ("5€", "5")],
        *[("\\frac{8}{2}", "4"), ("-\\frac12", "-1/2"), ("3\\frac{1}{2}", "7/2"), ("3 1/2", "7/2"), ("10/4", "5/2")],
        *[("x = 5", "5"), ("**42**", "42"), ("$42$", "42"), ("2.5 million", "2500000"), ("٣٤", "34"), ("−４２", "-42")],
        *[("5 \\text{ million}", "5000000"), ("5 \\text{ million dollars}", "5000000")],
    ],
)
def test_plain_numbers_are_read_exactly(text, value):
    assert str(parse_number(text).value) == value


@pytest.mark.parametrize(
    "text",
    [
        *[
            "",
            "5x",
            "5 x",
            "5\\sqrt{2}",
            "1,2",
            "5,50",
            "1,234,56",
            "1/0",
            "10^5",
            "10**9",
            "²",
            "9 (mod 8)",
            "1.2.3",
            "1e9999",
        ],
        *["5!", "5\\text{ or }6", "5 apples, 6 pears"],
    ],
)
def test_other_texts_are_not_plain_numbers(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("gold", "found", "equal"),
    [
        *[("4.0", "\\frac{8}{2}", True), ("10/3", "3.33333333", True), ("10/3", "3.33", False)],
        *[("15%", "0.15", True), ("15%", "15", True), ("15", "15%", True), ("15%", "0.15%", False)],
        *[("0.15", "15%", True), ("15", "0.15", False), ("0.0000001", "0", False), ("1", "1.000001", False)],
        *[("x=5", "5", True), ("5", "x=5", True), ("x=5", "y=5", False)],
    ],
)
def test_numbers_are_equal_as_documented(gold, found, equal):
    assert same_number(parse_number(gold), parse_number(found)) is equal


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        *[("\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"), ("\\boxed{\\boxed{7}}", "7"), ("\\fbox{3}", "3")],
        *[("\\boxed 5", "5"), ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"), ("none", None), ("\\boxed{12} \\boxed{3", "12")],
    ],
)
def test_the_last_balanced_box_is_the_answer(reply, answer):
    assert extract(reply, "boxed") == answer


def test_an_open_box_is_not_an_answer():
    assert parse_number(extract("so 5 is \\boxed{51")) is None
    assert to_latex(extract("so 5 is \\boxed{51")) is None


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("\\boxed{1}\nAnswer: 2\n#### 3\nso 4", "3"),
        ("#### 2\nAnswer: 3\n\\boxed{1}", "1"),
        ("Answer: 3\nso 4", "3"),
        ("Answer: 3. Wait, it is 4.", "4"),
        ("\\boxed{1}, \\boxed{2} and \\boxed{2}", "1, 2"),
        ("1 and then 4.", "4"),
        ("16 - 3 = 13\nA: 26", "26"),
        ("**Answer:** $1,000", "$1,000"),
        ("**Final Answer**\n\n42", "42"),
        ("### Answer:\n\n$$\\frac{1}{2}$$", "\\frac{1}{2}"),
        ("The answer is 18 because 9 * 2 = 18.", "18"),
        ("The final answer is: $x = 3$. I hope it is correct.", "x = 3"),
        ("The answer is 7. I hope that the answer is clear", "7"),
        ("The answer is $\\$139$", "\\$139"),
        ("The answer is 18 (since 20-2=18).", "18"),
        ("The answer is six (6).", "6"),
        ("The answer is f(5)", "f(5)"),
        ("Ainsi, elle paie 1 000", "1 000"),
        ("Il y en a 1 234,5 en tout", "1 234,5"),
        ("about 2.5e3", "2.5e3"),
        ("Der Preis ist 5,50 €.", "5,50 €"),
        ("So we pay $$\\$ 1.50$$", "\\$ 1.50"),
        ("Answer: The total is 18 dollars", "18"),
        ("La respuesta es 12", "12"),
        ("Die Antwort ist 3.5 Prozent", "3.5 Prozent"),
        ("答案是 42。", "42"),
        ("so $y = \\frac{3}{4}$.", "y = \\frac{3}{4}"),
        ("It costs 5 to 15%", "15%"),
        ("I do not know.", None),
        ("", None),
    ],
)
def test_auto_takes_what_is_stated_last_and_explicitly(reply, answer):
    assert extract(reply) == answer


@pytest.mark.parametrize(
    ("style", "answer"), [("boxed", "1"), ("gsm8k", "2"), ("answer", "3"), ("last", "4"), ("choice", None)]
)
def test_a_style_reads_only_its_own_answers(style, answer):
    assert extract("\\boxed{1}\n#### 2\nAnswer: 3\nso 4", style) == answer


# "Answer: C" in the languages of multilingual benchmarks
LOCALISED = [
    "Answer: C", "Respuesta: C", "Réponse : C", "Antwort: C", "Risposta: C", "Resposta: C", "Antwoord: C", "Ответ: C",
    "Відповідь: C", "Odpowiedź: C", "Cevap: C", "Jawaban: C", "Jibu: C", "Ìdáhùn: C", "答案：C", "答案是C", "答え：C",
    "정답: C", "답은 C", "คำตอบ: C", "الجواب: C", "उत्तर: C", "উত্তর: C", "సమాధానం: C", "Đáp án: C",
    "Απάντηση: C", "תשובה: C", "Svar: C",
]  # fmt: skip


@pytest.mark.parametrize("reply", LOCALISED)
def test_choices_are_found_in_many_languages(reply):
    assert choice(f"A) one B) two\n{reply}") == "C"


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        *[("The answer is C", "C"), ("The answer is (C).", "C"), ("The correct answer is **C**", "C"), ("C", "C")],
        *[("\\boxed{\\text{C}}", "C"), ("It must be (B)", "B"), ("(A) or (B)? I take\nB.", "B"), ("answer: c", "C")],
        *[("Answer: option D) blue", "D"), ("The answer is a mystery", None), ("Can I?", None), ("", None)],
        *[("Answer: A. Answer: B", "B"), ("Answer: C\nI am sure.", "C"), ("Answer: \\(\\text{(D)}\\)", "D")],
        *[("故选:B", "B"), ("所以,故选B.", "B"), ("The correct option is B", "B"), ("Option B is correct.", "B")],
        *[("Option B is not correct.", None), ("Choice (B) is the best one.", "B")],
        *[("La opción correcta es la B.", "B"), ("La respuesta correcta es la opción B.", "B")],
        ("La réponse correcte est B.", "B"),
    ],
)
def test_choices_are_found_in_sentences(reply, letter):
    assert choice(reply) == letter


def test_a_reference_may_be_a_letter():
    golds = ("C", "(C)", "\\text{(C)}", "C.", "(C) 5", "\\textbf{(C)}\\ 5", "c", "Cat", "4")
    assert [choice_of_gold(each)[0] for each in golds] == [*"CCCCCC", *[None] * 3]
    assert [choice_of_gold(each)[1] for each in golds[4:6]] == ["5", "5"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("x^2+y^2=4", "x^2+y^2=4"), ("2x=4", "2x=4"), ("x=4", "x = 4"), ("4=x", "x = 4"), ("AB = 4", "4")],
        *[
            ("3+1=4", "4"),
            ("f(2) = 4", "4"),
            ("m+n=4", "4"),
            ("\\angle ABC = 4", "4"),
            ("|AB|=4", "4"),
            ("y=4, x=5", "y=4, x=5"),
        ],
        *[("\\frac{10}{3} \\approx 3.33", "\\frac{10}{3}"), ("x \\approx 3.33", "x = 3.33"), ("5", "5")],
    ],
)
def test_an_equation_gives_the_value_of_a_quantity(text, value):
    assert value_side(text, rounded=False) == value


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
