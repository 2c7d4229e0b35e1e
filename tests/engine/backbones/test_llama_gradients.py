"""Gradients over trees equal those of the plain forward of transformers, one sequence at a time."""

import copy

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.engine.backbones import node_attention
from gym_rm.engine.backbones.attention import LayerCall
from gym_rm.engine.backbones.decoder import DecoderBackbone
from gym_rm.engine.backbones.node_attention import NodeAttention
from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.token_tree import TokenSequence
from tests.engine.backbones.trees import dense_attention, states, tree_of

TOLERANCE = 1e-5  # relative to the largest gradient

# What the fused forward computes, and options of the layers' own forward over trees.
MODELS = {
    "grouped heads": ("llama", {}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "biases of qwen2": ("qwen2", {}),
    "norms of queries and keys": ("qwen3", {}),
    "window in some layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "window": ("mistral", {"sliding_window": 5}),
    "soft cap": ("gemma2", {"sliding_window": 7}),
    "partial rotary positions": ("gpt_neox", {}),
    "experts": ("mixtral", {}),
    "learned positions": ("gpt2", {}),
    "sinks": ("gpt_oss", {"sliding_window": 7}),
}
FUSED = [name for name, (architecture, _) in MODELS.items() if architecture in ("llama", "qwen2", "qwen3", "mistral")]


@pytest.fixture(scope="module")
def models():
    """Function that returns a model in evaluation mode, made once; its initial weights give values around 1."""
    made = {}

    def of(name):
        if name not in made:
            architecture, options = MODELS[name]
            made[name] = tiny_models.reward_model(architecture, initializer_range=0.15, **options)
        return made[name]

    return of


@st.composite
def sequences(draw):
    """Return sequences of a random tree: deep paths, duplicates, prefixes of each other, reads at several turns."""
    seed = draw(st.integers(0, 2**20))
    random = np.random.default_rng(seed)
    grown = [random.integers(5, 350, random.integers(1, 30))]
    for _ in range(draw(st.integers(0, 7))):
        base = grown[-1] if draw(st.booleans()) else grown[random.integers(len(grown))]
        kept = base[: random.integers(0, len(base) + 1)]
        new = random.integers(5, 350, random.integers(0 if len(kept) else 1, 12))
        grown.append(np.concatenate([kept, new]))
    made = []
    for ids in grown:
        reads = random.choice(len(ids), min(len(ids), int(random.integers(1, 4))), replace=False)
        made.append(TokenSequence(ids.astype(np.int32), np.unique(reads)))
    return made


def gradients(model, hidden):
    """Return the gradients of a random sum of hidden states, by the name of the parameter."""
    factors = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    named = {name: each for name, each in model.base_model.named_parameters() if each.requires_grad}
    found = torch.autograd.grad((hidden.float() * factors).sum(), list(named.values()), allow_unused=True)
    return {name: each for name, each in zip(named, found, strict=True) if each is not None}


def plain_gradients(model, texts):
    """The plain forward, in float64 where the model computes in it."""
    rows = []
    for each in texts:
        ids = torch.from_numpy(each.input_ids.astype(np.int64))[None]
        rows.append(model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, each.read_positions])
    return gradients(model, torch.cat(rows))


def tree_gradients(model, texts, *, fuse, checkpointing=False):
    plan = plan_trees(texts, max_num_batched_tokens=10**6)
    decoder = DecoderBackbone(model)
    decoder.fuse, decoder.checkpointing = fuse, checkpointing
    (tree,) = plan.batches
    return gradients(model, decoder.hidden_states(tree)[torch.from_numpy(plan.value_index)])


def difference(got, expected):
    assert got.keys() == expected.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    return max(float((got[name] - expected[name]).abs().max()) for name in expected) / largest


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=3)
@given(texts=sequences())
def test_gradients_of_the_layers_own_forward_equal_the_plain_ones(name, models, texts):
    model = models(name)
    got = tree_gradients(model, texts, fuse=False)
    assert difference(got, plain_gradients(model, texts)) < TOLERANCE


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
@pytest.mark.parametrize("name", FUSED)
@settings(max_examples=3)
@given(texts=sequences())
def test_gradients_of_the_fused_forward_equal_the_plain_ones(name, checkpointing, models, texts):
    model = models(name)
    got = tree_gradients(model, texts, fuse=True, checkpointing=checkpointing)
    assert difference(got, plain_gradients(model, texts)) < TOLERANCE


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("fault", ["sees a sibling", "misses its parent", "sees the future"])
def test_a_wrong_mask_is_found(fuse, fault, models, monkeypatch):
    """The comparison above is sharp enough to see one wrong key."""
    ids = np.random.default_rng(0).integers(5, 350, 40).astype(np.int32)
    prompt, left, right = ids[:9], ids[9:20], ids[20:29]
    texts = [TokenSequence(np.r_[prompt, each], np.array([8 + len(each)])) for each in (left, right)]
    model = models("grouped heads")
    monkeypatch.setattr(node_attention, "SMALL", 0)  # one call for each node
    make = NodeAttention._make_queries

    def faulty(self, window, only_reads):
        made = make(self, window, only_reads)
        last = made[-1]
        if fault == "sees a sibling":
            path = (0, 1, 2)
            mask = torch.nn.functional.pad(last.mask, (self.sizes[1], 0))
        elif fault == "misses its parent":
            path, mask = last.path, last.mask.clone()
            mask[:, 0] = -torch.inf
        else:
            path, mask = last.path, torch.zeros_like(last.mask)
        return [*made[:-1], node_attention.PartQueries(last.count, path, mask)]

    expected = plain_gradients(model, texts)
    assert difference(tree_gradients(model, texts, fuse=fuse), expected) < TOLERANCE
    monkeypatch.setattr(NodeAttention, "_make_queries", faulty)
    assert difference(tree_gradients(model, texts, fuse=fuse), expected) > 10 * TOLERANCE


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("only_reads", [False, True])
@settings(max_examples=3)
@given(texts=sequences())
def test_attention_of_nodes_equals_dense_attention_in_float64(window, only_reads, texts):
    tree = tree_of(texts)
    query, key, value = (each.double().requires_grad_() for each in states(tree, key_heads=2))
    expected = dense_attention(query, key, value, tree, window)[0]
    rows = torch.from_numpy(tree.read_indices) if only_reads else slice(None)
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    got = NodeAttention(tree)(LayerCall(0, 16**-0.5, window, only_reads), q[rows], k, v)
    torch.testing.assert_close(got, expected[rows], atol=1e-12, rtol=0)
    factors = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((got * factors).sum(), (query, key, value), retain_graph=True)
    plain = torch.autograd.grad((expected[rows] * factors).sum(), (query, key, value))
    torch.testing.assert_close(ours, plain, atol=1e-12, rtol=0)


def add_hook(model):
    model.base_model.layers[0].register_forward_hook(lambda module, inputs, output: 2 * output)


def add_adapter(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)


@pytest.mark.parametrize("change", [add_hook, add_adapter])
def test_a_changed_model_runs_its_own_layers(change, models):
    model = copy.deepcopy(models("norms of queries and keys"))
    decoder = DecoderBackbone(model)
    decoder.fuse = True
    change(model)
    texts = [TokenSequence(np.arange(5, 20, dtype=np.int32), np.array([3, 14]))]
    (tree,) = plan_trees(texts, max_num_batched_tokens=100).batches
    got = gradients(model, decoder.hidden_states(tree))
    expected = plain_gradients(model, texts)
    assert difference(got, expected) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("gradient", [True, False])
def test_mixed_precision_stays_near_the_plain_forward_in_it(dtype, gradient, models):
    model = models("norms of queries and keys")
    texts = [TokenSequence(np.arange(5, 20 + k, dtype=np.int32), np.array([14 + k])) for k in range(3)]
    plan = plan_trees(texts, max_num_batched_tokens=100)
    decoder = DecoderBackbone(model)
    decoder.fuse = True
    with torch.set_grad_enabled(gradient), torch.autocast("cpu", dtype):
        got = decoder.hidden_states(plan.batches[0])[torch.from_numpy(plan.value_index)]
        rows = [
            model.base_model(input_ids=torch.from_numpy(each.input_ids.astype(np.int64))[None]).last_hidden_state[0, -1]
            for each in texts
        ]
    torch.testing.assert_close(got, torch.stack(rows), atol=0.1, rtol=0.05)
