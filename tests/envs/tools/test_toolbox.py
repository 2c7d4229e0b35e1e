"""Execution of calls: many at once, hanging ones, large results, errors."""

import asyncio
import json
import threading
import time

import numpy as np
import pytest

from gym_rm.envs.tools import Tool, ToolOptions
from gym_rm.envs.tools.toolbox import Reply, Toolbox
from gym_rm.errors import ConfigError
from gym_rm.types import Prompt

QUESTION = ({"role": "user", "content": "?"},)


def calls(*functions):
    """Return a reply with these calls, each a name and arguments."""
    given = [{"function": {"name": name, "arguments": arguments}} for name, arguments in functions]
    return Reply({"role": "assistant", "content": "", "tool_calls": given}).numbered(())


def answers(tools, replies, earlier=(), **options):
    """Return the answers of a toolbox to some replies, each at the end of a conversation of its own."""
    box = Toolbox(tools, ToolOptions(**options), 2**20)
    try:
        prompts = [Prompt(QUESTION, "p", tools=box.schemas)] * len(replies)
        return box.answer(replies, [[*QUESTION, *earlier, reply.message] for reply in replies], prompts)
    finally:
        box.close()


def results(tools, *functions, **options):
    (answer,) = answers(tools, [calls(*functions)], **options)
    return [message["content"] for message in answer.messages]


def echo(value: str = "") -> str:
    return value


def tool(function, name="f"):
    return Tool(function, name=name)


def test_the_calls_of_a_reply_are_answered_in_order():
    (answer,) = answers([echo], [calls(("echo", {"value": "a"}), ("echo", {"value": "b"}))])
    assert answer.messages == [
        {"role": "tool", "tool_call_id": "call00001", "name": "echo", "content": "a"},
        {"role": "tool", "tool_call_id": "call00002", "name": "echo", "content": "b"},
    ]
    assert answer.num_errors == 0


def test_replies_run_at_the_same_time_and_the_calls_of_each_one_after_the_other():
    together, running = threading.Barrier(50, timeout=5), threading.local()

    def meet() -> int:
        assert not getattr(running, "busy", False)
        running.busy = True
        together.wait()
        running.busy = False
        return threading.get_ident()

    found = answers([meet], [calls(("meet", {}), ("meet", {})) for _ in range(50)])
    assert not any(answer.num_errors for answer in found)
    assert all(len({message["content"] for message in answer.messages}) == 1 for answer in found)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, None, True]}, '{"a": [1, null, true]}'),
        (None, "null"),
        (np.float64(0.5), "0.5"),
        ("\ud800 is half", "\ufffd is half"),
        ({"a": "\ud83d\ude00"}, '{"a": "😀"}'),
        ("<|im_end|>[TOOL_CALLS]", "<|im_end|>[TOOL_CALLS]"),
        (float("nan"), "NaN"),
        (10**1000, str(10**1000)),
    ],
    ids=str,
)  # fmt: skip
def test_results_become_texts(value, text):
    assert results([tool(lambda: value)], ("f", {})) == [text]


def test_the_middle_of_a_large_result_is_left_out_and_the_gap_is_counted():
    (text,) = results([tool(lambda: "a" * 10**7 + "b")], ("f", {}), max_result_length=1000)
    kept = text.count("a") - "characters are left out".count("a") + 1
    assert len(text) <= 1000
    assert text.endswith("b")
    assert f"[... {10**7 + 1 - kept:,} characters are left out ...]" in text


class Unshowable(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("k"), "Error: KeyError: 'k'"),
        (SystemExit(3), "Error: SystemExit: 3"),
        (KeyboardInterrupt(), "Error: KeyboardInterrupt: "),
        (Unshowable(), "Error: Unshowable (its message cannot be shown)"),
        (ValueError("\ud800"), "Error: ValueError: \ufffd"),
    ],
)
def test_what_a_tool_raises_is_a_text(error, text):
    def raises():
        raise error

    assert results([tool(raises)], ("f", {})) == [text]


def deep():
    value = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(("make", "kind"), [(deep, "Error: "), (lambda: 10**5000, "Error: ValueError")])
def test_a_result_that_cannot_be_written_is_an_error(make, kind):
    assert results([tool(make)], ("f", {}))[0].startswith(kind)


def test_faults_of_the_policy_are_texts():
    (answer,) = answers(
        [echo], [calls(("ecko", {}), ("echo", {"valeu": 1}), ("echo", "no JSON"), ("nothing", {}), ("echo", {}))]
    )
    texts = [message["content"] for message in answer.messages]
    assert texts == [
        "Error: not executed: unknown tool 'ecko'. Did you mean 'echo'?",
        "Error: not executed: invalid arguments of echo: valeu: Extra inputs are not permitted",
        "Error: not executed: invalid arguments of echo: expected a JSON object, got 'no JSON'",
        "Error: not executed: unknown tool 'nothing'. Known tools: echo.",
        "",
    ]
    assert answer.num_errors == 4


def test_the_budget_counts_the_calls_of_the_episode():
    earlier = [calls(("echo", {}), ("echo", {})).message]
    (answer,) = answers([echo], [calls(("echo", {"value": "third"}), ("echo", {}))], earlier, max_calls=3)
    assert [message["content"] for message in answer.messages] == [
        "third",
        "Error: not executed: the 3 calls of this conversation are used up.",
    ]


def test_a_call_that_could_not_be_read_is_answered_by_a_message_of_the_user():
    (answer,) = answers([echo], [calls(("echo", {}))._replace(problems=["one", "two"])])
    assert [message["role"] for message in answer.messages] == ["tool", "user"]
    assert answer.messages[1]["content"] == "Error: a tool call could not be read: one; two"
    assert answer.num_errors == 2


def test_hidden_parameters_get_copies_of_the_messages_so_far_and_of_the_row():
    def look(*, conversation, prompt) -> str:
        shown = [message["role"] for message in conversation], prompt.prompt_id
        conversation[1]["tool_calls"].clear()
        return json.dumps(shown)

    assert results([look], ("look", {}), ("look", {})) == [
        '[["user", "assistant"], "p"]',
        '[["user", "assistant", "tool"], "p"]',
    ]


def test_hanging_calls_in_every_row_cost_one_timeout():
    stop = threading.Event()

    def hang(seconds: float = 20.0):
        stop.wait(seconds)

    start = time.perf_counter()
    found = answers([hang, echo], [calls(("echo", {}), ("hang", {}), ("echo", {})) for _ in range(64)], timeout=0.3)
    assert time.perf_counter() - start < 4
    stop.set()
    for answer in found:
        assert [message["content"] for message in answer.messages] == [
            "",
            "Error: not finished: hang did not end within 0.3 seconds.",
            "Error: not executed: the time for the calls of a reply is over.",
        ]


def test_async_functions_are_tools_and_are_cancelled():
    cancelled = []

    async def wait(seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            cancelled.append(seconds)
            raise
        return "waited"

    found = answers([wait], [calls(("wait", {"seconds": 0.2}))] * 50, timeout=5)  # one after the other takes 10
    assert [answer.messages[0]["content"] for answer in found] == ["waited"] * 50
    (text,) = results([wait], ("wait", {"seconds": 60}), timeout=0.1)
    assert text.startswith("Error: ")
    assert cancelled == [60]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("calculator", "tools must be a list of functions"),
        ([echo, Tool(echo)], "two tools have the name 'echo'"),
        (["calclator"], "is none of .* Did you mean 'calculator'?"),
        (["json:nothing"], "json/__init__.py has no 'nothing'"),
        ([3], "tools must be a function or 'module:function', got 3"),
    ],
)
def test_tools_that_do_not_exist_are_refused(tools, message):
    with pytest.raises(ConfigError, match=message):
        Toolbox(tools, ToolOptions(), 2**20)


def test_tools_can_be_named():
    assert results(["calculator"], ("calculator", {"expression": "1 + 1"})) == ["2"]
    assert results([f"{__name__}:echo"], ("echo", {"value": "x"})) == ["x"]
