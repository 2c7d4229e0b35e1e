"""The ids of the turns of a dialogue, made from those of the whole dialogue, are those of shorter conversations."""

import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.engine.text.renderer import Renderer
from gym_rm.errors import ConversationError
from tests.engine.text.rendering import assistant, user
from tests.engine.text.test_control_tokens import CHATML_TOKENS, CUTS, FOLDS, GLUES, bpe

ITEM = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
LOOP = "{% for m in messages %}" + ITEM + "{% endfor %}"
TEMPLATES = {
    "ChatML": tiny_models.CHATML,
    "Llama 3": tiny_models.LLAMA3,
    "Gemma": tiny_models.GEMMA,
    "Mistral": tiny_models.MISTRAL,
    "Qwen": tiny_models.QWEN,
    "state": "{% set seen = namespace(users=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set seen.users = seen.users + 1 %}{% endif %}{{ seen.users }}" + ITEM + "{% endfor %}",
    "end": LOOP + "end",
    "else": LOOP + PROMPT.replace("{% endif", "{% else %}end{% endif"),
    "swallows spaces": "{% for m in messages %}" + ITEM + " {% endfor %} \n",
    "last": "{% for m in messages %}" + ITEM + "{% if loop.last %}end{% endif %}{% endfor %}",
    "number": "{{ messages | length }}" + LOOP,
    "last message": "{% for m in messages %}{{ messages[-1]['role'] }}" + ITEM + "{% endfor %}",
    "backwards": "{% for m in messages[::-1] %}" + ITEM + "{% endfor %}",
    "second loop": "{% for m in messages %}{{ m['role'] }}{% endfor %}" + LOOP,
    "break": "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}" + ITEM + "{% endfor %}",
    "no control tokens": tiny_models.PLAIN,
}
CHANGING = {"cuts": CUTS, "glues": GLUES, "folds": FOLDS}
STYLES = {"Llama 3": "llama3", "Gemma": "gemma", "Mistral": "mistral"}


def renderer(name):
    if name == "swallows spaces":
        return Renderer(bpe(CHATML_TOKENS, TEMPLATES[name], lstrip=True, rstrip=True), dropped_text="warn")
    tok = tiny_models.tokenizer(STYLES.get(name, "chatml"))
    return Renderer(tok, chat_template=(TEMPLATES | CHANGING)[name], dropped_text="warn")


def stops_of(conversation):
    stops = [k + 1 for k, message in enumerate(conversation) if message["role"] == "assistant"]
    return stops + [len(conversation)] * (stops[-1:] != [len(conversation)])


pieces = st.sampled_from(
    ["a", "b ", "\n", "<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<|eot_id|>", "</s>", "[INST]"]
)


@pytest.mark.parametrize("name", [*TEMPLATES, *CHANGING])
@given(texts=st.lists(st.lists(pieces, min_size=1, max_size=3).map("".join), min_size=1, max_size=7))
@settings(max_examples=5)
def test_turns_with_control_tokens_have_the_ids_of_the_conversation_up_to_them(name, texts):
    conversation = [(assistant if k % 2 else user)(text) for k, text in enumerate(texts)]
    one = renderer(name)
    alone = one.encode([conversation[:stop] for stop in stops_of(conversation)])
    if any(isinstance(result, ConversationError) for result in alone):
        assert isinstance(one.encode_turns([conversation])[0], ConversationError)
    else:
        turns = [turn.input_ids.tolist() for turn in one.encode_turns([conversation])[0]]
        assert turns == [result.input_ids.tolist() for result in alone]


@pytest.mark.parametrize("name", ["ChatML", "last", "else"])
def test_what_turns_share_is_tokenised_once(name, monkeypatch):
    """Tokenising every turn from the start takes a time that grows with the square of the number of turns."""
    one, lengths, tokenize = renderer(name), [], Renderer.tokenize

    def measured(self, texts, add_special_tokens=True):
        lengths.extend(map(len, texts))
        return tokenize(self, texts, add_special_tokens)

    monkeypatch.setattr(Renderer, "tokenize", measured)
    conversation = [(assistant if k % 2 else user)(f"turn {k} of the dialogue") for k in range(60)]
    (turns,) = one.encode_turns([conversation])
    assert len(turns) == 30
    assert sum(lengths) < 120 * len(conversation)
