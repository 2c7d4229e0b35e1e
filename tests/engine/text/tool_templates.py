"""Chat templates with tools as their models have them, and tokenizers with the control tokens that they write."""

import functools
import importlib.resources
import re
from pathlib import Path

import pytest
import tiny_models
from tokenizers import AddedToken

CONTROL = re.compile(
    r"<\|[a-zA-Z0-9_]+\|>|<[a-z_]+\|>|<\|[a-z_]+>|\[/?[A-Z_]+\]|<｜[^｜]+｜>|</?(?!think>)[a-zA-Z_:]+>|◁[^▷]+▷"
)
KEEPING = ("qwen2_5", "llama3_1", "glm4moe", "mistral")  # write earlier turns again as they were
NAMES = (*KEEPING, "qwen3", "qwen3_5_think", "gptoss", "gemma4_v5")


@functools.cache
def tokenizer(name, special=True):
    """Return a tokenizer with a chat template: `"mistral"`, or one that TRL has under this name.

    Its control tokens are flagged as special, or not, as those for tools of several public models.
    """
    if name == "mistral":
        template = Path(__file__).with_name("mistral.jinja").read_text("utf-8")
    else:
        pytest.importorskip("trl", reason="TRL, which has the template, is not installed")
        template = (importlib.resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text("utf-8")
    made = tiny_models.tokenizer({"mistral": "mistral", "llama3_1": "llama3"}.get(name, "chatml"))
    tokens = sorted({*CONTROL.findall(template)} - {made.eos_token})
    made.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens])
    made.chat_template = template
    return made


def tool(name="add", description="Add two numbers."):
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "description": "One."}}, "required": ["a"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def calling(arguments, content="", number=1, name="add"):
    call = {"type": "function", "id": f"call{number:05d}", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def result(text, number=1, name="add"):
    return {"role": "tool", "content": text, "tool_call_id": f"call{number:05d}", "name": name}
