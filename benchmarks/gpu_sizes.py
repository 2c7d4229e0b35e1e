"""How large everything in gpu_day.py is, and what several of its parts share."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import scoring
import torch
import workloads

from gym_rm.engine.reward_model_scorer import RewardModelScorer

if TYPE_CHECKING:
    from gpu_day import Day


GROUP = 8  # replies to a prompt


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    models: tuple[str, ...] = ("0.6B", "4B", "8B")
    budgets: tuple[int, ...] = (8_192, 32_768, 65_536)
    rounds: int = 3
    tests: tuple[str, ...] = (
        "tests/engine/test_parity.py",
        "tests/engine/test_batch_invariance.py",
        "tests/engine/test_reward_model_scorer.py",
        "tests/generation/test_sampling.py",
    )
    head_sizes: tuple[int, ...] = (64, 128, 256)
    nth_case: int = 1  # of the wrong models
    tree: tuple[int, int] = (24, 100)  # sequences, and most tokens of a branch
    rows: tuple[int, ...] = (16, 48, 112, 272, 512, 1024, 1040, 2064, 4096, 4112, 8192, 16_384, 32_768)
    batches: int = 50
    batch_tokens: tuple[int, ...] = (2048, 8192, 32_768, 65_536)
    pool: int = 800  # conversations that batches are drawn from
    pairs: int = 200
    learned_pairs: tuple[int, int] = (128, 32)  # pairs, and of them in a step
    prompts: int = 64
    reply_tokens: int = 512
    steps: int = 3
    learned_tokens: int = 8192  # in a forward and backward of GRPO, beside 30 GB of keys and values of the sampler
    dtype: str = "bfloat16"

    @property
    def small(self) -> str:
        return self.models[0]


FULL = Sizes()
TINY = Sizes(
    models=("tiny",), budgets=(500, 1000, 2000), rounds=1, tests=("tests/engine/test_pages.py",), head_sizes=(16,),
    nth_case=8, tree=(6, 10), rows=(16, 48, 112), batches=4, batch_tokens=(500, 2000), pool=40, pairs=4,
    learned_pairs=(4, 2), prompts=2, reply_tokens=4, steps=2, dtype="float32",
)  # fmt: skip


class Subject:
    """A reward model with random weights on the device, and its scorer; each is made when it is first used."""

    def __init__(self, day: Day, size: str) -> None:
        self.day, self.size = day, size

    @functools.cached_property
    def model(self) -> Any:
        dtype = getattr(torch, self.day.sizes.dtype)
        return workloads.reward_model(self.size, len(self.day.tokenizer), device=str(self.day.device), dtype=dtype)

    @functools.cached_property
    def scorer(self) -> RewardModelScorer:
        return RewardModelScorer(self.model, self.day.tokenizer)

    @functools.cached_property
    def quantized(self) -> Any:
        return scoring.quantized(self.model, self.day.tokenizer)


def conversations_of(day: Day, tokens: int) -> list[workloads.Conversation]:
    """Return GSM8K groups with about twice as many unique tokens."""
    some = workloads.gsm8k_groups(4, GROUP)
    whole, prompts = (
        day.tokenizer.apply_chat_template(texts, return_dict=True)["input_ids"]
        for texts in (some, [[one[0]] for one in some[::GROUP]])
    )
    unique = sum(map(len, whole)) - (GROUP - 1) * sum(map(len, prompts))
    return workloads.gsm8k_groups(-(-8 * tokens // unique), GROUP)
