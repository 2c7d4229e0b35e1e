"""Parts C and D of gpu_day.py: the speed of scoring; precision, memory and loading."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import precision
import reward_training
import scoring
import torch
import workloads
from gpu_profile import by_class, kernels_of
from gpu_sizes import GROUP, Day, Subject, conversations_of, way_of
from torch import Tensor

import gym_rm
from gym_rm.engine.executors.model_info import bytes_per_token

# --- C: speed of scoring ----------------------------------------------------------------------------------------------


def part_c(day: Day) -> None:
    for size in day.sizes.models:
        subject = Subject(day, size)
        for tokens in day.sizes.budgets:
            shown = {"size": size, "tokens": tokens}
            day.row("scoring", functools.partial(scoring_speed, day, subject, tokens), expected=40, **shown)
        for tokens in day.sizes.budgets:
            shown = {"size": size, "tokens": tokens}
            day.row("padded", functools.partial(padded_speed, day, subject, tokens), expected=20, **shown)
        tokens = day.sizes.budgets[1]
        shown = {"size": size, "tokens": tokens}
        work = functools.partial(scoring_speed, day, subject, tokens, eight_bit=True)
        day.row("scoring with 8-bit products", work, expected=60, **shown)
        if importlib.util.find_spec("vllm"):
            day.row("vLLM", functools.partial(vllm_speed, day, subject, tokens), expected=120, **shown)
        else:
            day.skip("vLLM", "vllm is not installed", **shown)


def scoring_speed(day: Day, subject: Subject, tokens: int, *, eight_bit: bool = False) -> dict[str, Any]:
    """Return tokens/s of whole batches, and what they take of the GPU."""
    from torch._dynamo.utils import counters

    scorer, cuda = subject.quantized if eight_bit else subject.scorer, day.device.type == "cuda"
    scorer._scheduler.budget = tokens
    conversations, before = conversations_of(day, tokens), counters["stats"]["unique_graphs"]
    scorer.score(conversations)
    compiled = counters["stats"]["unique_graphs"] - before
    runs, seconds, rates = [], [], []
    for _ in range(day.sizes.rounds):
        rates.append(scoring.matmul_rates(subject.model, min(tokens, 16_384))["torch"])
        if cuda:
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        work = scorer.score(conversations).workload
        seconds.append(time.perf_counter() - started)
        runs.append(work.run_seconds)
    result = {
        "unique_tokens": work.unique_tokens,
        "real_tokens": work.num_tokens,
        "batches": work.num_batches,
        "tokens_per_second": work.unique_tokens / statistics.median(runs),
        "tokens_per_second_with_texts": work.unique_tokens / statistics.median(seconds),
        "matmul_flops": statistics.median(rates),
        "share_of_matmul": 2 * workloads.weights(subject.model) * work.unique_tokens
        / statistics.median(runs) / statistics.median(rates),
        "compilations": compiled,
        **way_of(scorer.executor),
    }  # fmt: skip
    if cuda:
        peak = torch.cuda.max_memory_allocated() - held
        result |= {"peak_bytes": peak, "estimated_bytes": bytes_per_token(subject.model) * tokens, "held_bytes": held}
    smallest = (subject.size, tokens) == (day.sizes.small, min(day.sizes.budgets)) and not eight_bit
    trace = day.output / "trace.json.gz" if smallest else None
    kernels = kernels_of(day.device, functools.partial(scorer.score, conversations), trace)
    layers = workloads.SHAPES[subject.size]["num_hidden_layers"]
    return result | by_class(kernels, work.num_batches, layers)


def padded_speed(day: Day, subject: Subject, tokens: int) -> dict[str, Any]:
    """Score the same conversations with transformers, sorted by length, in padded batches of as many tokens."""
    conversations = conversations_of(day, tokens)
    score = scoring.padded(subject.model, day.tokenizer, sort=True, batch_size=max(1, tokens // 256))
    subject.scorer._scheduler.budget = tokens
    ours = subject.scorer.score(conversations)
    theirs = score(conversations)
    seconds = [scoring.timed(functools.partial(score, conversations), day.device) for _ in range(day.sizes.rounds)]
    return {
        "tokens_per_second_with_texts": ours.workload.unique_tokens / statistics.median(seconds),
        "real_tokens_per_second": ours.workload.num_tokens / statistics.median(seconds),
        "largest_difference": float(np.abs(ours.rewards - theirs).max()),
    }


def vllm_speed(day: Day, subject: Subject, tokens: int) -> dict[str, Any]:
    """Score the same conversations with vLLM's classifier."""
    from vllm import LLM

    conversations = conversations_of(day, tokens)
    texts = day.tokenizer.apply_chat_template(conversations, tokenize=False)
    subject.scorer._scheduler.budget = tokens
    ours = subject.scorer.score(conversations)
    with tempfile.TemporaryDirectory() as folder:
        reward_training.save_model(Path(folder), subject.model, day.tokenizer)
        llm = LLM(folder, runner="pooling", convert="classify", max_num_batched_tokens=tokens, max_model_len=4096,
                  gpu_memory_utilization=0.3, dtype=day.sizes.dtype)  # fmt: skip
        llm.classify(texts, use_tqdm=False)
        seconds = scoring.timed(functools.partial(llm.classify, texts, use_tqdm=False), day.device)
    return {"tokens_per_second_with_texts": ours.workload.unique_tokens / seconds}


# --- D: precision, memory, loading ------------------------------------------------------------------------------------


def part_d(day: Day) -> None:
    small = Subject(day, day.sizes.small)
    day.row("out of memory", functools.partial(out_of_memory, day, small), expected=30, size=small.size)
    del small
    for size in day.sizes.ends:
        subject = Subject(day, size)
        day.row("sleep", functools.partial(sleep, day, subject), expected=60, size=size)
        day.row("loading", functools.partial(loading, day, subject), expected=90, size=size)
        del subject
    day.row("precision", functools.partial(precision_of, day), expected=60, size=day.sizes.small)


def precision_of(day: Day) -> dict[str, Any]:
    model = workloads.reward_model(day.sizes.small, len(day.tokenizer), device=str(day.device))
    reference, errors = precision.errors_of(model, day.tokenizer, workloads.hh_groups(day.sizes.pairs, 2))
    spread = float(np.abs(reference[::2] - reference[1::2]).mean())
    return {"pairs": day.sizes.pairs, "standard_deviation": float(reference.std()), "mean_margin": spread, **errors}


@contextlib.contextmanager
def little_memory(day: Day, scorer: Any, tokens: int) -> Iterator[None]:
    """Leave memory for batches of about so many tokens only; a CPU, which has more, raises the error by itself."""
    model = scorer.executor._model.reward_model
    if day.device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(day.device).total_memory
        allowed = torch.cuda.memory_reserved() + tokens * bytes_per_token(model.models[0])
        torch.cuda.set_per_process_memory_fraction(allowed / total)
    values = type(model).values

    def limited(batch: Any) -> Tensor:
        if batch.input_ids.size > tokens:
            raise torch.OutOfMemoryError("more tokens than fit")
        return values(model, batch)

    try:
        if day.device.type != "cuda":
            model.values = limited
        yield
    finally:
        vars(model).pop("values", None)
        if day.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)


def out_of_memory(day: Day, subject: Subject) -> dict[str, Any]:
    """Score batches that do not fit; the budget must shrink, and every score must keep its bits."""
    tokens = max(day.sizes.budgets)
    conversations = conversations_of(day, tokens)
    subject.scorer._scheduler.budget = tokens
    expected = subject.scorer.score(conversations).rewards
    with little_memory(day, subject.scorer, tokens // 4):
        got = subject.scorer.score(conversations).rewards
    if subject.scorer.max_num_batched_tokens >= tokens:
        raise ArithmeticError(f"nothing ran out of memory with {tokens} tokens, so nothing was tested")
    difference = float(np.abs(got - expected).max())
    if difference and subject.scorer.provenance.batch_invariance == "bit-equal":
        raise ArithmeticError(f"scores differ by {difference} after running out of memory")
    after = subject.scorer.max_num_batched_tokens
    return {"tokens_before": tokens, "tokens_after": after, "largest_difference": difference}


def sleep(day: Day, subject: Subject) -> dict[str, Any]:
    """Return the seconds to sleep and wake, the first time (which allocates the host's memory) and the second."""
    conversations = workloads.gsm8k_groups(2, GROUP)
    scorer, cuda, result = subject.scorer, day.device.type == "cuda", {}
    expected = scorer.score(conversations).rewards
    for time_of in ("first", "second"):
        before = torch.cuda.memory_allocated() if cuda else 0
        result[f"sleep_seconds_{time_of}"] = scoring.timed(scorer.sleep, day.device)
        result["freed_bytes"] = before - (torch.cuda.memory_allocated() if cuda else 0)
        result[f"wake_seconds_{time_of}"] = scoring.timed(scorer.wake, day.device)
    if not np.array_equal(scorer.score(conversations).rewards, expected):
        raise ArithmeticError("scores changed by sleeping")
    return result


def loading(day: Day, subject: Subject) -> dict[str, Any]:
    """Return the seconds to load a folder that is in the disk cache, to its first score, and to get new weights."""
    conversations = workloads.gsm8k_groups(2, GROUP)
    expected = subject.scorer.score(conversations).rewards
    options = {"dtype": day.sizes.dtype, "device": str(day.device)}
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        reward_training.save_model(Path(folder), subject.model, day.tokenizer)
        times = {"save_seconds": time.perf_counter() - started}
        started = time.perf_counter()
        scorer = gym_rm.load_scorer(folder, **options)
        times["load_seconds"] = time.perf_counter() - started
        got = scorer.score(conversations).rewards
        times["load_and_score_seconds"] = time.perf_counter() - started
        times["update_weights_seconds"] = scoring.timed(lambda: scorer.update_weights(folder), day.device)
        times["bytes"] = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    if not np.array_equal(got, expected) or not np.array_equal(scorer.score(conversations).rewards, expected):
        raise ArithmeticError("scores of the loaded model differ")
    return times
