"""BOS and other special tokens around a conversation; `test_renderer.py` has the cases of ordinary templates."""

import pytest
import tiny_models

from gym_rm.engine.text.renderer import Renderer
from tests.engine.text.rendering import assistant, bos_adding, ids_of, system, user

TURN = "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>"
TURNS = "{% for m in messages %}" + TURN + "{% endfor %}"
# As builds of Llama Guard 3, LFM2, DeepSeek and Mistral Small: something comes before the BOS, or it depends on the
# conversation.
NOT_FIRST = {
    "a line break": "\n{{ bos_token }}" + TURNS,
    "white space from a condition": "{% if true %} {% endif %} {{ bos_token }}" + TURNS,
    "a system block": "<|start_header_id|>system<|end_header_id|>\n\nrules<|eot_id|>{{ bos_token }}" + TURNS,
    "in the loop": "{% for m in messages %}{{ ' ' + bos_token if loop.first }}" + TURN + "{% endfor %}",
    "after the system message": "{% for m in messages %}{% if loop.index0 == (messages[0]['role'] == 'system') | int %}"
    "{{ bos_token }}{% endif %}" + TURN + "{% endfor %}",
}


@pytest.mark.parametrize("name", NOT_FIRST)
@pytest.mark.parametrize("start", [[], [system("be brief")]])
def test_a_bos_that_is_not_first_is_not_written_twice(name, start, warnings):
    tok = bos_adding("llama3", chat_template=NOT_FIRST[name])
    conversation = [*start, user("q"), assistant("a")]
    expected = tok.apply_chat_template(conversation, tokenize=True, return_dict=False)
    assert ids_of(Renderer(tok), conversation) == expected
    assert not [record for record in warnings.records if "BOS" in record.getMessage()]


def test_a_bos_that_the_template_writes_only_sometimes_is_added_otherwise(warnings):
    sometimes = "{{ bos_token if messages[0]['role'] == 'system' }}" + TURNS
    tok = bos_adding("llama3", chat_template=sometimes)
    conversation = [system("be brief"), user("q"), assistant("a")]
    assert ids_of(Renderer(tok), conversation) == tok.apply_chat_template(
        conversation, tokenize=True, return_dict=False
    )
    assert "writes no BOS" not in warnings.text
    assert ids_of(Renderer(tok), conversation[1:])[0] == tok.bos_token_id
    assert "writes no BOS" in warnings.text


def test_a_cls_that_the_template_writes_is_not_added():
    template = "{% for m in messages %}{{ '[CLS] ' + m['content'] + ' [SEP] ' }}{% endfor %}"
    from gym_rm.engine.text.input_format import InputFormat

    tok = tiny_models.tokenizer("bert", chat_template=template)
    ids = ids_of(Renderer(tok, input_format=InputFormat(encoder=True)), [user("the sum"), assistant("is")])
    assert (ids.count(tok.cls_token_id), ids.count(tok.sep_token_id)) == (2, 2)
