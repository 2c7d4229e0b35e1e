"""The first half hour on a GPU, in five parts, each a command of less than ten minutes.

    python benchmarks/gpu_first.py --part 1 2 --data FOLDER --output FOLDER --kernels /tmp/kernels   # then 3, 4 and 5
    python benchmarks/gpu_first.py --part 1 2 3 4 5 --tiny --data FOLDER --output FOLDER             # on a CPU

1: ceilings, attention, and whether a model loads as a tree. 2: a profiled batch of the smallest and the largest model
beside the prediction; its last lines have the share of the rate of products. 3: bits of products with every number of
rows, with and without split-K. 4: variants of the forward (`--variants`): speed, bits, and errors against float64; its
last line says which is the fastest with equal bits. 5: an update, and decoding.

Rows, the exit code, what is needed and `--kernels` are those of gpu_day.py, which comes after.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "tests"))  # whose helpers import each other

import gpu_checks
import gpu_command
import gpu_predictions
import gpu_scoring
import gpu_training
import numpy as np
import scoring
import torch
import workloads
from gpu_sizes import GROUP, NO_TRITON, Day, Subject, require_as_promised

from gym_rm.engine.backbones import tree_attention
from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.token_tree import TokenSequence

# --- 1: ceilings, attention, load -------------------------------------------------------------------------------------


def ceilings(day: Day, **_: Any) -> None:
    day.row("versions", functools.partial(gpu_checks.versions, day.device), expected=5)
    day.row("copies", functools.partial(copy_rates, day), expected=5)
    day.row("products", functools.partial(product_rates, day), expected=10)
    for head_size in day.sizes.head_sizes[:2]:
        for paths in (False, True):
            gpu_checks.attention_row(day, head_size, "bfloat16", paths=paths)
    subject = Subject(day, day.sizes.small)
    day.row("load", functools.partial(load, subject), expected=60, size=subject.size)


def copy_rates(day: Day) -> dict[str, float]:
    """Return bytes/s of a copy and of a sum of two tensors."""
    a, b, c = (torch.zeros(day.sizes.copied, dtype=torch.bfloat16, device=day.device) for _ in range(3))
    rates = {}
    for name, tensors, work in (("copy", 2, lambda: b.copy_(a)), ("sum", 3, lambda: torch.add(a, b, out=c))):
        work()
        seconds = scoring.timed(functools.partial(gpu_checks.repeat, 10, work), day.device)
        rates[name] = 10 * tensors * a.numel() * a.itemsize / seconds
    return rates


@torch.inference_mode()
def product_rates(day: Day) -> dict[str, float]:
    """Return FLOP/s of a large square product, and of those of the models with as many rows as a batch has."""
    side = day.sizes.square
    shapes = {"square": (side, side, side)} | {
        f"{size}: {n}x{k}": (day.sizes.rows, n, k) for size in day.sizes.ends for n, k in workloads.weight_shapes(size)
    }
    rates = {}
    for name, (m, n, k) in shapes.items():
        x, weight = (torch.randn(rows, k, dtype=getattr(torch, day.sizes.dtype), device=day.device) for rows in (m, n))
        work = functools.partial(torch.nn.functional.linear, x, weight)
        work()
        rates[name] = 10 * 2 * m * n * k / scoring.timed(functools.partial(gpu_checks.repeat, 10, work), day.device)
    return rates


def load(subject: Subject) -> dict[str, Any]:
    """Load the model with its trial, whose table is in the log of the row, and score a few groups as a tree."""
    work = subject.scorer.score(workloads.gsm8k_groups(4, GROUP)).workload
    if not work.unique_tokens < work.num_tokens:
        raise ArithmeticError("the groups did not share their prompts")
    return {**subject.way, "tried_length": subject.scorer.info.tried_length, "unique_tokens": work.unique_tokens}


# --- 2: a profiled batch ----------------------------------------------------------------------------------------------


def profiled(day: Day, **_: Any) -> None:
    tokens = day.sizes.budgets[1]
    lines = []
    for size in day.sizes.ends:
        work = functools.partial(profiled_batch, day, Subject(day, size), tokens)
        found = day.row("batch", work, expected=70, size=size, tokens=tokens)
        lines.append(f"{size}: no number, see the error" if found is None else f"{size}: {summary(found)}")
    print(*lines, sep="\n", flush=True)


def profiled_batch(day: Day, subject: Subject, tokens: int) -> dict[str, Any]:
    found = gpu_scoring.scoring_speed(day, subject, tokens)
    name = torch.cuda.get_device_name() if day.device.type == "cuda" else ""
    for chip, of in gpu_predictions.CHIPS.items():
        if chip in name:
            variant = "path kernel" if found["paths"] else "fused kernels" if found["kernels"] else "pages of 64"
            classes = gpu_predictions.nanoseconds(subject.size, of, gpu_predictions.VARIANTS[variant])
            layers = workloads.SHAPES[subject.size]["num_hidden_layers"]
            scale = 1e-9 * layers * found["unique_tokens"] / found["batches"]
            predicted = {key: scale * value for key, value in classes.items()}
            found |= {"predicted_for": f"{chip}, {variant}", "predicted": predicted}
    return found


def summary(found: Mapping[str, Any]) -> str:
    """Return the numbers to know first in words."""
    classes = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in found["seconds_by_class"].items())
    predicted = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in found.get("predicted", {}).items())
    return (
        f"{found['share_of_matmul']:.1%} of the measured rate of products, {found['matmul_flops'] / 1e12:.1f} TFLOP/s; "
        f"{found['tokens_per_second']:,.0f} tokens/s, {found['tokens_per_second_with_texts']:,.0f} with texts; layout "
        f"{found['layout']}, fused {found['fused']}, kernels {found['kernels']}, paths {found['paths']}, rung "
        f"{found['rung']}, {found['bits']}; {found['launches_of_a_layer']:.1f} launches a layer; ms of a batch: "
        + classes
        + (f"; predicted: {predicted}" if predicted else "")
    )


# --- 3: bits of products ----------------------------------------------------------------------------------------------


def bits(day: Day, **_: Any) -> None:
    lines = []
    for size in day.sizes.ends:
        for split_k in (False, True):
            shown = {"size": size, "form": day.sizes.dtype, "split_k": split_k}
            if split_k and day.device.type != "cuda":
                day.skip("products", "split-K is a setting of a GPU, which is not here", **shown)
                continue
            work = functools.partial(gpu_checks.product_bits, day, size, day.sizes.dtype, split_k=split_k)
            found = day.row("products", work, expected=30, **shown)
            if found is not None:
                lines.append(f"{size}, {'with' if split_k else 'without'} split-K: {costs(found)}")
    print(*lines, sep="\n", flush=True)


def costs(found: Mapping[str, Any]) -> str:
    """Return in words how long the products of a batch take in ms, by rung, and whether all of them keep their bits."""
    rungs = next(iter(found.values()))["flops"]
    ms = {rung: sum(1e3 * each["most_flop"] / each["flops"][rung] for each in found.values()) for rung in rungs}
    kept = {rung: all(rung in each["kept_by"] for each in found.values()) for rung in rungs}
    return ", ".join(f"{rung} {value:.2f}" + " keeps" * kept[rung] for rung, value in ms.items())


# --- 4: variants ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One way to run the forward: attention along paths or by pages of some size, with kernels in Triton or without."""

    kernels: bool = False
    paths: bool = False
    page: int = 64


VARIANTS = {
    "page128": Variant(page=128),
    "page64": Variant(),
    "kernels": Variant(kernels=True),
    "paths": Variant(paths=True),
    "kernels+paths": Variant(kernels=True, paths=True),
}


def variants(day: Day, *, variants: Sequence[str], **_: Any) -> None:
    subject = Subject(day, day.sizes.small)
    exact: list[Any] = []
    found: dict[str, Mapping[str, Any]] = {}
    for name in variants:
        shown = {"size": subject.size, "variant": name}
        if day.device.type != "cuda" and VARIANTS[name] != Variant():
            reason = NO_TRITON if VARIANTS[name].kernels or VARIANTS[name].paths else "the size is not used on a CPU"
            day.skip("variant", reason, **shown)
            continue
        work = functools.partial(run_variant, day, subject, VARIANTS[name], exact)
        result = day.row("variant", work, expected=45, promised=False, **shown)  # it checks what it runs
        if result is not None:
            found[name] = result
    rates = {name: round(each["tokens_per_second"]) for name, each in found.items()}
    equal = [name for name, each in found.items() if not each["other_bits"]]
    print(
        f"fastest with equal bits: {max(equal, key=lambda name: rates[name], default=None)}; tokens/s of all: {rates}"
    )


def run_variant(day: Day, subject: Subject, variant: Variant, exact: list[Any]) -> dict[str, Any]:
    """Return the speed of a variant, the bits of a conversation in random batches, and the error of scores.

    `exact` has the scores of transformers in float64, or gets them.
    """
    scorer, cuda = subject.scorer, day.device.type == "cuda"
    conversations = workloads.gsm8k_groups(day.sizes.exact, GROUP) + workloads.hh_groups(day.sizes.exact, 2)
    if not exact:
        double = copy.deepcopy(subject.model).double()
        exact.append(scoring.padded(double, day.tokenizer, sort=False, batch_size=1)(conversations))
        del double
    switches: dict[str, bool] = {"kernels": variant.kernels, "paths": variant.paths}
    page: Any = contextlib.nullcontext()
    if cuda:
        gpu_checks.force(scorer.executor, scorer.executor._model.rows, **switches)
        page = mock.patch.object(tree_attention, "PAGE_WITHOUT_GRADIENTS", variant.page)
    with page:
        page_used = page_size(day)  # a CPU has its own
        if cuda:
            require_as_promised({"page": page_used}, page=variant.page)
        speed = gpu_scoring.scoring_speed(day, subject, day.sizes.budgets[1])
        equal = gpu_checks.bits_in_batches(day, scorer, day.sizes.first_batches)
        error = float(np.abs(scorer.score(conversations).rewards - exact[0]).max() / np.std(exact[0]))
    require_as_promised(speed, layout="tree", fused=True, **(switches if cuda else {}))
    return speed | equal | {"page": page_used, "largest_error_of_standard_deviation": error}


@torch.inference_mode()
def page_size(day: Day) -> int:
    """Return the number of positions in a page of flex_attention."""
    short = TokenSequence(np.arange(4, dtype=np.int32), np.array([3]))
    (tree,) = plan_trees([short], max_num_batched_tokens=16).batches
    return tree_attention.TreeAttention(tree, day.device).pages.size


# --- 5: update and decoding -------------------------------------------------------------------------------------------


def update_and_decoding(day: Day, **_: Any) -> None:
    sizes = day.sizes
    with tempfile.TemporaryDirectory() as name:
        task = gpu_training.task_in(day, Path(name))
        shown = {"size": sizes.small, "group_size": GROUP, "reply_tokens": sizes.reply_tokens}
        work = functools.partial(gpu_training.update, day, task)
        day.row("update", work, expected=90, prompts=sizes.prompts, tokens=sizes.learned_tokens, **shown)
        for prompts in (sizes.prompts, sizes.few_prompts):
            work = functools.partial(gpu_training.decoding, day, replace(task, num_prompts=prompts))
            day.row("decoding", work, expected=50, prompts=prompts, **shown)


PARTS: Mapping[str, Callable[..., None]] = {
    "1": ceilings,
    "2": profiled,
    "3": bits,
    "4": variants,
    "5": update_and_decoding,
}
MINUTES = {"1": 3.5, "2": 4.5, "3": 3.0, "4": 7.0, "5": 6.0}
CHOICES = {"variants": (list(VARIANTS), "variants of part 4")}

if __name__ == "__main__":
    gpu_command.run(__doc__ or "", PARTS, MINUTES, CHOICES)
