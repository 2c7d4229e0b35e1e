import threading

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gym_rm
from gym_rm import ConfigError
from gym_rm.data import load_prompts
from gym_rm.engine.backbones.low_precision import Float8Linear, Int8Linear, quantize_layers


def make_layer(make, inputs=64, outputs=32, bias=True, seed=0):
    torch.manual_seed(seed)
    linear = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    return linear, make(linear)


def cpu_has_float8():
    """Return whether torch multiplies 8-bit floats with a scale per row on a CPU, as newer versions do."""
    try:
        make_layer(Float8Linear)[1](torch.ones(1, 64))
    except RuntimeError:
        return False
    return True


without_float8 = pytest.mark.skipif(not cpu_has_float8(), reason="this torch has no such products on a CPU")
each_format = pytest.mark.parametrize("make", [Int8Linear, pytest.param(Float8Linear, marks=without_float8)])


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 40), inputs=st.integers(2, 90), outputs=st.integers(1, 70), seed=st.integers(0, 9))
def test_int8_is_the_product_of_rounded_integers(rows, inputs, outputs, seed):
    linear, layer = make_layer(Int8Linear, inputs, outputs, bias=False, seed=seed)
    x = torch.randn(rows, inputs)

    def rounded(matrix):
        scale = np.abs(matrix).max(axis=1, keepdims=True) / 127
        return np.rint(matrix / scale), scale

    (xs, x_scale), (ws, w_scale) = rounded(x.numpy()), rounded(linear.weight.numpy())
    np.testing.assert_allclose(layer(x).numpy(), (xs @ ws.T) * x_scale * w_scale.T, rtol=1e-4, atol=1e-5)


@each_format
def test_the_output_is_close_to_that_of_the_replaced_layer(make):
    linear, layer = make_layer(make)
    x = torch.randn(3, 5, 64)
    assert layer(x).shape == (3, 5, 32)
    assert (layer(x) - linear(x)).norm() < 0.05 * linear(x).norm()


@each_format
def test_a_row_does_not_depend_on_other_rows(make):
    _, layer = make_layer(make)
    x = torch.randn(40, 64)
    x[7] *= 1e4
    together = layer(x)
    for row in range(0, 40, 7):
        torch.testing.assert_close(layer(x[row : row + 1])[0], together[row], rtol=0, atol=0)


@each_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_does_not_change_other_rows(make, bad):
    _, layer = make_layer(make)
    x = torch.randn(4, 64)
    expected = layer(x)
    x[2, 5] = bad
    output = layer(x)
    assert not output[2].isfinite().any()
    torch.testing.assert_close(output[[0, 1, 3]], expected[[0, 1, 3]], rtol=0, atol=0)


@each_format
def test_the_output_of_a_row_of_zeros_is_the_bias(make):
    linear, layer = make_layer(make)
    torch.testing.assert_close(layer(torch.zeros(1, 64))[0], linear.bias)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "bert"])
def test_a_quantized_scorer_stays_close_and_independent_of_its_batch(architecture, saved_model, gsm8k_groups):
    conversations = [chat for group in gsm8k_groups[:3] for chat in group]
    folder = str(saved_model(architecture))
    exact = gym_rm.load_scorer(folder).score(conversations).rewards
    scorer = gym_rm.load_scorer(folder, quantization="int8")
    quantized = scorer.score(conversations)
    assert not np.array_equal(quantized.rewards, exact)
    assert np.abs(quantized.rewards - exact).max() < 0.6 * exact.std()
    assert quantized.provenance.settings["quantization"] == "int8"
    alone = np.concatenate([scorer.score([conversation]).rewards for conversation in conversations])
    assert np.array_equal(quantized.rewards, alone)
    (model,) = scorer.executor.models
    head = getattr(model, "score", None) or model.classifier
    assert type(head) is nn.Linear


def test_quantised_scores_of_the_embedded_model_correlate_with_exact_scores():
    conversations = [
        [*prompt.messages, {"role": "assistant", "content": f"It is {number}."}]
        for prompt in load_prompts(limit=60)
        for number in range(int(prompt.answer) % 7, 100, 7)
    ]
    exact = gym_rm.load_scorer().score(conversations).rewards
    quantized = gym_rm.load_scorer(quantization="int8").score(conversations).rewards
    assert np.corrcoef(exact, quantized)[0, 1] > 0.99


def test_invalid_quantization_is_refused(saved_model):
    with pytest.raises(ConfigError, match="quantization must be 'int8' or 'fp8', got 'int3'"):
        gym_rm.load_scorer(quantization="int3")
    with pytest.raises(ConfigError, match="needs an Ada, Hopper or newer GPU, but the model is on cpu"):
        gym_rm.load_scorer(device="cpu", quantization="fp8")
    with pytest.raises(ConfigError, match="found no linear layers to replace in GPT2"):
        gym_rm.load_scorer(str(saved_model("gpt2")), quantization="int8")
    with pytest.raises(ConfigError, match="needs a CPU, but the model is on cuda"):
        quantize_layers(tiny_models.reward_model("qwen3"), "int8", torch.device("cuda"))


def test_the_provenance_of_a_quantised_model_has_the_format(saved_model):
    first = gym_rm.load_scorer(str(saved_model("qwen3")), quantization="int8")
    model, tokenizer = first.executor.models[0], first.renderer.tokenizer
    for options in ({}, {"quantization": "int8"}):
        scorer = gym_rm.RewardModelScorer(model, tokenizer, **options)
        assert scorer.provenance.settings["quantization"] == "int8"


def test_a_model_that_does_not_run_with_quantised_layers_is_refused(saved_model, monkeypatch):
    def forward(self, x):
        raise RuntimeError("expected scalar type Float but found Char")

    monkeypatch.setattr(Int8Linear, "forward", forward)
    with pytest.raises(ConfigError, match="does not run with quantised layers: expected scalar type Float"):
        gym_rm.load_scorer(str(saved_model("bert")), quantization="int8")


def test_quantising_does_not_change_a_model_that_was_passed_in(saved_model, gsm8k_groups):
    scorer = gym_rm.load_scorer(str(saved_model("qwen3")))
    model, tokenizer = scorer.executor.models[0], scorer.renderer.tokenizer
    before = scorer.score(gsm8k_groups[0]).rewards
    quantized = gym_rm.RewardModelScorer(model, tokenizer, quantization="int8")
    assert quantized.provenance.settings["quantization"] == "int8"
    assert np.array_equal(scorer.score(gsm8k_groups[0]).rewards, before)
    assert type(model.base_model.layers[0].self_attn.q_proj) is nn.Linear
    shared = quantized.executor.models[0]
    assert shared.base_model.embed_tokens.weight is model.base_model.embed_tokens.weight, (
        "tensors are shared, except those of linear layers"
    )
    assert shared.config is not model.config


def test_attributes_that_cannot_be_copied_do_not_disturb_int8(saved_model, gsm8k_groups):
    plain = gym_rm.load_scorer(str(saved_model("qwen3")))
    model, tokenizer = plain.executor.models[0], plain.renderer.tokenizer
    quantized = gym_rm.RewardModelScorer(model, tokenizer, quantization="int8")
    before = quantized.score(gsm8k_groups[0]).rewards
    model.lock, model.activations = threading.Lock(), torch.ones(1, requires_grad=True) * 2
    quantized.clear_cache()
    assert np.array_equal(quantized.score(gsm8k_groups[0]).rewards, before)


def test_clear_cache_quantises_trained_weights_again(saved_model, gsm8k_groups):
    scorer = gym_rm.load_scorer(str(saved_model("qwen3")))
    model, tokenizer = scorer.executor.models[0], scorer.renderer.tokenizer
    quantized = gym_rm.RewardModelScorer(model, tokenizer, quantization="int8")
    before = quantized.score(gsm8k_groups[0]).rewards
    with torch.no_grad():
        for layer in model.base_model.layers:
            layer.mlp.up_proj.weight.mul_(-1.5)
    quantized.clear_cache()
    after = quantized.score(gsm8k_groups[0]).rewards
    exact = scorer.score(gsm8k_groups[0]).rewards
    assert np.abs(after - before).max() > 0.1
    assert np.abs(after - exact).max() < 0.5 * exact.std()


def adapted(model):
    """Attach a LoRA adapter with large random weights."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj", "v_proj", "down_proj"])
    wrapped = peft.get_peft_model(model, config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    return wrapped.get_base_model()


@pytest.mark.parametrize("attach", ["before", "after"])
def test_int8_scores_of_a_model_with_an_adapter_are_close(attach, saved_model, gsm8k_groups):
    plain = gym_rm.load_scorer(str(saved_model("qwen3")))
    model, tokenizer = plain.executor.models[0], plain.renderer.tokenizer
    if attach == "before":
        model = adapted(model)
    quantized = gym_rm.RewardModelScorer(model, tokenizer, quantization="int8")
    if attach == "after":
        model = adapted(model)
        quantized.clear_cache()
    exact = gym_rm.RewardModelScorer(model, tokenizer).score(gsm8k_groups[0]).rewards
    assert np.abs(quantized.score(gsm8k_groups[0]).rewards - exact).max() < 0.2 * exact.std()


def test_int8_uses_a_replaced_head_and_assigned_weights_after_clear_cache(saved_model, gsm8k_groups):
    plain = gym_rm.load_scorer(str(saved_model("qwen3")))
    model, tokenizer = plain.executor.models[0], plain.renderer.tokenizer
    quantized = gym_rm.RewardModelScorer(model, tokenizer, quantization="int8")
    torch.manual_seed(0)
    model.score = nn.Linear(model.config.hidden_size, 1, bias=False)
    model.load_state_dict({name: 1.1 * tensor for name, tensor in model.state_dict().items()}, assign=True)
    quantized.clear_cache()
    exact = gym_rm.RewardModelScorer(model, tokenizer).score(gsm8k_groups[0]).rewards
    assert np.abs(quantized.score(gsm8k_groups[0]).rewards - exact).max() < 0.2 * exact.std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_number_of_a_row_does_not_overflow(dtype):
    torch.manual_seed(0)
    linear = torch.nn.Linear(32, 256, bias=False).to(dtype)
    layer = Int8Linear(linear)
    restored = layer.weight.float() * layer.scale.float().reshape(-1, 1)
    error = (restored - linear.weight.detach().float()).abs().amax(dim=1)
    assert (error <= 0.51 * layer.scale.float().reshape(-1)).all()


def test_int8_leaves_out_layers_whose_adapter_reads_the_weight(saved_model):
    peft = pytest.importorskip("peft")
    model = tiny_models.reward_model("qwen3")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, use_dora=True)
    adapted = peft.get_peft_model(model, config).get_base_model()
    tokenizer = tiny_models.tokenizer("qwen")
    conversations = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"It is {n}."}] for n in range(8)
    ]
    expected = gym_rm.RewardModelScorer(adapted, tokenizer).score(conversations).rewards
    rewards = gym_rm.RewardModelScorer(adapted, tokenizer, quantization="int8").score(conversations).rewards
    assert np.abs(rewards - expected).max() < 0.2


def test_an_interrupt_while_weights_are_quantised_again_keeps_the_scorer(monkeypatch):
    from gym_rm.engine.executors import local

    model, tokenizer = tiny_models.reward_model("qwen3"), tiny_models.tokenizer("qwen")
    scorer = gym_rm.RewardModelScorer(model, tokenizer, quantization="int8")
    conversations = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]]
    before = scorer.score(conversations).rewards
    model.score.weight.data.mul_(2)
    with monkeypatch.context() as patch:
        patch.setattr(local, "quantize_layers", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            scorer.score(conversations)
    np.testing.assert_allclose(scorer.score(conversations).rewards, 2 * before, rtol=1e-4)
