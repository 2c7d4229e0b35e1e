import functools

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import softmax

from gym_rm.engine.backbones import tree_attention as tree_attention_module
from gym_rm.engine.backbones.reward_model import HeadedDecoder
from gym_rm.engine.backbones.tree_attention import (
    FLEX_BLOCK_SIZE,
    MASKED_QUERIES,
    MERGED_TOKENS,
    NAME,
    TreeAttention,
    TreeMask,
    UnsupportedByTree,
    _compiled_flex_attention,
    attend,
    attend_with_flex,
    attending_to_trees,
    padded_length,
    tree_attention,
    tree_mask,
)
from gym_rm.engine.kinds.readouts import ModuleHead
from gym_rm.engine.token_tree import TokenSequence, plan_padded, plan_trees

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(seed=st.integers(0, 10_000))
def test_blocks_and_flex_equal_dense_attention(kind, seed):
    options = dict(KINDS[kind])
    key_heads, window = options.pop("key_heads", 4), options.pop("window", None)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 1, 4)
    scaling = options.pop("scaling", None)
    tree = tree_of(random_tree(seed))
    query, key, value = states(tree, key_heads=key_heads, seed=seed)
    expected = dense_attention(query, key, value, tree, window, scaling=scaling, **options)
    context = TreeAttention(tree, CPU)
    assert not context.use_flex
    by_blocks = attend(query, key, value, context.blocks(window), scaling, **options)
    torch.testing.assert_close(by_blocks, expected, atol=3e-6, rtol=0)
    flex = attend_with_flex(query, key, value, context, scaling, window, **options)
    torch.testing.assert_close(flex, expected, atol=3e-6, rtol=0)

    reads = torch.from_numpy(tree.read_indices)
    few = query[:, :, reads]
    only = attend(few, key, value, context.blocks(window, only_reads=True), scaling, **options)
    torch.testing.assert_close(only, expected[:, reads], atol=3e-6, rtol=0)
    only = attend_with_flex(few, key, value, context, scaling, window, rows=reads, **options)
    torch.testing.assert_close(only, expected[:, reads], atol=3e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 300, 700])
def test_nodes_longer_than_a_masked_block(window):
    ids = np.random.default_rng(0).integers(5, 350, 3 * MASKED_QUERIES)
    cut = MASKED_QUERIES // 2
    tree = tree_of([sequence(ids), sequence(np.r_[ids[:cut], ids[: 2 * MASKED_QUERIES]]), sequence(ids[5:])])
    query, key, value = states(tree, heads=1, key_heads=1, size=8)
    got = attend(query, key, value, TreeAttention(tree, CPU).blocks(window), None)
    torch.testing.assert_close(got, dense_attention(query, key, value, tree, window), atol=3e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 16])
def test_gradients_equal_those_of_dense_attention(window):
    """Compares attention by blocks, because flex_attention has a backward only on CUDA."""
    tree = tree_of(random_tree(7))
    inputs = states(tree, key_heads=2, requires_grad=True)
    weights = torch.randn(1, len(tree), 4, 16)
    expected = torch.autograd.grad((dense_attention(*inputs, tree, window) * weights).sum(), inputs)
    output = attend(*inputs, TreeAttention(tree, CPU).blocks(window), None)
    gradients = torch.autograd.grad((output * weights).sum(), inputs)
    for got, gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, gradient, atol=1e-5, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("window", [None, 16])
def test_gradients_of_compiled_flex_attention(window):
    tree = tree_of(random_tree(7))
    inputs = [each.cuda().requires_grad_() for each in states(tree, key_heads=2)]
    host = [each.detach().cpu().requires_grad_() for each in inputs]
    weights = torch.randn(1, len(tree), 4, 16)
    expected = torch.autograd.grad((dense_attention(*host, tree, window) * weights).sum(), host)
    output = attend_with_flex(*inputs, TreeAttention(tree, torch.device("cuda")), None, window)
    gradients = torch.autograd.grad((output * weights.cuda()).sum(), inputs)
    for got, gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got.cpu(), gradient, atol=1e-2, rtol=0)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gpt_neox", "mistral"])
def test_gradients_through_a_tree_are_the_sum_of_plain_gradients(architecture):
    """In training, the gradient of a shared prompt is the sum over all its replies."""
    model = HeadedDecoder(tiny_models.reward_model(architecture).double(), ModuleHead("score"), None)
    sequences = random_tree(3, sequences=6, node=20, vocabulary=300)
    weights = torch.linspace(-1, 1, sum(len(each.read_positions) for each in sequences))

    def gradients(plan):
        model.models[0].zero_grad()
        values = torch.cat([model.values(batch) for batch in plan.batches])[plan.value_index]
        (values[:, 0] * weights).sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.models[0].named_parameters()}

    through_tree = gradients(plan_trees(sequences, max_num_batched_tokens=10_000))
    plain = gradients(plan_padded(sequences, max_num_batched_tokens=10_000, alone=True))
    for name, gradient in plain.items():
        torch.testing.assert_close(through_tree[name], gradient, atol=1e-5 * max(1, gradient.abs().max()), rtol=0)


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.sampled_from([None, 1, 16, 200]))
def test_block_mask_equals_the_dense_rule_for_every_pair(seed, window):
    tree = tree_of(random_tree(seed, sequences=14, node=80))
    mask = TreeAttention(tree, CPU).block_mask(window)
    length = padded_length(len(tree))
    index = torch.arange(length)
    rule = mask.mask_mod(None, None, index[:, None], index[None, :])
    assert torch.equal(rule[: len(tree), : len(tree)], dense_rule(tree, window))
    assert torch.equal(rule[len(tree) :, : len(tree)], torch.zeros(length - len(tree), len(tree), dtype=bool))
    assert rule[len(tree) :].any(dim=1).all(), "a padding query without keys would be NaN"

    blocks = rule.view(
        length // FLEX_BLOCK_SIZE, FLEX_BLOCK_SIZE, length // FLEX_BLOCK_SIZE, FLEX_BLOCK_SIZE
    ).transpose(1, 2)
    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (partial & full).any()
    assert blocks[full].all()
    assert not blocks[~partial & ~full].any()


def listed(count, indices):
    """Return the blocks in a list of a block mask: bool `[Q, K]`."""
    count, indices = count[0, 0], indices[0, 0]
    found = torch.zeros(len(count), indices.shape[1], dtype=bool)
    for row, number in enumerate(count.tolist()):
        found[row, indices[row, :number].long()] = True
    return found


def test_the_block_mask_of_a_large_tree_skips_most_blocks():
    prompt = np.random.default_rng(0).integers(5, 350, 256)
    replies = [sequence(np.r_[prompt, np.full(256, 1000 + k)]) for k in range(16)]
    tree = tree_of(replies)
    mask = TreeAttention(tree, CPU).block_mask(None)
    needed = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    assert needed == 3 + 16 * (2 * 2 + 3)  # prompt: a triangle; each reply: a square with the prompt, and a triangle


def test_each_length_compiles_one_kernel_and_none_falls_back(monkeypatch, recwarn):
    """By default, torch compiles 8 kernels, and then materialises all scores. The backend here only counts."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    monkeypatch.setattr(tree_attention_module, "COMPILED_ON", ("cpu",))
    _compiled_flex_attention.cache_clear()
    torch._dynamo.reset()

    def run(length, window):
        tree = tree_of([sequence(range(5, 5 + length))])
        query, key, value = states(tree)
        with torch.inference_mode():
            attend_with_flex(query, key, value, TreeAttention(tree, CPU, use_flex=True), None, window)

    lengths = range(100, 100 + 12 * FLEX_BLOCK_SIZE, FLEX_BLOCK_SIZE)
    for length in lengths:
        run(length, None)
    assert counter.frame_count == len(lengths)
    for window in (16, 40, 99):
        run(100, window)
    run(100, None)
    assert counter.frame_count == len(lengths) + 1, "all windows share a kernel"
    assert torch._dynamo.config.recompile_limit == 8
    assert not [each for each in recwarn if "unfused" in str(each.message)]
    _compiled_flex_attention.cache_clear()


@given(st.integers(1, 300_000))
def test_padded_length(length):
    padded = padded_length(length)
    assert padded >= length
    assert padded % FLEX_BLOCK_SIZE == 0
    assert padded - length < max(FLEX_BLOCK_SIZE, length / 16)
    assert padded_length(padded) == padded


def test_there_are_few_padded_lengths():
    for doubling in range(7, 18):
        lengths = {padded_length(length) for length in range(2**doubling + 1, 2 ** (doubling + 1) + 1)}
        assert len(lengths) <= 16


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


def test_branches_at_every_token_share_blocks_of_queries():
    trunk = list(range(5, 305))
    tree = tree_of([sequence([*trunk[:length], 400]) for length in range(1, 300)])
    assert len(tree.node_starts) > 500
    attention = TreeAttention(tree, CPU)
    assert len(attention.blocks(None)) < 20
    assert len(attention.blocks(None, only_reads=True)) < 20


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_values_that_are_not_finite_do_not_reach_other_long_replies(poison):
    prompt, length = range(5, 15), 2 * MERGED_TOKENS
    tree = tree_of([sequence([*prompt, *range(20, 20 + length)]), sequence([*prompt, *range(200, 200 + length)])])
    query, key, value = states(tree)
    clean = attend(query, key, value, TreeAttention(tree, CPU).blocks(None), None)
    last = int(tree.subtree_end[0]) - 1  # the last token of the second sequence
    key[:, :, last], value[:, :, last] = poison, poison
    poisoned = attend(query, key, value, TreeAttention(tree, CPU).blocks(None), None)
    first_sequence = tree.ancestors(int(tree.read_indices[1]))
    assert torch.equal(poisoned[:, first_sequence], clean[:, first_sequence])
    assert not poisoned[:, last].isfinite().all()


@pytest.mark.parametrize("architecture", ["qwen3", "mistral", "gemma2", "gpt_oss", "llama"])
def test_whole_models_return_the_same_values_with_flex(architecture, monkeypatch):
    """Runs flex_attention as on a GPU, but uncompiled, with and without the fused forward."""
    model = HeadedDecoder(tiny_models.reward_model(architecture), ModuleHead("score"), None)
    plan = plan_trees(random_tree(5, vocabulary=300), max_num_batched_tokens=10_000)
    alone = plan_padded(random_tree(5, vocabulary=300), max_num_batched_tokens=10_000, alone=True)
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
