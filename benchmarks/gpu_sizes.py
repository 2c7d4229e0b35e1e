"""How large everything in gpu_day.py is, how a row is run and written, and what several of its parts share."""

from __future__ import annotations

import functools
import gc
import json
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scoring
import torch
import workloads

from gym_rm.engine.reward_model_scorer import RewardModelScorer

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


class TimeUp(BaseException):
    """The minutes of a part have passed; no `except Exception` on the way may keep it."""


class Day:
    """Runs the rows of a part and writes a line for each; rows that do not fit into the time left are skipped."""

    def __init__(self, part: str, output: Path, *, minutes: float, sizes: Sizes) -> None:
        self.part, self.output, self.sizes = part, output, sizes
        self.device = torch.device("cpu" if sizes is TINY else "cuda")
        self.errors = 0
        self._end = time.monotonic() + 60 * minutes
        self._file = (output / f"part_{part}.jsonl").open("w", encoding="utf-8")

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    @functools.cached_property
    def tokenizer(self) -> Any:
        return workloads.tokenizer()

    def row(self, name: str, work: Callable[[], Mapping[str, Any]], *, expected: float, **parameters: Any) -> None:
        """Run one row, and write its result, or its error.

        Args:
            name: what is measured.
            work: returns the result.
            expected: seconds that it takes on a GPU; it is skipped if fewer are left.
            **parameters: of the row.
        """
        if expected > self.seconds_left:
            self.skip(
                name, f"takes about {expected:.0f} s, and {max(self.seconds_left, 0):.0f} s are left", **parameters
            )
            return
        print(f"{self.part} {name} {parameters} ...", flush=True)
        started = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, self.seconds_left)
        try:
            outcome: dict[str, Any] = {"result": dict(work())}
        except (Exception, SystemExit, TimeUp) as error:
            traceback.print_exc()
            self.errors += 1
            outcome = {"error": f"{type(error).__name__}: {error}"[:3000]}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self._write(name, parameters, outcome | {"seconds": round(time.perf_counter() - started, 3)})
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def skip(self, name: str, reason: str, **parameters: Any) -> None:
        """Write why a row does not run."""
        self._write(name, parameters, {"skipped": reason, "seconds": 0.0})

    def _write(self, name: str, parameters: Mapping[str, Any], outcome: Mapping[str, Any]) -> None:
        line = json.dumps({"part": self.part, "name": name, "parameters": parameters, **outcome})
        print(line, file=self._file, flush=True)
        print(f"  {line[:400]}", flush=True)


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
