"""Random trees of conversations, and attention over them with a dense mask."""

import numpy as np
import torch
from torch.nn.functional import softmax

from gym_rm.engine.token_tree import TokenSequence, plan_trees


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


def dense_rule(tree, window):
    """Return which query attends to which key, computed from the parents: bool `[T, T]`."""
    allowed = np.zeros((len(tree), len(tree)), dtype=bool)
    for query, parent in enumerate(tree.parents):
        if parent >= 0:
            allowed[query] = allowed[parent]
        allowed[query, query] = True
    if window is not None:
        allowed &= tree.position_ids[:, None] - tree.position_ids < window
    return torch.from_numpy(allowed)


def dense_attention(query, key, value, tree, window, *, scaling=None, softcap=None, sinks=None):
    """Return softmax attention with a dense mask, as the reference."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~dense_rule(tree, window), float("-inf"))
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(1, -1, len(tree), 1)
        scores = torch.cat([scores, column], dim=-1)
    return (softmax(scores, dim=-1)[..., : len(tree)] @ value).transpose(1, 2)


def states(tree, *, heads=4, key_heads=4, size=16, seed=0, requires_grad=False):
    torch.manual_seed(seed)
    shapes = [(1, count, len(tree), size) for count in (heads, key_heads, key_heads)]
    return [torch.randn(shape, requires_grad=requires_grad) for shape in shapes]
