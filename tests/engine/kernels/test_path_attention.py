"""Attention along paths equals dense attention in float64, and a row's bits depend on its path alone."""

import functools

import numpy as np
import pytest
import torch

from gym_rm.engine.backbones.attention import LayerCall
from gym_rm.engine.backbones.tree_attention import TreeAttention
from gym_rm.engine.paths import paths_of
from gym_rm.testing import check_attention
from gym_rm.testing.attention import naive_attention
from tests.engine.backbones.trees import random_tree, sequence, tree_of
from tests.engine.kernels.triton_device import DEVICE, needs_triton

pytestmark = needs_triton
ATOL = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def paths(tree):
    """Return an attention that fails where the kernel does not run."""
    attention = TreeAttention(tree, DEVICE, paths=True, use_flex=False)
    attention.parts = None
    return attention


def on_host(tree):
    """Return the attention for states on the host."""
    attention = paths(tree)
    return lambda call, *states: attention(call, *(each.to(DEVICE) for each in states)).cpu()


def states(tree, *, heads=4, key_heads=2, size=16, value_size=None, dtype=torch.float32):
    torch.manual_seed(0)
    sizes = ((heads, size), (key_heads, size), (key_heads, value_size or size))
    return [torch.randn(len(tree), *each).to(DEVICE, dtype) for each in sizes]


def require_as_dense(tree, call, *given):
    exact = naive_attention(tree, call, *(each.cpu() for each in given))
    got = paths(tree)(call, *given)
    assert (got.dtype, got.shape) == (given[2].dtype, exact.shape)
    torch.testing.assert_close(got.cpu().double(), exact, atol=ATOL[got.dtype], rtol=0)


def test_it_equals_naive_attention():
    check_attention(on_host, key_heads=[2], windows=[None, 1, 70])
    check_attention(on_host, key_heads=[4, 1], windows=[16], softcaps=[None, 2.0], sinks=True)


@pytest.mark.parametrize("seed", range(24))
def test_random_trees(seed):
    tree = tree_of(random_tree(seed, sequences=8, node=30))
    random = np.random.default_rng(seed)
    window, cap = (random.choice(each) for each in ([None, 1, 9, 40], [None, 3.0]))
    call = LayerCall(0, 0.3, window, softcap=cap)
    require_as_dense(tree, call, *states(tree, heads=6, key_heads=int(random.choice([6, 2, 1]))))


@pytest.mark.parametrize("dtype", ATOL, ids=str)
@pytest.mark.parametrize(("size", "value_size"), [(64, 64), (80, 80), (24, 40), (192, 128), (256, 256)])
def test_sizes_of_heads_and_precisions(size, value_size, dtype):
    tree = tree_of(random_tree(1, sequences=4, node=40))
    require_as_dense(tree, LayerCall(0, size**-0.5), *states(tree, size=size, value_size=value_size, dtype=dtype))


def test_other_states_in_memory_than_whole_rows():
    tree = tree_of(random_tree(1, sequences=4, node=20))
    query, key, value = states(tree)
    call = LayerCall(0, 0.25)
    packed = torch.cat([query, key, value], dim=1)
    expected = paths(tree)(call, query, key, value)
    assert torch.equal(paths(tree)(call, *packed.split([4, 2, 2], dim=1)), expected)
    turned = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (query, key, value))
    assert torch.equal(paths(tree)(call, *turned), expected)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_every_tree(window, dtype):
    watched = random_tree(0, sequences=1, node=80)[0]
    ids, alone = watched.input_ids, tree_of([watched])
    table = torch.randn(400, 8, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    call = LayerCall(0, 0.25, window)

    def outputs(tree, rows):
        query, key, value = table[torch.from_numpy(tree.input_ids)].split([4, 2, 2], dim=1)
        return paths(tree)(call, query.contiguous(), key.contiguous(), value.contiguous())[rows]

    expected = outputs(alone, np.arange(len(alone)))
    for seed in range(4):
        random = np.random.default_rng(seed)
        cuts = random.integers(0, len(ids), 6)
        others = [sequence(np.r_[ids[:cut], random.integers(5, 350, random.integers(1, 70))]) for cut in cuts]
        tree = tree_of([*others, watched])
        found = [tree.ancestors(row) for row in np.flatnonzero(tree.depths == len(ids) - 1)]
        (path,) = (each for each in found if np.array_equal(tree.input_ids[each], ids))
        assert torch.equal(outputs(tree, path), expected)


@pytest.mark.parametrize("only_reads", [False, True])
@pytest.mark.parametrize(
    ("heads", "window", "cap", "sinks"), [(4, None, None, False), (6, 16, 2.0, True), (2, None, None, True)]
)
def test_gradients_equal_those_of_naive_attention(heads, window, cap, sinks, only_reads):
    tree = tree_of(random_tree(3, sequences=8, node=30))
    rows = torch.from_numpy(tree.read_indices) if only_reads else torch.arange(len(tree))
    given = states(tree, heads=heads, size=24, value_size=16)
    given += [torch.linspace(-1, 1, heads, device=DEVICE)] if sinks else []
    exact = [each.cpu().double().requires_grad_() for each in given]
    given = [each.requires_grad_() for each in given]

    def attended(attention, query, key, value, of_heads=None, *, of_rows):
        query = query[rows.to(query.device)] if of_rows else query
        return attention(LayerCall(0, 0.2, window, only_reads, softcap=cap, sinks=of_heads), query, key, value)

    output = attended(paths(tree), *given, of_rows=True)
    expected = attended(functools.partial(naive_attention, tree), *exact, of_rows=False)[rows]
    torch.testing.assert_close(output.detach().cpu().double(), expected.detach(), atol=3e-6, rtol=0)
    weights = torch.randn(expected.shape)
    got = torch.autograd.grad((output * weights.to(DEVICE)).sum(), given)
    gradients = torch.autograd.grad((expected * weights).sum(), exact)
    for one, other in zip(got, gradients, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, atol=2e-5, rtol=0)


def test_values_have_the_same_bits_with_gradients():
    tree = tree_of(random_tree(3, sequences=8, node=30))
    given = states(tree)
    without = paths(tree)(LayerCall(0, 0.2), *given)
    assert torch.equal(paths(tree)(LayerCall(0, 0.2), *(each.requires_grad_() for each in given)), without)


def test_rows_of_padding_are_zeros_and_get_none():
    tree = tree_of(random_tree(3, sequences=4, node=20))
    padded = [torch.cat([each, torch.full_like(each[:7], torch.nan)]) for each in states(tree)]
    given = [each.requires_grad_() for each in padded]
    output = paths(tree)(LayerCall(0, 0.2), *given)
    assert not output[len(tree) :].any()
    assert torch.isfinite(output).all()
    for gradient in torch.autograd.grad(output[: len(tree)].sum(), given):
        assert torch.isfinite(gradient).all()
        assert not gradient[len(tree) :].any()


def test_calls_that_no_kernel_covers_run_by_pages():
    tree = tree_of(random_tree(3, sequences=4, node=20))
    attention = TreeAttention(tree, DEVICE, paths=True, use_flex=False)
    covers = attention._paths.covers
    query, key, value = states(tree)
    assert covers(LayerCall(0, 1.0), query, key, value)
    assert not covers(LayerCall(0, 1.0, dropout=0.1), query, key, value)
    assert not covers(LayerCall(0, 1.0), query.double(), key.double(), value.double())
    assert not covers(LayerCall(0, 1.0), *states(tree, size=320))
    assert not covers(LayerCall(0, 1.0), *states(tree, heads=80, key_heads=1))


def test_a_tree_of_one_token():
    tree = tree_of([sequence([7])])
    assert len(paths_of(tree).tokens) == 1
    query, key, value = states(tree)
    torch.testing.assert_close(paths(tree)(LayerCall(0, 1.0), query, key, value), value.repeat_interleave(2, dim=1))
