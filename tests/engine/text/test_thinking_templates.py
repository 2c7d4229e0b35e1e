"""Thinking of public models: what their chat templates write before a reply, and what the models write then.

The templates are the parts for users' messages and for the generation prompt of those on the hub.
"""

import pytest
import tiny_models

from gym_rm.engine.text.thinking import Thinking

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
WITHOUT = "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}"
TEMPLATES = {
    "Qwen3": CHATML + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    + WITHOUT + "{% endif %}{% endif %}",
    "Qwen3.5": CHATML + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    + WITHOUT + "{% else %}{{ '<think>\n' }}{% endif %}{% endif %}",
    "Nemotron 3": CHATML + "{% if add_generation_prompt %}{% if enable_thinking is not defined or enable_thinking %}"
    "{{ '<|im_start|>assistant\n<think>\n' }}{% else %}{{ '<|im_start|>assistant\n<think></think>' }}"
    "{% endif %}{% endif %}",
    "DeepSeek-R1-Distill": "{{ bos_token }}{% for m in messages %}{{ '<｜User｜>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
    "Magistral": "{{ bos_token }}{% for m in messages %}{{ '[INST]' + m.content + '[/INST]' }}{% endfor %}",
    "gpt-oss": "{% for m in messages %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
}  # fmt: skip
OFF = {"enable_thinking": False}
HARMONY = "<|channel|>analysis<|message|>2 + 2.<|end|><|start|>assistant<|channel|>final<|message|>4"


@pytest.mark.parametrize(
    ("model", "kwargs", "opening", "finished", "unfinished"),
    [
        ("Qwen3", {}, "", "<think>\n2 + 2.\n</think>\n\n4", "<think>\n2 + 2. So"),
        ("Qwen3", OFF, "", "4", None),
        ("Qwen3.5", {}, "<think>\n", "2 + 2.\n</think>\n\n4", "2 + 2. So"),
        ("Qwen3.5", OFF, "", "4", None),
        ("Nemotron 3", {}, "<think>\n", "2 + 2.\n</think>\n4", "2 + 2. So"),
        ("Nemotron 3", OFF, "", "4", None),
        ("DeepSeek-R1-Distill", {}, "<think>\n", "2 + 2.\n</think>\n\n4", "2 + 2. So"),
        ("Magistral", {}, "", "[THINK]2 + 2.[/THINK]4", "[THINK]2 + 2. So"),
        ("gpt-oss", {}, "", HARMONY, "<|channel|>analysis<|message|>2 + 2. So"),
    ],
)
def test_replies_of_public_models(model, kwargs, opening, finished, unfinished):
    tokenizer = tiny_models.tokenizer("chatml", chat_template=TEMPLATES[model])
    thinking = Thinking.of_template(tokenizer, **kwargs)
    asked = [{"role": "user", "content": "What is 2 + 2? <think>"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False, **kwargs)
    assert thinking.opening(prompt) == opening
    assert thinking.opened == bool(opening)
    thought = "" if unfinished is None else "2 + 2."
    # What was sampled, and the whole turn as agents give it to an environment.
    assert thinking.split({"content": finished}) == Thinking().split({"content": opening + finished}) == (thought, "4")
    if unfinished is not None:
        both = thinking.split({"content": unfinished}), Thinking().split({"content": opening + unfinished})
        assert both == ((both[0][0], None),) * 2


def test_a_tokenizer_without_a_template_opens_nothing():
    assert Thinking.of_template(tiny_models.tokenizer("chatml", chat_template=None)) == Thinking()
