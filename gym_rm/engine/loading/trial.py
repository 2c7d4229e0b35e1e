"""Which layout an architecture takes, found out by trying: a tree, a padded batch, or one sequence at a time.

Whatever a configuration claims, a layout is used only if it gives the values of the plain forward, so a new
architecture is either fast or slow but never wrong. The trial runs once, at load, on about a hundred tokens.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from gym_rm.engine.backbones.tree_attention import SUPPORTED_LAYER_TYPES, UnsupportedByTree
from gym_rm.errors import ConfigError, logger
from gym_rm.engine.kinds.reward_model import Layout, RewardModel
from gym_rm.engine.token_tree import BatchPlan, TokenSequence, plan_padded, plan_trees

Values: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

# Relative to the largest value. A layout that computes something else is off by far more.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.bfloat16: 0.1, torch.float16: 0.05}


def forget_lengths(model: RewardModel) -> None:
    """Let rotary frequencies of the kind `dynamic` follow each forward's own length.

    As they come, they also remember the longest text that the process has seen, and with them the scores would.
    """
    for module in (part for whole in model.modules for part in whole.modules()):
        if "dynamic" in str(getattr(module, "rope_type", "")) and _forget not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_forget)


def _forget(module: torch.nn.Module, inputs: Any) -> None:
    for name in [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]:
        prefix = name.removesuffix("inv_freq")
        if not prefix.endswith("original_"):
            original = getattr(module, f"{prefix}original_inv_freq")
            module.register_buffer(name, original.to(getattr(module, name).device), persistent=False)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


@torch.inference_mode()
def choose_layout(model: RewardModel, *, allow_tree: bool) -> Layout:
    """The fastest layout whose values equal those of the plain forward, one sequence at a time.

    Also settles `model.fused`: a fused forward that is off gives way to the model's own forward over the tree.
    """
    forget_lengths(model)
    with model.evaluating():
        return _choose_layout(model, allow_tree)


@torch.inference_mode()
def check_layout(model: RewardModel) -> None:
    """Run the trial in the layout that was chosen, after something about the model has changed.

    Raises:
        ConfigError: the model does not run, or gives what is no number.
    """
    plan = plan_trees if model.layout == "tree" else plan_padded
    with model.evaluating():
        try:
            values = _values(model, plan(_trial(model), max_num_batched_tokens=10**6))
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise ConfigError(f"{type(model.model).__name__} does not run with such layers: {error}") from error
    if not np.isfinite(values).all():
        raise ConfigError(f"{type(model.model).__name__} gives {values.min()} with such layers.")


def _choose_layout(model: RewardModel, allow_tree: bool) -> Layout:
    sequences = _trial(model)
    expected = _values(model, plan_padded(sequences, max_num_batched_tokens=10**6, alone=True))
    if not model.presentation.encoder and allow_tree and _could_take_trees(model):
        plan = plan_trees(sequences, max_num_batched_tokens=10**6)
        if model.fused and not _agrees(model, plan, expected):
            model.fused = False
        if model.fused or _agrees(model, plan, expected):
            return "tree"
    plan = plan_padded(sequences, max_num_batched_tokens=10**6)
    return "padded" if _agrees(model, plan, expected) else "one_by_one"


def _agrees(model: RewardModel, plan: BatchPlan, expected: Values) -> bool:
    name, layout = type(model.model).__name__, type(plan.batches[0]).__name__
    try:
        got = _values(model, plan)
    except (UnsupportedByTree, TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        logger.info("%s does not take a %s (fused=%s): %s", name, layout, model.fused, error)
        return False
    difference = float(np.abs(got - expected).max() / max(1e-6, np.abs(expected).max()))
    if not difference <= TOLERANCE.get(model.dtype, 0.1):
        logger.info("%s does not take a %s (fused=%s): off by %.1e", name, layout, model.fused, difference)
        return False
    return True


def longest_shared(model: RewardModel) -> int | None:
    """Longest sequence whose values do not depend on how long its neighbours are; None for no limit.

    Rotary frequencies of the kinds `dynamic` and `longrope` change for the whole batch once its longest sequence
    exceeds the original context.
    """
    config = model.model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    for rope in nested:
        if rope.get("rope_type") in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            return int(original or config.max_position_embeddings)
    return None


def _could_take_trees(model: RewardModel) -> bool:
    config = model.model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ())
    return layer_types <= SUPPORTED_LAYER_TYPES and getattr(config, "attention_chunk_size", None) is None


def _trial(model: RewardModel) -> list[TokenSequence]:
    """Three levels of shared prefixes, a stranger, and different lengths."""
    config = model.model.config.get_text_config()
    ends = _token_ids(config, "eos_token_id")
    avoid = [*ends, *_token_ids(config, "pad_token_id"), *_token_ids(config, "bos_token_id")]
    allowed = np.setdiff1d(np.arange(min(config.vocab_size, 20_000)), avoid if config.vocab_size > 8 else [])
    ids = np.random.default_rng(0).choice(allowed, 64).astype(np.int32)
    cuts = [ids[:9], ids[:14], np.r_[ids[:9], ids[20:27]], np.r_[ids[:14], ids[30:33]], ids[40:52]]
    if config.is_encoder_decoder:  # their classifiers read at EOS
        cuts = [np.append(cut, ends[:1]).astype(np.int32) for cut in cuts]
    return [TokenSequence(cut, np.array([len(cut) - 1])) for cut in cuts]


def _token_ids(config: Any, name: str) -> list[int]:
    """A token id of a configuration, which may name none, one or several."""
    named = getattr(config, name, None)
    return [int(token) for token in np.atleast_1d(named)] if named is not None else []


def _values(model: RewardModel, plan: BatchPlan) -> Values:
    values: Values = torch.cat([model.trial(batch) for batch in plan.batches]).float().cpu().numpy()
    return values[plan.value_index]
