import numpy as np
import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.renderer import Renderer
from gym_rm.errors import ConfigError, ConversationError
from tests.engine.text.rendering import (
    assistant,
    bos_adding,
    each_style,
    ids_of,
    renderer_of,
    user,
)

# --- same ids as transformers


@each_style
def test_real_conversations_have_the_ids_of_transformers(style, gsm8k_groups, hh_pairs):
    conversations = [c for group in [*gsm8k_groups[::20], *hh_pairs[::10]] for c in group]
    tok = tiny_models.tokenizer(style)
    for conversation, rendered in zip(conversations, Renderer(tok).encode(conversations), strict=True):
        assert rendered.truncated_tokens == 0
        assert rendered.input_ids.dtype == np.int32
        ids = tok.apply_chat_template(conversation, tokenize=True, return_dict=False)
        assert rendered.input_ids.tolist() == ids


@each_style
@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=4))
@settings(max_examples=20)
def test_any_text_has_the_ids_of_a_call_of_the_tokenizer(style, texts):
    renderer = renderer_of(style)
    expected = renderer.tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert [ids.tolist() for ids in renderer.tokenize(texts, add_special_tokens=False)] == expected


def test_what_another_call_left_in_the_tokenizer_does_not_change_ids():
    renderer = Renderer(tiny_models.tokenizer("chatml"))
    tok, texts = renderer.tokenizer, ["What is 12 + 30?<|im_end|>", "Two"]
    before = [ids.tolist() for ids in renderer.tokenize(texts)]
    tok(texts, truncation=True, max_length=2, padding="max_length", split_special_tokens=True)
    assert [ids.tolist() for ids in renderer.tokenize(texts)] == before


def test_a_tokenizer_with_a_call_of_its_own_is_called():
    tok = tiny_models.tokenizer("chatml")

    class Lower(type(tok)):
        def __call__(self, texts, **options):
            return super().__call__([text.lower() for text in texts], **options)

    plain = Renderer(tok).tokenize(["what is it?"])[0].tolist()
    tok.__class__ = Lower
    assert Renderer(tok).tokenize(["WHAT is it?"])[0].tolist() == plain


@each_style
@given(
    texts=st.lists(st.text(max_size=9), min_size=1, max_size=5),
    replies=st.lists(st.text(max_size=20), min_size=3, max_size=4),
)
@settings(max_examples=10)
def test_texts_that_share_most_of_their_parts_have_the_ids_of_each_alone(style, texts, replies):
    renderer = renderer_of(style)
    turns = [(user if k % 2 == 0 else assistant)(f"{text} and more than a reply has") for k, text in enumerate(texts)]
    turns = turns[: len(turns) - 1 + len(turns) % 2]
    conversations = [[*turns, assistant(reply or "-")] for reply in replies]
    for together, conversation in zip(renderer.encode(conversations), conversations, strict=True):
        (alone,) = renderer.encode([conversation])
        if isinstance(alone, ConversationError):
            assert str(together) == str(alone)
        else:
            assert together.input_ids.tolist() == alone.input_ids.tolist()


def test_text_pairs_have_the_ids_of_transformers(hh_pairs):
    conversations = [conversation for pair in hh_pairs[::20] for conversation in pair]
    for style in ("bert", "roberta"):
        tok = tiny_models.tokenizer(style)
        renderer = Renderer(tok, input_format=InputFormat(encoder=True))
        for conversation, rendered in zip(conversations, renderer.encode(conversations), strict=True):
            context = "\n".join(message["content"] for message in conversation[:-1])
            expected = tok(context, conversation[-1]["content"])
            assert rendered.input_ids.tolist() == expected["input_ids"]
            types = expected.get("token_type_ids")
            assert rendered.second_segment == (None if types is None else types.index(1))


def test_a_long_reply():
    tok = tiny_models.tokenizer("chatml")
    reply = "So it is. " * 10_000
    (rendered,) = Renderer(tok).encode([[user("q"), assistant(reply)]])
    assert tok.decode(rendered.input_ids).count("So it is.") == 10_000
    (hostile,) = Renderer(tok).encode([[user("q"), assistant("<|im_end|>" * 10_000)]])
    assert (hostile.input_ids == tok.eos_token_id).sum() == 2


# --- BOS


@pytest.mark.parametrize("style", ["llama3", "gemma", "mistral"])
def test_one_bos_if_template_and_tokenizer_both_write_one(style, warnings):
    tok = bos_adding(style)
    assert tok("a")["input_ids"][0] == tok.bos_token_id
    for reply in ("a", tok.bos_token, f"a{tok.bos_token}"):
        ids = ids_of(Renderer(tok), [user("q"), assistant(reply)])
        assert ids[0] == tok.bos_token_id
        assert ids.count(tok.bos_token_id) == 1
    assert not warnings.records


def test_bos_if_only_the_tokenizer_writes_one(warnings):
    tok = bos_adding("llama3", chat_template=tiny_models.CHATML)
    conversation = [user("q"), assistant("a")]
    written = tok.apply_chat_template(conversation, tokenize=True, return_dict=False)
    assert ids_of(Renderer(tok), conversation) == [tok.bos_token_id, *written]
    assert "writes no BOS" in warnings.text
    assert ids_of(Renderer(tok, add_bos=False), conversation) == written


# --- invalid conversations and options


BAD_CONVERSATIONS = {
    "not a list": ("hello", "a conversation must be a list of"),
    "a mapping": ({"role": "user", "content": "q"}, "a conversation must be a list of"),
    "None": (None, "a conversation must be a list of"),
    "no messages": ([], "empty; expected at least one message"),
    "a text for a message": (["hello"], "message 0 must be"),
    "no content": ([{"role": "user"}], "message 0 must be"),
    "no role": ([{"content": "q"}], "message 0 must be"),
    "None for content": ([user("q"), assistant(None)], "the content of message 1 must be a string; got NoneType"),
    "an image": ([user([{"type": "image"}])], "the content of message 0 has a part of the type 'image'"),
    "a number for a role": ([{"role": 3, "content": "q"}], "the role of message 0 must be a string"),
    "a role that is not a word": ([{"role": "user<|im_end|>", "content": "q"}], "expected a word such as 'user'"),
    "an empty role": ([{"role": "", "content": "q"}], "expected a word such as 'user'"),
    "tool calls": ([user("q"), assistant("a") | {"tool_calls": [1]}], "must be a list of calls"),
    "a lone surrogate": ([user("q"), assistant("a\ud800b")], "lone surrogate.*character 1"),
    "a lone surrogate in a role": ([{"role": "us\udfffer", "content": "q"}], "lone surrogate"),
}


@pytest.mark.parametrize("case", BAD_CONVERSATIONS)
def test_an_invalid_conversation_gets_an_error_and_the_others_are_rendered(case):
    bad, reason = BAD_CONVERSATIONS[case]
    good = [user("q"), assistant("a")]
    renderer = Renderer(tiny_models.tokenizer("chatml"))
    first, error, last = renderer.encode([good, bad, good])
    assert isinstance(error, ConversationError)
    with pytest.raises(ConversationError, match=reason):
        raise error
    assert first.input_ids.tolist() == last.input_ids.tolist() == ids_of(renderer, good)
    first, error, last = renderer.encode_turns([good, bad, good])
    assert (len(first), len(last)) == (1, 1)
    with pytest.raises(ConversationError, match=reason):
        raise error


@pytest.mark.parametrize("text", ["", " ", "\n", "\0", "a\0b", "\u200b", "é" * 1000, "🙂" * 50, "\r\n\t"])
@each_style
def test_empty_and_unusual_texts_render(style, text):
    tok = tiny_models.tokenizer(style)
    conversation = [user("q"), assistant(text), user(text), assistant("a")]
    expected = tok.apply_chat_template(conversation, tokenize=True, return_dict=False)
    assert ids_of(Renderer(tok), conversation) == expected


@pytest.mark.parametrize(
    "broken",
    ["{{ messages[0]['content'] + 1 }}", "{{ 1 / 0 }}", "{{ messages[0].content.index('x') }}", "{{ missing.field }}"],
)
def test_a_template_that_crashes_fails_only_that_row(broken):
    template = "{% if messages[0]['content'] == 'q' %}" + broken + "{% endif %}" + tiny_models.CHATML
    renderer = Renderer(tiny_models.tokenizer("chatml"), chat_template=template)
    error, good = renderer.encode([[user("q")], [user("other")]])
    assert "the chat template cannot write this conversation" in str(error)
    assert len(good.input_ids)


def test_a_template_that_writes_nothing_for_a_conversation_is_an_error():
    template = "{% if messages[0]['role'] != 'tool' %}" + tiny_models.CHATML + "{% endif %}"
    renderer = Renderer(tiny_models.tokenizer("chatml"), chat_template=template, dropped_text="warn")
    (error,) = renderer.encode([[{"role": "tool", "content": "q"}]])
    assert "the chat template wrote nothing" in str(error)


def test_a_decoder_needs_a_chat_template():
    with pytest.raises(ConfigError, match=r"no chat template.*pass chat_template="):
        Renderer(tiny_models.tokenizer("chatml", chat_template=None))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"overlong": "cut"}, "overlong must be"),
        ({"max_length": 0}, "max_length must be an integer of at least 1"),
        ({"max_length": -5}, "max_length must be an integer of at least 1"),
    ],
)
def test_an_invalid_option_is_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        Renderer(tiny_models.tokenizer("chatml"), **options)
