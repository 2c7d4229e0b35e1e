"""How large everything in gpu_first.py and gpu_day.py is, how a row is run and written, and what their parts share."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import scoring
import torch
import workloads

from gym_rm.engine.executors.executor import LoadSpec, ModelInfo
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.loading.trial import Forward
from gym_rm.engine.reward_model_scorer import RewardModelScorer
from gym_rm.training import parallel_model

GROUP = 8  # replies to a prompt


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    models: tuple[str, ...] = ("0.6B", "4B", "8B")
    budgets: tuple[int, ...] = (8_192, 32_768, 65_536)
    rounds: int = 3
    tests: tuple[str, ...] = (
        "tests/engine/kernels/test_path_attention.py",
        "tests/engine/kernels/test_elementwise.py",
        "tests/engine/kernels/test_models.py",
        "tests/engine/test_parity.py",
        "tests/engine/test_batch_invariance.py",
        "tests/engine/test_reward_model_scorer.py",
        "tests/generation/test_sampling.py",
    )
    head_sizes: tuple[int, ...] = (64, 128, 256)
    nth_case: int = 1  # of the wrong models
    tree: tuple[int, int] = (24, 100)  # sequences, and most tokens of a branch
    square: int = 8192  # rows and columns of the matrices whose product is a ceiling
    copied: int = 2**29  # numbers that are copied
    rows: int = 32_768  # most rows of a product
    batches: int = 50
    first_batches: int = 20  # of each variant in gpu_first.py
    exact: int = 4  # groups whose scores are compared with float64
    batch_tokens: tuple[int, ...] = (2048, 8192, 32_768, 65_536)
    pool: int = 800  # conversations that batches are drawn from
    pairs: int = 200
    learned_pairs: tuple[int, int] = (128, 32)  # pairs, and of them in a step
    prompts: int = 64
    few_prompts: int = 8
    reply_tokens: int = 512
    steps: int = 3
    learned_tokens: int = 8192  # in a forward and backward of GRPO, beside 30 GB of keys and values of the sampler
    dtype: str = "bfloat16"

    @property
    def small(self) -> str:
        return self.models[0]

    @property
    def ends(self) -> tuple[str, ...]:
        """The smallest and the largest model."""
        return tuple(dict.fromkeys((self.models[0], self.models[-1])))


FULL = Sizes()
TINY = Sizes(
    models=("tiny",), budgets=(500, 1000, 2000), rounds=1, tests=("tests/engine/test_pages.py",), head_sizes=(16,),
    nth_case=8, tree=(6, 10), square=256, copied=2**16, rows=336, batches=4, first_batches=2, exact=1,
    batch_tokens=(500, 2000), pool=40, pairs=4, learned_pairs=(4, 2), prompts=2, few_prompts=1, reply_tokens=4,
    steps=2, dtype="float32",
)  # fmt: skip


NO_TRITON = "Triton's kernels need a GPU, which is not here"  # why a row is skipped


def way_of(executor: Any) -> dict[str, Any]:
    """Return how the model of an executor runs."""
    loaded = executor._model
    decoders, info = loaded.reward_model.decoders, loaded.info
    switches = {name: all(getattr(each, name, False) for each in decoders) for name in ("kernels", "paths")}
    rung = None if loaded.rows is None else str(loaded.rows.rows)
    return {"layout": info.layout, "fused": info.fused, **switches, "rung": rung, "bits": info.batch_invariance}


def require_as_promised(way: Mapping[str, Any], **promised: Any) -> None:
    """Raise if a model does not run as it should: then a number would not be that of gym_rm."""
    found = {name: way[name] for name in promised} | {name: way[name] for name in ("rung", "bits") if name in way}
    if found.get("rung", "") is None or any(found[name] != value for name, value in promised.items()):
        raise ArithmeticError(f"the model does not run as promised, {promised} and with a rung, but {found}")


@contextlib.contextmanager
def everything_as_promised(device: torch.device) -> Iterator[None]:
    """Let every model that is loaded or trained raise if it runs without trees, the fused forward or, on CUDA, kernels.

    All models of these benchmarks support them.
    """
    load, choose = LocalExecutor.load, parallel_model.choose_layout
    promised = {"layout": "tree", "fused": True, "kernels": device.type == "cuda"}

    def checked_load(executor: LocalExecutor, spec: LoadSpec) -> ModelInfo:
        info = load(executor, spec)
        require_as_promised(way_of(executor), **promised)
        return info

    def checked_choice(*arguments: Any, **options: Any) -> Forward:
        forward = choose(*arguments, **options)
        kernels = getattr(forward, "kernels", False)
        require_as_promised({"layout": forward.layout, "fused": forward.fuse, "kernels": kernels}, **promised)
        return forward

    with (
        mock.patch.object(LocalExecutor, "load", checked_load),
        mock.patch.object(parallel_model, "choose_layout", checked_choice),
    ):
        yield


class Lines(logging.Handler):
    """Keeps what the package logs, such as the table of a model's trial."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        logger = logging.getLogger("gym_rm")
        before = logger.level
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(self)
            logger.setLevel(before)


class TimeUp(BaseException):
    """The minutes of a part have passed; no `except Exception` on the way may keep it."""


class Day:
    """Runs the rows of a part and writes a line for each; rows that do not fit into the time left are skipped."""

    def __init__(self, part: str, output: Path, *, minutes: float, sizes: Sizes) -> None:
        self.part, self.output, self.sizes = part, output, sizes
        self.device = torch.device("cpu" if sizes is TINY else "cuda")
        self.results = self.errors = 0
        self._end = time.monotonic() + 60 * minutes
        self._file = (output / f"part_{part}.jsonl").open("a", encoding="utf-8")  # a part that runs again adds its rows

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    @functools.cached_property
    def tokenizer(self) -> Any:
        return workloads.tokenizer()

    def row(
        self,
        name: str,
        work: Callable[[], Mapping[str, Any]],
        *,
        expected: float,
        promised: bool = True,
        **parameters: Any,
    ) -> Mapping[str, Any] | None:
        """Run one row, write its result, or its error, with what the package logged; return the result.

        Args:
            name: what is measured.
            work: returns the result.
            expected: seconds that it takes on a GPU; it is skipped if fewer are left.
            promised: whether all models in it must run as promised.
            **parameters: of the row.
        """
        if expected > self.seconds_left:
            self.skip(
                name, f"takes about {expected:.0f} s, and {max(self.seconds_left, 0):.0f} s are left", **parameters
            )
            return None
        print(f"{self.part} {name} {parameters} ...", flush=True)
        started = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, self.seconds_left)
        check = everything_as_promised(self.device) if promised else contextlib.nullcontext()
        heard = Lines()
        try:
            with check, heard.listening():
                outcome: dict[str, Any] = {"result": dict(work())}
            self.results += 1
        except (Exception, SystemExit, TimeUp) as error:
            traceback.print_exc()
            self.errors += 1
            outcome = {"error": f"{type(error).__name__}: {error}"[:3000]}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        seconds = round(time.perf_counter() - started, 3)
        self._write(name, parameters, outcome | {"seconds": seconds} | ({"log": heard.lines} if heard.lines else {}))
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return outcome.get("result")

    def skip(self, name: str, reason: str, **parameters: Any) -> None:
        """Write why a row does not run."""
        self._write(name, parameters, {"skipped": reason, "seconds": 0.0})

    def _write(self, name: str, parameters: Mapping[str, Any], outcome: Mapping[str, Any]) -> None:
        line = json.dumps({"part": self.part, "name": name, "parameters": parameters, **outcome})
        print(line, file=self._file, flush=True)
        print(f"  {line[:400]}", flush=True)


class Subject:
    """A reward model with random weights on the device, and its scorers; each is made when it is first used.

    A scorer that cannot be made raises the same error each time, without trying again.
    """

    def __init__(self, day: Day, size: str) -> None:
        self.day, self.size = day, size
        self._made: dict[str, RewardModelScorer | Exception] = {}

    @functools.cached_property
    def model(self) -> Any:
        dtype = getattr(torch, self.day.sizes.dtype)
        return workloads.reward_model(self.size, len(self.day.tokenizer), device=str(self.day.device), dtype=dtype)

    @property
    def scorer(self) -> RewardModelScorer:
        return self._once("plain", RewardModelScorer)

    @property
    def quantized(self) -> RewardModelScorer:
        return self._once("8-bit", scoring.quantized)

    @property
    def way(self) -> dict[str, Any]:
        return way_of(self.scorer.executor)

    def _once(self, name: str, make: Callable[..., Any]) -> Any:
        if name not in self._made:
            try:
                self._made[name] = make(self.model, self.day.tokenizer)
            except Exception as error:
                self._made[name] = error
        if isinstance(made := self._made[name], Exception):
            raise made
        return made


def conversations_of(day: Day, tokens: int) -> list[workloads.Conversation]:
    """Return GSM8K groups with about twice as many unique tokens."""
    some = workloads.gsm8k_groups(4, GROUP)
    whole, prompts = (
        day.tokenizer.apply_chat_template(texts, return_dict=True)["input_ids"]
        for texts in (some, [[one[0]] for one in some[::GROUP]])
    )
    unique = sum(map(len, whole)) - (GROUP - 1) * sum(map(len, prompts))
    return workloads.gsm8k_groups(-(-8 * tokens // unique), GROUP)
