"""Formats of tool calls in texts: what they read, what they report, and that nothing raises."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.data.tools import json_fault
from gym_rm.envs.tools.formats import FORMATS, MOST_CALLS, hermes, llama3, load_format, mistral, read_reply
from gym_rm.errors import ConfigError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(), VALUES, max_size=3)
NAMES = st.from_regex(r"[A-Za-z_][\w-]{0,20}", fullmatch=True).filter(str.isascii)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)


def write_hermes(calls):
    return "".join(f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


def write_llama3(calls):
    return "<|python_tag|>" + "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)


def write_mistral(calls):
    return "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": a} for n, a in calls], ensure_ascii=False)


def write_new_mistral(calls):
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a, ensure_ascii=False)}" for n, a in calls)


WRITERS = [(write_hermes, hermes), (write_llama3, llama3), (write_mistral, mistral), (write_new_mistral, mistral)]


def found(parsed):
    return [(call["name"], call["arguments"]) for call in parsed.calls]


@pytest.mark.parametrize(("write", "read"), WRITERS)
@settings(max_examples=30)
@given(CALLS)
def test_every_call_is_read_as_it_was_written(write, read, calls):
    parsed = read("Let us see. " + write(calls))
    assert (found(parsed), parsed.problems, parsed.content.strip()) == (calls, [], "Let us see.")


MARKS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<function=f>", "</function>"]
MARKS += ["<think>", '{"name": "f", "arguments": {}}', '{"name": ', "[", "{", '"', "\\ud800", ";", "NaN", "1e999"]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60)
@given(st.lists(st.sampled_from(MARKS) | st.text(max_size=5), max_size=12).map("".join))
def test_no_text_raises_and_every_call_is_plain_json(name, text):
    message, _ = read_reply(text, FORMATS[name])
    assert not json_fault(message)


def block(arguments, end="</tool_call>"):
    return f'<tool_call>{{"name": "f", "arguments": {arguments}}}{end}'


XML = "<tool_call>\n<function=f>\n<parameter=a>\n1 < 2\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", block('{"a": "</tool_call>"}'), [("f", {"a": "</tool_call>"})]),
        ("hermes", block('"{\\"a\\": 1}"'), [("f", {"a": 1})]),
        ("hermes", block("{}", end=""), [("f", {})]),
        ("hermes", block("{}", end="") + '<tool_call>{"name": "g"}', [("f", {}), ("g", {})]),
        ("hermes", XML, [("f", {"a": "1 < 2"})]),
        (
            "hermes",
            '<tool_call>{"function": {"name": "f", "arguments": {"a": "\n"}}}</tool_call>',
            [("f", {"a": "\n"})],
        ),
        (
            "llama3",
            '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            [("f", {"a": 1}), ("g", {})],
        ),
        ("llama3", '{"name": "Ann", "age": 3}', []),
        ("llama3", '{"answer": 3}', []),
        ("llama3", '{"name": "f", "parameters": {}} is a call', []),
        ("llama3", '{"name": "f", "parameters": {}}; {bad', []),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', [("f", {"a": 1})]),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', [("f", {})]),
    ],
)
def test_a_text_has_these_calls(name, text, calls):
    parsed = FORMATS[name](text)
    assert found(parsed) == calls
    assert not parsed.problems
    assert calls or parsed.content == text


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", block('{"a": }'), "the JSON is not valid: Expecting value"),
        ("hermes", block("{}", end=" and text</tool_call>"), "expected </tool_call> after the JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "'name' must be the name of a tool, got None"),
        ("hermes", block("[1]"), "'arguments' of f must be a JSON object"),
        ("hermes", "<tool_call>[1]</tool_call>", "expected a JSON object with 'name' and 'arguments', got [1]"),
        ("hermes", block('{"a": NaN}'), "cannot be written as JSON"),
        ("hermes", block('{"a": "\\ud800"}'), "surrogates not allowed"),
        ("hermes", block('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}"), "nested"),
        ("hermes", block('{"a": ' + "[" * 90 + "]" * 90 + "}"), "nested"),
        ("hermes", block('{"a": ' + "9" * 5000 + "}"), "4300 digits"),
        ("llama3", '<|python_tag|>search(query="x")', "the JSON is not valid"),
        ("llama3", '<|python_tag|>{"name": "g", "parameters": {}}; {bad', "the JSON is not valid"),
        ("mistral", '[TOOL_CALLS][{"name": "g", "arguments": {}}, {"arguments": {}}]', "'name' must be"),
        ("mistral", "[TOOL_CALLS]g[ARGS]{bad", "the JSON is not valid"),
    ],
    ids=lambda value: value[:40],
)
def test_a_call_that_cannot_be_read_is_reported_beside_good_ones(name, text, problem):
    parsed = FORMATS[name](text)
    assert len(parsed.problems) == 1
    assert problem in parsed.problems[0]
    if name == "hermes":
        again = hermes(f'{text}<tool_call>{{"name": "good"}}</tool_call>')
        assert (found(again), again.content, len(again.problems)) == ([("good", {})], text, 1)
        assert problem in again.problems[0]


def test_a_reply_of_many_broken_calls_is_read_fast():
    start = time.perf_counter()
    parsed = hermes('<tool_call>{"a": "</tool_call>' * 40_000)
    assert len(parsed.problems) == MOST_CALLS + 1
    assert time.perf_counter() - start < 5


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        (f"<think>{CALL}</think>No.", f"<think>{CALL}</think>No.", 0),
        (f"<think>{CALL}", f"<think>{CALL}", 0),
        (f"<think>\nHm.\n</think>\n\nSo {CALL}\n", "<think>\nHm.\n</think>\n\nSo", 1),
        (f"Hm.</think>{CALL}", "Hm.</think>", 1),
        (f" So {CALL} and {CALL}", " So  and", 2),
        (" plain \n", " plain \n", 0),
    ],
)
def test_calls_in_thinking_are_text_and_thinking_stays(text, content, num_calls):
    message, problems = read_reply(text, hermes)
    assert (message["content"], len(message.get("tool_calls", ())), problems) == (content, num_calls, [])


def test_thoughts_between_calls_go_to_their_field():
    message, _ = read_reply(f"<think>One.</think>{CALL}\n<think>Two.</think>So {CALL}", hermes)
    assert (message["content"], message["reasoning_content"], len(message["tool_calls"])) == ("So", "One.\nTwo.", 2)


def shout(text):
    name, call, rest = text.partition("!")
    return (rest, [{"name": name, "arguments": {}}], ["a problem"]) if call else (text, [], [])


def test_a_function_can_be_the_format():
    message, problems = read_reply("now!rest", load_format(shout))
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "now", "arguments": {}}}]
    assert (message["content"], problems) == ("rest", ["a problem"])


@pytest.mark.parametrize("value", ["hermse", 3, "json:nothing"])
def test_an_unknown_format_is_refused(value):
    with pytest.raises(ConfigError, match=r"call_format must be"):
        load_format(value)


@pytest.mark.parametrize("value", ["x", ("x", None, [])])
def test_what_a_function_returns_is_checked(value):
    with pytest.raises(ConfigError, match=r"call_format must return \(content, calls, problems\), got "):
        read_reply("x", lambda text: value)
