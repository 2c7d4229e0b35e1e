"""Every path of a GPU, without one: see `fake_cuda`. What is checked are devices, shapes, types, and waits of the host.

A test is a function of the architecture, so that another one needs only its name in `DECODERS` or `ENCODERS`.
"""

import numpy as np
import pytest
import tiny_models
import torch

from gym_rm.engine.backbones import batch_invariance, low_precision
from gym_rm.engine.backbones.batch_invariance import BatchInvariant, same_products
from gym_rm.engine.backbones.decoder import DecoderBackbone
from gym_rm.engine.backbones.devices import pinned_like
from gym_rm.engine.backbones.invariant_products import LADDER, GemmRows
from gym_rm.engine.backbones.low_precision import Float8Linear, quantize_layers
from gym_rm.engine.backbones.prefix_cache import PrefixCache
from gym_rm.engine.backbones.reward_model import make_reward_model
from gym_rm.engine.batch_planning import plan_padded, plan_trees
from gym_rm.engine.executors import loaded_model
from gym_rm.engine.executors.executor import LoadSpec
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.kinds.readouts import ClassifierLogits, ModuleHead, TokenLogits, TokenLogProbabilities
from gym_rm.engine.loading.trial import Forward, trial_sequences
from gym_rm.engine.token_tree import TokenSequence
from gym_rm.generation.decoding import LeanDecoder, lean_obstacle
from gym_rm.generation.model_decoding import ModelDecoder
from gym_rm.generation.sampling import draw, trial
from tests.engine.fake_cuda import DEVICE, fake_gpu, on_gpu

DECODERS = ("qwen3", "gemma2", "gpt_oss", "mixtral", "gpt2")
FUSED = ("qwen3",)
ENCODERS = ("bert",)
FEW = ("qwen3", "gemma2")  # one that is fused, and one with soft caps
KERNELS_PER_LAYER = {False: 30, True: 13}  # without and with those of the package
HEAD = ModuleHead("score")


@pytest.fixture
def gpu():
    with fake_gpu() as record:
        yield record


def rewards(architecture, **overrides):
    return on_gpu(tiny_models.reward_model, architecture, **overrides)


def policy(architecture):
    return on_gpu(tiny_models.policy, architecture)


def batch_of(model, layout="tree"):
    """Five texts with shared prefixes as one batch, each read at its end; the batch has 5 reads."""
    plan = {"tree": plan_trees, "padded": plan_padded}[layout]
    texts = [
        TokenSequence(each.input_ids, each.read_positions[-1:]) for each in trial_sequences(model.config, 24, 8)[:5]
    ]
    (batch,) = plan(texts, max_num_batched_tokens=10**6).batches
    return batch


def hidden_states(model, batch, *, fuse=True, kernels=False, rows=None, prefix_cache=None):
    if kernels:
        pytest.importorskip("triton")
    decoder = DecoderBackbone(model, prefix_cache)
    decoder.use(fuse=decoder.fuse and fuse, kernels=kernels)
    with torch.inference_mode(), BatchInvariant(rows):
        return decoder.hidden_states(batch)


def require(values, shape, dtype):
    assert (values.device, tuple(values.shape), values.dtype) == (DEVICE, shape, dtype)


# --- the backbone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "layout", "fuse"),
    [(name, layout, False) for name in DECODERS for layout in ("tree", "padded")]
    + [(name, "tree", True) for name in FUSED],
)
def test_a_batch_runs_without_waits(gpu, architecture, layout, fuse):
    model = rewards(architecture)
    hidden = hidden_states(model, batch_of(model, layout), fuse=fuse)
    require(hidden, (5, model.config.hidden_size), torch.bfloat16)
    assert gpu.waits == []


@pytest.mark.parametrize("architecture", DECODERS)
def test_a_tree_runs_with_the_kernels_without_waits(gpu, architecture):
    model = rewards(architecture)
    hidden = hidden_states(model, batch_of(model), kernels=True)
    require(hidden, (5, model.config.hidden_size), torch.bfloat16)
    assert gpu.waits == []
    assert gpu.kernels.count("gym_rm.attend.default") == model.config.num_hidden_layers


@pytest.mark.parametrize("rows", LADDER["cuda"], ids=str)
def test_products_of_these_rows_run_without_waits(gpu, rows):
    model = rewards(FUSED[0])
    require(hidden_states(model, batch_of(model), rows=rows), (5, model.config.hidden_size), torch.bfloat16)
    assert gpu.waits == []


@pytest.mark.parametrize("architecture", FUSED)
def test_the_prefix_cache_runs_without_waits(gpu, architecture):
    model, cache = rewards(architecture), PrefixCache(512)
    *others, watched = trial_sequences(model.config)
    for sequences in ([watched], [watched, *others]):
        (batch,) = plan_trees(sequences, max_num_batched_tokens=10**6).batches
        hidden = hidden_states(model, batch, prefix_cache=cache)
    require(hidden, (batch.num_reads, model.config.hidden_size), torch.bfloat16)
    assert gpu.waits == []


@pytest.mark.parametrize("architecture", FUSED)
def test_eight_bit_products_run_without_waits(gpu, architecture, monkeypatch):
    model = rewards(architecture)
    monkeypatch.setattr(low_precision, "COMPILED_ON", ())
    quantize_layers(model, "fp8", DEVICE)
    gpu.clear()
    require(hidden_states(model, batch_of(model)), (5, model.config.hidden_size), torch.bfloat16)
    assert gpu.waits == []


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("architecture", FUSED)
def test_a_fused_layer_launches_few_kernels(gpu, architecture, kernels):
    counts = []
    for layers in (2, 3):
        model = rewards(architecture, num_hidden_layers=layers)
        gpu.clear()
        hidden_states(model, batch_of(model), kernels=kernels)
        counts.append(len(gpu.kernels))
    assert counts[1] - counts[0] <= KERNELS_PER_LAYER[kernels]


@pytest.mark.parametrize(("layer", "product"), [(torch.nn.Linear, "mm.default"), (Float8Linear, "_scaled_mm.default")])
def test_products_of_every_number_of_rows_are_compared_with_few_waits(gpu, monkeypatch, layer, product):
    monkeypatch.setattr(low_precision, "COMPILED_ON", ())
    monkeypatch.setitem(batch_invariance.TESTED_ROWS, "cuda", 1040)
    assert same_products.__wrapped__(GemmRows(), layer, (64, 32), torch.bfloat16, DEVICE, 1)
    assert gpu.kernels.count(product) == 1 + 1040 // 16
    assert gpu.waits == ["_same_rows: _local_scalar_dense.default reads numbers"] * 2


# --- readouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("architecture", FEW)
def test_logits_of_tokens_are_float32_without_waits(gpu, architecture, replaced):
    model = policy(architecture)
    head = make_reward_model(TokenLogits((7, 9)), model)
    if replaced:  # the layer of logits computes something of its own
        model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: output + 1)
    gpu.clear()
    with torch.inference_mode():
        require(head.values(batch_of(model)), (5, 2), torch.float32)
    assert gpu.waits == []


@pytest.mark.parametrize(("architecture", "layout"), [*((name, "tree") for name in FEW), (FEW[0], "padded")])
def test_log_probabilities_are_float32_without_waits(gpu, architecture, layout):
    both = make_reward_model(TokenLogProbabilities(), policy(architecture), policy(architecture))
    gpu.clear()
    with torch.inference_mode():
        require(both.values(batch_of(both.models[0], layout)), (5, 2), torch.float32)
    assert gpu.waits == []


@pytest.mark.parametrize("architecture", ENCODERS)
def test_a_classifier_returns_float32_without_waits(gpu, architecture):
    model = rewards(architecture)
    classifier = make_reward_model(ClassifierLogits(), model)
    with torch.inference_mode():
        require(classifier.values(batch_of(model, "padded")), (5, 1), torch.float32)
    assert gpu.waits == []


# --- the executor ----------------------------------------------------------------------------------------------------


def loaded(monkeypatch, model, layout="tree", readout=HEAD):
    """An executor whose trial runs, and then chooses the fastest forward of this layout: fake values agree."""

    def choose(candidate, run, *_, **__):
        chosen = Forward(layout, fuse=layout == "tree" and candidate.can_fuse)
        plan = {"tree": plan_trees, "padded": plan_padded}[layout]
        run(plan(trial_sequences(candidate.config), max_num_batched_tokens=10**6), chosen)
        return chosen

    monkeypatch.setattr(loaded_model, "verify", choose)
    executor = LocalExecutor()
    info = executor.load(LoadSpec(model, readout))
    assert (info.device, info.dtype, info.layout) == (str(DEVICE), "bfloat16", layout)
    return executor


@pytest.mark.parametrize("architecture", [*FEW, *ENCODERS])
def test_the_executor_waits_once_for_the_values_of_all_batches(gpu, monkeypatch, architecture):
    layout, readout = ("padded", ClassifierLogits()) if architecture in ENCODERS else ("tree", HEAD)
    model = rewards(architecture, num_labels=3)
    executor = loaded(monkeypatch, model, layout, readout)
    gpu.clear()
    results = executor.run([batch_of(model, layout)] * 3)
    assert [result.error for result in results] == [None] * 3
    assert [(result.values.shape, result.values.dtype) for result in results] == [((5, 3), np.float32)] * 3
    assert gpu.waits == ["run: _to_copy.default from cuda to cpu"]


@pytest.mark.parametrize("architecture", FUSED)
def test_a_model_that_slept_and_woke_runs_as_before(gpu, monkeypatch, architecture):
    model = rewards(architecture)
    executor = loaded(monkeypatch, model)
    executor.sleep()
    gpu.clear()
    executor.wake()
    assert gpu.waits == []
    assert [result.error for result in executor.run([batch_of(model)])] == [None]


@pytest.mark.parametrize("architecture", FUSED)
def test_pinned_memory_is_in_few_blocks_of_powers_of_two(gpu, architecture):
    tensors = list(rewards(architecture).parameters())
    pinned = pinned_like(tensors)
    assert [(t.shape, t.dtype, t.device.type) for t in pinned] == [(t.shape, t.dtype, "cpu") for t in tensors]
    blocks = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in pinned}.values()
    assert all(size.bit_count() == 1 for size in blocks)
    assert len(blocks) < len(tensors) / 2
    assert sum(blocks) < 1.25 * sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("architecture", FUSED)
def test_weights_are_updated_on_the_gpu(gpu, monkeypatch, architecture):
    executor = loaded(monkeypatch, rewards(architecture))
    executor.update_weights(dict(rewards(architecture, seed=1).state_dict()))
    gpu.clear()
    assert [result.error for result in executor.run([batch_of(*executor.models)])] == [None]


# --- sampling --------------------------------------------------------------------------------------------------------


def decoder_of(model):
    return ModelDecoder(model) if lean_obstacle(model) else LeanDecoder(model)


@pytest.mark.parametrize("architecture", FEW)
def test_a_decoder_starts_steps_and_drops_rows_on_the_gpu(gpu, architecture):
    model = policy(architecture)
    assert np.isfinite(trial(model, decoder_of(model)))  # a failure is infinite


@pytest.mark.parametrize("architecture", FEW)
def test_a_token_is_sampled_without_waits(gpu, architecture):
    decoder = decoder_of(policy(architecture))
    prompts = [np.arange(5, 8, dtype=np.int32), np.arange(5, 9, dtype=np.int32)]
    decoder.start(prompts, np.array([0, 0, 1]), 4)
    tokens, uniforms = torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.zeros(3, device=DEVICE).double()
    gpu.clear()
    for _ in range(2):
        tokens, log_probs = draw(decoder.step(tokens), uniforms, 1.0)
    require(tokens, (3,), torch.int64)
    require(log_probs, (3,), torch.float32)
    assert gpu.waits == []
