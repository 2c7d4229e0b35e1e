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


def test_dropping_turns_keeps_system_last_user_and_reply():
    tok = tiny_models.tokenizer("chatml")
    shorter = [ids_of(Renderer(tok), [LONG[0], *LONG[1 + 2 * k :]]) for k in range(6)]
    for limit in range(len(shorter[-1]), len(shorter[0]) + 1, 2):
        (rendered,) = Renderer(tok, max_length=limit, overlong="drop_turns").encode([LONG])
        assert rendered.input_ids.tolist() == next(ids for ids in shorter if len(ids) <= limit)
        assert rendered.truncated_tokens == len(shorter[0]) - len(rendered.input_ids)
    (error,) = Renderer(tok, max_length=len(shorter[-1]) - 1, overlong="drop_turns").encode([LONG])
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
