"""The rows of gpu_day.py, by part."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import precision
import reward_training
import scoring
import torch
import workloads
from torch import Tensor
from torch.autograd import DeviceType

import gym_rm
from gym_rm.engine.backbones.batch_invariance import (
    LADDER,
    WITHOUT_SPLIT_K,
    BatchInvariant,
    blas_settings,
    same_products,
    set_blas,
)
from gym_rm.engine.backbones.low_precision import FORMATS
from gym_rm.engine.backbones.tree_attention import TreeAttention
from gym_rm.engine.executors.executor import LoadSpec
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.executors.model_info import bytes_per_token
from gym_rm.engine.kinds.readouts import ModuleHead
from gym_rm.engine.loading.trial import Forward
from gym_rm.engine.reward_model_scorer import RewardModelScorer
from gym_rm.generation.sampling import LocalSampler
from gym_rm.planning.hardware import calibration
from gym_rm.planning.planner import plan

if TYPE_CHECKING:
    from gpu_day import Day

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("transformers", "triton", "numpy", "accelerate", "gymnasium", "pydantic", "pytest", "trl", "vllm")
BOUNDS = {"float32": 0.01, "bfloat16": 0.03}  # of differences from float64, relative to the largest value
NEEDS_GPU = re.compile(r"^@(pytest\.mark\.gpu|needs_gpu)", re.MULTILINE)
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


# --- A: versions, tests, attention ------------------------------------------------------------------------------------


def part_a(day: Day) -> None:
    sizes = day.sizes
    day.row("versions", functools.partial(versions, day.device), expected=20)
    marked = [file for file in (ROOT / "tests").rglob("test_*.py") if NEEDS_GPU.search(file.read_text())]
    day.row("GPU tests", functools.partial(run_tests, day, *map(str, marked), "-m", "gpu"), expected=60)
    for dtype in BOUNDS:
        for head_size in sizes.head_sizes:
            work = functools.partial(attention_errors, day, head_size, dtype)
            day.row("attention", work, expected=20, head_size=head_size, dtype=dtype)
    for dtype in BOUNDS:
        if (ROOT / "tests" / "engine" / "loading" / "mutations.py").exists():
            day.row("wrong models", functools.partial(wrong_models, day, dtype), expected=100, dtype=dtype)
        else:
            day.skip("wrong models", "tests/engine/loading/mutations.py is not there", dtype=dtype)
    for name in sizes.tests:
        day.row("tests", functools.partial(run_tests, day, str(ROOT / name), "-m", "not slow"), expected=60, file=name)


def versions(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["machine"] = workloads.machine(device.type)
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        found |= {"gpu": about.name, "gpu_bytes": about.total_memory, "driver": driver, "cuda": torch.version.cuda}
    return found


def run_tests(day: Day, *options: str) -> dict[str, Any]:
    """Run pytest in a process of its own; raise with the end of its output if a test fails."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *options]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HYPOTHESIS_STORAGE_DIRECTORY": folder}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=day.seconds_left, check=False
        )
    if done.returncode:
        raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2500:]}")
    return {word: int(count) for count, word in re.findall(r"(\d+) (passed|skipped|deselected)", done.stdout)}


def attention_errors(day: Day, head_size: int, dtype: str) -> dict[str, Any]:
    """Compare attention over a random tree, and its gradients, with dense attention in float64."""
    from tests.engine.backbones.trees import dense_attention, random_tree, states, tree_of

    sequences, node = day.sizes.tree
    tree = tree_of(random_tree(head_size, sequences=sequences, node=node))
    given = [each.to(getattr(torch, dtype)) for each in states(tree, key_heads=2, size=head_size)]
    exact = [each.double().requires_grad_() for each in given]
    weights = torch.randn(1, len(tree), 4, head_size)
    expected = dense_attention(*exact, tree, None)
    gradients = torch.autograd.grad((expected * weights).sum(), exact)
    inputs = [each.to(day.device) for each in given]
    with torch.inference_mode():
        output = TreeAttention(tree, day.device, use_flex=True).attend(*inputs, None, None)
    inputs = [each.requires_grad_() for each in inputs]
    learned = TreeAttention(tree, day.device).attend(*inputs, None, None)  # on a CPU, flex_attention has no backward
    got = torch.autograd.grad((learned * weights.to(day.device)).sum(), inputs)
    errors = {"output": _error(output, expected)}
    errors |= {f"gradient of {name}": _error(*each) for name, *each in zip("qkv", got, gradients, strict=True)}
    if not max(errors.values()) <= BOUNDS[dtype]:
        raise ArithmeticError(f"differences from float64 above {BOUNDS[dtype]}: {errors}")
    return {"tokens": len(tree), "relative_errors": errors}


def wrong_models(day: Day, dtype: str) -> dict[str, Any]:
    """Load models whose attention, positions or products are wrong; the trial must not accept them as trees."""
    import tiny_models

    from tests.engine.loading.mutations import MUTATIONS
    from tests.engine.loading.test_mutations import CASES, MODELS

    layouts = {}
    cases = [case[:2] for case in CASES if case[2] == (day.device.type == "cuda")]  # whether flex_attention runs
    for name, architecture in cases[:: day.sizes.nth_case]:
        model = tiny_models.reward_model(architecture, **MODELS[architecture]).to(day.device, getattr(torch, dtype))
        with MUTATIONS[name]():
            info = LocalExecutor().load(LoadSpec(model, ModuleHead("score")))
        layouts[f"{name} ({architecture})"] = info.layout
    accepted = [name for name, layout in layouts.items() if layout == "tree"]
    if accepted:
        raise ArithmeticError(f"{len(accepted)} of {len(layouts)} were accepted as trees: {', '.join(accepted)}")
    return {"refused": len(layouts)}


def _error(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected value."""
    return float((got.detach().cpu().double() - expected).abs().max() / expected.abs().max())


# --- B: bits of products and of scores --------------------------------------------------------------------------------


def part_b(day: Day) -> None:
    eight_bit = "fp8" if day.device.type == "cuda" else "int8"
    for size in day.sizes.models:
        for form in (day.sizes.dtype, eight_bit):
            day.row("products", functools.partial(product_bits, day, size, form), expected=20, size=size, form=form)
    subject = Subject(day, day.sizes.small)
    for rung in ("none", *map(str, LADDER[day.device.type]), eight_bit):
        work = functools.partial(score_bits, day, subject, rung)
        day.row("one conversation in batches", work, expected=60, size=subject.size, rung=rung)


def product_bits(day: Day, size: str, form: str) -> dict[str, Any]:
    """Return by shape of the weight at which rows bits change, which rungs of the ladder keep them, and rates."""
    shape = workloads.SHAPES[size]
    hidden, inner, head = (shape[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    heads, key_heads = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    shapes = dict.fromkeys([(heads, hidden), (key_heads, hidden), (hidden, heads), (inner, hidden), (hidden, inner)])
    found = {}
    dtype, before = getattr(torch, day.sizes.dtype), blas_settings()
    layer = FORMATS.get(form, torch.nn.Linear)
    for weight_shape in shapes:
        torch.manual_seed(0)
        with torch.device(day.device), torch.inference_mode():
            linear: Any = torch.nn.Linear(*weight_shape[::-1], bias=False, dtype=dtype)
            product = linear if layer is torch.nn.Linear else layer(linear)
            few = torch.randn(16, weight_shape[1], dtype=dtype)
            expected, other = product(few), []
            for rows in day.sizes.rows:
                chosen = torch.randint(16, (rows,))
                many = few[chosen]
                if not torch.equal(product(many), expected[chosen]):
                    other.append(rows)
            times = {"none": scoring.timed(functools.partial(repeat, 5, product, many), day.device)}
        try:
            if day.device.type == "cuda":
                set_blas(WITHOUT_SPLIT_K)
            with torch.inference_mode():
                for rung in LADDER[day.device.type]:
                    with BatchInvariant(rung):
                        product(many)
                        times[str(rung)] = scoring.timed(functools.partial(repeat, 5, product, many), day.device)
            threads = torch.get_num_threads()
            kept = [
                str(rung)
                for rung in LADDER[day.device.type]
                if same_products(rung, layer, weight_shape, dtype, day.device, threads)
            ]
        finally:
            set_blas(before)
        rates = {name: 10 * len(many) * linear.weight.numel() / seconds for name, seconds in times.items()}
        found["x".join(map(str, weight_shape))] = {"other_bits_at": other, "kept_by": kept, "flops": rates}
    return found


def repeat(times: int, function: Callable[..., Any], *arguments: Any) -> None:
    for _ in range(times):
        function(*arguments)


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


def score_bits(day: Day, subject: Subject, rung: str) -> dict[str, Any]:
    """Score one conversation in random batches, and compare the bits of its score; `rung` says how products run."""
    scorer = subject.quantized if rung in FORMATS else subject.scorer
    if rung not in FORMATS:
        rows = {str(rows): rows for rows in LADDER[day.device.type]}
        forward = Forward(scorer.layout, scorer.info.fused, invariant=rung in rows)
        forward = replace(forward, rows=rows[rung]) if rung in rows else forward
        scorer.executor._set_forward(forward)  # type: ignore[attr-defined]
    scorer._scheduler.budget = 2 * max(day.sizes.batch_tokens)
    pool = workloads.gsm8k_groups(day.sizes.pool // GROUP, GROUP)
    lengths = np.array([len(each.input_ids) for each in scorer.renderer.encode(pool)])
    (watched,) = workloads.hh_groups(1, 1)
    alone = scorer.score([watched]).rewards[0]
    random, found, rates = np.random.default_rng(0), [], []
    for number in range(day.sizes.batches):
        tokens = day.sizes.batch_tokens[number % len(day.sizes.batch_tokens)]
        order = random.permutation(len(pool))
        others = [pool[row] for row in order[np.cumsum(lengths[order]) < 0.95 * tokens]]
        place = int(random.integers(len(others) + 1))
        scores = scorer.score([*others[:place], watched, *others[place:]])
        found.append(scores.rewards[place])
        if tokens == max(day.sizes.batch_tokens):
            rates.append(scores.workload.unique_tokens / scores.workload.run_seconds)
    differences = np.abs(np.array(found) - alone)
    return {
        "at_load": f"{scorer.info.rows}, {scorer.provenance.batch_invariance}",
        "batches": len(found),
        "other_bits": int((differences > 0).sum()),
        "largest_difference": float(differences.max()),
        "tokens_per_second": statistics.median(rates),
    }


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


def conversations_of(day: Day, tokens: int) -> list[workloads.Conversation]:
    """Return GSM8K groups with about twice as many unique tokens."""
    some = workloads.gsm8k_groups(4, GROUP)
    whole, prompts = (
        day.tokenizer.apply_chat_template(texts, return_dict=True)["input_ids"]
        for texts in (some, [[one[0]] for one in some[::GROUP]])
    )
    unique = sum(map(len, whole)) - (GROUP - 1) * sum(map(len, prompts))
    return workloads.gsm8k_groups(-(-8 * tokens // unique), GROUP)


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
        rates.append(scoring.matmul_rate(subject.model, min(tokens, 16_384)))
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
        "batch_invariance": scorer.provenance.batch_invariance,
    }  # fmt: skip
    if cuda:
        peak = torch.cuda.max_memory_allocated() - held
        result |= {"peak_bytes": peak, "estimated_bytes": bytes_per_token(subject.model) * tokens, "held_bytes": held}
    return result | launches(day, subject, tokens, scorer, conversations, work.num_batches)


def launches(
    day: Day, subject: Subject, tokens: int, scorer: Any, conversations: list[workloads.Conversation], batches: int
) -> dict[str, Any]:
    """Return kernels of a batch (on a CPU, operations), and write the trace of the smallest batches."""
    cuda = day.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=activities) as profile:
        scorer.score(conversations)
    events = profile.events() or []
    if cuda:
        kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    else:
        kernels = [event for event in events if event.name.startswith("aten::")]
    if (subject.size, tokens) == (day.sizes.small, min(day.sizes.budgets)) and scorer is subject.scorer:
        profile.export_chrome_trace(str(day.output / "trace.json.gz"))
    return {
        "launches_of_a_batch": len(kernels) / batches,
        "launches_of_a_layer": len(kernels) / batches / workloads.SHAPES[subject.size]["num_hidden_layers"],
    }


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
    for size in dict.fromkeys((day.sizes.small, day.sizes.models[-1])):
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
    model = scorer.executor._model
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


# --- E: training, decoding, the planner -------------------------------------------------------------------------------


def part_e(day: Day) -> None:
    import grpo

    sizes = day.sizes
    work = {"size": sizes.small, "prompts": sizes.prompts, "group_size": GROUP, "reply_tokens": sizes.reply_tokens}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        learn = functools.partial(training_step, day, folder / "pairs")
        day.row("reward training", learn, expected=60, size=sizes.small)
        grpo.make_models(sizes.small, folder, device=str(day.device), dtype=getattr(torch, sizes.dtype))
        task = grpo.Task(
            str(folder / "policy"), str(folder / "reward_model"), str(workloads.DATA / "gsm8k_graded.jsonl.gz"),
            sizes.prompts, sizes.reply_tokens, 1e-6, sizes.steps, dtype=sizes.dtype,
            batch_tokens=sizes.learned_tokens,
        )  # fmt: skip
        day.row("calibration", calibrated, expected=20)
        day.row("decoding", functools.partial(decoding, day, task), expected=60, **work)
        day.row("GRPO step", functools.partial(grpo_step, day, task), expected=100, **work)
        day.row("planned step", functools.partial(planned_step, day, task), expected=5, **work)
        day.row("decoding of transformers", functools.partial(their_decoding, day, task), expected=60, **work)
        if importlib.util.find_spec("trl") and importlib.util.find_spec("datasets"):
            trl = replace(task, micro_batch=max(GROUP, task.num_completions // 16))
            day.row("GRPO step of TRL", functools.partial(grpo_step, day, trl, ours=False), expected=150, **work)
        else:
            day.skip("GRPO step of TRL", "trl is not installed", **work)


def training_step(day: Day, folder: Path) -> dict[str, Any]:
    """Return seconds of the steps of reward training; the first ones compile."""
    model = workloads.reward_model(day.sizes.small, len(day.tokenizer), device=str(day.device))
    reward_training.save_model(folder, model, day.tokenizer)
    del model
    pairs, batch = day.sizes.learned_pairs
    read = reward_training.read_pairs("hh", day.tokenizer, SimpleNamespace(max_length=2048, limit=pairs))
    run = reward_training.train_ours(reward_training.Job(folder, read, batch), precision="auto")
    tokens = sum(len(ids) for pair in read for ids in pair.ids)
    return {
        "step_seconds": run.step_seconds,
        "best_step_seconds": min(run.step_seconds),
        "pairs_per_second": batch / min(run.step_seconds),
        "tokens_of_a_pair": tokens / len(read),
        "losses": run.losses,
    }


def calibrated() -> dict[str, Any]:
    return {name: shown for name, shown, _ in calibration.calibration_rows(calibration.calibrate())}


def prompts_of(task: Any, tokenizer: Any) -> list[list[int]]:
    """Return the token ids of the prompts of a step, each as often as its group is large."""
    prompts = task.ordered_prompts()[: task.num_prompts]
    texts = [list(prompt.messages) for prompt in prompts]
    encoded = tokenizer.apply_chat_template(texts, add_generation_prompt=True, return_dict=True)["input_ids"]
    return [list(ids) for ids in encoded for _ in range(task.group_size)]


def policy_of(day: Day, task: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(task.policy, dtype=task.dtype).to(day.device).eval()


def decoding(day: Day, task: Any) -> dict[str, Any]:
    prompts = [np.array(ids, dtype=np.int32) for ids in prompts_of(task, day.tokenizer)]
    sampler = LocalSampler(policy_of(day, task), day.tokenizer, max_new_tokens=task.max_new_tokens)
    sampler.sample(prompts[:GROUP], seeds=range(GROUP))
    found: list[Any] = []
    seconds = scoring.timed(lambda: found.extend(sampler.sample(prompts, seeds=range(len(prompts)))), day.device)
    tokens = sum(len(each.token_ids) for each in found)
    decoder = type(sampler._decoder).__name__
    return {"replies": len(found), "tokens": tokens, "tokens_per_second": tokens / seconds, "decoder": decoder}


def their_decoding(day: Day, task: Any) -> dict[str, Any]:
    """Decode with transformers' continuous batching, or with `generate` where that cannot run."""
    from transformers import GenerationConfig

    prompts, model = prompts_of(task, day.tokenizer), policy_of(day, task)
    settings = GenerationConfig(
        max_new_tokens=task.max_new_tokens, do_sample=True, temperature=1.0, top_k=0, eos_token_id=1, pad_token_id=2
    )
    paged = day.device.type == "cuda" and hasattr(model, "generate_batch")
    if paged:

        def run(some: list[list[int]]) -> int:
            outputs = model.generate_batch(some, generation_config=settings, progress_bar=False)
            return sum(len(each.generated_tokens) for each in outputs.values())
    else:

        def run(some: list[list[int]]) -> int:
            batch = day.tokenizer.pad({"input_ids": some}, return_tensors="pt", padding_side="left").to(day.device)
            output = model.generate(**batch, generation_config=settings)
            return int((output[:, batch["input_ids"].shape[1] :] != 2).sum())

    run(prompts[:GROUP])
    counts: list[int] = []
    seconds = scoring.timed(lambda: counts.append(run(prompts)), day.device)
    method = "generate_batch" if paged else "generate"
    return {"tokens": counts[0], "tokens_per_second": counts[0] / seconds, "method": method}


def grpo_step(day: Day, task: Any, *, ours: bool = True) -> dict[str, Any]:
    """Return the mean seconds of the phases of a step, without the first step, which compiles."""
    import grpo

    watch = grpo.Stopwatch()
    run = grpo.train_ours(task, watch) if ours else grpo.train_trl(task, watch, same_scorer=False)
    every = [step["wall"]["step"] for step in watch.steps]
    return {**watch.means()["wall"], "tokens": run.tokens, "first_step": every[0], "steps": every}


def planned_step(day: Day, task: Any) -> dict[str, Any]:
    """Return the planner's seconds of the same step, with the numbers of the calibration."""
    sizes = day.sizes
    policy, reward_model = (
        json.loads(Path(folder, "config.json").read_text()) for folder in (task.policy, task.reward_model)
    )
    prompt = float(np.mean([len(ids) for ids in prompts_of(task, day.tokenizer)]))
    planned = plan(
        {
            "cluster": {"gpu": "here"},
            "policy": {"config": policy, "dtype": sizes.dtype, "shared_prompts": True},
            "generation": {"engine": "transformers"},
            "reward_models": {"rm": {"config": reward_model, "dtype": sizes.dtype}},
            "workload": {"num_prompts": sizes.prompts, "group_size": GROUP, "prompt_tokens": round(prompt)}
            | {"reply_tokens": sizes.reply_tokens},
        }
    )
    return {"step": planned.step_seconds} | {phase.value: seconds for phase, seconds in planned.phase_seconds}


PARTS: Mapping[str, Callable[[Day], None]] = {"A": part_a, "B": part_b, "C": part_c, "D": part_d, "E": part_e}
