"""Inputs of the benchmarks: real conversations, by default from ../shared/data, and reward models with random weights.

The tokenizer is a byte-level BPE with 8,000 tokens trained on the same text, so that token counts are realistic. The
chat template is ChatML in the style of Qwen.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import results
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

import gym_rm
from gym_rm.types import Message

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"  # `parse_args` replaces it
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Shapes of Qwen3 reward models: four small ones for a CPU, then the published ones.
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 192, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 16},
    "1M": {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 384, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 32},
    "25M": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "head_dim": 64},
    "100M": {"hidden_size": 896, "num_hidden_layers": 12, "intermediate_size": 2432, "num_attention_heads": 14}
    | {"num_key_value_heads": 2, "head_dim": 64},
    "0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
    "4B": {"hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
}

Conversation = list[Message]


def parse_args(parser: argparse.ArgumentParser, options: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of a benchmark with `--data`, the folder of the conversations, and `--save`."""
    global DATA
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the conversations; default: %(default)s")
    results.add_argument(parser)
    args = parser.parse_args(options)
    DATA = args.data
    return args


def rows(name: str) -> list[dict[str, Any]]:
    path = DATA / f"{name}.jsonl.gz"
    if not path.exists():
        sys.exit(f"file not found: {path}. Pass the folder with the real conversations as --data FOLDER.")
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    control = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    texts = [row["question"] for row in rows("gsm8k_graded")]
    texts += [solution["text"] for row in rows("gsm8k_graded") for solution in row["solutions"]]
    texts += [message["content"] for row in rows("hh_harmless") for message in row["context"]]
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in control],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def reward_model(
    size: str, vocab_size: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    settings = {"vocab_size": vocab_size} | SHAPES[size]
    config = Qwen3Config(
        **settings, num_labels=1, pad_token_id=2, eos_token_id=1, max_position_embeddings=32_768, initializer_range=0.05
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForSequenceClassification.from_config(config, dtype=dtype).eval()


def weights(model: PreTrainedModel) -> int:
    """Return the number of weights in the linear layers of the backbone, which multiply every token."""
    layers = [layer for layer in model.base_model.modules() if isinstance(layer, torch.nn.Linear)]
    return sum(layer.weight.numel() for layer in layers)


def weight_shapes(size: str) -> list[tuple[int, int]]:
    """Return the different shapes `[N, K]` of the weights of a layer's products."""
    shape = SHAPES[size]
    hidden, inner, head = (shape[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    pairs = [(queries, hidden), (keys, hidden), (hidden, queries), (inner, hidden), (hidden, inner)]
    return list(dict.fromkeys(pairs))


def gsm8k_groups(groups: int, size: int, *, first: int = 0) -> list[Conversation]:
    """Return groups of one problem with `size` replies: its own graded replies, then replies to other problems."""
    data = rows("gsm8k_graded")
    replies = [solution["text"] for row in data for solution in row["solutions"]]
    result = []
    for group in range(first, first + groups):
        row = data[group % len(data)]
        own = [solution["text"] for solution in row["solutions"]]
        round_number = group // len(data)  # later rounds over the problems add replies to other problems than before
        others = [replies[(4 * group + (37 + 101 * round_number) * k + 400) % len(replies)] for k in range(1, size)]
        question: Message = {"role": "user", "content": row["question"]}
        result += [[question, {"role": "assistant", "content": reply}] for reply in (own + others)[:size]]
    return result


def hh_groups(groups: int, size: int, *, first: int = 0) -> list[Conversation]:
    """Return groups of one dialogue with `size` replies: its two ranked replies, then replies of other dialogues."""
    data = rows("hh_harmless")
    replies = [completion["completion"] for row in data for completion in row["completions"]]
    result: list[Conversation] = []
    for group in range(first, first + groups):
        row = data[(3 * group) % len(data)]
        own = [completion["completion"] for completion in row["completions"]]
        others = [replies[(2 * group + 37 * k + 400) % len(replies)] for k in range(1, size)]
        result += [row["context"] + reply for reply in (own + others)[:size]]
    return result


def gsm8k_singles(count: int, *, first: int = 0) -> list[Conversation]:
    """Return different problems with one reply each, which share no prefix."""
    return gsm8k_groups(count, 1, first=first)


def machine(device: str) -> str:
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        model = [
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ]
        name = (
            f"{model[0] if model else platform.processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
        )
    versions = f"gym_rm {gym_rm.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{name}; {versions}, Python {platform.python_version()}"
