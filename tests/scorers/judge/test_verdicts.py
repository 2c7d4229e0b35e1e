"""Verdicts in what a judge wrote."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.scorers.judge.verdicts import NoVerdict, read_choice, read_score

MARK = "BXTRQW"


def score(text, mark=None, scale=(1, 10)):
    return read_score(text, scale=scale, mark=mark)


@pytest.mark.parametrize(
    "text",
    [
        "Score: 7",
        "**Score:** 7",
        "Score: 7/10",
        "Score: 7 out of 10",
        "Score：7",
        "[[7]]",
        '{"score": 7}',
        '```json\n{"reason": "good", "score": 7.0}\n```',
        "It could be 9 or 3.\nScore: 7 - a solid reply",
        "Score: n, from 1 to 10.\nScore: 7\nThat is, [[7]].",
    ],
)
def test_a_clear_score_is_read(text):
    assert score(text) == 7


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "Score: n",
        "Score: 11",
        "Score: -7",
        "Score: 7-8",
        "Score: 7 or 8",
        "Score: 7%",
        "Score: 7,5",
        "Score: 7/5",
        "Score: 7 out of 12",
        "Score: ٧",
        "Score: " + "9" * 400,
        "Score: 3\nScore: 7",
        "Score: 3, and so [[7]]",
    ],
)
def test_an_unclear_score_is_no_verdict(text):
    with pytest.raises(NoVerdict):
        score(text)


@pytest.mark.parametrize(
    "text",
    [
        f"Score {MARK}: 7",
        f"**Score {MARK}:** 7",
        f"Score ({MARK.lower()}): 7/10",
        f"[[{MARK}: 7]]",
        f"The reply says 'Score: 10', [[10]], {{\"score\": 10}} and Score QWXZTR: 9.\nScore {MARK}: 7",
    ],
)
def test_only_verdicts_with_the_mark_count(text):
    assert score(text, MARK) == 7


@pytest.mark.parametrize(
    "text",
    [
        "Score: 10",
        '{"score": 10}',
        f'{{"score": 10, "mark": "{MARK}"}}',
        "Score QWXZTR: 10",
        f"{MARK}. Score: 10",
        f"Score {MARK}X: 10",
        f"Score {MARK}: n",
        f"Score {MARK}: 3\nScore {MARK}: 7",
    ],
)
def test_verdicts_without_the_mark_or_against_each_other_do_not_count(text):
    with pytest.raises(NoVerdict):
        score(text, MARK)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Verdict: A", "A"),
        ("**Verdict:** B.", "B"),
        ("[[A]]", "A"),
        ("[[C]]", "tie"),
        ('{"verdict": "B"}', "B"),
        ("Verdict: A is better", "A"),
    ],
)
def test_a_clear_choice_is_read(text, expected):
    assert read_choice(text, mark=None) == expected


@pytest.mark.parametrize(
    "text",
    ["", "A", "Verdict: a tie", "Verdict: A or B", "Verdict: A/B", "Verdict: AB", "Verdict: A\nVerdict: B", "[[D]]",
     "Verdict: C", "Verdict: reply"],
)  # fmt: skip
def test_an_unclear_choice_is_no_verdict(text):
    with pytest.raises(NoVerdict):
        read_choice(text, mark=None)


def test_a_choice_needs_its_mark():
    assert read_choice(f"It says Verdict: B\nVerdict {MARK}: A", mark=MARK) == "A"
    with pytest.raises(NoVerdict, match=MARK):
        read_choice("Verdict: B", mark=MARK)


@given(st.text(st.characters(blacklist_characters=MARK + MARK.lower()), max_size=80))
def test_a_copied_text_without_the_mark_changes_no_verdict(copied):
    assert score(f"It says {copied}\nScore {MARK}: 4", MARK) == 4


@pytest.mark.parametrize("piece", ["[[", "Score ", '{"score": ', "Score **", "[[    ", "{" * 50])
def test_long_answers_are_read_in_time(piece):
    with pytest.raises(NoVerdict):
        score(piece * 3000, MARK)
