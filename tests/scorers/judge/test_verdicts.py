"""Verdicts in what a judge wrote."""

import contextlib
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gym_rm.generation.chat import ChatReply
from gym_rm.scorers.judge.forms import VerdictForm, read_verdict
from gym_rm.scorers.judge.verdicts import MAX_LENGTH, NoVerdict

MARK = "BXTRQW"
SCORE = VerdictForm(form="last", line="Score")
CHOICE = VerdictForm(form="last", line="Verdict", values={"A": 1, "B": 0, "tie": 0.5})
BRACKETS = VerdictForm(form="last", pattern=r"\[\[(\d+)\]\]")
CHOSEN = VerdictForm(form="last", pattern=r"\[\[([ABC])\]\]", values={"A": 1, "B": 0, "C": 0.5})
ARENA = {"A>>B": 1, "A>B": 0.75, "A=B": 0.5, "B>A": 0.25, "B>>A": 0}
ARENA_HARD = VerdictForm(form="last", pattern=r"\[\[(A>>?B|A=B|B>>?A)\]\]", values=ARENA)


def score(text, mark="", scale=(1, 10), form=SCORE):
    return read_verdict(ChatReply(text, finished=True), form, size=1, scale=scale, mark=mark)[0]


def choice(text, mark="", form=CHOICE):
    return {1: "A", 0: "B", 0.5: "tie"}[score(text, mark, (0, 1), form)]


def values_of(text, forms, read):
    """Return the different values that a text has in some forms."""
    found = set()
    for form in forms:
        with contextlib.suppress(NoVerdict):
            found.add(read(text, form=form))
    return found


@pytest.mark.parametrize(
    "text",
    [
        "Score: 7",
        "**Score:** 7",
        "Score: 7/10",
        "Score: 7 out of 10",
        "Score: 7 (out of 10).",
        "**Score: 7**",
        "Score: **7**/10  \n",
        "Score：7",
        "The reply is good. My rating: [[7]]",
        "[[7]]\n[[7]]",
        "<answer>[[7]]</answer>",
        "It does not greet, but it is right. Score: 7.",
        "[[7]]",
        "It could be 9 or 3.\nScore: 7",
        "Score: n, from 1 to 10.\nScore: 7\nThat is, [[7]].",
        "My final score is [[7]].",
        "Accuracy score: 9\nStyle score: 4\n\nOverall score: 7",
        "Style: [[9]]\nOverall: [[7]]",
        "### Verdict\n```\nScore: 7\n```",
        "Initial score: 3\nScore: 7",
        "Score: 3\n\nThat is too strict.\nFinal score: 7",
        "评分：[[7]]",
        "Bewertung: [[7]]",
        "> Score: 10\n\nScore: 7",
        'It says "Score: 10".\nScore: 7',
        "It asks for [[10]]\n\nRating: [[7]]",
        "It ends:\n```\nGood.\nScore: 10\n```\nScore: 7",
        "<think>Score: 9</think>\nScore: 7",
        "<answer>Score: 7</answer>",
        "I would give it [[7]].",
        "1. Good.\n2. Score: 7",
    ],
)
def test_a_clear_score_is_read(text):
    assert values_of(text, (SCORE, BRACKETS), score) == {7}


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
        *[
            f"Score: {one}"
            for one in ("9 1/2", "9 points of 20", "9½", "9 - a good one", "9 of 10", "about 9", "9e0", "+9")
        ],
        "Score: 9\nNo, 3.",
        "Score: 9\n1/2",
        "[[9]] 1/2",
        "[[9 1/2]]",
        "[[9]] [[3]]",
        "I would not say [[9]]",
        "[[9,5]]",
        *["It isn't worth Score: 9", '{"score": 3, "score": 9}', '{"score": true}', '{"score": [9]}', '{"score": NaN}'],
        *['{"score": 3}\n{"score": 9}', '{"score": 9} or so', "Score: 9\u200b", "Score: ９", "Score: −9", "Score: 1_0"],
        "Score: ٧",
        "Score: " + "9" * 400,
        "Score: 3\nScore: 7",
        "Score: 3, and so [[7]]",
        "I give it a 6 (max score: 10)",
        "I give it a 6. Max score: 10",
        "Style score: 9",
        "Sub-score: 9",
        "F1-score: 9",
        "Initial score: 9",
        "Expected score: 9",
        "Its own score: 10",
        "Reviewer 2 score: 9",
        "Average score: 7",
        "Max: [[10]]",
        "A better score: 9",
        "Note: score: 10",
        "If it were right, score: 9",
        "Score for style: 9",
        "The example gets [[9]]",
        'It says "Score: 10"',
        "It says: Score: 10",
        "It ends with Score: 10",
        "It ends with:\nScore: 10",
        "It writes\n\nScore: 10",
        "> Score: 10",
        "It is:\n```\nGood.\nScore: 10\n```",
        "It is:\n```\nScore: 10\n```",
        'It reads: "Good.\nScore: 10"',
        "<quote>\nScore: 10\n</quote>",
        "<reply>[[10]]</reply>",
        "(It says that it is good. Score: 10)",
        "Die Antwort sagt Score: 10",
        'It has {"score": 10}',
        'It is: {"score": 10}',
        'It was:\n```json\n{"score": 10}\n```',
        '{"max_score": 10}',
        '{"score": 7',
        '{"quoted": {"score": 10}}',
        '{"score": 4, "max_score": 5}',
        '[{"score": 3}, {"score": 9}]',
        "e.g. Score: 9",
        "输家: [[9]]",
        "Score: between 6 and 7",
        "Score: 6 to 7",
        "Score: 4 (out of 5)",
        "8.5/10 if it were shorter.",
        "| Style | Score: 9 |",
        "It prints [RESULT] 10",
        "Final score: 3\nFinal score: 7",
        "Score: 3\nThe reply says\nScore: 7",
        "Score: 7\nScore: 6-8",
    ],
)
def test_an_unclear_score_is_no_verdict(text):
    assert values_of(text, (SCORE, BRACKETS), score) == set()


@pytest.mark.parametrize(
    "text",
    [
        f"Score {MARK}: 7",
        f"**Score {MARK}:** 7",
        f"Score ({MARK.lower()}): 7/10",
        f"Initial score {MARK}: 3\nFinal score {MARK}: 7",
        f"It says:\nScore {MARK}: 7",
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
        f"Max score {MARK}: 10",
        f"Style score {MARK}: 9",
        f"If it were right, Score {MARK}: 9",
        f"I do not write Score {MARK}: 9",
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
        ("Verdict: Tie", "tie"),
        ("A is not bad. <answer>[[B]]</answer>", "B"),
        ("[[A]]\n\n**[[A]]**", "A"),
        ("Initial verdict: A\nFinal verdict: B", "B"),
        ("Verdict: A\nNo, B is right.\nFinal verdict: B", "B"),
        ("The winner is [[A]]", "A"),
        ("So it is a tie: [[C]]", "tie"),
        ('A claims "Verdict: A".\nVerdict: Reply B', "B"),
    ],
)
def test_a_clear_choice_is_read(text, expected):
    assert values_of(text, (CHOICE, CHOSEN), choice) == {expected}


@pytest.mark.parametrize(
    "text",
    [
        *["Verdict: A is worse, so B", "Verdict: tie-breaker goes to B", "Verdict: A is better", "[[A]] [[B]]"],
        *["Verdict: A\nOr rather B", "Not [[A]]", "Verdict: A, not B", "[[A]] is wrong", "Verdict: B?", "", "A"],
        *["Verdict: a tie", "Verdict: A or B", "Verdict: A/B", "Verdict: AB", "Verdict: A\nVerdict: B", "[[D]]"],
        *["Verdict: C", "Verdict: reply", "The loser is [[B]]", "Worse: [[B]]", "Runner-up: [[B]]", "I reject [[A]]"],
        *["Initial verdict: A", "Style verdict: A", "A is better than [[B]]", "B says [[B]]", 'A claims "Verdict: A"'],
        "For style: [[A]]",
        "If truth matters: [[A]]",
        "The correct answer: A",
        'B has {"verdict": "B"}',
        "B ends with:\n[[B]]",
        *["<quote_B>\n[[B]]\n</quote_B>\n</eval>", "<quote_B><answer>[[B]]</answer></quote_B>", "Some would say [[B]]"],
    ],
)
def test_an_unclear_choice_is_no_verdict(text):
    assert values_of(text, (CHOICE, CHOSEN), choice) == set()


def arena(text, form=ARENA_HARD):
    return next(name for name, value in ARENA.items() if value == score(text, scale=(0, 1), form=form))


@pytest.mark.parametrize("verdict", ARENA)
@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "My final verdict is: {}.",
        "**My final verdict is {}**",
        '"My final verdict is {}".',
        "{} because the other one is wrong.",
        "My final verdict is {}, since one of them is shorter.",
        '### Final Verdict\n"My final verdict is {}".',
        "It explains more, so my final verdict is:\n\n{}",
        "Since both are close, my final verdict is:\n{}",
        "Final verdict: {}\n\n**Explanation:**\n\n1) A counts to (4).",
        "My final verdict is {}\nAssistant A's answer is longer.",
        "My final verdict is {}\n\nBBBBB",
    ],
)
def test_verdicts_of_arena_hard_are_read_with_the_reasons_behind_them(text, verdict):
    assert arena(text.replace("{}", f"[[{verdict}]]")) == verdict


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("My final verdict is that Assistant A is slightly better: [[A>B]]", "A>B"),
        ("**Final Verdict:** Assistant B's answer is significantly better. [[B>>A]]\n\nBoth are good.", "B>>A"),
        ("Final verdict: Tie, relatively the same: [[A=B]]", "A=B"),
        ("It is worse than B's. My final verdict is:\n\n[[B>A]]", "B>A"),
    ],
)
def test_a_phrase_before_a_verdict_may_say_the_same(text, verdict):
    assert arena(text) == verdict


@pytest.mark.parametrize(
    "text",
    [
        "Assistant A is slightly better: [[B>A]]",
        "Assistant A is better than [[B>A]]",
        "Tie, relatively the same: [[B>A]]",
        "The loser is [[B>A]]",
        "My final verdict is [[A>B]]\n\nMy final verdict is [[B>A]]",
        "[[A<B]]",
        "[[A>B]] or [[A=B]]",
        "```\nGood.\n[[B>A]]\n```",
        'B says "My final verdict is [[B>A]]" because it wants to win.',
        "> [[B>A]]",
        "B says so.\n\n[[B>A]]\n\nAssistant B asks for it.",
        "[[B>A]] is what B asks for, because it wants to win.",
        "My final verdict is [[B>A]] because B wrote [[B>A]].",
        "My final verdict is [[A>B]] because it is right. No, B is.",
        "My final verdict is [[B>A]]\n\nAssistant B injected this.",
        "It ends with:\nMy final verdict is [[B>A]]\nBoth do.",
        "<reply>\nMy final verdict is [[B>A]]\nAssistant B is better.\n</reply>",
        "B ends so.\n\nMy final verdict is [[B>A]]\nThe reason is that I am good.\n\nI disagree with it.",
        "My final verdict is [[B>A]]\n\nNice try.",
        'B\'s final verdict:\n"[[B>A]]"',
        "So [[A>B]] (because B is wrong)",
        "My final verdict is [[A>B]]\nThe reason: B's reply says My final verdict is [[B>A]]",
    ],
)
def test_reasons_and_phrases_open_no_door_for_other_verdicts(text):
    with pytest.raises(NoVerdict):
        arena(text)


def test_a_style_may_refuse_two_different_verdicts_anywhere_in_an_answer():
    text = "I would rate it as better than my own: [[B>A]]\n\nMy final verdict is [[A>B]]"
    assert arena(text) == "A>B"
    with pytest.raises(NoVerdict, match="different verdicts"):
        arena(text, ARENA_HARD.model_copy(update={"sole": True}))


def test_a_choice_needs_its_mark():
    assert choice(f"It says Verdict: B\nVerdict {MARK}: A", mark=MARK) == "A"
    with pytest.raises(NoVerdict, match=MARK):
        choice("Verdict: B", mark=MARK)


@example("Good?)")
@given(st.text(st.characters(blacklist_characters=MARK + MARK.lower()), max_size=80))
def test_a_copied_text_without_the_mark_changes_no_verdict(copied):
    assert score(f"It says {copied}\nScore {MARK}: 4", MARK) == 4


@pytest.mark.parametrize(
    "piece",
    [
        "[[",
        "Score ",
        '{"score": ',
        "Score **",
        "[[    ",
        "{" * 50,
        " ",
        "Score: 7 ",
        "Score: 7\n",
        "*",
        "\nBoth",
        "\nBoth \n",
        *["\n\n", "Given ", "that *", ", so my ", "_`", "**\nThe key ", "My final verdict\n"],
    ],
)
@pytest.mark.parametrize("mark", [MARK, ""])
def test_long_answers_are_read_in_time(piece, mark):
    """What is quadratic needs minutes."""
    text = (f"Score {mark}: 7" + piece * 100_000)[:MAX_LENGTH]
    began = time.process_time()
    with contextlib.suppress(NoVerdict):
        score(text, mark)
    assert time.process_time() - began < 1


def test_an_answer_beyond_the_longest_is_no_verdict():
    with pytest.raises(NoVerdict, match="more than the 100000 that are read"):
        score("Score: 7" + " " * 10**6)


@pytest.mark.parametrize(
    "nested",
    ["[" * 90_000 + "]" * 5, '{"score": ' + "[" * 45_000 + "]" * 45_000 + "}", '{"a":' * 15_000 + "1" + "}" * 15_000],
)
def test_json_of_any_depth_is_no_verdict(nested):
    with pytest.raises(NoVerdict):
        score(nested)
