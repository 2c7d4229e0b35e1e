"""flex_attention over trees: compiled by inductor for the CPU where that supports it, else uncompiled."""

import functools

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import pad

from gym_rm.engine.backbones import flex_attention as flex_attention_module
from gym_rm.engine.backbones.batch_invariance import BatchInvariant
from gym_rm.engine.backbones.flex_attention import (
    FLEX_BLOCK_SIZE,
    PAGE_WITHOUT_GRADIENTS,
    _compiled_flex_attention,
    buffer_lengths,
)
from gym_rm.engine.backbones.invariant_products import GemmRows
from gym_rm.engine.backbones.reward_model import HeadedDecoder
from gym_rm.engine.backbones.tree_attention import TreeAttention
from gym_rm.engine.batch_planning import plan_padded, plan_trees
from gym_rm.engine.kinds.readouts import ModuleHead
from tests.engine.backbones.trees import attend, dense_attention, random_tree, sequence, states, tree_of

CPU = torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 16])
def test_gradients_of_compiled_flex_attention(window):
    tree = tree_of(random_tree(7))
    inputs = [each.cuda().requires_grad_() for each in states(tree, key_heads=2)]
    host = [each.detach().cpu().requires_grad_() for each in inputs]
    weights = torch.randn(1, len(tree), 4, 16)
    expected = torch.autograd.grad((dense_attention(*host, tree, window) * weights).sum(), host)
    output = attend(TreeAttention(tree, torch.device("cuda")), *inputs, window)
    gradients = torch.autograd.grad((output * weights.cuda()).sum(), inputs)
    for got, gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got.cpu(), gradient, atol=1e-2, rtol=0)


@settings(max_examples=8)
@given(st.integers(0, 10_000), st.sampled_from([None, 1, 16, 200]), st.booleans())
def test_the_kernel_of_flex_visits_the_keys_of_a_query_in_the_order_of_positions(seed, window, training):
    """Each key is at the offset of its position. So the sum has the same terms, in the same order, in every tree."""
    tree = tree_of(random_tree(seed, sequences=14, node=80))
    with torch.set_grad_enabled(training):
        context = TreeAttention(tree, CPU, use_flex=True)
        mask = context.block_mask(window)
    size = context.pages.size
    assert size == (FLEX_BLOCK_SIZE if training else PAGE_WITHOUT_GRADIENTS)
    length, num_slots = buffer_lengths(len(tree), len(context.slots))
    assert mask.seq_lengths == (length, num_slots)
    assert mask.full_kv_num_blocks is None, "the kernel would visit full blocks after all others"
    rule = mask.mask_mod(None, None, torch.arange(length)[:, None], torch.arange(num_slots)).numpy()
    assert mask.kv_indices.shape[2:] == (length // size, num_slots // size)
    assert not rule[len(tree) :].any(), "padding attends to nothing"
    counts, orders = mask.kv_num_blocks[0, 0].tolist(), mask.kv_indices[0, 0].numpy()
    for query in range(len(tree)):
        block = query // size
        visited = orders[block, : counts[block], None] * size + np.arange(size)
        visible = visited.reshape(-1)[rule[query, visited.reshape(-1)]]
        assert len(visible) == rule[query].sum(), "no block with keys of the query is left out"
        ancestors = tree.ancestors(query)
        expected = ancestors if window is None else ancestors[-window:]
        assert context.slots[visible].tolist() == expected.tolist()
        assert (visible % size).tolist() == (tree.position_ids[expected] % size).tolist()


def test_the_block_mask_of_a_large_tree_skips_most_blocks():
    prompt = np.random.default_rng(0).integers(5, 350, 256)
    replies = [sequence(np.r_[prompt, np.full(256, 1000 + k)]) for k in range(16)]
    tree = tree_of(replies)
    mask = TreeAttention(tree, CPU, use_flex=True).block_mask(None)
    needed = int(mask.kv_num_blocks.sum())
    assert needed == 3 + 16 * (2 * 2 + 3)  # prompt: a triangle; each reply: a square with the prompt, and a triangle


def test_the_padding_of_large_multiples_of_rows_has_queries_too():
    tree = tree_of(random_tree(0))
    with BatchInvariant(GemmRows(1024)):
        context = TreeAttention(tree, CPU, use_flex=True)
    inputs = [pad(each, (0, 0, 0, 1024 - len(tree))) for each in states(tree)]
    assert attend(context, *inputs).shape[:2] == (1, 1024)


@torch.inference_mode()
def test_tiny_models_have_heads_that_compiled_attention_has(monkeypatch):
    """Otherwise each would run padded on a GPU, and no test there would be of a tree."""
    sizes = {}
    trees = {*tiny_models.ARCHITECTURES} - {*tiny_models.FALLBACKS, *tiny_models.ENCODERS}

    def note(self, call, query, key, value):
        sizes.setdefault(name, set()).update(each.shape[-1] for each in (query, key, value))
        return query.new_zeros(*query.shape[:2], value.shape[-1])

    monkeypatch.setattr(TreeAttention, "__call__", note)
    for name in trees:
        HeadedDecoder(tiny_models.reward_model(name), ModuleHead("score"), None).values(tree_of(random_tree(0)))
    assert sizes.keys() == trees
    assert min(min(each) for each in sizes.values()) >= 16


@pytest.fixture
def counter(monkeypatch):
    """Let inductor compile flex_attention for the CPU; return a counter of the graphs."""
    counter = CompileCounterWithBackend("inductor")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    monkeypatch.setattr(flex_attention_module, "COMPILED_ON", ("cpu",))
    _compiled_flex_attention.cache_clear()
    torch._dynamo.reset()
    yield counter
    _compiled_flex_attention.cache_clear()


def batch_of(tokens, branches, random):
    """Return a tree of about so many tokens: a prompt and replies that branch off it inside its pages."""
    ids = random.integers(5, 350, tokens // 2)
    replies = [
        np.r_[ids[: random.integers(1, len(ids) + 1)], random.integers(5, 350, max(1, tokens // 2 // branches))]
        for _ in range(branches)
    ]
    return tree_of([sequence(each) for each in (ids, *replies)])


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@torch.inference_mode()
def test_compiled_values_equal_those_by_pages_and_in_float64(size, counter, monkeypatch):
    """Without sinks, because torch compiles no log-sum-exp for a CPU."""
    monkeypatch.setattr(flex_attention_module, "SHORTEST", 2048)  # to compile less
    random = np.random.default_rng(size)
    for seed in range(7):
        tree = batch_of(int(random.integers(50, 900)), int(random.integers(1, 12)), random)
        query, key, value = states(tree, key_heads=2, size=size, seed=seed)
        window, softcap = random.choice([None, 16, 200]), random.choice([None, 2.0])
        got = attend(TreeAttention(tree, CPU, use_flex=True), query, key, value, window, softcap=softcap)
        by_pages = attend(TreeAttention(tree, CPU), query, key, value, window, softcap=softcap)
        exact = dense_attention(*(x.double() for x in (query, key, value)), tree, window, softcap=softcap)
        torch.testing.assert_close(got, by_pages, atol=3e-6, rtol=0)
        torch.testing.assert_close(got.double(), exact, atol=3e-6, rtol=0)
    assert counter.frame_count <= 2, "with and without a soft cap"


@pytest.mark.slow
@torch.inference_mode()
def test_a_kernel_for_each_doubling_of_the_tokens(counter, recwarn):
    """After a batch in each doubling, none compiles. torch's own limit is 8 kernels; then it computes all scores."""
    random = np.random.default_rng(0)

    def run(tokens, branches, window):
        tree = batch_of(tokens, branches, random)
        attend(TreeAttention(tree, CPU, use_flex=True), *states(tree, heads=2, key_heads=1), window)

    warm_up = [512, 1024, 2048, 4096]
    for tokens in warm_up:
        run(tokens, 1, None)
    assert counter.frame_count == len(warm_up)
    for _ in range(50):
        run(int(random.integers(100, 3000)), int(random.integers(1, 20)), random.choice([None, 16, 200]))
    assert counter.frame_count == len(warm_up)
    assert torch._dynamo.config.recompile_limit == 8
    assert not [each for each in recwarn if "unfused" in str(each.message)]


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gpt_oss"])
def test_whole_models_return_the_same_values_with_flex(architecture, monkeypatch):
    """Runs flex_attention as on a GPU, but uncompiled, with and without the fused forward."""
    model = HeadedDecoder(tiny_models.reward_model(architecture), ModuleHead("score"), None)
    plan = plan_trees(random_tree(5, vocabulary=300), max_num_batched_tokens=10_000)
    alone = plan_padded(random_tree(5, vocabulary=300), max_num_batched_tokens=10_000, alone=True, exact=True)
    with torch.inference_mode():
        expected = torch.cat([model.values(batch) for batch in alone.batches])[alone.value_index]
        plain_init = TreeAttention.__init__
        monkeypatch.setattr(
            TreeAttention, "__init__", lambda self, tree, device, **_: plain_init(self, tree, device, use_flex=True)
        )
        (backbone,) = model.decoders
        for fuse in {backbone.fuse, False}:
            backbone.fuse = fuse
            got = torch.cat([model.values(batch) for batch in plan.batches])[plan.value_index]
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
