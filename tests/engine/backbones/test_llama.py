"""`llama_forward` replaces the model's own only while the modules compute what it computes."""

import types

import numpy as np
import pytest
import tiny_models
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gym_rm
from gym_rm.engine.backbones import llama
from gym_rm.engine.backbones.batch_invariance import BatchInvariant
from gym_rm.engine.backbones.decoder import DecoderBackbone
from gym_rm.engine.backbones.invariant_products import GemmRows
from gym_rm.engine.backbones.llama import forward_fingerprint, llama_forward, rotary_positions
from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.token_tree import TokenSequence
from gym_rm.errors import ConfigError
from tests.engine.watching import dialogue

CONVERSATIONS = [dialogue("What is 12 + 30?", "The sum is 42."), dialogue("What is 12 + 30?", "I don't think so.")]


@torch.inference_mode()
def plain_rewards(model, tokenizer):
    """Rewards of the model's own forward, without the scorer."""
    logits = [model(**tiny_models.plain_ids(tokenizer, each)).logits for each in CONVERSATIONS]
    return np.array([each.item() for each in logits])


def add_adapter(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)


def add_hook(model):
    model.base_model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 2)


def replace_head(model):
    model.score = nn.Linear(32, 1)


def replace_activation(model):
    model.base_model.layers[0].mlp.act_fn = nn.GELU()


def replace_norm(model):
    model.base_model.norm = nn.LayerNorm(32)


def replace_forward(model):
    mlp = model.base_model.layers[0].mlp
    mlp.forward = lambda states: 2 * type(mlp).forward(mlp, states)


def replace_class(model):
    """As libraries of kernels do, which assign another class to the modules."""
    mlp = model.base_model.layers[0].mlp
    mlp.__class__ = type(
        "Doubled", (type(mlp),), {"forward": lambda self, states: 2 * self.__class__.__base__.forward(self, states)}
    )


def replace_embedding(model):
    model.base_model.embed_tokens = nn.Embedding(400, 32)


def replace_epsilon(model):
    model.base_model.norm.variance_epsilon = 0.5


def leave_out_a_layer(model):
    model.config.num_hidden_layers = 1


SAME_KINDS = [replace_epsilon, leave_out_a_layer, add_hook, replace_forward, replace_embedding]
OTHER_KINDS = [add_adapter, replace_head, replace_activation, replace_norm, replace_class]
CHANGES = SAME_KINDS + OTHER_KINDS


@pytest.mark.parametrize("change", OTHER_KINDS)
def test_other_modules_than_when_the_scorer_was_made_are_an_error(change):
    model, tokenizer = tiny_models.reward_model("llama"), tiny_models.tokenizer("llama3")
    scorer = gym_rm.RewardModelScorer(model, tokenizer)
    change(model)
    with pytest.raises(ConfigError, match="of the model have changed since the scorer was made"):
        scorer.score(CONVERSATIONS)


@pytest.mark.parametrize(("change", "options"), [*((each, {}) for each in SAME_KINDS), (add_hook, {"tree": False})])
def test_a_change_of_the_model_after_the_scorer_was_made_counts(change, options):
    model, tokenizer = tiny_models.reward_model("llama"), tiny_models.tokenizer("llama3")
    scorer = gym_rm.RewardModelScorer(model, tokenizer, **options)
    before = scorer.score(CONVERSATIONS).rewards
    change(model)
    expected = plain_rewards(model, tokenizer)
    assert np.abs(expected - before).min() > 1e-3
    np.testing.assert_allclose(scorer.score(CONVERSATIONS).rewards, expected, atol=1e-5)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_scored_by_its_own_forward(change):
    model, tokenizer = tiny_models.reward_model("llama"), tiny_models.tokenizer("llama3")
    change(model)
    rewards = gym_rm.RewardModelScorer(model, tokenizer).score(CONVERSATIONS).rewards
    np.testing.assert_allclose(rewards, plain_rewards(model, tokenizer), atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_unchanged_models_are_fused(architecture):
    assert forward_fingerprint(tiny_models.reward_model(architecture).base_model) is not None


def test_an_activation_of_another_library_is_not_fused():
    """In low precision, the trial at load cannot tell a similar activation from rounding."""
    model = tiny_models.reward_model("qwen3").bfloat16()
    model.base_model.layers[1].mlp.act_fn = types.new_class("Swish", (nn.SiLU,))()
    assert forward_fingerprint(model.base_model) is None


def test_bfloat16_is_nearer_to_float32_than_the_models_own_forward():
    model = tiny_models.reward_model("qwen3", num_hidden_layers=24).bfloat16()
    backbone, states = DecoderBackbone(model), {}
    sequence = TokenSequence(np.arange(10, 90, dtype=np.int32), np.arange(79))
    (tree,) = plan_trees([sequence], max_num_batched_tokens=1000).batches
    with torch.inference_mode():
        for fuse in (True, False):
            backbone.use(fuse=fuse, kernels=False)
            states[fuse] = backbone.hidden_states(tree)
        exact = DecoderBackbone(model.float()).hidden_states(tree)
    assert states[True].dtype is torch.bfloat16
    errors = {fuse: (each.float() - exact).norm().item() for fuse, each in states.items()}
    assert errors[True] < 0.8 * errors[False], errors


def test_attention_to_later_tokens_is_not_fused():
    model = tiny_models.reward_model("qwen3")
    model.base_model.layers[0].self_attn.is_causal = False
    assert forward_fingerprint(model.base_model) is None


# --- calls of torch


class CountsCalls(BatchInvariant):
    """Counts the calls of torch that it changes or passes on."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return super().__torch_function__(func, types, args, kwargs)


def hidden_states(context, num_layers=2):
    """Return the hidden states of 80 tokens in a context."""
    decoder = DecoderBackbone(tiny_models.reward_model("qwen3", num_hidden_layers=num_layers))
    sequence = TokenSequence(np.arange(10, 90, dtype=np.int32), np.arange(79))
    (tree,) = plan_trees([sequence], max_num_batched_tokens=1000).batches
    with torch.inference_mode(), context:
        return decoder.hidden_states(tree)


@pytest.mark.parametrize("rows", [GemmRows(), GemmRows(32, in_chunks=True)], ids=str)
def test_no_call_of_a_layer_goes_through_the_context(rows):
    shallow, deep = CountsCalls(rows), CountsCalls(rows)
    hidden_states(shallow)
    hidden_states(deep, num_layers=5)
    assert shallow.calls == deep.calls


@pytest.mark.parametrize("rows", [GemmRows(), GemmRows(32, in_chunks=True), GemmRows(24, in_chunks=True)], ids=str)
def test_products_outside_of_the_context_have_the_bits_of_those_inside(rows, monkeypatch):
    got = hidden_states(BatchInvariant(rows))
    monkeypatch.setattr(llama, "current_context", lambda: None)
    assert torch.equal(got, hidden_states(BatchInvariant(rows)))


class Kernels(TorchDispatchMode):
    """Counts the operations that compute or copy numbers."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not (func.is_view or func is torch.ops.aten.empty_like.default)
        return func(*args, **(kwargs or {}))


def kernels(num_layers):
    """Return the number of kernels of a forward in float32, without those of the attention."""
    backbone = tiny_models.reward_model("qwen3", num_hidden_layers=num_layers).base_model
    with torch.inference_mode(), BatchInvariant():
        x = backbone.embed_tokens(torch.arange(16))
        rotary = rotary_positions(backbone, x, torch.arange(16))
        with Kernels() as counted:
            llama_forward(backbone, x, rotary, lambda layer, query, key, value, **options: query)
    return counted.count


def test_a_layer_runs_few_kernels_outside_of_its_attention(monkeypatch):
    # Norms are one kernel on a GPU, and several on a CPU.
    monkeypatch.setattr(torch, "rms_norm", lambda x, shape, weight, eps: x * weight)
    assert kernels(3) - kernels(2) == 4 + 7 + 2 * 3 + 2  # norms, products, positions and the activation
