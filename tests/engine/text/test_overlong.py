import numpy as np
import pytest
import tiny_models

from gym_rm.engine.text.overlong import drop_turns
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
    assert f"the conversation has {length} tokens, more than max_length=50; shorten it" in str(error)
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
    assert "more than max_length" in str(error)


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


def test_dropping_turns_renders_few_times():
    """The turns to drop are found by bisection: rendering ten thousand prefixes would take minutes."""
    conversation = [(assistant if k % 2 else user)("x") for k in range(10_000)]
    calls = []

    def render(shorter):
        calls.append(len(shorter))
        return Rendered(np.zeros(len(shorter), dtype=np.int32))

    whole = Rendered(np.zeros(len(conversation), dtype=np.int32))
    kept = drop_turns(conversation, whole, 101, render)
    assert len(kept.input_ids) == 100
    assert kept.truncated_tokens == 9900
    assert len(calls) <= 14
