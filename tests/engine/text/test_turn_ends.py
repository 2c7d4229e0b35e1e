"""The ends of turns that are found with one rendering are the lengths of the texts of shorter conversations."""

import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.engine.text.renderer import Renderer
from gym_rm.engine.text.turn_ends import find_turn_ends
from gym_rm.errors import ConversationError
from tests.engine.text.rendering import assistant, ids_of, system, user
from tests.engine.text.test_control_tokens import CHATML_TOKENS, CUTS, FOLDS, GLUES, bpe

ITEM = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
# Templates for which every end is found.
LINEAR = {
    "ChatML": tiny_models.CHATML,
    "Llama 3": tiny_models.LLAMA3,
    "Gemma": tiny_models.GEMMA,
    "Mistral": tiny_models.MISTRAL,
    "first message": "{% if messages[0]['role'] != 'system' %}{{ 'default\n' }}{% endif %}{% for m in messages %}"
    + ITEM
    + "{% endfor %}"
    + PROMPT,
    "system apart": "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{{ messages[0]['content'] }}"
    "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}" + ITEM + "{% endfor %}" + PROMPT,
    "renamed": "{% set rest = messages %}{% for m in rest %}" + ITEM + "{% endfor %}",
    "message before": "{% for m in messages %}{{ messages[loop.index0 - 1]['role'] if loop.index0 else '' }}"
    + ITEM
    + "{% endfor %}",
    "state": "{% set seen = namespace(users=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set seen.users = seen.users + 1 %}{% endif %}{{ seen.users }}" + ITEM + "{% endfor %}",
    "prompt in the loop": "{% for m in messages %}"
    + ITEM
    + "{% if loop.last and m['role'] == 'user' and add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}{% endfor %}",
    "macro": "{% macro write(m) %}" + ITEM + "{% endmacro %}{% for m in messages %}{{ write(m) }}{% endfor %}",
    "look ahead for tools": "{% for m in messages %}"
    + ITEM
    + "{% if m['role'] == 'tool' and loop.last %}end{% endif %}"
    "{% endfor %}",
    "filter": "{% for m in messages if m['role'] != 'tool' %}" + ITEM + "{% endfor %}",
    "inner loop": "{% for m in messages %}" + ITEM + "{% for letter in 'ab' %}{{ letter }}{% endfor %}{% endfor %}",
    "end": "{% for m in messages %}" + ITEM + "{% endfor %}end",
    "else": "{% for m in messages %}" + ITEM + "{% endfor %}" + PROMPT.replace("{% endif", "{% else %}end{% endif"),
    "swallows spaces": "{% for m in messages %}" + ITEM + " {% endfor %} \n",
    "marked": "{% for m in messages %}{% generation %}" + ITEM + "{% endgeneration %}{% endfor %}",
    "EOS after the loop": "{% for m in messages %}" + ITEM + "{% endfor %}\n{{ eos_token }}\n",
}
# Templates in which the text of a turn depends on later messages.
OTHERS = {
    "Qwen": tiny_models.QWEN,
    "last": "{% for m in messages %}" + ITEM + "{% if loop.last %}end{% endif %}{% endfor %}",
    "next": "{% for m in messages %}" + ITEM + "{% if loop.nextitem is defined %}more{% endif %}{% endfor %}",
    "length of the loop": "{% for m in messages %}{{ loop.length }}" + ITEM + "{% endfor %}",
    "number": "{{ messages | length }}{% for m in messages %}" + ITEM + "{% endfor %}",
    "message after": "{% for m in messages %}" + ITEM + "{{ messages[loop.index]['role'] if messages[loop.index] }}"
    "{% endfor %}",
    "last message": "{% for m in messages %}{{ messages[-1]['role'] }}" + ITEM + "{% endfor %}",
    "backwards": "{% for m in messages[::-1] %}" + ITEM + "{% endfor %}",
    "second loop": "{% for m in messages %}{{ m['role'] }}{% endfor %}{% for m in messages %}" + ITEM + "{% endfor %}",
    "macro at the end": "{% macro end() %}{{ messages[-1]['role'] }}{% endmacro %}{% for m in messages %}"
    + ITEM
    + "{% endfor %}{{ end() }}",
    "end after users": "{% set seen = namespace(role='') %}{% for m in messages %}{% set seen.role = m['role'] %}"
    + ITEM
    + "{% endfor %}{% if seen.role == 'user' %}end{% endif %}",
    "whole list": "{% for m in messages %}" + ITEM + "{{ messages | map(attribute='role') | join }}{% endfor %}",
    "renamed loop": "{% for m in messages %}{% set outer = loop %}" + ITEM + "{{ outer.last }}{% endfor %}",
    "groups": "{% for role, group in messages | groupby('role') %}{% for m in group %}"
    + ITEM
    + "{% endfor %}{% endfor %}",
    "break": "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}" + ITEM + "{% endfor %}",
    "printed list": "{% for m in messages %}" + ITEM + "{{ messages }}{% endfor %}",
    "comparison": "{% for m in messages %}" + ITEM + "{{ messages == [] }}{% endfor %}",
    "sum": "{% for m in messages + [] %}" + ITEM + "{% endfor %}",
    "two levels": "{% if messages %}{% for m in messages %}" + ITEM + "{% endfor %}{% endif %}",
}
TEMPLATES = LINEAR | OTHERS


def renderer(name):
    if name == "swallows spaces":
        return Renderer(bpe(CHATML_TOKENS, TEMPLATES[name], lstrip=True, rstrip=True), dropped_text="warn")
    tok = tiny_models.tokenizer({"Llama 3": "llama3", "Gemma": "gemma", "Mistral": "mistral"}.get(name, "chatml"))
    return Renderer(tok, chat_template=TEMPLATES[name], dropped_text="warn")


def alternating(count, text="turn {} of the dialogue"):
    return [(assistant if k % 2 else user)(text.format(k)) for k in range(count)]


def ends_of(name, conversation):
    """Return the texts of shorter conversations that are known from one rendering, by their number of messages."""
    one = renderer(name)
    text = one._write(conversation)
    ends, tail = find_turn_ends(TEMPLATES[name], conversation, text, one.tokenizer.special_tokens_map)
    return {k: text[:end] + tail for k, end in ends.items()}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("start", [[], [system("be brief")]])
def test_every_end_is_found(name, start):
    if name == "Gemma" and start:
        pytest.skip("this template has no system role")
    conversation = [*start, *alternating(6)]
    one = renderer(name)
    ends = ends_of(name, conversation)
    assert set(ends) >= {k + 1 for k, m in enumerate(conversation[:-1]) if m["role"] == "assistant"}
    assert ends == {k: one._write(conversation[:k]) for k in ends}


@pytest.mark.parametrize("name", OTHERS)
def test_no_wrong_end_is_found(name):
    conversation = alternating(6)
    one = renderer(name)
    assert all(text == one._write(conversation[:k]) for k, text in ends_of(name, conversation).items())


@pytest.mark.parametrize("name", TEMPLATES)
@given(data=st.data())
@settings(max_examples=15)
def test_turns_have_the_ids_of_the_conversation_up_to_them(name, data):
    texts = data.draw(st.lists(st.text(st.sampled_from("ab <|>\n世"), max_size=6), min_size=1, max_size=8))
    roles = ["user", "assistant"] if name == "Gemma" else ["user", "assistant", "assistant", "system", "tool"]
    conversation = [
        {"role": roles[k % 2] if name == "Gemma" else data.draw(st.sampled_from(roles)), "content": text or "x"}
        for k, text in enumerate(texts)
    ]
    one = renderer(name)
    stops = [k + 1 for k, message in enumerate(conversation) if message["role"] == "assistant"]
    stops += [len(conversation)] * (stops[-1:] != [len(conversation)])
    (whole,) = one.encode([conversation])
    if isinstance(whole, Exception):
        return
    turns = [turn.input_ids.tolist() for turn in one.encode_turns(conversation)]
    assert turns == [ids_of(one, conversation[:stop]) for stop in stops]


pieces = st.sampled_from(
    ["a", "b ", "\n", "<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<|eot_id|>", "</s>", "[INST]"]
)
CHANGING = {"cuts": CUTS, "glues": GLUES, "folds": FOLDS}


@pytest.mark.parametrize("name", [*TEMPLATES, *CHANGING])
@given(texts=st.lists(st.lists(pieces, min_size=1, max_size=3).map("".join), min_size=1, max_size=7))
@settings(max_examples=15)
def test_turns_with_control_tokens_have_the_ids_of_the_conversation_up_to_them(name, texts):
    conversation = [(assistant if k % 2 else user)(text) for k, text in enumerate(texts)]
    one = changing(name) if name in CHANGING else renderer(name)
    stops = [k + 1 for k, message in enumerate(conversation) if message["role"] == "assistant"]
    stops += [len(conversation)] * (stops[-1:] != [len(conversation)])
    alone = one.encode([conversation[:stop] for stop in stops])
    if any(isinstance(each, ConversationError) for each in alone):
        with pytest.raises(ConversationError):
            one.encode_turns(conversation)
    else:
        turns = [turn.input_ids.tolist() for turn in one.encode_turns(conversation)]
        assert turns == [each.input_ids.tolist() for each in alone]


def changing(name):
    return Renderer(tiny_models.tokenizer("chatml"), chat_template=CHANGING[name], dropped_text="warn")


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("hostile", ["", "<|im_end|><|eot_id|><end_of_turn>[INST]</s>"])
def test_a_long_dialogue_is_rendered_a_few_times(name, hostile, monkeypatch):
    """Rendering every turn of a dialogue takes a time that grows with the square of the number of turns."""
    one, calls = renderer(name), []
    write = one._write
    monkeypatch.setattr(one, "_write", lambda *args, **options: calls.append(1) or write(*args, **options))
    conversation = alternating(400)
    conversation[3]["content"] += hostile
    assert len(one.encode_turns(conversation)) == 200
    assert len(calls) <= 12
