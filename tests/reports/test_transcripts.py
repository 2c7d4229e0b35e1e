"""Conversations as text, HTML and pictures."""

from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.reports.transcripts import COLUMNS, LINE, MARGIN, ROWS, Html, Transcript, print_transcripts

CONVERSATION = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four\n\tindeed"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "<b>"}}}
any_text = st.text(st.characters(exclude_categories=()), max_size=200)  # lone surrogates too


def saying(*contents, **options):
    return Transcript([{"role": "user", "content": each} for each in contents], **options)


def same(first, second):
    return np.array_equal(first.picture(), second.picture())


# --- text


def test_a_transcript_has_title_messages_and_outcome():
    text = Transcript(CONVERSATION, title="prompt 7", reward=1.0).text()
    assert text == "--- prompt 7\nuser: 2 + 2?\nassistant: four\n\tindeed\n--- reward 1"


@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        ({}, ""),
        ({"reward": -0.5}, "reward -0.5"),
        ({"reward": 0.0, "is_fallback": True, "is_over": True}, "reward 0 (fallback), episode over"),
        ({"is_over": True}, "episode over"),
    ],
)
def test_the_outcome_is_the_reward_and_whether_the_episode_is_over(options, outcome):
    assert saying("a", **options).outcome == outcome


def test_control_characters_and_lone_surrogates_are_escaped():
    text = saying("\x1b[2J\x07\r\x9b31m\x00\ud800", title="t").text()
    assert text.splitlines()[1] == r"user: \x1b[2J\x07\x0d\x9b31m\x00\ud800"


def test_only_the_first_transcripts_are_printed(capsys):
    print_transcripts([Transcript(CONVERSATION, title=str(index)) for index in range(5)], most=2)
    out = capsys.readouterr().out
    assert "--- 1" in out
    assert "--- 2" not in out
    assert "and 3 more" in out


def test_brackets_are_printed_as_text(capsys):
    print_transcripts([saying("[red]x[/red]", title="t")])
    assert "[red]x[/red]" in capsys.readouterr().out


# --- HTML


class Reader(HTMLParser):
    """Collects the tags, the attributes and the text of a block."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.said = set(), set(), ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.said += data


@given(role=any_text, content=any_text, title=any_text)
@settings(deadline=None)
def test_nothing_that_is_said_becomes_markup(role, content, title):
    html = Transcript([{"role": role, "content": content, "tool_calls": [CALL]}], title=title).html()
    read = Reader(html)
    assert read.tags == {"div", "pre", "b"}
    assert read.attributes == {"style", "dir"}
    assert "calls add({&quot;a&quot;: &quot;&lt;b&gt;&quot;})" in html
    html.encode()


def test_html_has_what_the_text_has():
    said = Reader(Transcript([*CONVERSATION, {"role": "tool", "name": "<i>", "content": ""}], "t & u", 1.5).html()).said
    assert said == "t & uuser\n2 + 2?assistant\nfour\n\tindeedtool <i>\nreward 1.5"


def test_a_notebook_shows_a_transcript_and_its_html():
    transcript = Transcript(CONVERSATION)
    assert isinstance(transcript.html(), Html)
    assert transcript._repr_html_() == transcript.html()._repr_html_() == str(transcript.html())


# --- pictures


@given(contents=st.lists(any_text, max_size=3), title=any_text, reward=st.none() | st.floats())
@settings(deadline=None, max_examples=40)
def test_every_conversation_has_a_picture(contents, title, reward):
    picture = saying(*contents, title=title, reward=reward).picture()
    assert picture.shape == (480, 640, 3)
    assert picture.dtype == np.uint8


@pytest.mark.parametrize("content", ["x" * 100_000, "a b " * 25_000, "\n" * 100_000, "你好" * 50_000, "\x1b" * 100_000])
def test_long_messages_have_a_picture_of_their_end(content):
    assert same(saying("first", content, "last"), saying("other", content, "last"))
    assert not same(saying("first", content, "last"), saying("first", content, "end"))


def test_a_picture_says_how_many_lines_are_above():
    # The label and 30 lines; the first row is the count.
    lines = [str(row) for row in range(30)]
    above, shown = 31 - (ROWS - 1), lines[-(ROWS - 1) :]
    count = Transcript([{"role": f"… {above} more lines above", "content": "\n".join(shown)}])
    below = MARGIN + 3 * LINE  # the count is neither bold nor blue, as a label is
    assert np.array_equal(saying("\n".join(lines)).picture()[below:], count.picture()[below:])
    assert same(saying("\n".join(lines)), saying("\n".join(["other", *lines[1:]])))
    assert not same(saying("\n".join(lines)), saying("\n".join(["one more", *lines])))
    assert not same(saying("\n".join(shown)), saying("\n".join(["other", *shown[1:]])))


@pytest.mark.parametrize(
    ("text", "wrapped"),
    [
        ("word " * 40, "\n".join([" ".join(["word"] * 15)] * 2 + [" ".join(["word"] * 10)])),
        ("y" * (COLUMNS + 3), "y" * COLUMNS + "\nyyy"),
        ("a\n\n\tb", "a\n\n    b"),
    ],
)
def test_lines_break_at_spaces_or_in_a_long_word(text, wrapped):
    assert same(saying(text), saying(wrapped))


def test_a_picture_shows_roles_calls_and_the_reward():
    roles = ["system", "user", "assistant", "tool"]
    pictures = [Transcript([{"role": role, "content": ""}]).picture() for role in roles]
    pictures.append(Transcript([{"role": "assistant", "content": "", "tool_calls": [CALL]}]).picture())
    pictures.append(Transcript([{"role": "assistant", "content": ""}], reward=1.0).picture())
    assert len({picture.tobytes() for picture in pictures}) == 6
