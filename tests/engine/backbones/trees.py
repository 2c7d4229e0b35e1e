"""Random trees of conversations, and attention over them with a dense mask."""

import functools

import numpy as np
import torch

from gym_rm.engine.backbones.attention import LayerCall
from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.token_tree import TokenSequence
from gym_rm.testing.attention import naive_attention


def sequence(ids):
    ids = np.array(ids, dtype=np.int32)
    return TokenSequence(ids, np.unique([len(ids) // 2, len(ids) - 1]))


def random_tree(seed, *, sequences=12, node=40, vocabulary=350):
    """Return sequences that branch off each other at random positions: a tree of a few hundred tokens."""
    random = np.random.default_rng(seed)
    grown = [random.integers(5, vocabulary, random.integers(1, 2 * node))]
    while len(grown) < sequences:
        base = grown[random.integers(len(grown))]
        kept = base[: random.integers(0, len(base) + 1)]
        grown.append(np.concatenate([kept, random.integers(5, vocabulary, random.integers(1, node))]))
    return [sequence(ids) for ids in grown]


def tree_of(sequences):
    (tree,) = plan_trees(sequences, max_num_batched_tokens=1_000_000).batches
    return tree


def call_of(query, window=None, scaling=None, **options):
    return LayerCall(0, query.shape[-1] ** -0.5 if scaling is None else scaling, window, **options)


def attend(attention, query, key, value, window=None, **options):
    """Return the output `[1, Q, H, D]` of an attention for states `[1, H, T, D]`."""
    inputs = (each[0].transpose(0, 1) for each in (query, key, value))
    return attention(call_of(query, window, **options), *inputs)[None]


def dense_attention(query, key, value, tree, window, **options):
    """Return softmax attention with a naive mask, as the reference."""
    return attend(functools.partial(naive_attention, tree), query, key, value, window, **options).to(query.dtype)


def states(tree, *, heads=4, key_heads=4, size=16, seed=0, requires_grad=False):
    torch.manual_seed(seed)
    shapes = [(1, count, len(tree), size) for count in (heads, key_heads, key_heads)]
    return [torch.randn(shape, requires_grad=requires_grad) for shape in shapes]
