import datetime
import functools
import logging

import numpy as np
import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from gym_rm.errors import ConfigError, ConversationError
from gym_rm.engine.text.renderer import DATE, InputFormat, Renderer

STYLES = ("chatml", "qwen", "llama3", "gemma", "mistral", "plain", "unigram")
each_style = pytest.mark.parametrize("style", STYLES)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def ids_of(renderer, conversation):
    (one,) = renderer.encode([conversation])
    if isinstance(one, ConversationError):
        raise one
    return one.input_ids.tolist()


def text_of(renderer, conversation):
    return renderer.tokenizer.decode(ids_of(renderer, conversation))


def bos_adding(style, **overrides):
    """A tokenizer that puts its BOS before every text, as Llama's and Gemma's do."""
    tok = tiny_models.tokenizer(style, **overrides)
    pair = (tok.bos_token, tok.bos_token_id)
    tok.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tok.bos_token} $A", pair=f"{tok.bos_token} $A {tok.bos_token} $B", special_tokens=[pair]
    )
    return tok


@pytest.fixture
def warnings(caplog):
    """What was warned of in this test, whatever was said before."""
    from gym_rm.errors import warn_once

    warn_once.cache_clear()
    caplog.set_level(logging.WARNING, "gym_rm")
    return caplog


# --- the ids are those of transformers


@each_style
def test_real_conversations_have_the_ids_of_transformers(style, gsm8k_groups, hh_pairs):
    conversations = [c for group in [*gsm8k_groups[::20], *hh_pairs[::10]] for c in group]
    tok = tiny_models.tokenizer(style)
    for conversation, rendered in zip(conversations, Renderer(tok).encode(conversations), strict=True):
        assert rendered.truncated_tokens == 0
        assert rendered.input_ids.dtype == np.int32
        ids = tok.apply_chat_template(conversation, tokenize=True, return_dict=False)
        assert rendered.input_ids.tolist() == ids


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


def test_variables_reach_the_template():
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if loud %}!{% endif %}"
    tok = tiny_models.tokenizer("plain")
    assert text_of(Renderer(tok, chat_template=template), [user("hi")]) == "hi"
    assert text_of(Renderer(tok, chat_template=template, chat_template_kwargs={"loud": True}), [user("hi")]) == "hi!"


def test_the_template_hash_tells_templates_apart():
    tok = tiny_models.tokenizer("chatml")
    one, same, other = Renderer(tok), Renderer(tok), Renderer(tok, chat_template=tiny_models.PLAIN)
    assert one.template_hash == same.template_hash != other.template_hash
    assert len(one.template_hash) == 16


def test_a_conversation_is_scored_to_its_end_not_to_the_next_reply():
    assert not text_of(Renderer(tiny_models.tokenizer("chatml")), [user("q"), assistant("a")]).endswith("assistant\n")
    with_prompt = Renderer(tiny_models.tokenizer("chatml"), input_format=InputFormat(generation_prompt=True))
    assert text_of(with_prompt, [user("q")]).endswith("<|im_start|>assistant\n")


# --- BOS


@pytest.mark.parametrize("style", ["llama3", "gemma", "mistral"])
def test_one_bos_where_template_and_tokenizer_both_write_one(style, warnings):
    tok = bos_adding(style)
    assert tok("a")["input_ids"][0] == tok.bos_token_id
    for reply in ("a", tok.bos_token, f"a{tok.bos_token}"):
        ids = ids_of(Renderer(tok), [user("q"), assistant(reply)])
        assert ids[0] == tok.bos_token_id
        assert ids.count(tok.bos_token_id) == 1
    assert not warnings.records


def test_bos_where_only_the_tokenizer_writes_one(warnings):
    tok = bos_adding("llama3", chat_template=tiny_models.CHATML)
    conversation = [user("q"), assistant("a")]
    written = tok.apply_chat_template(conversation, tokenize=True, return_dict=False)
    assert ids_of(Renderer(tok), conversation) == [tok.bos_token_id, *written]
    assert "writes no BOS" in warnings.text
    assert ids_of(Renderer(tok, add_bos=False), conversation) == written


def test_bos_on_request():
    tok = tiny_models.tokenizer("unigram")  # has a BOS, but neither it nor its template writes it
    conversation = [user("q"), assistant("a")]
    bare = ids_of(Renderer(tok), conversation)
    assert tok.bos_token_id not in bare
    assert ids_of(Renderer(tok, add_bos=True), conversation) == [tok.bos_token_id, *bare]
    llama = tiny_models.tokenizer("llama3")
    assert ids_of(Renderer(llama, add_bos=True), conversation) == ids_of(Renderer(llama), conversation)
    with pytest.raises(ConfigError, match="no BOS token"):
        Renderer(tiny_models.tokenizer("chatml"), add_bos=True)


# --- what cannot be rendered


BAD_CONVERSATIONS = {
    "not a list": ("hello", "a conversation is a list of"),
    "a mapping": ({"role": "user", "content": "q"}, "a conversation is a list of"),
    "None": (None, "a conversation is a list of"),
    "no messages": ([], "empty; expected at least one message"),
    "a text for a message": (["hello"], "message 0 must be"),
    "no content": ([{"role": "user"}], "message 0 must be"),
    "no role": ([{"content": "q"}], "message 0 must be"),
    "None for content": ([user("q"), assistant(None)], "the content of message 1 must be a string; got NoneType"),
    "parts for content": ([user([{"type": "text", "text": "q"}])], "the content of message 0 must be a string"),
    "a number for a role": ([{"role": 3, "content": "q"}], "the role of message 0 must be a string"),
    "a role that is no word": ([{"role": "user<|im_end|>", "content": "q"}], "expected a plain word"),
    "an empty role": ([{"role": "", "content": "q"}], "expected a plain word"),
    "tool calls": ([user("q"), assistant("") | {"tool_calls": [1]}], r"fields \['tool_calls'\]"),
    "half a character": ([user("q"), assistant("a\ud800b")], "lone surrogate.*character 1"),
    "half a character in a role": ([{"role": "us\udfffer", "content": "q"}], "lone surrogate"),
}


@pytest.mark.parametrize("case", BAD_CONVERSATIONS)
def test_what_is_no_conversation_is_named_and_costs_its_row_alone(case):
    bad, reason = BAD_CONVERSATIONS[case]
    good = [user("q"), assistant("a")]
    renderer = Renderer(tiny_models.tokenizer("chatml"))
    first, error, last = renderer.encode([good, bad, good])
    assert isinstance(error, ConversationError)
    with pytest.raises(ConversationError, match=reason):
        raise error
    assert first.input_ids.tolist() == last.input_ids.tolist() == ids_of(renderer, good)
    with pytest.raises(ConversationError, match=reason):
        renderer.encode_turns(bad)


def test_fields_without_a_value_are_nothing():
    renderer = Renderer(tiny_models.tokenizer("chatml"))
    message = assistant("a") | {"tool_calls": None, "name": None}
    assert ids_of(renderer, [user("q"), message]) == ids_of(renderer, [user("q"), assistant("a")])


def test_tuples_and_other_mappings_are_fine():
    from types import MappingProxyType

    renderer = Renderer(tiny_models.tokenizer("chatml"))
    frozen = tuple(MappingProxyType(message) for message in [user("q"), assistant("a")])
    assert ids_of(renderer, frozen) == ids_of(renderer, [user("q"), assistant("a")])


@pytest.mark.parametrize("text", ["", " ", "\n", "\0", "a\0b", "\u200b", "é" * 1000, "🙂" * 50, "\r\n\t"])
@each_style
def test_any_text_that_is_text_renders(style, text):
    tok = tiny_models.tokenizer(style)
    conversation = [user("q"), assistant(text), user(text), assistant("a")]
    expected = tok.apply_chat_template(conversation, tokenize=True, return_dict=False)
    assert ids_of(Renderer(tok), conversation) == expected


def test_a_template_that_refuses_says_so():
    renderer = Renderer(tiny_models.tokenizer("gemma"))
    good = [user("q"), assistant("a")]
    results = renderer.encode([[system("s"), user("q")], [user("q"), user("q")], good])
    assert "System role not supported" in str(results[0])
    assert "roles must alternate" in str(results[1])
    assert results[2].input_ids.tolist() == ids_of(renderer, good)


@pytest.mark.parametrize(
    "broken",
    ["{{ messages[0]['content'] + 1 }}", "{{ 1 / 0 }}", "{{ messages[0].content.index('x') }}", "{{ missing.field }}"],
)
def test_a_template_that_fails_costs_its_row_alone(broken):
    template = "{% if messages[0]['content'] == 'q' %}" + broken + "{% endif %}" + tiny_models.CHATML
    renderer = Renderer(tiny_models.tokenizer("chatml"), chat_template=template)
    error, good = renderer.encode([[user("q")], [user("other")]])
    assert "the chat template refuses this conversation" in str(error)
    assert len(good.input_ids)


def test_roles_that_the_template_drops_are_refused():
    """Mistral's template writes only the roles it knows: a tool's answer would vanish from the text that is scored."""
    template = tiny_models.MISTRAL.replace("{% else %}", "{% elif message['role'] == 'assistant' %}")
    renderer = Renderer(tiny_models.tokenizer("mistral"), chat_template=template)
    (error,) = renderer.encode([[user("q"), {"role": "tool", "content": "42"}, assistant("a")]])
    assert "does not write messages of the role 'tool'" in str(error)


def test_roles_that_the_template_writes_are_scored():
    renderer = Renderer(tiny_models.tokenizer("chatml"))
    for role in ("tool", "developer", "ipython", "user A", "o1-mini", "Ünïcode"):
        assert f"<|im_start|>{role}\n42<|im_end|>" in text_of(renderer, [user("q"), {"role": role, "content": "42"}])


def test_a_template_that_writes_nothing():
    (error,) = Renderer(tiny_models.tokenizer("chatml"), chat_template="{{ '' }}").encode([[user("q")]])
    assert "the chat template wrote nothing" in str(error)


def test_missing_template():
    with pytest.raises(ConfigError, match=r"no chat template.*pass chat_template="):
        Renderer(tiny_models.tokenizer("chatml", chat_template=None))
    templates = {"rag": tiny_models.CHATML, "tool_use": tiny_models.PLAIN}
    with pytest.raises(ConfigError, match=r"\['rag', 'tool_use'\] and no default"):
        Renderer(tiny_models.tokenizer("chatml", chat_template=templates))
    named = Renderer(tiny_models.tokenizer("chatml", chat_template=templates | {"default": tiny_models.PLAIN}))
    assert text_of(named, [user("q")]) == "user: q\n"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"overlong": "cut"}, "overlong must be"),
        ({"max_length": 0}, "at least 1 token"),
        ({"max_length": -5}, "at least 1 token"),
    ],
)
def test_settings_that_cannot_be(options, reason):
    with pytest.raises(ConfigError, match=reason):
        Renderer(tiny_models.tokenizer("chatml"), **options)


# --- templates that write more than the messages, or less


DATED = "{% if strftime_now is defined %}{{ 'Today: ' + strftime_now('%d %b %Y') }}{% endif %}" + tiny_models.CHATML
DATED_LATER = (
    "{% set format = '%-d. %B %Y, %A%%' %}{% macro day() %}{{ strftime_now(format) }}{% endmacro %}{{ day() }}"
)


@pytest.mark.parametrize(
    ("template", "written", "next_day"),
    [
        (DATED, "Today: 26 Jul 2024<|im_start|>", "27 Jul 2024"),
        (DATED_LATER, "26. July 2024, Friday%", "27. July 2024"),
    ],
)
def test_templates_that_write_the_date_are_told_one(template, written, next_day, warnings):
    tok = tiny_models.tokenizer("chatml", chat_template=template)
    assert text_of(Renderer(tok), [user("q")]).startswith(written)
    assert "writes today's date" in warnings.text
    for later in (DATE + datetime.timedelta(days=1), "2024-07-27"):
        assert next_day in text_of(Renderer(tok, date=later), [user("q")])
    with pytest.raises(ConfigError, match="date must be"):
        Renderer(tok, date="yesterday")


def test_the_date_leaves_the_rest_of_a_template_alone():
    for start in ("", " ", "\n", "\n\n ", "{# note #}\n", "  {% if true %}x{% endif %}"):
        template = start + "{{ messages[0]['content'] }}"
        dated = template + "{% if false %}{{ strftime_now('%Y') }}{% endif %}"
        tok = tiny_models.tokenizer("plain")
        assert text_of(Renderer(tok, chat_template=dated), [user("q")]) == tok.apply_chat_template(
            [user("q")], chat_template=template, tokenize=False
        )


def test_default_system_prompts_are_scored():
    renderer = Renderer(tiny_models.tokenizer("qwen"))
    assert "You are a helpful assistant." in text_of(renderer, [user("q"), assistant("a")])
    assert "You are a helpful assistant." not in text_of(renderer, [system("Be brief."), user("q"), assistant("a")])


def test_earlier_thinking_is_stripped_as_the_template_says():
    renderer = Renderer(tiny_models.tokenizer("qwen"))
    thinking = assistant("<think>hmm</think>\n4")
    assert "hmm" in text_of(renderer, [user("q"), thinking])
    assert "hmm" not in text_of(renderer, [user("q"), thinking, user("sure?"), assistant("yes")])


def test_a_template_that_ends_without_eos_is_left_so():
    tok = tiny_models.tokenizer("plain")
    assert text_of(Renderer(tok), [user("q"), assistant("a")]) == "user: q\nassistant: a\n"


# --- every turn


MONOTONE = {"chatml", "llama3", "gemma", "mistral", "unigram"}
turns_texts = st.lists(st.text(st.sampled_from("ab <|>\n\t\0é世"), max_size=8), min_size=1, max_size=7)


@each_style
@given(texts=turns_texts, thinking=st.booleans())
@settings(max_examples=25)
def test_every_turn_is_the_conversation_up_to_it(style, texts, thinking):
    renderer = renderer_of(style)
    conversation = [(assistant if k % 2 else user)(text or "x") for k, text in enumerate(texts)]
    if thinking and len(conversation) > 1:
        conversation[1] = assistant("<think>so</think>\n" + conversation[1]["content"])
    stops = [k + 1 for k, message in enumerate(conversation) if message["role"] == "assistant"]
    stops += [len(conversation)] * (conversation[-1]["role"] != "assistant")
    turns = [rendered.input_ids.tolist() for rendered in renderer.encode_turns(conversation)]
    assert turns == [ids_of(renderer, conversation[:stop]) for stop in stops]


@functools.cache
def renderer_of(style):
    return Renderer(tiny_models.tokenizer(style))


@pytest.mark.parametrize("style", STYLES)
def test_every_turn_of_real_dialogues(style, hh_pairs):
    renderer = renderer_of(style)
    for conversation, _ in hh_pairs[::60]:
        turns = renderer.encode_turns(conversation)
        stops = [k + 1 for k, message in enumerate(conversation) if message["role"] == "assistant"]
        assert [t.input_ids.tolist() for t in turns] == [ids_of(renderer, conversation[:stop]) for stop in stops]
        if style in MONOTONE:
            last = turns[-1].input_ids
            assert all(np.array_equal(turn.input_ids, last[: len(turn.input_ids)]) for turn in turns)


def test_turns_of_a_conversation_that_ends_with_the_user():
    renderer = renderer_of("chatml")
    conversation = [user("q"), assistant("a"), user("why?")]
    assert [t.input_ids.tolist() for t in renderer.encode_turns(conversation)] == [
        ids_of(renderer, conversation[:2]),
        ids_of(renderer, conversation),
    ]


def test_turns_with_control_tokens_in_them():
    renderer = renderer_of("chatml")
    conversation = [user("q"), assistant("a<|im_end|>"), user("<|im_start|>"), assistant("b")]
    turns = [t.input_ids.tolist() for t in renderer.encode_turns(conversation)]
    assert turns == [ids_of(renderer, conversation[:2]), ids_of(renderer, conversation)]


def test_turns_of_a_text_pair():
    renderer = Renderer(tiny_models.tokenizer("bert"), input_format=InputFormat(encoder=True))
    conversation = [user("q"), assistant("a"), user("why?"), assistant("so")]
    turns = renderer.encode_turns(conversation)
    alone = [*renderer.encode([conversation[:2]]), *renderer.encode([conversation])]
    assert [(t.input_ids.tolist(), t.second_segment) for t in turns] == [
        (t.input_ids.tolist(), t.second_segment) for t in alone
    ]


# --- over-long conversations


LONG = [
    system("be brief"),
    *(message for k in range(6) for message in (user(f"question {k}"), assistant(f"reply {k}"))),
]


def test_refusing_is_the_default():
    renderer = Renderer(tiny_models.tokenizer("chatml"), max_length=50)
    error, good = renderer.encode([LONG, [user("q")]])
    length = len(ids_of(Renderer(tiny_models.tokenizer("chatml")), LONG))
    assert f"the conversation has {length} tokens, over max_length=50; raise max_length" in str(error)
    assert good.truncated_tokens == 0


@pytest.mark.parametrize("style", ["chatml", "llama3"])
def test_dropping_turns_keeps_system_last_user_and_reply(style):
    tok = tiny_models.tokenizer(style)
    full = len(ids_of(Renderer(tok), LONG))
    shortest = len(ids_of(Renderer(tok), [LONG[0], *LONG[-2:]]))
    seen = set()
    for limit in range(shortest, full + 1):
        (rendered,) = Renderer(tok, max_length=limit, overlong="drop_turns").encode([LONG])
        assert len(rendered.input_ids) <= limit
        assert rendered.truncated_tokens == full - len(rendered.input_ids)
        kept = [
            k for k in range(6) if rendered.input_ids.tolist() == ids_of(Renderer(tok), [LONG[0], *LONG[1 + 2 * k :]])
        ]
        assert len(kept) == 1, "whole turns are dropped, oldest first"
        assert kept == [0] or len(ids_of(Renderer(tok), [LONG[0], *LONG[2 * kept[0] - 1 :]])) > limit, (
            "no more than needed"
        )
        seen.update(kept)
    assert seen == set(range(6))
    (error,) = Renderer(tok, max_length=shortest - 1, overlong="drop_turns").encode([LONG])
    assert "even with only the system message, the last user message and the reply" in str(error)


@pytest.mark.parametrize(
    ("conversation", "kept"),
    [
        ([user("long " * 50), assistant("a")], None),  # the only question is never dropped
        ([user("long " * 50), assistant("a"), assistant("b")], None),
        ([user("long " * 50), assistant("a"), user("why?")], 2),
        ([user("one"), assistant("long " * 50), user("two"), assistant("b")], 2),
        ([assistant("long " * 50), user("q"), assistant("a")], 1),
        ([assistant("long " * 50), assistant("a")], 1),
        ([system("rule"), assistant("long " * 50), user("q"), assistant("a")], 2),
    ],
)
def test_what_may_be_dropped(conversation, kept):
    tok = tiny_models.tokenizer("chatml")
    (rendered,) = Renderer(tok, max_length=60, overlong="drop_turns").encode([conversation])
    if kept is None:
        assert isinstance(rendered, ConversationError)
    else:
        head = conversation[:1] if conversation[0]["role"] == "system" else []
        assert rendered.input_ids.tolist() == ids_of(Renderer(tok), [*head, *conversation[kept:]])


@pytest.mark.parametrize("style", ["chatml", "llama3"])
def test_truncating_from_the_left_keeps_the_end_and_bos(style):
    tok = tiny_models.tokenizer(style)
    ids = ids_of(Renderer(tok), LONG)
    head = int(ids[0] == tok.bos_token_id)
    for limit in (head + 1, 10, 50, len(ids) - 1, len(ids)):
        (rendered,) = Renderer(tok, max_length=limit, overlong="truncate_left").encode([LONG])
        assert rendered.input_ids.tolist() == [*ids[:head], *ids[len(ids) - limit + head :]]
        assert rendered.truncated_tokens == len(ids) - limit
        assert rendered.input_ids.dtype == np.int32


def test_truncating_a_text_pair_keeps_its_frame():
    tok = tiny_models.tokenizer("bert")
    whole = Renderer(tok, input_format=InputFormat(encoder=True))
    conversation = [user("question " * 20), assistant("reply " * 5)]
    (full,) = whole.encode([conversation])
    reply = len(full.input_ids) - full.second_segment
    for limit in (reply + 5, reply + 1, reply - 2, 3):
        short = Renderer(tok, input_format=InputFormat(encoder=True), max_length=limit, overlong="truncate_left")
        (rendered,) = short.encode([conversation])
        assert len(rendered.input_ids) == limit
        assert (rendered.input_ids[0], rendered.input_ids[-1]) == (tok.cls_token_id, tok.sep_token_id)
        assert limit - rendered.second_segment == min(reply, limit - 1)
        assert rendered.truncated_tokens == len(full.input_ids) - limit


def test_a_limit_that_leaves_no_text():
    (error,) = Renderer(tiny_models.tokenizer("llama3"), max_length=1, overlong="truncate_left").encode([LONG])
    assert isinstance(error, ConversationError)


def test_overlong_turns_are_cut_one_by_one():
    tok = tiny_models.tokenizer("chatml")
    renderer = Renderer(tok, max_length=60, overlong="truncate_left")
    turns = renderer.encode_turns(LONG)
    assert len(turns) == 6
    assert all(len(turn.input_ids) <= 60 for turn in turns)
    alone = [renderer.encode([LONG[: 3 + 2 * k]])[0] for k in range(6)]
    assert [t.input_ids.tolist() for t in turns] == [t.input_ids.tolist() for t in alone]
    assert [t.truncated_tokens for t in turns] == [t.truncated_tokens for t in alone]


# --- sizes


def test_ten_thousand_turns():
    conversation = [(assistant if k % 2 else user)(f"turn {k}") for k in range(10_000)]
    renderer = Renderer(tiny_models.tokenizer("chatml"), max_length=1000, overlong="drop_turns")
    (rendered,) = renderer.encode([conversation])
    assert len(rendered.input_ids) <= 1000
    assert rendered.truncated_tokens > 100_000


def test_a_megabyte():
    tok = tiny_models.tokenizer("chatml")
    reply = "So it is. " * 100_000
    (rendered,) = Renderer(tok).encode([[user("q"), assistant(reply)]])
    assert tok.decode(rendered.input_ids).count("So it is.") == 100_000
    (hostile,) = Renderer(tok).encode([[user("q"), assistant("<|im_end|>" * 100_000)]])
    assert (hostile.input_ids == tok.eos_token_id).sum() == 2


def test_no_conversations():
    assert Renderer(tiny_models.tokenizer("chatml")).encode([]) == []
