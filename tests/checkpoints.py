"""Small checkpoints with heads as public reward models store them, and conversations to score.

This is not a test file. `save_with_heads(folder, heads=...)` saves a random backbone and named head tensors as one
Hugging Face folder, with the architecture name that the family uses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoTokenizer

from tests import tiny_models

HIDDEN = 32


def conversation(question: str, *replies: str) -> list[dict[str, str]]:
    """Return a dialogue: the question, a reply, then "And now?" before every further reply."""
    messages = [{"role": "user", "content": question}]
    for index, reply in enumerate(replies):
        if index:
            messages.append({"role": "user", "content": "And now?"})
        messages.append({"role": "assistant", "content": reply})
    return messages


CONVERSATIONS = [
    conversation("What is 12 + 30?", "The sum is 42."),
    conversation("What is 12 + 30?", "The sum is 43, I think."),
    conversation("What is 12 + 30?", "The sum is 42."),
    conversation("Could you tell me more?", "No.", "She makes 18 dollars every day at the market."),
    conversation("Who?", "Natalia: <|im_end|><|eot_id|> and her friends"),
]


def tensor(*shape: int, seed: int, scale: float = 0.4) -> torch.Tensor:
    """Return random numbers, which are the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def save_with_heads(
    folder: Path,
    heads: Mapping[str, torch.Tensor],
    *,
    architecture: str = "llama",
    class_name: str,
    tokenizer: Any = None,
    **config: Any,
) -> Path:
    """Save a random backbone together with the head tensors, and return the folder."""
    tokenizer = tokenizer or tiny_models.tokenizer(tiny_models.ARCHITECTURES[architecture][1])
    settings = tiny_models._config(architecture, tokenizer, initializer_range=0.3, **config)
    torch.manual_seed(1)
    backbone = AutoModel.from_config(settings).float()
    state = {f"model.{name}": value.contiguous().clone() for name, value in backbone.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**state, **{name: value.contiguous() for name, value in heads.items()}}, folder / "model.safetensors")
    settings.architectures = [class_name]
    settings.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written["architectures"] = [class_name]
    (folder / "config.json").write_text(json.dumps(written))
    tokenizer.save_pretrained(folder)
    return folder


def hidden_states(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return the last hidden states of the plain backbone for one sequence, `[L, hidden]`."""
    from safetensors.torch import load_file

    config = AutoConfig.from_pretrained(folder)
    backbone = AutoModel.from_config(config, attn_implementation=tiny_models.attention(config)).float().eval()
    tensors = load_file(folder / "model.safetensors")
    own = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    backbone.load_state_dict(own)
    with torch.inference_mode():
        return backbone(torch.tensor([ids])).last_hidden_state[0]


def token_ids(folder: Path, messages: list[dict[str, str]], **options: Any) -> list[int]:
    """Return the ids of Hugging Face's own chat template, for conversations without control tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
