"""A conformance check for the attention of decoder layers over a token tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.token_tree import TokenSequence, TokenTree
from gym_rm.testing.assertions import asserting

if TYPE_CHECKING:
    from torch import Tensor

    from gym_rm.engine.backbones.attention import Attention, LayerCall

HEADS, SIZE = 4, 16
NODE = 40  # tokens of a run without a branch; several pages of a path have branches inside


@asserting
def check_attention(
    implementation: Callable[[TokenTree], Attention],
    *,
    key_heads: Sequence[int] = (4, 2, 1),
    windows: Sequence[int | None] = (None, 1, 16, 70),
    softcaps: Sequence[float | None] = (None,),
    sinks: bool = False,
    atol: float = 3e-6,
    seed: int = 0,
) -> None:
    """Check that each token attends to the tokens before it on its own path, and to no others.

    The trees have branches at random positions. Queries are of all tokens, and of those that are read. The expected
    output is a softmax over all pairs of tokens with a naive mask, in float64.

    Args:
        implementation: function that returns the attention over a tree, on a CPU.
        key_heads: numbers of heads of keys and values, for 4 heads of queries.
        windows: sliding windows; None for none.
        softcaps: soft caps of the scores; None for none.
        sinks: whether heads also have sinks.
        atol: largest difference of an output.
        seed: seed of the trees and of the states.

    Raises:
        AssertionError: an output differs.

    Example:
        >>> import torch
        >>> from gym_rm.engine.backbones.tree_attention import TreeAttention
        >>> check_attention(lambda tree: TreeAttention(tree, torch.device("cpu")), windows=[None], key_heads=[2])
    """
    import torch  # loads slowly

    from gym_rm.engine.backbones.attention import LayerCall

    random = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    for heads in key_heads:
        tree = _random_tree(random)
        attention = implementation(tree)
        shapes = [(len(tree), each, SIZE) for each in (HEADS, heads, heads)]
        query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
        reads = torch.from_numpy(tree.read_indices)
        of_heads = torch.linspace(-1, 1, HEADS) if sinks else None
        for window in windows:
            for softcap in softcaps:
                call = LayerCall(0, SIZE**-0.5, window, softcap=softcap, sinks=of_heads)
                expected = naive_attention(tree, call, query, key, value)
                _compare(attention(call, query, key, value), expected, f"all tokens, {call}", atol)
                call = LayerCall(0, SIZE**-0.5, window, only_reads=True, softcap=softcap, sinks=of_heads)
                _compare(attention(call, query[reads], key, value), expected[reads], f"tokens read, {call}", atol)


def naive_attention(tree: TokenTree, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return softmax attention `[T, H, D]` of all tokens over all pairs, in float64; with gradients."""
    import torch

    groups = query.shape[1] // key.shape[1]
    query, key, value = (each.double().transpose(0, 1) for each in (query, key, value))
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = query @ key.transpose(1, 2) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~torch.from_numpy(_visible(tree, call.window)), -torch.inf)
    if call.sinks is not None:
        scores = torch.cat([scores, call.sinks.double().view(-1, 1, 1).expand(-1, len(tree), 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(tree)]
    return (weights @ value).transpose(0, 1)


def _visible(tree: TokenTree, window: int | None) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Return which token attends to which, from the parents alone, `[T, T]`."""
    visible = np.zeros((len(tree), len(tree)), dtype=np.bool_)
    depths = np.zeros(len(tree), dtype=np.int64)
    for token, parent in enumerate(tree.parents.tolist()):
        if parent >= 0:
            visible[token] = visible[parent]
            depths[token] = depths[parent] + 1
        visible[token, token] = True
    return visible if window is None else visible & (depths[:, None] - depths < window)


def _random_tree(random: np.random.Generator) -> TokenTree:
    """Return a tree of texts that branch off each other at random positions; two tokens of each are read."""
    texts = [random.integers(5, 350, 3 * NODE)]
    while len(texts) < 8:
        base = texts[random.integers(len(texts))]
        kept = base[: random.integers(0, len(base) + 1)]
        texts.append(np.concatenate([kept, random.integers(5, 350, random.integers(1, NODE))]))
    sequences = [TokenSequence(ids.astype(np.int32), np.unique([len(ids) // 2, len(ids) - 1])) for ids in texts]
    (tree,) = plan_trees(sequences, max_num_batched_tokens=10_000).batches
    assert isinstance(tree, TokenTree)
    return tree


def _compare(got: Tensor, expected: Tensor, what: str, atol: float) -> None:
    got = got.reshape(len(got), HEADS, -1)
    assert got.shape == expected.shape, f"{what}: the output has the shape {tuple(got.shape)}."
    wrong = (got.double() - expected).abs().amax(dim=(1, 2))
    worst = int(wrong.argmax())
    assert wrong[worst] <= atol, f"{what}: the output of query {worst} differs by {wrong[worst]:.1e}, more than {atol}."
