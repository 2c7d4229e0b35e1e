"""Parts A and B of gpu_day.py: versions, tests and attention; the bits of products and of scores.

gpu_first.py has some of their rows too, with other sizes.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import scoring
import torch
import workloads
from gpu_sizes import GROUP, NO_TRITON, Day, Subject
from torch import Tensor

from gym_rm.engine.backbones.batch_invariance import (
    WITHOUT_SPLIT_K,
    BatchInvariant,
    blas_settings,
    set_blas,
)
from gym_rm.engine.backbones.invariant_products import LADDER, GemmRows
from gym_rm.engine.backbones.low_precision import FORMATS
from gym_rm.engine.backbones.tree_attention import TreeAttention
from gym_rm.engine.executors import loaded_model
from gym_rm.engine.executors.executor import LoadSpec, ModelInfo
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.kinds.readouts import ModuleHead
from gym_rm.engine.reward_model_scorer import RewardModelScorer

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
        day.skip("GPU tests", "they need a GPU, which is not here")
    for head_size in sizes.head_sizes:
        attention_row(day, head_size, "float32")
    attention_row(day, sizes.head_sizes[-1], "bfloat16")  # gpu_first.py has the smaller ones
    for name in sizes.tests:
        day.row("tests", functools.partial(run_tests, day, str(ROOT / name), "-m", "not slow"), expected=60, file=name)
    for dtype in BOUNDS:
        if (ROOT / "tests" / "engine" / "loading" / "mutations.py").exists():
            work = functools.partial(wrong_models, day, dtype)
            day.row("wrong models", work, expected=100, promised=False, dtype=dtype)
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
    """Run pytest in a process of its own; raise with the end of its output if a test fails, or if most are skipped."""
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
    if counts.get("passed", 0) <= counts.get("skipped", 0):
        raise ArithmeticError(f"most tests did not run: {counts}")
    return counts


def attention_row(day: Day, head_size: int, dtype: str, *, paths: bool = False) -> None:
    """Run a row of `attention_errors`."""
    shown = {"head_size": head_size, "dtype": dtype, "attention": "paths" if paths else "pages"}
    if paths and day.device.type != "cuda":
        day.skip("attention", NO_TRITON, **shown)
        return
    work = functools.partial(attention_errors, day, head_size, dtype, paths=paths)
    day.row("attention", work, expected=20, **shown)


def attention_errors(day: Day, head_size: int, dtype: str, *, paths: bool) -> dict[str, Any]:
    """Compare attention over a random tree, without and with gradients, with dense attention in float64."""
    from tests.engine.backbones.trees import attend, dense_attention, random_tree, states, tree_of

    sequences, node = day.sizes.tree
    tree = tree_of(random_tree(head_size, sequences=sequences, node=node))
    given = [each.to(getattr(torch, dtype)) for each in states(tree, key_heads=2, size=head_size)]
    exact = [each.double().requires_grad_() for each in given]
    weights = torch.randn(1, len(tree), 4, head_size)
    expected = dense_attention(*exact, tree, None)
    gradients = torch.autograd.grad((expected * weights).sum(), exact)
    inputs = [each.to(day.device) for each in given]
    options: dict[str, Any] = {"paths": True} if paths else {}
    with torch.inference_mode():
        output = attend(TreeAttention(tree, day.device, use_flex=True, **options), *inputs)
    inputs = [each.requires_grad_() for each in inputs]
    learned = attend(TreeAttention(tree, day.device, **options), *inputs)  # on a CPU, flex_attention has no backward
    got = torch.autograd.grad((learned * weights.to(day.device)).sum(), inputs)
    errors = {"output": _error(output, expected), "output with gradients": _error(learned, expected)}
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
        with mock.patch.object(loaded_model, "has_kernels", return_value=False):  # whose mutations are tests
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
    got, expected = got.detach().cpu().double(), expected.detach()
    return float((got - expected).abs().max() / expected.abs().max())


# --- B: bits of products and of scores --------------------------------------------------------------------------------


def part_b(day: Day) -> None:
    eight_bit = "fp8" if day.device.type == "cuda" else "int8"
    for size in day.sizes.models:  # gpu_first.py has those in full precision
        day.row(
            "products", functools.partial(product_bits, day, size, eight_bit), expected=40, size=size, form=eight_bit
        )
    subject = Subject(day, day.sizes.small)
    for rung in ("none", *map(str, LADDER[day.device.type]), eight_bit):
        work = functools.partial(score_bits, day, subject, rung)
        day.row("one conversation in batches", work, expected=60, size=subject.size, rung=rung)


def product_bits(day: Day, size: str, form: str, *, split_k: bool = False) -> dict[str, Any]:
    """Return by shape of a layer's weights what `bits_of_product` finds, with and without split-K in cuBLAS."""
    before = blas_settings()
    try:
        if day.device.type == "cuda" and not split_k:
            set_blas(WITHOUT_SPLIT_K)
        return {f"{n}x{k}": bits_of_product(day, (n, k), form) for n, k in workloads.weight_shapes(size)}
    finally:
        set_blas(before)


@torch.inference_mode()
def bits_of_product(day: Day, shape: tuple[int, int], form: str) -> dict[str, Any]:
    """Run a product with every number of rows that is a multiple of 16, and compare the bits of 16 rows in all places.

    Returns:
        The numbers of rows with which a row depends on its place, and those with other bits than most; which rungs of
        the ladder keep the bits with all their numbers of rows; and the rate of each rung with the most rows.
    """
    torch.manual_seed(0)
    dtype, layer = getattr(torch, day.sizes.dtype), FORMATS.get(form, torch.nn.Linear)
    with torch.device(day.device):
        linear: Any = torch.nn.Linear(*shape[::-1], bias=False, dtype=dtype)
        product = linear if layer is torch.nn.Linear else layer(linear)
        chosen = torch.randint(16, (day.sizes.rows,))
        chosen[:16] = torch.arange(16)
        many = torch.randn(16, shape[1], dtype=dtype)[chosen]
        key = torch.randint(1, 2**31, (16, shape[0]))
    counts = range(16, day.sizes.rows + 1, 16)
    agree, sums = [], []  # on the device, so that nothing waits
    for count in counts:
        result = product(many[:count])
        few = result[:16].contiguous()
        agree.append((result == few[chosen[:count]]).all())
        sums.append((few.view(torch.int16 if few.itemsize == 2 else torch.int32) * key).sum())
    digests = dict(zip(counts, zip(torch.stack(agree).tolist(), torch.stack(sums).tolist(), strict=True), strict=True))
    ladder = [rows for rows in LADDER[day.device.type] if not rows.packed and rows.multiple <= day.sizes.rows]
    times = {"none": scoring.timed(functools.partial(repeat, 5, product, many), day.device)}
    if form == "fp8":
        times |= accumulation_seconds(day, product, many)
    for rows in ladder:
        with BatchInvariant(rows):
            product(many)
            times[str(rows)] = scoring.timed(functools.partial(repeat, 5, product, many), day.device)
    (usual, _), *_ = Counter(digest for _, digest in digests.values()).most_common(1)
    others = [count for count, (_, digest) in digests.items() if digest != usual]
    placed = [count for count, (same, _) in digests.items() if not same]
    return {
        "row_counts": len(digests),
        "most_flop": 2 * len(many) * linear.weight.numel(),
        "place_matters_at": {"number": len(placed), "first": placed[:10]},
        "other_bits_at": {"number": len(others), "first": others[:10]},
        "kept_by": [str(rows) for rows in ladder if keeps(rows, digests)],
        "flops": {name: 10 * len(many) * linear.weight.numel() / seconds for name, seconds in times.items()},
    }


def keeps(rows: GemmRows, digests: Mapping[int, tuple[bool, int]]) -> bool:
    """Return whether all products with these numbers of rows have the same bits, in every place."""
    found = [
        digest
        for count, digest in digests.items()
        if (count == rows.multiple if rows.in_chunks else count % rows.multiple == 0)
    ]
    return all(same for same, _ in found) and len({digest for _, digest in found}) == 1


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


def force(executor: Any, rows: BatchInvariant | None, **switches: bool) -> None:
    """Let a loaded model run in another way than the one that was verified.

    Args:
        executor: its executor.
        rows: the mode of its products.
        **switches: attributes of its `DecoderBackbone`, such as `kernels` and `paths`.
    """
    loaded = executor._model
    for decoder in loaded.reward_model.decoders:
        for name, value in switches.items():
            if not hasattr(decoder, name):
                raise AttributeError(f"{type(decoder).__name__} has no switch {name!r}")
            setattr(decoder, name, value)
    executor._model = replace(loaded, rows=rows)


def score_bits(day: Day, subject: Subject, rung: str) -> dict[str, Any]:
    """Score one conversation in random batches, and compare the bits of its score; `rung` says how products run."""
    scorer = subject.quantized if rung in FORMATS else subject.scorer
    if rung not in FORMATS:
        rows = {str(rows): rows for rows in LADDER[day.device.type]}
        force(scorer.executor, BatchInvariant(rows[rung]) if rung in rows else None)
    at_load = f"{scorer.info.rows}, {scorer.provenance.batch_invariance}"
    return {"at_load": at_load, **bits_in_batches(day, scorer, day.sizes.batches)}


def bits_in_batches(day: Day, scorer: RewardModelScorer, batches: int) -> dict[str, Any]:
    """Score one conversation alone and in random batches, and compare the bits of its score."""
    scorer._scheduler.budget = 2 * max(day.sizes.batch_tokens)
    pool = workloads.gsm8k_groups(day.sizes.pool // GROUP, GROUP)
    lengths = np.array([len(each.input_ids) for each in scorer.renderer.encode(pool)])
    (watched,) = workloads.hh_groups(1, 1)
    alone = scorer.score([watched]).rewards[0]
    random, found, rates = np.random.default_rng(0), [], []
    for number in range(batches):
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
        "random_batches": len(found),
        "other_bits": int((differences > 0).sum()),
        "largest_difference": float(differences.max()),
        "tokens_per_second_of_random_batches": statistics.median(rates),
    }
