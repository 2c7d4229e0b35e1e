import numpy as np
import pytest

from gym_rm.data.messages import join_reply, parse_messages, prompt_messages, refuse_rendered
from gym_rm.engine.text.messages import plain_content
from gym_rm.errors import ConfigError

USER = {"role": "user", "content": "2 + 2?"}
FOUR = {"role": "assistant", "content": "4"}
PARTS = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]
IMAGE = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "x"}}]

# --- messages of a file


def test_a_text_is_one_message():
    assert parse_messages("hi", "here", "prompt") == ({"role": "user", "content": "hi"},)
    assert parse_messages("hi", "here", "reply", text_role="assistant") == ({"role": "assistant", "content": "hi"},)


def test_keys_with_the_value_none_are_dropped():
    """Column formats add the keys of other messages with the value None."""
    assert parse_messages([{**USER, "name": None}], "here", "messages") == (USER,)
    named = {**USER, "name": "Ann"}
    assert parse_messages([named], "here", "messages") == (named,)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "here: 'messages' must be a text or a list of messages, got int 3"),
        (None, "here: 'messages' must be a text or a list of messages, got NoneType None"),
        (b"hi", "here: 'messages' must be a text or a list of messages, got bytes b'hi'"),
        (USER, "here: 'messages' must be a text or a list of messages, got dict"),
        ([], r"here: 'messages' must be a text or a list of messages, got list \[\]"),
        ([USER, "hi"], r"here: 'messages\[1\]' must be a message {'role', 'content'}, got str 'hi'"),
        ([{"role": "user"}], r"here: 'messages\[0\].content' must be a text, got only the keys \['role'\]"),
        ([{"role": 3, "content": "hi"}], r"here: 'messages\[0\].role' must be a text, got int 3"),
        ([{"role": "user", "content": None}], r"here: 'messages\[0\].content' must be a text, got NoneType None"),
    ],
)
def test_invalid_messages_are_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        parse_messages(value, "here", "messages")


def test_content_in_text_parts_is_joined():
    assert parse_messages([{"role": "user", "content": PARTS}], "here", "messages") == (USER,)


def test_a_message_with_tool_calls_needs_no_content():
    called = {"role": "assistant", "tool_calls": [{"name": "add"}]}
    for given in (called, {**called, "content": None}):
        assert parse_messages([USER, given], "here", "messages")[1] == {**called, "content": ""}


def test_an_image_is_refused():
    with pytest.raises(ConfigError, match=r"'messages\[0\].content' must be a text, got list .*other parts than text"):
        parse_messages([{"role": "user", "content": IMAGE}], "here", "messages")


# --- prompts and replies of a trainer


@pytest.mark.parametrize("prompt", ["2 + 2?", [USER], (USER,), np.array([USER], dtype=object)])
@pytest.mark.parametrize("reply", ["4", [FOUR], (FOUR,)])
def test_a_prompt_and_a_reply_become_one_conversation(prompt, reply):
    assert list(join_reply(prompt, reply)) == [USER, FOUR]


@pytest.mark.parametrize("content", [IMAGE, None, 3, "text", [{"text": "no type"}], ["text"]])
def test_other_content_than_text_is_kept(content):
    assert plain_content(content) == content
    assert prompt_messages([{"role": "user", "content": content}]) == [{"role": "user", "content": content}]


def test_the_given_messages_are_not_changed():
    prompt = [{"role": "user", "content": PARTS}]
    join_reply(prompt, "4")
    assert prompt == [{"role": "user", "content": PARTS}]


@pytest.mark.parametrize("prompt", [None, [], ["hi"], USER])
def test_what_is_neither_text_nor_messages_is_refused(prompt):
    with pytest.raises(ConfigError, match="row 7 must be a text or a list of messages, got"):
        join_reply(prompt, "4", "row 7")
    with pytest.raises(ConfigError, match="the reply to row 7 must be a text or a list of messages, got"):
        join_reply("2 + 2?", 3, "row 7")


RENDERED = [
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
    "<bos><start_of_turn>user\nHi<end_of_turn>\n",
    "<s>[INST] Hi [/INST]",
    "<|user|>\nHi<|end|>\n<|assistant|>",
    "<｜User｜>Hi<｜Assistant｜>",
]


@pytest.mark.parametrize("text", RENDERED)
def test_a_prompt_with_an_applied_chat_template_is_refused(text):
    with pytest.raises(ConfigError, match=r"row 7 contains .*: the policy's chat template has been applied to it"):
        refuse_rendered(text, "row 7")
    with pytest.raises(ConfigError, match="chat template has been applied"):
        join_reply(text, "4")


@pytest.mark.parametrize("text", ["2 < 3 | 4 > 1", "<b>bold</b>", "user: hi", "[INSTALL] it", ""])
def test_ordinary_text_is_not_mistaken_for_a_rendered_prompt(text):
    refuse_rendered(text, "row 7")
    assert prompt_messages(text) == [{"role": "user", "content": text}]


def test_a_reply_may_contain_control_tokens():
    """The renderer encodes control tokens in a reply as plain text, so they cannot forge a turn."""
    assert list(join_reply("hi", RENDERED[0]))[-1] == {"role": "assistant", "content": RENDERED[0]}
