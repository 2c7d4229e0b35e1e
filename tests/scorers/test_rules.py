"""Rules for the form of a reply."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gym_rm
from gym_rm import ConfigError, Prompt
from gym_rm.scorers.rules import FormatScorer, LengthScorer, RepetitionScorer
from gym_rm.testing import check_scorer

RULES = {"format": {"format": "boxed"}, "length": {"max_length": 100}, "repetition": {}}


def value(scorer, reply, prompt=None):
    said = [[{"role": "user", "content": "say"}, {"role": "assistant", "content": reply}]]
    return scorer.score(said, None if prompt is None else [prompt]).rewards[0]


@pytest.mark.parametrize("kind", RULES)
def test_every_rule_passes_the_checks_of_scorers(kind):
    check_scorer(gym_rm.load_scorer({"kind": kind, **RULES[kind]}))


@pytest.mark.parametrize("kind", RULES)
def test_a_conversation_without_a_reply_has_no_score(kind):
    with pytest.raises(gym_rm.ScoringError, match="role 'assistant'"):
        gym_rm.load_scorer({"kind": kind, **RULES[kind]}).score([[{"role": "user", "content": "say"}]])


@pytest.mark.parametrize(
    ("name", "reply", "expected"),
    [
        ("think_answer", "<think>a\nb</think>\n<answer>18</answer>", 1.0),
        ("think_answer", "  <think></think>\n<answer></answer>\n", 1.0),
        ("think_answer", "<think>a</think><answer>18</answer>", 0.0),
        ("think_answer", "Well, <think>a</think>\n<answer>18</answer>", 0.0),
        ("think_answer", "<think>a</think>\n<answer>18</answer>\n<answer>19</answer>", 0.0),
        ("boxed", r"so \boxed{18}", 1.0),
        ("boxed", r"so \boxed{\frac{1}{2}}", 1.0),
        ("boxed", r"so \boxed{}", 0.0),
        ("boxed", "so 18", 0.0),
    ],
)
def test_formats(name, reply, expected):
    assert value(FormatScorer(format=name), reply) == expected


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("a\nb</think>\n<answer>18</answer>", 1.0),
        ("<think>a</think>\n<answer>18</answer>", 1.0),  # as agents give it
        ("a\n<answer>18</answer>", 0.0),
        ("a<think>b</think>\n<answer>18</answer>", 0.0),
    ],
)
def test_a_tag_that_the_template_opened_is_taken_as_written(reply, expected):
    assert value(FormatScorer(format="think_answer", thinking="opened"), reply) == expected


def test_a_closing_tag_alone_is_no_format():
    assert value(FormatScorer(format="think_answer"), "a</think>\n<answer>18</answer>") == 0.0


def test_rules_judge_the_answer_alone_and_give_their_lowest_value_without_one():
    rules = [
        FormatScorer(pattern=r"\d+", judged="answer"),
        LengthScorer(max_length=10, judged="answer"),
        RepetitionScorer(size=1, judged="answer"),
    ]
    assert [value(rule, "<think>a a a a a a</think>18") for rule in rules] == [1.0, 0.0, 0.0]
    assert [value(rule, "<think>18") for rule in rules] == [0.0, -1.0, -1.0]


def test_a_pattern_matches_the_whole_reply():
    rule = FormatScorer(pattern=r"It is \d+\.")
    assert [value(rule, reply) for reply in ("It is 18.", "It is 18. Yes", "18")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("pattern", [r"(a+)+b", r"(a|aa)*b", r"(.*)*,", r"(\w+\s?)*$x"])
def test_a_pattern_that_takes_exponential_time_ends_in_time(pattern):
    start = time.process_time()
    assert value(FormatScorer(pattern=pattern), "a" * 50_000) == 0.0
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give either format or pattern"),
        ({"format": "boxed", "pattern": "a"}, "give either format or pattern"),
        ({"format": "boxd"}, "Did you mean 'boxed'"),
        ({"pattern": "("}, "must be a regular expression"),
        ({"pattern": 3}, "must be a regular expression"),
    ],
)
def test_an_invalid_format_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        FormatScorer(**settings)


def test_the_penalty_of_a_long_reply_is_the_one_of_dapo():
    rule = LengthScorer(max_length=100, buffer=20)
    lengths = (0, 80, 90, 100, 5000)
    assert [value(rule, "x" * length) for length in lengths] == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_lengths_that_leave_no_reply_without_a_penalty_are_refused():
    with pytest.raises(ConfigError, match="buffer=200 must be at most"):
        LengthScorer(max_length=100, buffer=200)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [("one two three four", 0.0), ("a b a b", -0.5), ("A b a B", -0.5), ("", 0.0), ("好好好好", -0.75)],
)
def test_repeated_words_are_a_penalty(reply, expected):
    assert value(RepetitionScorer(size=1), reply) == expected


@given(st.text(max_size=200), st.integers(1, 5))
def test_the_penalty_of_repetition_is_bounded(reply, size):
    assert -1.0 < value(RepetitionScorer(size=size), reply) <= 0.0


@pytest.mark.parametrize("kind", [*RULES, "math"])
def test_a_reply_in_text_parts_is_read_and_one_with_an_image_is_a_failed_row(kind):
    scorer = gym_rm.load_scorer({"kind": kind, **RULES.get(kind, {})})
    parts = [{"type": "text", "text": "The answer "}, {"type": "text", "text": "is 18."}]
    contents = ["The answer is 18.", parts, [*parts, {"type": "image", "image": "a.png"}], None]
    conversations = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": each}] for each in contents]
    with pytest.raises(gym_rm.ScoringError, match=r"2 of 4.*part of the type 'image'") as caught:
        scorer.score(conversations, [Prompt(({"role": "user", "content": "?"},), "p", answer="18")] * 4)
    rewards = caught.value.scores.rewards
    assert rewards[0] == rewards[1]
    assert "must be a text, got None" in caught.value.scores.errors[3]
