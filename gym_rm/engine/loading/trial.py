"""Trial that chooses the layout of a model: a tree, padded batches, or one sequence at a time.

A layout is used only if its values equal those of the plain forward, on texts of more than three pages. Two texts also
run alone; whether the bits of their values are the same is written into the provenance of the scores. A tree is also
compared with settings by which short texts notice what long ones need: with a short sliding window and a low soft cap.
In low precision, rounding can hide a small error, so it must pass two exact tests: other branches change nothing, and
positions change something. A new architecture may therefore be slow, but its scores are not wrong.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gym_rm.engine.backbones.invariant_products import GemmRows
from gym_rm.engine.backbones.tree_attention import PAGE_SIZE, SUPPORTED_LAYER_TYPES, UnsupportedByTree
from gym_rm.engine.batch_planning import plan_layout, plan_trees
from gym_rm.engine.debugging import Switches
from gym_rm.engine.token_tree import BatchPlan, Layout, TokenSequence, TokenTree
from gym_rm.errors import ConfigError, brief, logger

Values: TypeAlias = NDArray[np.float32]
Expected: TypeAlias = tuple[Values, float]  # of the plain forward, and their largest difference by rounding

# Maximum difference of a row of values by rounding, relative to the largest row. Correct layouts differ by up to 1.2e-6
# in float32. In 16 bits the difference depends on the weights, so it is measured, and these bound what is tolerated.
# With 8-bit products, where an activation can be rounded to the next number of 8 bits, 0.1 is always tolerated.
TOLERANCE = {"float32": 1e-4, "float64": 1e-6, "bfloat16": 0.1, "float16": 0.03}
LEAST_TOLERANCE, MOST_TOLERANCE = {"bfloat16": 0.01, "float16": 0.003}, 0.5  # wrong layouts differ by more than 1
ALONE = 2  # sequences at the end of the trial's that also run alone
LOW_CAP = 1e-3  # soft cap of attention scores in the trial
LEAST_TOKENS = 256  # of the largest batch
EVERYTHING = 10**6  # a token budget larger than the whole trial
COMPILERS = ("torch._dynamo", "torch._inductor")
FAILURES = (UnsupportedByTree, TypeError, ValueError, RuntimeError, AttributeError, LookupError)


@dataclass(frozen=True, slots=True)
class Forward:
    """How batches run through the model.

    Attributes:
        layout: layout of the batches.
        fuse: whether the fused forward replaces the model's own.
        kernels: whether the package's kernels run, see `DecoderBackbone.use`.
        invariant: whether the model runs in `BatchInvariant`; False for the plain forward, to compare with.
        rows: numbers of rows of each matrix product, see `BatchInvariant`.
        batch_invariance: result of `check_invariance`: `"bit-equal"`, or for example `"within 1.2e-07"`, the largest
            difference relative to the largest value. None before the check.
    """

    layout: Layout
    fuse: bool
    kernels: bool = False
    invariant: bool = True
    rows: GemmRows = field(default_factory=GemmRows)
    batch_invariance: str | None = None

    def __str__(self) -> str:
        options = {"fused": self.fuse, "kernels": self.kernels, str(self.rows): self.invariant}
        return ", ".join([self.layout, *(name for name, used in options.items() if used)])


PLAIN = Forward("one_by_one", fuse=False, invariant=False)  # the model's own forward, to compare with

Run: TypeAlias = Callable[[BatchPlan, Forward], Values]
"""Runs the batches of a plan and returns their values `[sum R, ...]`."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Properties of a model that the trial needs.

    Attributes:
        name: name of the model, for log lines.
        config: configuration of the model.
        dtype: precision of the model, such as `"float32"`.
        can_take_trees: whether the model is a decoder and trees are allowed.
        can_fuse: whether the fused forward supports the model.
        has_kernels: whether the package's kernels can run on the model's device.
        num_values: number of a row's last values that a head computes.
        max_width: maximum width of padded batches; None for no limit.
        modules: the model's modules, whose windows and soft caps the trial changes for a while.
        page_size: positions in a page of the tree's attention.
        table: what was compared, and what came of it, for one table in the log.
    """

    name: str
    config: Any
    dtype: str
    can_take_trees: bool
    can_fuse: bool
    has_kernels: bool = False
    num_values: int = 0
    max_width: int | None = None
    modules: tuple[nn.Module, ...] = ()
    page_size: int = PAGE_SIZE
    table: list[tuple[str, str]] = field(default_factory=list)

    def note(self, compared: object, found: str) -> None:
        """Add a line to the table."""
        self.table.append((str(compared), found))

    @property
    def length(self) -> int:
        """Number of tokens of the longest text that the trial compares with the plain forward."""
        longest = 3 * self.page_size + 17
        return longest if self.max_width is None else min(longest, self.max_width - 1)


def plain_values(candidate: Candidate, run: Run) -> Expected:
    """Return what all forwards must return, and the largest difference by rounding.

    Raises:
        ConfigError: the plain forward fails.
    """
    try:
        return _expected(candidate, run)
    except FAILURES as error:
        raise ConfigError(f"the forward of {candidate.name} fails for short texts: {brief(error)}.") from error


def choose_forward(candidate: Candidate, run: Run) -> Forward:
    """Return the first of `agreeing_forwards`."""
    return next(agreeing_forwards(candidate, run))


def agreeing_forwards(
    candidate: Candidate,
    run: Run,
    ladder: Iterable[GemmRows] = (GemmRows(),),
    *,
    max_num_batched_tokens: int = EVERYTHING,
    expected: Expected | None = None,
    switches: Switches = Switches(),  # noqa: B008  # immutable
) -> Iterator[Forward]:
    """Yield forwards whose values equal those of the plain forward on one sequence at a time, the fastest first.

    Arguments are those of `check_invariance`, and the switches for debugging.

    Raises:
        ConfigError: the plain forward fails, or no forward of the layout that the switches force agrees with it.
    """
    expected = plain_values(candidate, run) if expected is None else expected
    check = functools.partial(check_invariance, candidate, run=run, max_num_batched_tokens=max_num_batched_tokens)
    (rungs,) = itertools.tee(ladder, 1)
    config = candidate.config.get_text_config()
    known_layers = SUPPORTED_LAYER_TYPES.issuperset(getattr(config, "layer_types", None) or ())
    tree = switches.layout in (None, "tree") and candidate.can_take_trees and known_layers
    if tree and getattr(config, "attention_chunk_size", None) is None:
        for fuse in (True, False) if candidate.can_fuse else (False,):
            within: list[Forward] = []  # rounding; another that keeps the bits comes first
            for kernels in (True, False) if candidate.has_kernels else (False,):
                forward = check(Forward("tree", fuse=fuse, kernels=kernels), ladder=copy.copy(rungs), expected=expected)
                if forward != PLAIN and _keeps_to_branches(candidate, run, forward, expected[1]):
                    with short_windows_and_low_caps(candidate) as changed:
                        same = not changed or check(forward, ladder=[forward.rows]) != PLAIN
                    if same and forward.batch_invariance == "bit-equal":
                        yield forward
                    elif same:
                        within.append(forward)
                    if same and kernels and within:
                        logger.warning("%s: the kernels do not keep the bits: %s", candidate.name, forward)
            yield from within
    layouts: tuple[Layout, ...] = ("padded", "one_by_one")
    for layout in (each for each in layouts if switches.layout in (None, each)):
        forward = check(Forward(layout, fuse=False), ladder=copy.copy(rungs), expected=expected)
        if forward != PLAIN:
            yield forward
    if switches.layout is not None:
        raise ConfigError(f"GYM_RM_DEBUG: the layout {switches.layout!r} does not agree with {candidate.name}.")
    yield PLAIN


def check_invariance(
    candidate: Candidate,
    forward: Forward,
    run: Run,
    ladder: Iterable[GemmRows],
    *,
    max_num_batched_tokens: int,
    expected: Expected | None = None,
) -> Forward:
    """Return the forward with the first of these rows for which sequences have the same bits in several batches.

    Two sequences run alone and with all others, which have more rows than two chunks. Rows with other values than those
    of the plain forward are not used, and the result is `PLAIN` if there are no others. If no rows keep the bits, the
    first ones are used.

    Args:
        candidate, forward: the model, and how it runs.
        run: returns hidden states and values `[sum R, ...]`.
        ladder: numbers of rows of each matrix product to try, the fastest first; those that no batch has are not tried.
        max_num_batched_tokens: token budget of a batch.
        expected: values of the plain forward; None to run it.
    """
    expected = _expected(candidate, run) if expected is None else expected
    sequences = trial_sequences(candidate.config, candidate.length, candidate.page_size)
    largest = max(batch.input_ids.size for batch in _plan(candidate, forward, sequences).batches)
    reads = sum(len(each.read_positions) for each in sequences[-ALONE:])
    found = []
    for rows in (each for each in ladder if each.multiple <= max_num_batched_tokens):
        tried = replace(forward, rows=rows)
        least = (
            0 if forward.layout == "one_by_one" else min(max(2 * rows.multiple, LEAST_TOKENS), max_num_batched_tokens)
        )
        others = other_sequences(candidate, least - largest)
        plans = _plan(candidate, tried, sequences[-ALONE:], alone=True), _plan(candidate, tried, [*others, *sequences])
        try:
            alone, every = (run(plan, tried)[plan.value_index] for plan in plans)
        except Exception as error:
            if not is_failure(error, tried):
                raise
            candidate.note(tried, f"fails: {brief(error)}")
            if did_not_compile(error, tried):  # with no number of rows
                warning = "%s: this does not compile or run here, so a slower forward does: %s: %s"
                logger.warning(warning, candidate.name, tried, brief(error))
                break
            continue
        difference = _difference_to_plain(candidate, every[len(others) :], expected[0])
        between = difference_of(alone, every[-reads:])
        equal = _same_bits(alone, every[-reads:])
        invariance = "bit-equal" if equal else f"within {between:.1e}"
        agrees = difference <= expected[1] and (equal or between <= expected[1])
        refused = "" if agrees else "refused: "
        candidate.note(tried, f"{refused}{difference:.1e} from the plain forward, {invariance} in two batches")
        if agrees:
            found.append(replace(tried, batch_invariance=invariance))
        if agrees and equal:
            return found[-1]
    return found[0] if found else PLAIN


def is_failure(error: Exception, forward: Forward) -> bool:
    """Return whether an error means that a forward cannot be used, but another can."""
    return isinstance(error, FAILURES) or did_not_compile(error, forward)


def did_not_compile(error: Exception, forward: Forward) -> bool:
    """Return whether an error is of a compiler, or of what it needs, so that it says nothing about the model."""
    if forward.kernels:  # Triton needs a C compiler and a folder, and some of its errors have no class of their own
        return not isinstance(error, MemoryError)
    return any(kind.__module__.startswith(COMPILERS) for kind in type(error).__mro__)


def _expected(candidate: Candidate, run: Run) -> Expected:
    """Return the values of the plain forward; in 16 bits, three times what another rounding changes is tolerated."""
    sequences = trial_sequences(candidate.config, candidate.length, candidate.page_size)
    plan = _plan(candidate, PLAIN, sequences)
    values, least = run(plan, PLAIN)[plan.value_index], tolerance_of(candidate.dtype)
    if candidate.dtype in ("float32", "float64"):
        return values, least
    with _rounding_otherwise(candidate.modules):
        change = difference_of(run(plan, PLAIN)[plan.value_index], values)
    least = LEAST_TOLERANCE.get(candidate.dtype, least)
    return values, min(max(least, 3 * change), MOST_TOLERANCE)


@contextlib.contextmanager
def _rounding_otherwise(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let every module without parts change its numbers by as much as rounding can, in the same way on all ranks."""
    calls = itertools.count()

    def change(part: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or output.dtype not in (torch.bfloat16, torch.float16):
            return output
        generator = torch.Generator(output.device).manual_seed(next(calls))
        noise = torch.rand(output.shape, generator=generator, device=output.device) - 0.5
        return (output * (1 + torch.finfo(output.dtype).eps * noise)).to(output.dtype)

    with contextlib.ExitStack() as hooks:
        for part in (part for module in modules for part in module.modules() if not part._modules):
            hooks.enter_context(part.register_forward_hook(change))
        yield


@contextlib.contextmanager
def short_windows_and_low_caps(candidate: Candidate) -> Iterator[bool]:
    """Let the modules have settings that matter for short texts; whether any has changed."""
    settings = {"sliding_window": candidate.page_size + 5, "attn_logit_softcapping": LOW_CAP}
    owners: list[Any] = [part for module in candidate.modules for part in module.modules()]
    owners += {id(part.config): part.config for part in owners if hasattr(part, "config")}.values()
    before = [
        (owner, name, value)
        for owner in owners
        for name, setting in settings.items()
        if isinstance(value := vars(owner).get(name), int | float) and value > setting
    ]
    try:
        for owner, name, _ in before:
            setattr(owner, name, settings[name])
        yield bool(before)
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _plan(
    candidate: Candidate, forward: Forward, sequences: Sequence[TokenSequence], *, alone: bool = False
) -> BatchPlan:
    """Return the plan of sequences alone, or of all in one batch if they can share one."""
    width = candidate.max_width
    return plan_layout(forward.layout, sequences, max_num_batched_tokens=EVERYTHING, max_width=width, alone=alone)


def max_batchable_length(config: Any) -> int | None:
    """Return the maximum length of sequences that share a batch; None for no limit.

    Rotary frequencies of the types `dynamic` and `longrope` change for the whole batch if its longest sequence exceeds
    the original context.
    """
    config = config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    for rope in nested:
        if rope.get("rope_type") in ("dynamic", "longrope"):
            name = "original_max_position_embeddings"
            return int(rope.get(name) or getattr(config, name, None) or config.max_position_embeddings)
    return None


def _keeps_to_branches(candidate: Candidate, run: Run, forward: Forward, tolerance: float) -> bool:
    """Return whether the values of a branch depend on its own tokens and on the positions that the tree has."""
    if tolerance <= TOLERANCE["float32"]:  # smaller than what an error changes
        return True
    same = forward.batch_invariance == "bit-equal"  # with other branches and without
    sequences = trial_sequences(candidate.config, candidate.length, candidate.page_size)
    plan = plan_trees(sequences[-1:] if same else sequences, max_num_batched_tokens=EVERYTHING)
    (tree,) = plan.batches
    assert isinstance(tree, TokenTree)
    reads = plan.value_index[-len(sequences[-1].read_positions) :]
    path = tree.ancestors(int(tree.read_indices[reads[-1]]))

    def values(**changed: Any) -> Values:
        return run(replace(plan, batches=(replace(tree, **changed),)), forward)[reads]

    before = values()
    if not same:
        ids, beside = tree.input_ids.copy(), np.setdiff1d(np.arange(len(tree)), path)
        ids[beside] = ids[beside[::-1]]
        others = difference_of(values(input_ids=ids), before)
        # On a GPU, and on a CPU whose products need chunks, the rounding of an expert's products depends on how many
        # tokens it gets. Some kernels also return other bits for the same input.
        settings = candidate.config.get_text_config().to_dict().items()
        experts = any("expert" in name and isinstance(number, int) and number > 1 for name, number in settings)
        rounds = others > 0 and (experts or not _same_bits(values(), before))
        if others > (tolerance if rounds else 0):
            candidate.note(forward, f"refused: other branches change values by {others:.1e}")
            return False
    positions = tree.position_ids.copy()
    positions[path[len(path) // 2 :]] += 1
    if _same_bits(values(position_ids=positions), before):
        candidate.note(forward, "refused: the model computes positions of its own")
        return False
    return True


def _difference_to_plain(candidate: Candidate, got: Values, expected: Values) -> float:
    """Return the largest difference of the hidden states and of all values, relative to the largest."""
    parts = (slice(got.shape[1] - candidate.num_values), slice(None))
    return max(difference_of(got[:, part], expected[:, part]) for part in parts)


def difference_of(got: Values, expected: Values) -> float:
    """Return the norm of the largest difference of a row, relative to the largest expected row.

    Rows that are not finite in both, after a token whose weights are not, are equal.
    """
    got, expected = (each.reshape(len(each), -1) for each in (got, expected))
    finite = np.isfinite(expected).all(axis=1)
    if not np.array_equal(finite, np.isfinite(got).all(axis=1)):
        return float("inf")
    changes = got[finite] - expected[finite]
    rows, largest = (np.linalg.norm(each, axis=1).max(initial=0.0) for each in (changes, expected[finite]))
    return float(rows / max(1e-6, largest))


def _same_bits(first: Values, second: Values) -> bool:
    return np.array_equal(first, second, equal_nan=True)


def tolerance_of(dtype: str) -> float:
    """Return the largest difference by rounding in a precision, such as `"float32"`; larger with TF32 products."""
    if dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
        dtype = "float16"
    return TOLERANCE.get(dtype, TOLERANCE["bfloat16"])


def trial_sequences(config: Any, length: int = 3 * PAGE_SIZE + 17, page: int = PAGE_SIZE) -> list[TokenSequence]:
    """Return branches at many places of a long sequence and of a short one, and at the end these two.

    There are branches before, between and after the other tokens in the order of a tree: one longer than a page, one
    inside the page in which its parent begins, at the start of a page and after it, in the last page, and of a short
    text.

    Args:
        config: configuration of the model.
        length: length of the longest sequence.
        page: positions in a page; fewer if the longest sequence has no fourth page.
    """
    page = min(page, max(1, (length - 8) // 3))
    low, ids, high = (_random_ids(config, (1, length), part)[0] for part in (0, 2, 3))
    start, branch = max(2, length // 12), np.r_[ids[: page + 1], high[: page + 9]]
    cuts = [
        np.r_[low[:10], high[:3]],
        np.r_[ids[:page], low[:3]],
        np.r_[branch[: page + 4], low[:4]],
        np.r_[ids[: 3 * page + 2], low[:2]],
        branch,
        np.r_[ids[:start], high[:6]],
        low[:14],
        ids,
    ]
    reads = (np.arange(1, min(length, len(cut)))[::-3][::-1] for cut in cuts)
    return [TokenSequence(cut[:length], each) for cut, each in zip(cuts, reads, strict=True)]


def other_sequences(candidate: Candidate, tokens: int) -> list[TokenSequence]:
    """Return sequences of more than `tokens` tokens, which are between those of the trial in the order of a tree.

    They have no fourth page, so that only one path of a tree has one.
    """
    length = min(3 * candidate.page_size, candidate.length)
    ids = _random_ids(candidate.config, (max(0, tokens // length + 1), length), 1)
    return [TokenSequence(each, np.array([length - 1])) for each in ids]


def _random_ids(config: Any, shape: tuple[int, int], part: int) -> NDArray[np.int32]:
    """Return random ids, of a quarter of the tokens that are not control tokens."""
    config = config.get_text_config()
    control = (getattr(config, f"{name}_token_id", None) for name in ("eos", "pad", "bos"))  # none, one or several
    avoid = [int(token) for named in control if named is not None for token in np.atleast_1d(named)]
    allowed = np.setdiff1d(np.arange(min(config.vocab_size, 20_000)), avoid if config.vocab_size > 8 else [])
    places = (part + np.random.default_rng(part).random(shape)) / 4 * len(allowed)
    return allowed[places.astype(np.int64)].astype(np.int32)
