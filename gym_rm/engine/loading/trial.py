"""Trial that chooses the layout of a model: a tree, padded batches, or one sequence at a time.

A layout is used only if its values equal those of the plain forward. In low precision, rounding can hide a small
error. So a tree must also pass two exact tests: other branches change nothing, and positions change something. A new
architecture may therefore be slow, but its scores are not wrong. The executor runs the trial once, at load, on about a
hundred tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gym_rm.engine.backbones.tree_attention import SUPPORTED_LAYER_TYPES, UnsupportedByTree
from gym_rm.engine.token_tree import BatchPlan, Layout, TokenSequence, TokenTree, plan_padded, plan_trees
from gym_rm.errors import ConfigError, logger

Values: TypeAlias = NDArray[np.float32]

# Maximum difference, relative to the largest value. In bfloat16, correct layouts of random models differ by up to 0.07.
TOLERANCE = {"float32": 1e-3, "float64": 1e-6, "bfloat16": 0.1, "float16": 0.03}
PROMPT_TOKENS = 9  # length of the trial's prompt
UNCHANGED = 2  # index of the trial's sequence whose values must not depend on other branches
EVERYTHING = 10**6  # a token budget larger than the whole trial
FAILURES = (UnsupportedByTree, TypeError, ValueError, RuntimeError, AttributeError, LookupError)


@dataclass(frozen=True, slots=True)
class Forward:
    """How batches run through the model.

    Attributes:
        layout: layout of the batches.
        fuse: whether the fused forward replaces the model's own.
    """

    layout: Layout
    fuse: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """Properties of a model that the trial needs.

    Attributes:
        name: name of the model, for log lines.
        config: configuration of the model.
        dtype: precision of the model, such as `"float32"`.
        can_take_trees: whether the model is a decoder and trees are allowed.
        can_fuse: whether the fused forward supports the model.
    """

    name: str
    config: Any
    dtype: str
    can_take_trees: bool
    can_fuse: bool


def choose_forward(candidate: Candidate, run: Callable[[BatchPlan, bool], Values]) -> Forward:
    """Return the fastest forward whose values equal those of the plain forward on one sequence at a time.

    Args:
        candidate: properties of the model.
        run: function that runs a plan's batches, with the fused forward if its second argument is True, and returns
            their values `[sum R, ...]`.
    """
    sequences = trial_sequences(candidate.config)
    plain = plan_padded(sequences, max_num_batched_tokens=EVERYTHING, alone=True)
    expected = run(plain, False)[plain.value_index]

    def agrees(plan: BatchPlan, fuse: bool) -> bool:
        layout = type(plan.batches[0]).__name__
        try:
            got = run(plan, fuse)[plan.value_index]
        except FAILURES as error:
            logger.info("%s does not support a %s (fused=%s): %s", candidate.name, layout, fuse, error)
            return False
        difference = _difference(got, expected)
        if not difference <= _tolerance(candidate):
            reason = f"relative difference {difference:.1e}"
            logger.info("%s does not support a %s (fused=%s): %s", candidate.name, layout, fuse, reason)
            return False
        return True

    if candidate.can_take_trees and _could_take_trees(candidate.config):
        tree = plan_trees(sequences, max_num_batched_tokens=EVERYTHING)
        for fuse in (True, False) if candidate.can_fuse else (False,):
            if agrees(tree, fuse) and _keeps_to_branches(candidate, run, fuse):
                return Forward("tree", fuse=fuse)
    padded = agrees(plan_padded(sequences, max_num_batched_tokens=EVERYTHING), False)
    return Forward("padded" if padded else "one_by_one", fuse=False)


def check_forward(candidate: Candidate, forward: Forward, run: Callable[[BatchPlan, bool], Values]) -> None:
    """Run the trial again in the chosen layout, after the model was quantised.

    Raises:
        ConfigError: the model does not run, or returns values that are not finite.
    """
    plan = plan_trees if forward.layout == "tree" else plan_padded
    try:
        values = run(plan(trial_sequences(candidate.config), max_num_batched_tokens=EVERYTHING), forward.fuse)
    except FAILURES as error:
        raise ConfigError(f"{candidate.name} does not run with quantised layers: {error}") from error
    if not np.isfinite(values).all():
        raise ConfigError(
            f"{candidate.name} returns values that are not finite with quantised layers; pass quantization=None."
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


def _keeps_to_branches(candidate: Candidate, run: Callable[[BatchPlan, bool], Values], fuse: bool) -> bool:
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
        return run(moved, fuse)[index]

    before = values()
    others = _difference(values(changed=True), before)
    # The number of tokens of an expert changes with other branches, and with it the rounding of its products. Some
    # kernels also return other bits for the same input.
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
    config = config.get_text_config()
    ends = _token_ids(config, "eos_token_id")
    avoid = [*ends, *_token_ids(config, "pad_token_id"), *_token_ids(config, "bos_token_id")]
    allowed = np.setdiff1d(np.arange(min(config.vocab_size, 20_000)), avoid if config.vocab_size > 8 else [])
    ids, others = np.random.default_rng(0).choice(allowed, (2, 64)).astype(np.int32)
    if changed:  # all tokens but the first of a branch, which decides the order
        for start, stop in ((PROMPT_TOKENS + 1, 14), (31, 33), (41, 52)):
            ids[start:stop] = others[start:stop]
    prompt = ids[:PROMPT_TOKENS]
    cuts = [prompt, ids[:14], np.r_[prompt, ids[20:27]], np.r_[ids[:14], ids[30:33]], ids[40:52]]
    if config.is_encoder_decoder:  # encoder-decoder classifiers read at EOS
        cuts = [np.append(cut, ends[:1]).astype(np.int32) for cut in cuts]
    return [TokenSequence(cut, np.array([len(cut) - 1])) for cut in cuts]


def _could_take_trees(config: Any) -> bool:
    config = config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ())
    return layer_types <= SUPPORTED_LAYER_TYPES and getattr(config, "attention_chunk_size", None) is None


def _token_ids(config: Any, name: str) -> list[int]:
    """Return the token ids of a configuration under this name: none, one or several."""
    named = getattr(config, name, None)
    return [int(token) for token in np.atleast_1d(named)] if named is not None else []
