import functools

import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from gym_rm.engine.text.renderer import Renderer
from gym_rm.engine.text.token_bound import TokenBound
from tests.engine.text.rendering import STYLES, assistant, system, user
from tests.engine.text.test_control_tokens import CHATML_TOKENS, bpe, sentencepiece_like

WITHOUT_A_BOUND = ("unigram", "bert", "Whitespace", "Strip", "NFKC")


def with_parts(normalizer=None, pre_tokenizer=None):
    tok = tiny_models.tokenizer("chatml")
    if normalizer is not None:
        tok.backend_tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tok.backend_tokenizer.pre_tokenizer = pre_tokenizer
    return tok


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
TOKENIZERS = {
    **{style: functools.partial(tiny_models.tokenizer, style) for style in (*STYLES, "bert", "roberta")},
    "byte fallback": sentencepiece_like,
    "swallows spaces": functools.partial(bpe, CHATML_TOKENS, tiny_models.CHATML, lstrip=True, rstrip=True),
    "NFC": lambda: with_parts(normalizers.NFC()),
    "NFKC": lambda: with_parts(normalizers.NFKC()),
    "Strip": lambda: with_parts(normalizers.Strip()),
    "Whitespace": lambda: with_parts(None, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), BYTES])),
    "Digits": lambda: with_parts(None, pre_tokenizers.Sequence([pre_tokenizers.Digits(), BYTES])),
}


@functools.cache
def tokenizer(name):
    return TOKENIZERS[name]()


@functools.cache
def bound(name):
    return TokenBound(tokenizer(name))


texts = st.lists(
    st.sampled_from(
        ["e", "the ", "sum", " ", "\n", "   ", "e\u0301", "世", "🙂", "\u0301", "\0", "<|im_end|>", "</s>", "\ufdfa"]
    )
    | st.text(st.characters(codec="utf-8"), max_size=5)
    | st.sampled_from(tiny_models.CORPUS),
    max_size=30,
).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=texts, repeats=st.integers(1, 9))
@settings(max_examples=60)
def test_no_text_has_fewer_tokens_than_the_bound(name, text, repeats):
    text *= repeats
    assert bound(name)(text) <= len(tokenizer(name)(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bound_of_ordinary_text(name):
    """It is at least a twentieth of the number of tokens, or 0 for tokenizers that can remove or merge any text."""
    text = " ".join(tiny_models.CORPUS) * 10
    count = len(tokenizer(name)(text, add_special_tokens=False)["input_ids"])
    assert (bound(name)(text) == 0) if name in WITHOUT_A_BOUND else (bound(name)(text) > count / 20)


def test_a_tokenizer_without_a_backend_has_no_bound():
    assert TokenBound(object())("text " * 100) == 0


@pytest.mark.parametrize("reply", ["So it is. " * 30_000, "<|im_end|>" * 30_000, "x" * 300_000])
@pytest.mark.parametrize("overlong", ["error", "drop_turns"])
def test_a_reply_that_is_much_too_long_is_refused_without_tokenising_it(reply, overlong, monkeypatch):
    renderer = Renderer(tiny_models.tokenizer("chatml"), max_length=100, overlong=overlong)
    monkeypatch.setattr(renderer, "tokenize", lambda texts: [] if not texts else pytest.fail("tokenised"))
    monkeypatch.setattr(renderer._control, "encode", lambda *_: pytest.fail("tokenised"))
    (error,) = renderer.encode([[system("s"), user("q"), assistant(reply)]])
    assert "the conversation has at least " in str(error)
    assert "more than max_length=100" in str(error)


@pytest.mark.parametrize("field", [{"reasoning_content": "So it is. " * 30_000},
                                   {"tool_calls": [{"function": {"arguments": {"a": "x" * 300_000}}}]}])  # fmt: skip
def test_a_field_that_is_much_too_long_is_refused_without_tokenising_it(field, monkeypatch):
    template = "{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}{{ m.tool_calls }}{% endfor %}"
    renderer = Renderer(tiny_models.tokenizer("chatml"), chat_template=template, max_length=100)
    monkeypatch.setattr(renderer, "tokenize", lambda texts: [] if not texts else pytest.fail("tokenised"))
    (error,) = renderer.encode([[user("q"), {**assistant("a"), **field}]])
    assert "the conversation has at least " in str(error)


def test_turns_are_dropped_from_a_conversation_that_is_much_too_long():
    long = [user("q"), assistant("So it is. " * 3000), user("And now?"), assistant("No.")]
    renderer = Renderer(tiny_models.tokenizer("chatml"), max_length=100, overlong="drop_turns")
    whole, short = Renderer(tiny_models.tokenizer("chatml")).encode([long, long[2:]])
    (kept,) = renderer.encode([long])
    assert kept.input_ids.tolist() == short.input_ids.tolist()
    assert kept.truncated_tokens == len(whole.input_ids) - len(short.input_ids)
