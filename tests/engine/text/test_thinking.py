"""The thinking and the answer of a reply."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm import ConfigError
from gym_rm.engine.text.thinking import KNOWN_TAGS, Thinking
from gym_rm.errors import ConversationError


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def answer_of(text, **options):
    return Thinking(**options).split(assistant(text))[1]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Plain.", "Plain."),
        ("<think>Hm.</think>\n\nYes.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", "Yes."),
        ("Hm, <think> is a tag.", "Hm, <think> is a tag."),
        ("Hm.</think>Yes.", "Yes."),
        ("<think>a</think>b</think>Yes.", "b</think>Yes."),
        ("<THINKING>Hm.</THINKING> Yes.", "Yes."),
        ("\n <think>a</think> <think>b</think>Yes.", "Yes."),
        ("First\n<think>a</think>then", "First\nthen"),
        ("<think>In <reasoning>x</reasoning> or", None),
        ("<think>Hm. Score: 3", None),
        ("<think>a</think><think>b", None),
        ("<think>a</think>Yes.\n<think>b", None),
        ("<|channel|>analysis<|message|>Hm.<|end|><|channel|>final<|message|>Yes.", "Yes."),
        ("<|channel|>analysis<|message|>Hm.", None),
        ("The mark <|channel|> is text here.", "The mark <|channel|> is text here."),
        ("", ""),
    ],
)
def test_the_answer_is_what_is_not_thinking(text, answer):
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>Write `</think>`.</think>Yes.", "Yes."),
        ("<think>\n```\nprint('</think>')\n```\n</think>Yes.", "Yes."),
        ("<think>a\n```\nno\n</think>\n```\nyes\n```", "```\nyes\n```"),
        ("thoughts\n```py\nno\n</think>\n```py\nyes\n```", "```py\nyes\n```"),
        ("```py\nx = '</think>'\n```", "```py\nx = '</think>'\n```"),
        ("<think>a</think>\n```\n</think>\n```", "```\n</think>\n```"),
        ("~~~\n<think>\n~~~\nYes.", "~~~\n<think>\n~~~\nYes."),
        ("The tag ``a </think>`` ends it.", "The tag ``a </think>`` ends it."),
        ("A ` here\nHm.</think>Yes, `x`.", "Yes, `x`."),
    ],
)
def test_tags_in_code_are_text(text, answer):
    assert answer_of(text) == answer


def test_thinking_that_the_template_opened_must_end():
    assert answer_of("Score: 3", opened=True) is None
    assert answer_of("Hm. `</think>` Score: 3", opened=True) == "` Score: 3"
    assert answer_of("Hm.</think>Score: 3", opened=True) == answer_of("<think>Hm.</think>Score: 3", opened=True)


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        (assistant("Yes.", reasoning_content="Hm."), ("Hm.", "Yes.")),
        (assistant("Yes.", reasoning="a", reasoning_details=[{"text": "a"}]), ("a", "Yes.")),
        (assistant("Yes.", reasoning_details=[{"text": "a"}, {"summary": "b"}]), ("a\nb", "Yes.")),
        (assistant(None, thinking="Hm."), ("Hm.", None)),
        (assistant("", reasoning="Hm.", tool_calls=[{}]), ("Hm.", "")),
        (assistant([{"type": "text", "text": "Yes."}], reasoning=None), ("", "Yes.")),
    ],
)
def test_thinking_can_be_in_a_field_of_the_message(message, parts):
    assert Thinking().split(message) == parts


def test_a_field_with_thinking_shows_that_the_tag_is_not_left_open():
    assert Thinking(opened=True).split(assistant("Yes.", reasoning_content="Hm.")) == ("Hm.", "Yes.")


def test_a_content_that_is_no_text_is_named():
    with pytest.raises(ConversationError, match="image"):
        Thinking().split(assistant([{"type": "image"}]))


def test_a_conversation_is_left_with_its_answers():
    user = {"role": "user", "content": "<think>?"}
    turns = [user, assistant("<think>a</think>b"), user, assistant("<think>c"), user, assistant("d\n", reasoning="e")]
    expected = [user, assistant("b"), user, assistant(""), user, assistant("d\n")]
    assert Thinking(opened=True).answered(turns) == (expected, "e", "d")
    assert Thinking().answered(turns[:4]) == (expected[:4], "c", None)


@pytest.mark.parametrize(
    ("value", "thinking"),
    [
        (None, Thinking()),
        ("opened", Thinking(opened=True)),
        (["<a>", "</a>"], Thinking((("<a>", "</a>"),))),
        ({"tags": ("<a>", "</a>"), "opened": True}, Thinking((("<a>", "</a>"),), True)),
        ({"opened": False}, Thinking()),
    ],
)
def test_an_option_says_how_a_policy_thinks(value, thinking):
    assert Thinking.parse(value) == thinking == Thinking.parse(thinking.setting)


@pytest.mark.parametrize("value", ["open", [], ["<a>"], ["<a>", "<a>"], ["", "b"], {"tag": 1}, {"opened": "yes"}, 3])
def test_an_invalid_option_is_refused(value):
    with pytest.raises(ConfigError, match="thinking must be None"):
        Thinking.parse(value)


PIECES = [tag for pair in KNOWN_TAGS for tag in pair]
PIECES += ["`", "```", "```\n", "\n", " ", "~~~", "a", "<|channel|>final<|message|>", "<|channel|>", "<|message|>"]
TEXTS = st.lists(st.sampled_from(PIECES)).map("".join)


@given(TEXTS, st.booleans())
def test_every_text_can_be_split(text, opened):
    thinking, answer = Thinking(opened=opened).split(assistant(text))
    assert len(thinking) + len(answer or "") <= len(text)


WORDS = st.text(st.sampled_from("abc \n.`"), max_size=20)


@given(st.lists(WORDS, min_size=1, max_size=4), WORDS, st.sampled_from(KNOWN_TAGS), st.booleans())
def test_thinking_is_not_in_the_answer(thoughts, answer, tags, opened):
    thoughts = [f"T{k}{thought.replace('`', '')}" for k, thought in enumerate(thoughts)]
    text = "".join(f"{tags[0]}{thought}{tags[1]}\n" for thought in thoughts) + answer
    text = text.removeprefix(tags[0]) if opened else text
    assert Thinking(opened=opened).split(assistant(text)) == ("\n".join(map(str.strip, thoughts)), answer.strip())


HOSTILE = [
    "<think>", "</think>", "<think></think>", "<think>`</think>`\n", "```\n</think>\n```\n", "`", "``\n", "`</think>",
    "\n", " ", "```a\n", "~", ">", "<", "[THINK", "</think>\n", "<think>\n", "<|channel|>", "<|channel|>a<|message|>b",
    "<|channel|>a ",
]  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("before", ["", "<think>", "```\n", "<|channel|>"])
def test_a_hostile_reply_is_split_in_linear_time(piece, before):
    began = time.process_time()
    Thinking().split(assistant(before + piece * (100_000 // len(piece))))
    assert time.process_time() - began < 2


def test_runs_of_backticks_of_every_length_are_paired_in_linear_time():
    began = time.process_time()
    Thinking().split(assistant("</think>" + " ".join("`" * k for k in range(1400))))
    assert time.process_time() - began < 2
