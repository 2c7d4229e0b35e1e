import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.engine.backbones import tree_attention as tree_attention_module
from gym_rm.engine.backbones.node_attention import NodeAttention
from gym_rm.engine.backbones.tree_attention import (
    NAME,
    TreeAttention,
    TreeMask,
    UnsupportedByTree,
    attending_to_trees,
    tree_attention,
    tree_mask,
)
from gym_rm.testing import check_attention
from tests.engine.backbones.trees import attend, dense_attention, random_tree, sequence, states, tree_of
from tests.engine.threads import threads

CPU = torch.device("cpu")


def attend_in(tree, query, key, value, window=None, **options):
    """Return the attention output of the tree's tokens, computed by tiles of queries."""
    return attend(TreeAttention(tree, CPU), query, key, value, window, **options)


KINDS = {
    "plain": {},
    "grouped heads": {"key_heads": 2},
    "one key head": {"key_heads": 1},
    "sliding window": {"window": 16},
    "window of one": {"window": 1},
    "scaling": {"scaling": 0.5},
    "soft cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all of it": {"key_heads": 2, "window": 24, "scaling": 0.3, "softcap": 3.0, "sinks": True},
}


@pytest.mark.parametrize("use_flex", [False, True])
def test_pages_and_flex_equal_naive_attention(use_flex):
    few = {"key_heads": [4, 1], "windows": [None, 16]} if use_flex else {}  # it runs uncompiled
    check_attention(lambda tree: TreeAttention(tree, CPU, use_flex=use_flex), **few)
    rare = {"key_heads": [2], "windows": [16], "softcaps": [None, 2.0], "sinks": True}
    check_attention(lambda tree: TreeAttention(tree, CPU, use_flex=use_flex), **rare)


def test_nodes_equal_naive_attention():
    check_attention(NodeAttention)


@pytest.mark.parametrize("fault", ["a sibling", "the future", "the window", "the reads", "the scale"])
def test_a_broken_attention_fails_the_check(fault):
    def broken(tree):
        whole = np.full(len(tree), len(tree))
        parents = np.arange(-1, len(tree) - 1)
        line = dataclasses.replace(tree, subtree_end=whole, parents=parents)
        seen = NodeAttention(line if fault == "a sibling" else tree)

        def attention(call, query, key, value):
            if fault == "the future":
                value = value.roll(-1, 0)
            changes = {"the window": {"window": None}, "the scale": {"scale": 1.0}}.get(fault, {})
            if fault == "the reads" and call.only_reads:
                query = query.flip(0)
            return seen(dataclasses.replace(call, **changes), query, key, value)

        return attention

    with pytest.raises(AssertionError, match="differs by"):
        check_attention(broken)


@pytest.mark.parametrize("window", [None, 33, 300, 700])
@pytest.mark.parametrize("pages_at_once", [1, 50])
def test_paths_of_many_pages(window, pages_at_once, monkeypatch):
    monkeypatch.setattr(tree_attention_module, "PAGES_AT_ONCE", pages_at_once)
    ids = np.random.default_rng(0).integers(5, 350, 800)
    tree = tree_of([sequence(ids), sequence(np.r_[ids[:130], ids[:400]]), sequence(ids[5:])])
    query, key, value = states(tree, heads=1, key_heads=1, size=8)
    got = attend_in(tree, query, key, value, window)
    torch.testing.assert_close(got, dense_attention(query, key, value, tree, window), atol=3e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 16])
def test_gradients_equal_those_of_dense_attention(window):
    """Compares attention by tiles, because flex_attention has a backward only on CUDA."""
    tree = tree_of(random_tree(7))
    inputs = states(tree, key_heads=2, requires_grad=True)
    weights = torch.randn(1, len(tree), 4, 16)
    expected = torch.autograd.grad((dense_attention(*inputs, tree, window) * weights).sum(), inputs)
    output = attend_in(tree, *inputs, window)
    gradients = torch.autograd.grad((output * weights).sum(), inputs)
    for got, gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, gradient, atol=1e-5, rtol=0)


# --- the functions registered with transformers


def call(module=None, mask=None, tree="some", **options):
    if tree == "some":
        tree = TreeAttention(tree_of([sequence(range(5, 45)), sequence(range(25, 35))]), CPU)
    query = torch.randn(1, 2, 50, 8)
    return tree_attention(module or torch.nn.Module(), query, query, query, mask, tree=tree, **options)[0]


def test_the_window_of_the_mask_overrides_that_of_the_layer():
    torch.manual_seed(0)
    by_mask = call(mask=tree_mask(local_size=4))
    torch.manual_seed(0)
    by_layer = call(sliding_window=4)
    torch.manual_seed(0)
    neither = call(mask=TreeMask(None), sliding_window=4)
    torch.manual_seed(0)
    full = call()
    assert torch.equal(by_mask, by_layer)
    assert torch.equal(neither, full)
    assert not torch.allclose(by_mask, full)


def test_unsupported_attention_is_refused():
    bidirectional = torch.nn.Module()
    bidirectional.is_causal = False
    for options, reason in [
        ({"tree": None}, "does not pass the tree"),
        ({"mask": torch.zeros(1, 1, 50, 50)}, "uses its own attention mask"),
        ({"position_bias": torch.zeros(1)}, "not plain causal"),
        ({"module": bidirectional}, "not plain causal"),
    ]:
        with pytest.raises(UnsupportedByTree, match=reason):
            call(**options)
    with pytest.raises(UnsupportedByTree, match="changes the causal mask"):
        tree_mask(use_vmap=True)


def test_the_attention_of_the_model_is_restored():
    model = tiny_models.reward_model("qwen3")
    before = model.config._attn_implementation
    with attending_to_trees(model):
        assert model.config._attn_implementation == NAME
    assert model.config._attn_implementation == before
    with pytest.raises(KeyError), attending_to_trees(model):
        raise KeyError
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), share=st.floats(0, 1))
def test_values_that_are_not_finite_do_not_reach_other_branches(poison, seed, share):
    """They reach the tokens after them, and the queries of their own page, because 0 times NaN is NaN."""
    tree = tree_of(random_tree(seed))
    bad = int(share * (len(tree) - 1))
    query, key, value = states(tree)
    clean = attend_in(tree, query, key, value)
    key[:, :, bad], value[:, :, bad] = poison, poison
    poisoned = attend_in(tree, query, key, value)
    first = TreeAttention(tree, CPU).pages.first
    start = first[np.searchsorted(first, bad, side="right") - 1]
    others = [token for token in range(len(tree)) if not start <= token < tree.subtree_end[bad]]
    assert torch.equal(poisoned[:, others], clean[:, others])
    assert not poisoned[:, bad].isfinite().all()


# --- bits of a query's output


BITS = {**KINDS, "sinks and window": {"sinks": True, "window": 16}, "long window": {"window": 70}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", BITS)
@settings(max_examples=3)
@given(data=st.data(), seed=st.integers(0, 10_000))
def test_the_output_of_a_query_has_the_same_bits_in_every_tree(kind, dtype, data, seed):
    options = dict(BITS[kind])
    key_heads, window = options.pop("key_heads", 4), options.pop("window", None)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 1, 4).to(dtype)
    sequences = random_tree(seed)
    everything = [(tuple(each.input_ids[: k + 1])) for each in sequences for k in range(len(each.input_ids))]
    of_path = {path: number for number, path in enumerate(dict.fromkeys(everything))}
    torch.manual_seed(seed)
    known = [torch.randn(len(of_path), heads, 16).to(dtype) for heads in (4, key_heads, key_heads)]

    def outputs(chosen):
        """Return the output of each token by its path, as attended to in a tree of these sequences."""
        tree = tree_of(chosen)
        paths = [of_path[tuple(tree.input_ids[tree.ancestors(token)])] for token in range(len(tree))]
        extra = data.draw(st.integers(0, 16))  # rows of padding, as in `with_padding`
        inputs = [each[paths + paths[:1] * extra].transpose(0, 1)[None] for each in known]
        with threads(data.draw(st.sampled_from([1, 2]))), torch.inference_mode():
            return dict(zip(paths, attend_in(tree, *inputs, window, **options)[0], strict=False))

    together = outputs(sequences)
    some = data.draw(st.lists(st.sampled_from(sequences), min_size=2, max_size=6))
    for chosen in ([data.draw(st.sampled_from(sequences))], some):
        for path, output in outputs(chosen).items():
            assert torch.equal(output, together[path])


def test_numbers_of_a_head_may_be_apart_in_memory():
    """As after the columns of a product were gathered from several ranks."""
    tree = tree_of([sequence(range(100))])
    query, key, value = states(tree)
    apart = [each.transpose(2, 3).contiguous().transpose(2, 3) for each in (query, key, value)]
    with torch.inference_mode():
        assert torch.equal(attend_in(tree, *apart), attend_in(tree, query, key, value))


@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), share=st.floats(0.1, 0.9), window=st.sampled_from([None, 16]))
def test_the_output_of_a_query_has_the_same_bits_among_other_queries(seed, share, window):
    """As if the keys of the other tokens came from a cache, and in the last layer, which runs at the reads only."""
    tree = tree_of(random_tree(seed))
    query, key, value = states(tree)
    everything = attend_in(tree, query, key, value, window)
    computed = np.flatnonzero(np.random.default_rng(seed).random(len(tree)) < share)
    computed = np.union1d(computed, len(tree) - 1)
    for prefix, chosen in [
        (SimpleNamespace(computed=computed, complete=lambda layer, key, value: (key, value)), computed),
        (None, tree.read_indices),
    ]:
        some = attend(
            TreeAttention(tree, CPU, prefix=prefix), query[:, :, chosen], key, value, window, only_reads=prefix is None
        )
        assert torch.equal(some, everything[:, chosen])
