"""Models with the kernels: the trial at load uses them where they are right, and only there."""

import dataclasses
import logging
import subprocess
from unittest import mock

import numpy as np
import pytest
import tiny_models
import torch

from gym_rm.engine.backbones.decoder import DecoderBackbone
from gym_rm.engine.backbones.invariant_products import GemmRows
from gym_rm.engine.backbones.llama import forward_fingerprint
from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.executors import loaded_model
from gym_rm.engine.executors.executor import LoadSpec
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.kinds.readouts import ModuleHead
from gym_rm.engine.loading.trial import trial_sequences
from gym_rm.engine.paths import Paths
from gym_rm.errors import ConfigError
from gym_rm.policy.trained_policy import StartPolicy, TrainedPolicy
from gym_rm.training import layouts
from tests.engine.kernels.triton_device import DEVICE, needs_triton

pytestmark = needs_triton
if needs_triton.args[0] is False:
    from gym_rm.engine.kernels import elementwise, path_attention

ARCHITECTURES = ("qwen3", "mistral", "gemma2", "gpt_oss")


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch):
    for module in (loaded_model, layouts):
        monkeypatch.setattr(module, "has_kernels", lambda device, dtype: True)
    monkeypatch.setattr(loaded_model._Trial, "ladder", lambda self: [GemmRows()])


def load(architecture="qwen3", dtype=torch.float32, **options):
    model = tiny_models.reward_model(architecture, num_hidden_layers=1).to(DEVICE, dtype)
    executor = LocalExecutor()
    return executor, executor.load(LoadSpec(model, ModuleHead("score"), **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_runs_with_the_kernels(architecture, dtype):
    executor, info = load(architecture, dtype)
    assert (info.layout, info.kernels, info.batch_invariance) == ("tree", True, "bit-equal")
    assert info.fused == (forward_fingerprint(executor.models[0].base_model) is not None)


def few_texts(model):
    return trial_sequences(model.config, 24, 8)


def other_tiles(change):
    plain = Paths.query_tiles
    return mock.patch.object(Paths, "query_tiles", lambda self, *given: change(self, plain(self, *given)))


def one_token_earlier(paths, tiles):
    tiles[:, 0] = np.maximum(tiles[:, 0] - 1, 0)
    return tiles


def call_with(**changes):
    plain = path_attention._numbers
    return mock.patch.object(path_attention, "_numbers", lambda call: plain(dataclasses.replace(call, **changes)))


def without(name, plain_of):
    return mock.patch.object(elementwise, name, plain_of(getattr(elementwise, name)))


MUTATIONS = {
    "paths that start a token too early": ("qwen3", lambda: other_tiles(one_token_earlier)),
    "no window": ("mistral", lambda: call_with(window=None)),
    "a window of one token more": ("gpt_oss", lambda: call_with(window=38)),
    "no soft cap": ("gemma2", lambda: call_with(softcap=None)),
    "another scale": ("qwen3", lambda: call_with(scale=0.3)),
    "no norm of heads": ("qwen3", lambda: without("norm_rotate", lambda plain: lambda x, norm, *r: plain(x, None, *r))),
    "no rotation": ("qwen3", lambda: without("norm_rotate", lambda plain: lambda x, norm, *rotary: x)),
    "silu of the other": ("qwen3", lambda: without("silu_mul", lambda plain: lambda gate, up: plain(up, gate))),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_wrong_kernels_are_refused(name):
    architecture, mutation = MUTATIONS[name]
    with mutation():
        _, info = load(architecture)
    assert not info.kernels
    assert info.layout == "tree", "torch computes the same tree"


class CompilationError(Exception):
    __module__ = "triton.compiler.errors"


FAILURES = [
    CompilationError("no such instruction"),
    RuntimeError("Failed to find C compiler."),
    subprocess.CalledProcessError(1, ["gcc"]),
    AssertionError("libcuda.so cannot be found"),
    PermissionError("the folder of kernels"),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_kernels_that_do_not_compile_are_a_warning_by_name(error, logged):
    with mock.patch.object(path_attention, "attend", side_effect=error):
        _, info = load()
    assert (info.layout, info.kernels, info.fused) == ("tree", False, True)
    (warning,) = (each.getMessage() for each in logged.records if each.levelno == logging.WARNING)
    assert "does not compile or run here" in warning
    assert "tree, fused, kernels" in warning


def test_kernels_without_memory_are_an_error():
    with (
        mock.patch.object(path_attention, "attend", side_effect=torch.OutOfMemoryError("nothing left")),
        pytest.raises(ConfigError, match="its forward does not"),
    ):
        load()


def test_kernels_that_lose_the_bits_do_not_replace_torch(logged):
    plain = path_attention._blocks
    by_number = lambda query, value, **kind: plain(query, value, **kind) | {"n": 16 if len(query) < 100 else 32}  # noqa: E731
    with mock.patch.object(path_attention, "_blocks", by_number):
        _, info = load()
    assert (info.layout, info.kernels, info.fused, info.batch_invariance) == ("tree", False, True, "bit-equal")
    assert "do not keep the bits" in logged.text


def test_the_prefix_cache_keeps_the_bits():
    executor, info = load(prefix_cache_tokens=2000)
    assert (info.kernels, info.batch_invariance) == (True, "bit-equal")
    plan = plan_trees(few_texts(executor.models[0]), max_num_batched_tokens=10**6)
    first, second = (executor.run(plan.batches)[0] for _ in range(2))
    assert second.reused_tokens > 0
    assert np.array_equal(first.values, second.values)


def test_training_runs_with_the_kernels_and_scores_are_those_of_training():
    model = tiny_models.policy("qwen3", num_hidden_layers=1).to(DEVICE)
    policy = TrainedPolicy(StartPolicy(model, None, tiny_models.tokenizer(), "tiny"))
    layout = layouts.choose_layout(policy, model, tree=True, fuse=True)
    assert (layout.layout, layout.fuse, layout.kernels) == ("tree", True, True)
    (batch,) = plan_trees(few_texts(model), max_num_batched_tokens=10**6).batches
    with_gradients = policy.trial_values(batch)
    with torch.no_grad():
        served = policy.trial_values(batch)
    assert with_gradients.requires_grad
    assert torch.equal(with_gradients, served)


def test_a_backward_without_the_window_is_refused():
    """The trial's texts are shorter than the window, so it makes the window short."""
    plain = path_attention.attend_backward_keys
    model = tiny_models.policy("mistral", num_hidden_layers=1, sliding_window=4096).to(DEVICE)
    policy = TrainedPolicy(StartPolicy(model, None, tiny_models.tokenizer(), "tiny"))
    everything = lambda *given: plain(*given[:-1], path_attention.NO_WINDOW)  # noqa: E731
    with mock.patch.object(path_attention, "attend_backward_keys", everything):
        layout = layouts.choose_layout(policy, model, tree=True, fuse=True)
    assert not layout.kernels


@pytest.mark.parametrize("wrong", [False, True])
def test_a_backward_without_half_of_a_weights_gradient_is_refused_in_bfloat16_too(wrong):
    plain = elementwise._launch_norm_rotate_backward

    def backward(*given):
        plain(*given)
        of_weight = given[6]
        if wrong and of_weight is not None:
            of_weight[:, : of_weight.shape[1] // 2] = 0

    model = tiny_models.policy("qwen3", num_hidden_layers=1).to(DEVICE, torch.bfloat16)
    policy = TrainedPolicy(StartPolicy(model, None, tiny_models.tokenizer(), "tiny"))
    with mock.patch.object(elementwise, "_launch_norm_rotate_backward", backward):
        layout = layouts.choose_layout(policy, model, tree=True, fuse=True)
    assert layout.kernels == (not wrong)


def test_gradients_of_checkpointed_layers_are_the_same():
    model = tiny_models.reward_model("qwen3", num_hidden_layers=1).to(DEVICE)
    (batch,) = plan_trees(few_texts(model), max_num_batched_tokens=10**6).batches
    gradients = []
    for checkpointing in (False, True):
        decoder = DecoderBackbone(model)
        decoder.use(fuse=True, kernels=True)
        decoder.checkpointing = checkpointing
        loss = decoder.hidden_states(batch).square().sum()
        gradients.append(torch.autograd.grad(loss, list(model.base_model.parameters())))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
