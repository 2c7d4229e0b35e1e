"""Gradients over trees equal those of the plain forward of transformers, one sequence at a time."""

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.engine.backbones.decoder import DecoderBackbone
from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.token_tree import TokenSequence

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
    "adapters": ("qwen2", {}),
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
            if name == "adapters":
                peft = pytest.importorskip("peft")
                config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
                peft.inject_adapter_in_model(config, made[name])
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


@pytest.mark.parametrize("gradient", [True, False])
def test_mixed_precision_stays_near_the_plain_forward_in_it(gradient, models):
    model = models("norms of queries and keys")
    texts = [TokenSequence(np.arange(5, 20 + k, dtype=np.int32), np.array([14 + k])) for k in range(3)]
    plan = plan_trees(texts, max_num_batched_tokens=100)
    decoder = DecoderBackbone(model)
    decoder.fuse = True
    with torch.set_grad_enabled(gradient), torch.autocast("cpu", torch.bfloat16):
        got = decoder.hidden_states(plan.batches[0])[torch.from_numpy(plan.value_index)]
        rows = [
            model.base_model(input_ids=torch.from_numpy(each.input_ids.astype(np.int64))[None]).last_hidden_state[0, -1]
            for each in texts
        ]
    torch.testing.assert_close(got, torch.stack(rows), atol=0.1, rtol=0.05)
