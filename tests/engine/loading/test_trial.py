"""The layout trial refuses trees where rounding would hide a wrong value."""

import numpy as np
import pytest
import tiny_models
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from gym_rm.engine.executors.executor import LoadSpec
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.kinds.readouts import ModuleHead
from gym_rm.engine.loading.trial import UNCHANGED, trial_sequences
from gym_rm.engine.token_tree import plan_trees

precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def layout_of(model):
    return LocalExecutor().load(LoadSpec(model, ModuleHead("score"))).layout


@precisions
@pytest.mark.parametrize("initializer_range", [0.02, 0.3])
@pytest.mark.parametrize(
    ("architecture", "config"),
    [("rwkv", {"attention_hidden_size": 32}), ("openai-gpt", {"n_embd": 32, "n_layer": 2, "n_head": 4})],
)
def test_a_backbone_that_ignores_the_tree_is_refused(architecture, config, initializer_range, dtype):
    sizes = {**tiny_models.SMALL, "vocab_size": 400, **config, "initializer_range": initializer_range}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes)).to(dtype).eval()
    model.score = nn.Linear(32, 1, dtype=dtype)
    assert layout_of(model) == "padded"


@precisions
def test_a_backbone_that_mixes_neighbouring_tokens_is_refused(dtype):
    """As a causal convolution does; every layer attends to the tree, and the difference is below the rounding."""
    model = tiny_models.reward_model("qwen3", initializer_range=0.02).to(dtype)

    def mix(module, inputs, output):
        return output + 1e-2 * torch.roll(output, 1, dims=1) * (torch.arange(output.shape[1]) > 0)[None, :, None]

    model.base_model.layers[0].mlp.register_forward_hook(mix)
    assert layout_of(model) == "padded"


@precisions
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_a_backbone_that_computes_its_own_positions_is_refused(architecture, dtype):
    model = tiny_models.reward_model(architecture, initializer_range=0.02).to(dtype)
    backbone = model.base_model

    def forward(input_ids, position_ids=None, **options):
        positions = torch.arange(input_ids.shape[1])[None]
        return type(backbone).forward(backbone, input_ids, position_ids=positions, **options)

    backbone.forward = forward
    assert layout_of(model) == "padded", "and the fused forward does not replace that of the user"


@precisions
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "mixtral", "gpt_oss", "deepseek_v3"])
def test_correct_trees_are_accepted(architecture, dtype):
    assert layout_of(tiny_models.reward_model(architecture, initializer_range=0.02).to(dtype)) == "tree"


def test_kernels_that_return_other_bits_for_the_same_input_are_accepted():
    model = tiny_models.reward_model("qwen3")

    def vary(module, inputs, output):
        return output * (1 + 1e-7 * torch.randn_like(output))

    model.base_model.layers[0].mlp.register_forward_hook(vary)
    assert layout_of(model) == "tree"


def test_only_the_other_branches_change():
    config = tiny_models.reward_model("qwen3").config
    before, after = trial_sequences(config), trial_sequences(config, changed=True)
    same = [np.array_equal(one.input_ids, other.input_ids) for one, other in zip(before, after, strict=True)]
    assert same == [True, False, True, False, False]
    assert same[UNCHANGED]
    trees = [plan_trees(each, max_num_batched_tokens=1000) for each in (before, after)]
    assert np.array_equal(trees[0].batches[0].position_ids, trees[1].batches[0].position_ids)
    assert np.array_equal(trees[0].value_index, trees[1].value_index)
