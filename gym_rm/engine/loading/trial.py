"""Trial that chooses the layout of a model: a tree, padded batches, or one sequence at a time.

A layout is used only if its values equal those of the plain forward. In low precision, rounding can hide a small
error. So a tree must also pass two exact tests: other branches change nothing, and positions change something. A new
architecture may therefore be slow, but its scores are not wrong.

`check_invariance` then runs one sequence in several batches and compares the bits of its values. It refuses nothing:
its result is written into the provenance of the scores. The executor runs both once, at load, on a few hundred tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gym_rm.engine.backbones.batch_invariance import Rows
from gym_rm.engine.backbones.tree_attention import SUPPORTED_LAYER_TYPES, UnsupportedByTree
from gym_rm.engine.token_tree import BatchPlan, Layout, TokenSequence, TokenTree, plan_padded, plan_trees
from gym_rm.errors import ConfigError, brief, logger

Values: TypeAlias = NDArray[np.float32]
IdArray: TypeAlias = NDArray[np.int32]

# Maximum difference, relative to the largest value. In bfloat16, correct layouts of random models differ by up to 0.07.
TOLERANCE = {"float32": 1e-3, "float64": 1e-6, "bfloat16": 0.1, "float16": 0.03}
PROMPT_TOKENS = 9  # length of the trial's prompt
TRIAL_TOKENS = 17  # length of the longest text that is compared with the plain forward
UNCHANGED = 2  # index of the trial's sequence whose values must not depend on other branches
MOST_TOKENS = 4096  # of the texts that `check_invariance` compares
EVERYTHING = 10**6  # a token budget larger than the whole trial
FAILURES = (UnsupportedByTree, TypeError, ValueError, RuntimeError, AttributeError, LookupError)


@dataclass(frozen=True, slots=True)
class Forward:
    """How batches run through the model.

    Attributes:
        layout: layout of the batches.
        fuse: whether the fused forward replaces the model's own.
        invariant: whether the model runs in `BatchInvariant`; False for the plain forward, to compare with.
        rows: numbers of rows of each matrix product, see `BatchInvariant`.
        batch_invariance: result of `check_invariance`: `"bit-equal"`, or for example `"within 1.2e-07"`, the largest
            difference relative to the largest value. None before the check.
    """

    layout: Layout
    fuse: bool
    invariant: bool = True
    rows: Rows = field(default_factory=Rows)
    batch_invariance: str | None = None


PLAIN = Forward("one_by_one", fuse=False, invariant=False)  # the model's own forward, to compare with

Run: TypeAlias = Callable[[BatchPlan, Forward], Values]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Properties of a model that the trial needs.

    Attributes:
        name: name of the model, for log lines.
        config: configuration of the model.
        dtype: precision of the model, such as `"float32"`.
        can_take_trees: whether the model is a decoder and trees are allowed.
        can_fuse: whether the fused forward supports the model.
        max_width: maximum width of padded batches; None for no limit.
    """

    name: str
    config: Any
    dtype: str
    can_take_trees: bool
    can_fuse: bool
    max_width: int | None = None


def choose_forward(candidate: Candidate, run: Run) -> Forward:
    """Return the fastest forward whose values equal those of the plain forward on one sequence at a time.

    Args:
        candidate: properties of the model.
        run: function that runs a plan's batches and returns their values `[sum R, ...]`.

    Raises:
        ConfigError: the plain forward fails.
    """
    sequences = trial_sequences(candidate.config)
    plain = plan_padded(sequences, max_num_batched_tokens=EVERYTHING, alone=True, exact=True)
    try:
        expected = run(plain, PLAIN)[plain.value_index]
    except FAILURES as error:
        raise ConfigError(f"the forward of {candidate.name} fails for short texts: {brief(error)}.") from error

    def agrees(forward: Forward) -> bool:
        plan = _plan(candidate, forward, sequences)
        try:
            got = run(plan, forward)[plan.value_index]
        except FAILURES as error:
            logger.info("%s does not support %s: %s", candidate.name, forward, error)
            return False
        difference = _difference(got, expected)
        if not difference <= _tolerance(candidate):
            logger.info("%s does not support %s: relative difference %.1e", candidate.name, forward, difference)
            return False
        return True

    if candidate.can_take_trees and _could_take_trees(candidate.config):
        for fuse in (True, False) if candidate.can_fuse else (False,):
            forward = Forward("tree", fuse=fuse)
            if agrees(forward) and _keeps_to_branches(candidate, run, forward):
                return forward
    for forward in (Forward("padded", fuse=False), Forward("one_by_one", fuse=False)):
        if agrees(forward):
            return forward
    return PLAIN


def check_invariance(candidate: Candidate, forward: Forward, run: Run, ladder: Sequence[Rows]) -> Forward:
    """Return the forward with the first of these rows for which sequences have the same bits in several batches.

    One sequence runs alone, then with half of the others, then with all of them. If no rows keep the bits, the first
    ones are used.

    Args:
        candidate: properties of the model.
        forward: the chosen forward.
        run: function that runs a plan's batches and returns their hidden states and values `[sum R, ...]`.
        ladder: numbers of rows of each matrix product to try, the fastest first.
    """
    found = []
    for rows in ladder:
        watched, others = invariance_sequences(
            candidate.config, candidate.max_width, min(2 * rows.multiple, MOST_TOKENS)
        )
        tried = replace(forward, rows=rows)
        values = []
        for beside in ([], others[: len(others) // 2], others):
            plan = _plan(candidate, tried, [*beside, watched])  # the last row of a padded batch
            values.append(run(plan, tried)[plan.value_index])
        alone, half, every = values
        of_others = len(half) - len(alone)
        same = np.concatenate([every[:of_others], every[-len(alone) :]])
        if np.array_equal(half, same) and np.array_equal(alone, same[of_others:]):
            return replace(tried, batch_invariance="bit-equal")
        difference = max(_difference(half, same), _difference(alone, same[of_others:]))
        found.append(replace(tried, batch_invariance=f"within {difference:.1e}"))
    return found[0]


def _plan(candidate: Candidate, forward: Forward, sequences: Sequence[TokenSequence]) -> BatchPlan:
    """Return the plan of all sequences in one batch, if they can share one."""
    if forward.layout == "tree":
        return plan_trees(sequences, max_num_batched_tokens=EVERYTHING)
    alone = forward.layout == "one_by_one"
    return plan_padded(
        sequences, max_num_batched_tokens=EVERYTHING, max_width=candidate.max_width, alone=alone, exact=alone
    )


def longest_shared(config: Any) -> int | None:
    """Return the maximum length of sequences that share a batch; None for no limit.

    Rotary frequencies of the types `dynamic` and `longrope` change for the whole batch if its longest sequence exceeds
    the original context.
    """
    config = config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    for rope in nested:
        if rope.get("rope_type") in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            return int(original or config.max_position_embeddings)
    return None


def _keeps_to_branches(candidate: Candidate, run: Run, forward: Forward) -> bool:
    """Return whether the values of a branch depend on its own tokens and on the positions that the tree has."""

    def values(*, changed: bool = False, shift: int = 0) -> Values:
        sequences = trial_sequences(candidate.config, changed=changed)
        watched = sequences.pop(UNCHANGED).input_ids
        sequences.append(TokenSequence(watched, np.arange(len(watched))))
        plan = plan_trees(sequences, max_num_batched_tokens=EVERYTHING)
        (tree,) = plan.batches
        assert isinstance(tree, TokenTree)
        index = plan.value_index[-len(watched) :]
        positions = tree.position_ids.copy()
        positions[tree.read_indices[index[PROMPT_TOKENS:]]] += shift
        moved = dataclasses.replace(plan, batches=(dataclasses.replace(tree, position_ids=positions),))
        return run(moved, forward)[index]

    before = values()
    others = _difference(values(changed=True), before)
    # On a GPU, and on a CPU whose products need chunks, which are tried later, the rounding of an expert's products
    # depends on how many tokens it gets. Some kernels also return other bits for the same input.
    rounds = _has_experts(candidate.config) or not np.array_equal(values(), before)
    if others > (_tolerance(candidate) if rounds else 0):
        logger.info("%s does not support a tree: other branches change values by %.1e", candidate.name, others)
        return False
    if np.array_equal(values(shift=1), before):
        logger.info("%s does not support a tree: it computes positions of its own", candidate.name)
        return False
    return True


def _difference(got: Values, expected: Values) -> float:
    """Return the largest difference relative to the largest expected value."""
    return float(np.abs(got - expected).max() / max(1e-6, np.abs(expected).max()))


def _tolerance(candidate: Candidate) -> float:
    return TOLERANCE.get(candidate.dtype, TOLERANCE["bfloat16"])


def _has_experts(config: Any) -> bool:
    numbers = config.get_text_config().to_dict().items()
    return any("expert" in name and isinstance(number, int) and number > 1 for name, number in numbers)


def trial_sequences(config: Any, *, changed: bool = False) -> list[TokenSequence]:
    """Return sequences with three levels of shared prefixes, one unrelated sequence, and different lengths.

    Args:
        config: configuration of the model.
        changed: whether all branches except that of sequence `UNCHANGED` get other tokens, but keep their order.
    """
    ids, others = _random_ids(config, (2, 64))
    if changed:  # all tokens but the first of a branch, which decides the order
        for start, stop in ((PROMPT_TOKENS + 1, 14), (31, 33), (41, 52)):
            ids[start:stop] = others[start:stop]
    prompt = ids[:PROMPT_TOKENS]
    cuts = [prompt, ids[:14], np.r_[prompt, ids[20:27]], np.r_[ids[:14], ids[30:33]], ids[40:52]]
    return [TokenSequence(cut, np.array([len(cut) - 1])) for cut in cuts]


def invariance_sequences(
    config: Any, max_length: int | None, tokens: int = 0
) -> tuple[TokenSequence, list[TokenSequence]]:
    """Return a sequence of several pages to compare in several batches, its siblings, and unrelated sequences.

    Args:
        config: configuration of the model.
        max_length: maximum length of a sequence; None for no limit.
        tokens: about the least number of tokens of all sequences.
    """
    length = min(44, (max_length or 44) - 1)
    ids, *rest = _random_ids(config, (max(12, 2 * tokens // length), length))
    siblings = [np.r_[ids[: length // 2], rest[0][:9]], np.r_[ids[: -length // 4], rest[1][:3]]]
    unrelated = [each[: length * k // len(rest) + 2] for k, each in enumerate(rest)]
    sequences = [each[:length] for each in (ids, *siblings, *unrelated)]
    watched = TokenSequence(sequences[0], np.arange(1, len(sequences[0])))  # a log-probability needs a token before
    return watched, [TokenSequence(each, np.array([len(each) - 1])) for each in sequences[1:]]


def _could_take_trees(config: Any) -> bool:
    config = config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ())
    return layer_types <= SUPPORTED_LAYER_TYPES and getattr(config, "attention_chunk_size", None) is None


def _random_ids(config: Any, shape: tuple[int, int]) -> IdArray:
    """Return random ids of tokens that are not control tokens."""
    config = config.get_text_config()
    avoid = [token for name in ("eos", "pad", "bos") for token in _token_ids(config, f"{name}_token_id")]
    allowed = np.setdiff1d(np.arange(min(config.vocab_size, 20_000)), avoid if config.vocab_size > 8 else [])
    return np.random.default_rng(0).choice(allowed, shape).astype(np.int32)


def _token_ids(config: Any, name: str) -> list[int]:
    """Return the token ids of a configuration under this name: none, one or several."""
    named = getattr(config, name, None)
    return [int(token) for token in np.atleast_1d(named)] if named is not None else []
