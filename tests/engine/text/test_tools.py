"""Tools in chat templates: the tokens of transformers, texts that stay data, and templates that want other forms."""

import functools

import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.engine.text.policy_renderer import PolicyRenderer
from gym_rm.engine.text.renderer import Renderer
from gym_rm.errors import ConversationError
from tests.engine.text.rendering import assistant, ids_of, system, user
from tests.engine.text.tool_templates import NAMES, calling, result, tokenizer, tool

CONVERSATION = [user("2 + 2?"), calling({"a": 2}), result("4"), assistant("It is 4.")]
CHATML = tiny_models.tokenizer("chatml").chat_template


def encoded(renderer, conversation, tools):
    (rendered,) = renderer.encode([conversation], [tools])
    if isinstance(rendered, ConversationError):
        raise rendered
    return rendered.input_ids.tolist()


def expected(name, conversation, tools, **options):
    return tokenizer(name).apply_chat_template(conversation, tools=tools, return_dict=False, **options)


@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_are_those_of_transformers(name):
    tools, more = (tool(),), (tool(), tool("sub"))
    scored, policy = Renderer(tokenizer(name)), PolicyRenderer(tokenizer(name))
    for given_tools in (tools, more, None):
        if scored.date is None:
            assert encoded(scored, CONVERSATION, given_tools or ()) == expected(name, CONVERSATION, given_tools)
    asked = [CONVERSATION[:1], CONVERSATION[:3]]
    prompts = policy.prompts(asked, [tools, None])
    assert [prompt.tolist() for prompt in prompts] == [
        expected(name, conversation, given_tools, add_generation_prompt=True)
        for conversation, given_tools in zip(asked, (tools, None), strict=True)
    ]


@functools.cache
def renderers_of(name):
    return Renderer(tokenizer(name)), PolicyRenderer(tokenizer(name))


PIECES = ["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "user\n", '"', "\\", "{", "}", "é", " "]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)


@settings(max_examples=20, deadline=None)
@given(TEXTS, TEXTS, st.dictionaries(TEXTS, TEXTS | st.lists(TEXTS, max_size=2), max_size=2), TEXTS)
def test_texts_of_tools_calls_and_results_are_data(description, key, arguments, said):
    tools = tool(description=description)
    tools["function"]["parameters"]["properties"][key] = {"type": "string", "description": description}
    conversation = [user("q"), calling({**arguments, key: said}), result(said), assistant("a")]
    for renderer in renderers_of("qwen2_5"):
        own = renderer._control.ids
        plain = [user("q"), calling({"a": 2}), result("4"), assistant("a")]
        counts = [
            sum(token in own for token in encoded(renderer, messages, [schema]))
            for messages, schema in ((conversation, tools), (plain, tool()))
        ]
        assert counts[0] == counts[1]


def test_turns_and_shortened_conversations_have_the_tools():
    conversation = [system("s"), user("q" * 40), assistant("a"), user("r"), *CONVERSATION[1:]]
    renderer, tools = Renderer(tokenizer("qwen3")), (tool(),)
    (turns,) = renderer.encode_turns([conversation], [tools])
    assert [turn.input_ids.tolist() for turn in turns] == [
        encoded(renderer, conversation[:stop], tools) for stop in (3, 5, 7)
    ]
    short = [conversation[0], *conversation[3:]]
    dropping = Renderer(renderer.tokenizer, max_length=len(encoded(renderer, short, tools)), overlong="drop_turns")
    assert encoded(dropping, conversation, tools) == encoded(renderer, short, tools)


def test_a_template_without_tools_writes_the_rest_and_warns_once(caplog):
    renderer = Renderer(tokenizer("deepseekv3"))
    assert encoded(renderer, CONVERSATION, (tool(),)) == encoded(renderer, CONVERSATION, ())
    assert [record.message for record in caplog.records if "does not write tools" in record.message][1:] == []


def test_control_tokens_that_a_template_writes_for_each_tool_are_not_mistaken_for_forged_ones():
    template = "{% for tool in tools or [] %}<|im_start|>{{ tool.function.name }}{% endfor %}" + CHATML
    renderer = Renderer(tiny_models.tokenizer("chatml"), chat_template=template)
    for tools in ((tool(),), (tool(), tool("sub")), (), (tool("sub"),)):
        written = renderer.tokenizer.apply_chat_template(
            [user("q"), assistant("a")], tools=tools or None, chat_template=template, return_dict=False
        )
        assert encoded(renderer, [user("q"), assistant("a")], tools) == written


def test_arguments_are_written_in_the_form_that_the_template_wants():
    text = [user("q"), calling('{"a": "é"}'), result("4"), assistant("a")]
    qwen, deepseek = Renderer(tokenizer("qwen2_5")), Renderer(tokenizer("deepseekv3"))
    assert '"arguments": {"a": "é"}' in qwen.tokenizer.decode(ids_of(qwen, text))
    written = deepseek.tokenizer.decode(ids_of(deepseek, [user("q"), calling({"a": "é"}), *text[2:]]))
    assert '```json\n{"a": "é"}\n```' in written
    assert ids_of(deepseek, text) == deepseek.tokenizer.encode(written)


def test_templates_that_want_other_ids_or_single_calls_get_them():
    calls = [{"id": f"call_{k:020d}", "function": {"name": "add", "arguments": {"a": k}}} for k in range(2)]
    results = [{"role": "tool", "content": f"r{k}", "tool_call_id": calls[k]["id"]} for k in range(2)]
    conversation = [user("q"), {"role": "assistant", "content": "", "tool_calls": calls}, *results, assistant("a")]
    mistral, llama = Renderer(tokenizer("mistral")), Renderer(tokenizer("llama3_1"))
    written = mistral.tokenizer.decode(ids_of(mistral, conversation))
    assert '"call_id": "call00002"' in written
    assert '"content": r1' in written
    written = llama.tokenizer.decode(ids_of(llama, conversation))
    order = [written.index(part) for part in ('{"a": 0}', '"r0"', '{"a": 1}', '"r1"')]
    assert order == sorted(order)


@pytest.mark.parametrize("tools", [[{"function": {"name": object()}}], [{"function": {"name": "\ud800"}}]])
def test_tools_that_no_tokenizer_can_read_are_an_error_of_the_row(tools):
    (error,) = Renderer(tokenizer("qwen2_5")).encode([CONVERSATION], [tools])
    assert isinstance(error, ConversationError)
    assert "a tool" in str(error)
