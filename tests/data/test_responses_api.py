import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.data.prompts import load_prompts
from gym_rm.data.responses_api import create_params, items_of_messages, messages_of_items
from gym_rm.errors import ConfigError

TOOL = {"type": "function", "name": "add", "description": "", "parameters": {"type": "object"}, "strict": True}
ROW = {
    "responses_create_params": {
        "input": [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "2 + 2?"}],
        "tools": [TOOL],
        "temperature": None,
    },
    "expected_answer": 4,
    "verifier_type": "exact",
    "_ng_task_index": 3,
}
OUTPUT = [
    {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "I add."}], "content": None},
    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 2}'},
    {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{a"},
    {"type": "function_call_output", "call_id": "c2", "output": "no JSON"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "4"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4", "annotations": []}]},
]
texts = st.text(max_size=20)
calls = st.lists(
    st.fixed_dictionaries({"name": st.text(min_size=1, max_size=5), "arguments": st.dictionaries(texts, texts)}),
    min_size=1,
    max_size=3,
)


def test_output_items_become_messages_as_chat_templates_read_them():
    function = {"name": "add", "arguments": {"a": 2}}
    assert messages_of_items(OUTPUT, "output") == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I add.",
            "tool_calls": [
                {"type": "function", "id": "c1", "function": function},
                {"type": "function", "id": "c2", "function": {"name": "add", "arguments": "{a"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c2", "name": "add", "content": "no JSON"},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "4"},
        {"role": "assistant", "content": "4"},
    ]


@given(st.lists(st.tuples(calls, texts, texts), max_size=3))
def test_messages_survive_as_items(turns):
    messages = [{"role": "user", "content": "2 + 2?"}]
    for functions, content, thought in turns:
        start = sum(len(message.get("tool_calls", ())) for message in messages) + 1
        ids = [f"call{number:05}" for number in range(start, start + len(functions))]
        given_calls = [{"type": "function", "id": i, "function": f} for i, f in zip(ids, functions, strict=True)]
        reply = {"role": "assistant", "content": content, "tool_calls": given_calls}
        messages.append(reply | ({"reasoning_content": thought} if thought else {}))
        for call_id, function in zip(ids, functions, strict=True):
            messages.append({"role": "tool", "tool_call_id": call_id, "name": function["name"], "content": "4"})
    assert messages_of_items(items_of_messages(messages), "items") == messages


@pytest.mark.parametrize(
    "items",
    [
        7,
        [7],
        [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a"}]}],
        [{"type": "web_search_call", "id": "w"}],
        [{"role": "nobody", "content": "Hi"}],
        [{"type": ["message"], "role": {}}],
        [{"role": "user", "content": {"text": "Hi"}}],
    ],
)
def test_items_that_are_no_text_are_named(items):
    with pytest.raises(ConfigError, match="output"):
        messages_of_items(items, "output")


def test_rows_of_nemo_gym_are_prompts():
    (prompt,) = load_prompts([ROW])
    assert prompt.messages == ({"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2?"})
    assert (prompt.answer, prompt.prompt_id, prompt.metadata["verifier_type"]) == ("4", "3", "exact")
    assert prompt.tools[0]["function"]["name"] == "add"
    assert create_params(prompt) == {"input": ROW["responses_create_params"]["input"], "tools": [TOOL]}


def test_other_prompts_become_rows_of_nemo_gym():
    (prompt,) = load_prompts([{"prompt": "2 + 2?", "tools": [TOOL]}])
    params = create_params(prompt)
    assert load_prompts([{"responses_create_params": params}])[0].messages == prompt.messages
    assert params["tools"][0]["name"] == "add"
