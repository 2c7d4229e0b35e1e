"""Tool calls in messages: decoded arguments, and ids that join calls and results."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.engine.text.tool_calls import decode_arguments, encode_arguments, renumber, separate

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def assistant(*calls):
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def call(arguments, **fields):
    name = fields.pop("name", "add")
    return {"type": "function", **fields, "function": {"name": name, "arguments": arguments}}


def arguments(message):
    return message["tool_calls"][0]["function"]["arguments"]


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_arguments_survive_the_wire_form(given_arguments):
    message = assistant(call(given_arguments))
    assert decode_arguments(encode_arguments(message)) == message == decode_arguments(message)


@pytest.mark.parametrize("text", ["", "{", "[1]", "4", '{"a": NaN}', '"{}"', "[" * 100_000, "9" * 5000, "null"])
def test_arguments_that_are_no_json_object_stay_as_they_came(text):
    message = assistant(call(text))
    assert decode_arguments(message) == encode_arguments(message) == message


def test_calls_of_other_forms_are_kept():
    flat = {"name": "add", "arguments": json.dumps({"a": 2})}
    assert decode_arguments(assistant(flat, 7))["tool_calls"] == [{"name": "add", "arguments": {"a": 2}}, 7]
    assert decode_arguments({"role": "user", "tool_calls": None}) == {"role": "user", "tool_calls": None}


def test_results_get_the_ids_and_names_of_their_calls():
    first = assistant(call({}, id="toolu_1", name="add"), call({}, id="toolu_2", name="sub"), call({}, name="mul"))
    results = [
        {"role": "tool", "content": "of sub", "tool_call_id": "toolu_2"},
        {"role": "tool", "content": "of mul", "name": "mul"},
        {"role": "tool", "content": "of add"},
        {"role": "tool", "content": "of none"},
    ]
    later = [assistant(call({}, name="sub")), {"role": "tool", "content": "of sub"}]
    messages = renumber([first, *results, *later])
    assert [each["id"] for each in messages[0]["tool_calls"]] == ["call00001", "call00002", "call00003"]
    joined = [(each["content"], each.get("tool_call_id"), each.get("name")) for each in messages if "name" in each]
    assert joined == [
        ("of sub", "call00002", "sub"),
        ("of mul", "call00003", "mul"),
        ("of add", "call00001", "add"),
        ("of sub", "call00004", "sub"),
    ]
    assert messages[4] == results[3]


def test_parallel_calls_can_be_written_one_after_the_other():
    calls = {**assistant(call({}, id="x"), call({}, id="y", name="sub")), "content": "Both."}
    results = [{"role": "tool", "content": "of y", "tool_call_id": "y"}, {"role": "tool", "content": "of x"}]
    messages = separate([{"role": "user", "content": "q"}, calls, *results, {"role": "user", "content": "r"}])
    assert [each["content"] for each in messages] == ["q", "Both.", "of x", "", "of y", "r"]
    assert [len(each.get("tool_calls", [])) for each in messages] == [0, 1, 0, 1, 0, 0]
