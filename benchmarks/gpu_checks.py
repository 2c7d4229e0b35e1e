"""Parts A and B of gpu_day.py: versions, tests and attention; the bits of products and of scores."""

from __future__ import annotations

import functools
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import scoring
import torch
import workloads
from gpu_sizes import GROUP, Day, Subject
from torch import Tensor

from gym_rm.engine.backbones.batch_invariance import (
    WITHOUT_SPLIT_K,
    BatchInvariant,
    blas_settings,
    same_products,
    set_blas,
)
from gym_rm.engine.backbones.invariant_products import LADDER
from gym_rm.engine.backbones.low_precision import FORMATS
from gym_rm.engine.backbones.tree_attention import TreeAttention
from gym_rm.engine.executors.executor import LoadSpec, ModelInfo
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.kinds.readouts import ModuleHead
from gym_rm.engine.loading.trial import Forward

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("transformers", "triton", "numpy", "accelerate", "gymnasium", "pydantic", "pytest", "trl", "vllm")
BOUNDS = {"float32": 0.01, "bfloat16": 0.03}  # of differences from float64, relative to the largest value
LOAD_SECONDS = 20  # to load a wrong model
NEEDS_GPU = re.compile(r"^@(pytest\.mark\.gpu|needs_gpu)", re.MULTILINE)


# --- A: versions, tests, attention ------------------------------------------------------------------------------------


def part_a(day: Day) -> None:
    sizes = day.sizes
    day.row("versions", functools.partial(versions, day.device), expected=20)
    marked = [file for file in (ROOT / "tests").rglob("test_*.py") if NEEDS_GPU.search(file.read_text())]
    if day.device.type == "cuda":
        day.row("GPU tests", functools.partial(run_tests, day, *map(str, marked), "-m", "gpu"), expected=60)
    else:
        day.skip("GPU tests", "a GPU is not there")
    for dtype in BOUNDS:
        for head_size in sizes.head_sizes:
            work = functools.partial(attention_errors, day, head_size, dtype)
            day.row("attention", work, expected=20, head_size=head_size, dtype=dtype)
    for name in sizes.tests:
        day.row("tests", functools.partial(run_tests, day, str(ROOT / name), "-m", "not slow"), expected=60, file=name)
    for dtype in BOUNDS:
        if (ROOT / "tests" / "engine" / "loading" / "mutations.py").exists():
            day.row("wrong models", functools.partial(wrong_models, day, dtype), expected=100, dtype=dtype)
        else:
            day.skip("wrong models", "tests/engine/loading/mutations.py is not there", dtype=dtype)


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
    """Run pytest in a process of its own; raise with the end of its output if a test fails, or if none passes."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *options]
    command += ["--data", str(workloads.DATA.resolve())]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HYPOTHESIS_STORAGE_DIRECTORY": folder}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=day.seconds_left, check=False
        )
    if done.returncode:
        raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2500:]}")
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|skipped|deselected)", done.stdout)}
    if not counts.get("passed"):
        raise RuntimeError(f"no test passed: {done.stdout[-2500:]}")
    return counts


def attention_errors(day: Day, head_size: int, dtype: str) -> dict[str, Any]:
    """Compare attention over a random tree, and its gradients, with dense attention in float64."""
    from tests.engine.backbones.trees import attend, dense_attention, random_tree, states, tree_of

    sequences, node = day.sizes.tree
    tree = tree_of(random_tree(head_size, sequences=sequences, node=node))
    given = [each.to(getattr(torch, dtype)) for each in states(tree, key_heads=2, size=head_size)]
    exact = [each.double().requires_grad_() for each in given]
    weights = torch.randn(1, len(tree), 4, head_size)
    expected = dense_attention(*exact, tree, None)
    gradients = torch.autograd.grad((expected * weights).sum(), exact)
    inputs = [each.to(day.device) for each in given]
    with torch.inference_mode():
        output = attend(TreeAttention(tree, day.device, use_flex=True), *inputs)
    inputs = [each.requires_grad_() for each in inputs]
    learned = attend(TreeAttention(tree, day.device), *inputs)  # on a CPU, flex_attention has no backward
    got = torch.autograd.grad((learned * weights.to(day.device)).sum(), inputs)
    errors = {"output": _error(output, expected)}
    errors |= {f"gradient of {name}": _error(*each) for name, *each in zip("qkv", got, gradients, strict=True)}
    if not max(errors.values()) <= BOUNDS[dtype]:
        raise ArithmeticError(f"differences from float64 above {BOUNDS[dtype]}: {errors}")
    return {"tokens": len(tree), "relative_errors": errors}


def wrong_models(day: Day, dtype: str) -> dict[str, Any]:
    """Load models whose attention, positions or products are wrong; the trial must not accept them as trees.

    Without a mutation they must run as trees, and a tree that fails with an error is not counted as refused. Each
    compiles its own attention, so the last ones may not fit into the minutes of the part.
    """
    import tiny_models

    from tests.engine.loading.mutations import MODELS, MUTATIONS, SMALL, failures, require_tree
    from tests.engine.loading.test_mutations import CASES

    def load(architecture: str) -> ModelInfo:
        model = tiny_models.reward_model(architecture, **MODELS[architecture]).to(day.device, getattr(torch, dtype))
        return LocalExecutor().load(LoadSpec(model, ModuleHead("score")))

    layouts, failed = {}, {}
    cases = [case[:2] for case in CASES if case[2] == (day.device.type == "cuda")]  # whether flex_attention runs
    if dtype != "float32":
        cases = [case for case in cases if case[0] not in SMALL]
    cases = cases[:: day.sizes.nth_case]
    for architecture in dict.fromkeys(architecture for _, architecture in cases):
        require_tree(architecture, load(architecture))
    for name, architecture in cases:
        if day.seconds_left < LOAD_SECONDS:
            break
        with MUTATIONS[name](), failures() as errors:
            layouts[f"{name} ({architecture})"] = load(architecture).layout
        failed |= {f"{name} ({architecture})": errors[0] for _ in errors[:1]}
    accepted = [name for name, layout in layouts.items() if layout == "tree"]
    if accepted:
        raise ArithmeticError(f"{len(accepted)} of {len(layouts)} were accepted as trees: {', '.join(accepted)}")
    if len(failed) == len(layouts):
        raise ArithmeticError(f"no wrong model was refused because of its values: {failed or 'none was loaded'}")
    return {"refused": len(layouts) - len(failed), "failed": failed, "not_loaded": len(cases) - len(layouts)}


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
            if form == "fp8":
                times |= accumulation_seconds(day, product, many)
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


def accumulation_seconds(day: Day, layer: Any, x: Tensor) -> dict[str, float]:
    """Return the seconds of 8-bit products alone, accumulated fast as in `Float8Linear`, and in float32."""
    rows, scale = layer.quantize(x)

    def product(fast: bool) -> Tensor:
        weights = layer.weight.T, scale, layer.scale
        return torch._scaled_mm(rows, *weights, out_dtype=torch.bfloat16, use_fast_accum=fast)

    kinds = {"products alone": True, "products alone, float32 accumulation": False}
    for fast in kinds.values():
        product(fast)
    return {
        name: scoring.timed(functools.partial(repeat, 5, product, fast), day.device) for name, fast in kinds.items()
    }


def repeat(times: int, function: Callable[..., Any], *arguments: Any) -> None:
    for _ in range(times):
        function(*arguments)


def force(executor: Any, forward: Forward) -> None:
    """Let a loaded model run in another way than the one that was verified."""
    loaded = executor._model
    for decoder in loaded.reward_model.decoders:
        decoder.fuse = forward.fuse
    executor._model = replace(loaded, rows=BatchInvariant(forward.rows) if forward.invariant else None)


def score_bits(day: Day, subject: Subject, rung: str) -> dict[str, Any]:
    """Score one conversation in random batches, and compare the bits of its score; `rung` says how products run."""
    scorer = subject.quantized if rung in FORMATS else subject.scorer
    if rung not in FORMATS:
        rows = {str(rows): rows for rows in LADDER[day.device.type]}
        forward = Forward(scorer.layout, scorer.info.fused, invariant=rung in rows)
        forward = replace(forward, rows=rows[rung]) if rung in rows else forward
        force(scorer.executor, forward)
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
