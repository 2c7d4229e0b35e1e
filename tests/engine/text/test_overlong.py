import numpy as np
import pytest
import tiny_models

from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.overlong import fit
from gym_rm.engine.text.rendered import Rendered
from gym_rm.engine.text.renderer import Renderer
from gym_rm.errors import ConversationError
from tests.engine.text.rendering import assistant, ids_of, system, user

LONG = [
    system("be brief"),
    *(message for k in range(6) for message in (user(f"question {k}"), assistant(f"reply {k}"))),
]


def test_a_conversation_that_is_too_long_is_refused_by_default():
    renderer = Renderer(tiny_models.tokenizer("chatml"), max_length=50)
    error, good = renderer.encode([LONG, [user("q")]])
    length = len(ids_of(Renderer(tiny_models.tokenizer("chatml")), LONG))
    assert f"the conversation has {length} tokens, more than max_length=50; increase max_length" in str(error)
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
def test_which_turns_are_dropped(conversation, kept):
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


def test_truncating_a_text_pair_keeps_cls_and_sep():
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


def test_truncating_moves_the_start_of_the_reply():
    tok = tiny_models.tokenizer("chatml")
    conversation = [user("question " * 20), assistant("reply " * 5)]
    marked = InputFormat(mark_reply=True)
    (full,) = Renderer(tok, input_format=marked).encode([conversation])
    reply = len(full.input_ids) - full.reply_start
    for limit in (reply + 5, reply, reply - 2):
        (cut,) = Renderer(tok, input_format=marked, max_length=limit, overlong="truncate_left").encode([conversation])
        assert len(cut.input_ids) - cut.reply_start == min(reply, limit)


def test_a_limit_that_leaves_no_text_is_an_error():
    (error,) = Renderer(tiny_models.tokenizer("llama3"), max_length=1, overlong="truncate_left").encode([LONG])
    assert isinstance(error, ConversationError)


def test_dropping_turns_renders_few_times():
    """The turns to drop are found by bisection: rendering ten thousand prefixes would take minutes."""
    conversation = [(assistant if k % 2 else user)("x") for k in range(10_000)]
    calls = []

    def render(shorter):
        calls.append(len(shorter))
        return Rendered(np.zeros(len(shorter), dtype=np.int32))

    whole = Rendered(np.zeros(len(conversation), dtype=np.int32))
    kept = fit(conversation, whole, max_length=101, overlong="drop_turns", head=slice(0, 0), render=render)
    assert len(kept.input_ids) == 100
    assert kept.truncated_tokens == 9900
    assert len(calls) <= 14
