import functools
import weakref

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import gym_rm
from gym_rm import ConfigError
from gym_rm.engine.backbones import low_precision
from gym_rm.engine.backbones.batch_invariance import BatchInvariant
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
def test_int8_is_the_product_of_rounded_weights_and_activations_of_two_terms(rows, inputs, outputs, seed):
    linear, layer = make_layer(Int8Linear, inputs, outputs, bias=False, seed=seed)
    x = torch.randn(rows, inputs)

    def scaled(matrix):
        scale = np.abs(matrix).max(axis=1, keepdims=True) / 127
        return matrix / scale, scale

    (xs, x_scale), (ws, w_scale) = scaled(x.numpy()), scaled(linear.weight.numpy())
    xs = np.rint(xs) + np.rint((xs - np.rint(xs)) * 256).clip(-127, 127) / 256
    np.testing.assert_allclose(layer(x).numpy(), (xs @ np.rint(ws).T) * x_scale * w_scale.T, rtol=1e-4, atol=1e-4)


def test_an_outlier_leaves_the_other_numbers_of_a_token_precise():
    linear, layer = make_layer(Int8Linear, 512, 64, bias=False)
    x = torch.randn(4, 512)
    x[:, 7] = 300.0
    rest = linear.weight.clone()
    rest[:, 7] = 0
    error = layer(x) - x @ (layer.weight * layer.scale.T).T
    assert error.std() < 0.02 * (x @ rest.T).std()  # 0.7 with one term


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


@pytest.mark.parametrize("architecture", ["qwen3", "bert"])
def test_a_quantized_scorer_stays_close_and_independent_of_its_batch(architecture, saved_model, gsm8k_groups):
    conversations = [chat for group in gsm8k_groups[:3] for chat in group]
    folder = str(saved_model(architecture))
    exact = gym_rm.load_scorer(folder).score(conversations).rewards
    scorer = gym_rm.load_scorer(folder, quantization="int8", check=architecture == "bert")
    quantized = scorer.score(conversations)
    assert not np.array_equal(quantized.rewards, exact)
    assert np.abs(quantized.rewards - exact).mean() < 0.3 * exact.std()
    assert quantized.provenance.settings["quantization"] == "int8"
    alone = np.concatenate([scorer.score([conversation]).rewards for conversation in conversations])
    assert np.array_equal(quantized.rewards, alone)
    (model,) = scorer.executor.models
    head = getattr(model, "score", None) or model.classifier
    assert type(head) is nn.Linear


def test_invalid_quantization_is_refused(saved_model):
    with pytest.raises(ConfigError, match="quantization must be 'int8' or 'fp8', got 'int3'"):
        gym_rm.load_scorer(quantization="int3")
    with pytest.raises(ConfigError, match="needs an Ada, Hopper or newer GPU, but the model is on cpu"):
        gym_rm.load_scorer(device="cpu", quantization="fp8")
    with pytest.raises(ConfigError, match="found no linear layers to replace in GPT2"):
        gym_rm.load_scorer(str(saved_model("gpt2")), quantization="int8", check=False)
    with pytest.raises(ConfigError, match=r"'int8' is refused for decoders: .* check=False loads it nevertheless"):
        gym_rm.load_scorer(str(saved_model("qwen3")), quantization="int8")
    with pytest.raises(ConfigError, match="needs a CPU, but the model is on cuda"):
        quantize_layers(tiny_models.reward_model("qwen3"), "int8", torch.device("cuda"))


def test_a_model_that_was_passed_in_is_not_quantised(saved_model):
    scorer = gym_rm.load_scorer(str(saved_model("qwen3")))
    with pytest.raises(ConfigError, match="needs a model of its own: save yours with save_pretrained"):
        gym_rm.RewardModelScorer(scorer.executor.models[0], scorer.renderer.tokenizer, quantization="int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_number_of_a_row_does_not_overflow(dtype):
    torch.manual_seed(0)
    linear = torch.nn.Linear(32, 256, bias=False).to(dtype)
    layer = Int8Linear(linear)
    restored = layer.weight.float() * layer.scale.float().reshape(-1, 1)
    error = (restored - linear.weight.detach().float()).abs().amax(dim=1)
    assert (error <= 0.51 * layer.scale.float().reshape(-1)).all()


def test_the_weights_of_a_layer_are_freed_before_the_next_layer_is_quantised(monkeypatch):
    model = tiny_models.reward_model("qwen3", num_hidden_layers=6)
    weights = [weakref.ref(each.weight) for each in model.base_model.modules() if isinstance(each, nn.Linear)]
    held = []
    assign = Int8Linear.assign
    monkeypatch.setattr(
        Int8Linear, "assign", lambda *args: assign(*args) or held.append(sum(w() is not None for w in weights))
    )
    quantize_layers(model, "int8", torch.device("cpu"))
    assert held[0] == len(weights) > 5 * held[-1]


@pytest.mark.slow
@torch.inference_mode()
def test_compiled_quantisation_has_the_bits_of_its_operations_and_one_graph_for_any_number_of_rows(monkeypatch):
    counter = CompileCounterWithBackend("inductor")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    monkeypatch.setattr(low_precision, "COMPILED_ON", ("cpu",))
    low_precision._compiled.cache_clear()
    torch._dynamo.reset()
    for inputs in (64, 80):
        for rows in (1, 7, 48, 2):
            x = 1000 * torch.randn(rows, inputs, dtype=torch.bfloat16)
            x[0, 0] = torch.inf
            with BatchInvariant():
                got = Float8Linear.quantize(x)
            for result, expected in zip(got, Float8Linear.quantized(x), strict=True):
                torch.testing.assert_close(result.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
    assert counter.frame_count <= 4  # one row is a case of its own
    low_precision._compiled.cache_clear()
