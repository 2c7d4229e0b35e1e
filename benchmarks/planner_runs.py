"""Runs whose memory planner_memory.py measures: scoring and training on pairs, each in a process of its own.

The baseline is the resident memory after the imports, before a model is loaded. The peak is VmHWM of Linux, which
`/proc/self/clear_refs` sets back at each instant, so that every instant has a peak of its own.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401 - which transformers imports late
import torch
import transformers
import workloads
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import gym_rm
from gym_rm.training.losses import bradley_terry


@dataclass
class Marks:
    """Peaks of resident memory above the baseline, in bytes, by instant.

    Attributes:
        baseline: resident memory after the imports.
        peaks: largest peak of each instant.
    """

    baseline: int = 0
    peaks: dict[str, int] = field(default_factory=dict)
    trace: list[tuple[str, int, int]] = field(default_factory=list)

    def start(self) -> None:
        gc.collect()
        _reset()
        self.baseline = _status("VmRSS")

    def mark(self, name: str) -> None:
        """Record the peak since the last mark."""
        peak = _status("VmHWM") - self.baseline
        self.trace.append((name, peak, _status("VmRSS") - self.baseline))
        self.peaks[name] = max(self.peaks.get(name, 0), peak)
        _reset()


def _status(key: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


# --- models with random weights --------------------------------------------------------------------------------------

_GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
_WINDOWED = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 2048, "sliding_window": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-1M": ("qwen3", workloads.SHAPES["1M"]),
    "qwen3-25M": ("qwen3", workloads.SHAPES["25M"]),
    "qwen3-100M": ("qwen3", workloads.SHAPES["100M"]),
    "qwen3-300M": (
        "qwen3",
        {"hidden_size": 1024, "num_hidden_layers": 20, "intermediate_size": 3072, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, "head_dim": 128},
    ),
    "qwen2-30M": (
        "qwen2",
        {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536, "num_attention_heads": 8}
        | {"num_key_value_heads": 2, "vocab_size": 16_000},
    ),
    "llama-50M": (
        "llama",
        {"hidden_size": 640, "num_hidden_layers": 10, "intermediate_size": 1792, "num_attention_heads": 10}
        | {"num_key_value_heads": 5},
    ),
    "mistral-45M": (
        "mistral",
        {"hidden_size": 576, "num_hidden_layers": 9, "intermediate_size": 2048, "num_attention_heads": 9}
        | {"num_key_value_heads": 3, "head_dim": 64, "sliding_window": 256},
    ),
    "gemma2-35M": ("gemma2", _GROUPED | _WINDOWED | {"query_pre_attn_scalar": 64}),
    "gemma3-35M": ("gemma3_text", _GROUPED | _WINDOWED),
    "mixtral-85M": (
        "mixtral",
        {"hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 1024, "num_local_experts": 8}
        | _GROUPED
        | {"num_experts_per_tok": 2, "sliding_window": None},
    ),
}


def make_model(name: str, folder: Path, *, dtype: str = "float32") -> Path:
    """Save a model of `MODELS` with random weights and its tokenizer, and return its folder."""
    path = folder / f"{name}-{dtype}"
    if (path / "config.json").exists():
        return path
    tokenizer = workloads.tokenizer()
    model_type, sizes = MODELS[name]
    settings: dict[str, Any] = {"vocab_size": len(tokenizer), "pad_token_id": 2, "eos_token_id": 1, "bos_token_id": 0}
    settings["max_position_embeddings"] = 32_768
    config = AutoConfig.for_model(model_type, **(settings | {"num_labels": 1} | sizes))
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, dtype=getattr(torch, dtype))
    path.parent.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


# --- the runs ---------------------------------------------------------------------------------------------------------


def measure(values: dict[str, Any]) -> Marks:
    """Run the work that these values describe, and return its peaks."""
    torch.set_num_threads(values.get("threads", 1))
    torch.manual_seed(0)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    _import_model_code(values)
    marks = Marks()
    {"scoring": _score, "training": _train}[values["work"]](values, marks)
    return marks


def _import_model_code(values: dict[str, Any]) -> None:
    """Import the modules that transformers imports late; they are no part of the memory of a model."""
    config = AutoConfig.from_pretrained(values["model"])
    for mapping in (AutoModelForSequenceClassification, AutoModelForCausalLM):
        with contextlib.suppress(KeyError):
            mapping._model_mapping[type(config)]


def conversations(values: dict[str, Any]) -> list[workloads.Conversation]:
    """Return real conversations: groups of one prompt with several replies."""
    groups = getattr(workloads, f"{values.get('rows', 'gsm8k')}_groups")
    return list(groups(values["num_prompts"], values["group_size"]))


def _score(values: dict[str, Any], marks: Marks) -> None:
    rows = conversations(values)
    marks.start()
    scorer = gym_rm.load_scorer(
        values["model"], dtype=values["dtype"], device="cpu", max_num_batched_tokens=values["tokens"]
    )
    marks.mark("load")
    for _ in range(values.get("steps", 3)):
        scorer.score(rows)
        marks.mark("forward")


def _train(values: dict[str, Any], marks: Marks) -> None:
    pairs, length = values["num_prompts"], values["length"]
    marks.start()
    model: Any = AutoModelForSequenceClassification.from_pretrained(values["model"], dtype=torch.float32, num_labels=1)
    config = model.config.get_text_config()
    config.pad_token_id = model.config.pad_token_id = 0
    model.train()
    if values.get("checkpointing"):
        model.gradient_checkpointing_enable()
    if rank := values.get("lora"):
        import peft  # an extra, which the other runs do not need

        if values.get("checkpointing"):
            model.enable_input_require_grads()
        model = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear", task_type="SEQ_CLS"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    marks.mark("load")
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    lengths = torch.randint(max(1, length // 2), length + 1, (2 * pairs,))
    lengths[0] = length
    attended = (torch.arange(length) < lengths[:, None]).long()
    ids = torch.randint(3, config.vocab_size, (2 * pairs, length)).masked_fill(attended == 0, 0)
    options = {} if not hasattr(config, "use_cache") else {"use_cache": False}
    for _ in range(values.get("steps", 2)):
        for part in range(values.get("accumulate", 1)):
            rewards = model(input_ids=ids.roll(part, 1) if part else ids, attention_mask=attended, **options).logits
            marks.mark("forward")
            bradley_terry(rewards[:pairs, 0], rewards[pairs:, 0]).mean().backward()
            del rewards
            marks.mark("backward")
        optimizer.step()
        marks.mark("optimizer step")
        optimizer.zero_grad()
