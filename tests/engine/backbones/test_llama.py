"""`llama_forward` replaces the model's own only while the modules compute what it computes."""

import types

import numpy as np
import pytest
import tiny_models
import torch
from torch import nn

import gym_rm
from gym_rm.engine.backbones.llama import llama_code
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


CHANGES = [
    replace_epsilon,
    leave_out_a_layer,
    add_adapter,
    add_hook,
    replace_head,
    replace_activation,
    replace_norm,
    replace_forward,
    replace_class,
    replace_embedding,
]


@pytest.mark.parametrize(("change", "options"), [*((each, {}) for each in CHANGES), (add_hook, {"tree": False})])
def test_a_change_of_the_model_after_the_scorer_was_made_counts(change, options):
    model, tokenizer = tiny_models.reward_model("llama"), tiny_models.tokenizer("llama3")
    scorer = gym_rm.RewardModelScorer(model, tokenizer, **options)
    before = scorer.score(CONVERSATIONS).rewards
    change(model)
    expected = plain_rewards(model, tokenizer)
    assert np.abs(expected - before).min() > 0.01
    np.testing.assert_allclose(scorer.score(CONVERSATIONS).rewards, expected, atol=1e-5)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_scored_by_its_own_forward(change):
    model, tokenizer = tiny_models.reward_model("llama"), tiny_models.tokenizer("llama3")
    change(model)
    rewards = gym_rm.RewardModelScorer(model, tokenizer).score(CONVERSATIONS).rewards
    np.testing.assert_allclose(rewards, plain_rewards(model, tokenizer), atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_unchanged_models_are_fused(architecture):
    assert llama_code(tiny_models.reward_model(architecture).base_model) is not None


def test_an_activation_of_another_library_is_not_fused():
    """In low precision, the trial at load cannot tell a similar activation from rounding."""
    model = tiny_models.reward_model("qwen3").bfloat16()
    model.base_model.layers[1].mlp.act_fn = types.new_class("Swish", (nn.SiLU,))()
    assert llama_code(model.base_model) is None


def test_attention_to_later_tokens_is_not_fused():
    model = tiny_models.reward_model("qwen3")
    model.base_model.layers[0].self_attn.is_causal = False
    assert llama_code(model.base_model) is None
