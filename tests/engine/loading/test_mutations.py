"""The trial at load notices wrong attention, positions and products, also those that only long texts need."""

from unittest import mock

import pytest
import tiny_models
import torch

from gym_rm.engine.backbones import decoder, tree_attention
from gym_rm.engine.backbones.prefix_cache import KnownPrefixes
from gym_rm.engine.backbones.tree_attention import TreeAttention
from gym_rm.engine.executors.executor import LoadSpec
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.kinds.readouts import ModuleHead
from gym_rm.errors import ConfigError
from tests.engine.loading.mutations import MODELS, MUTATIONS, SMALL, failures, require_tree

HEAD = ModuleHead("score")
NEEDS = {"soft cap": ("gemma2",), "window": ("mistral", "gemma2", "gpt_oss"), "sinks": ("gpt_oss",)}
CASES = [
    (name, architecture, use_flex)
    for name in MUTATIONS
    for architecture in next((models for word, models in NEEDS.items() if word in name), ("qwen3",))
    for use_flex in (False, True)
    if not name.startswith("pages: " if use_flex else "flex: ")
]


def load(architecture, *, use_flex, dtype=torch.float32, **config):
    """Load a model as on a GPU if `use_flex`, and return its properties."""
    model = tiny_models.reward_model(architecture, **(MODELS[architecture] | config)).to(dtype)
    init = TreeAttention.__init__

    def with_flex(self, *arguments, **options):
        init(self, *arguments, **(options | {"use_flex": use_flex}))

    size = tree_attention.FLEX_BLOCK_SIZE if use_flex else tree_attention.PAGE_SIZE
    pages = mock.patch.object(decoder, "page_size", return_value=size)
    with pages, mock.patch.object(TreeAttention, "__init__", with_flex):
        return LocalExecutor().load(LoadSpec(model, HEAD))


@pytest.mark.parametrize("use_flex", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", MODELS)
def test_without_a_mutation_the_tree_is_used(architecture, use_flex):
    info = load(architecture, use_flex=use_flex)
    require_tree(architecture, info)
    assert info.tried_length == (401 if use_flex else 113)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "architecture", "use_flex", "dtype"),
    [
        (*case, dtype)
        for case in CASES
        for dtype in (torch.float32, torch.bfloat16)
        if dtype == torch.float32 or case[0] not in SMALL
    ],
)
def test_a_mutation_is_refused(name, architecture, use_flex, dtype):
    with MUTATIONS[name](), failures() as failed:
        assert load(architecture, use_flex=use_flex, dtype=dtype).layout != "tree"
    assert failed == [], "refused because of its values, and not because it does not run"


@pytest.mark.slow
@pytest.mark.parametrize("std", [0.02, 0.3])
@pytest.mark.parametrize("use_flex", [False, True])
@pytest.mark.parametrize("architecture", MODELS)
def test_rounding_to_16_bits_is_no_mutation(architecture, use_flex, std):
    """Nor with large weights, for which rounding changes values by a tenth."""
    require_tree(architecture, load(architecture, use_flex=use_flex, dtype=torch.bfloat16, initializer_range=std))


def test_a_model_that_cannot_run_as_a_tree_is_no_control_and_its_failure_is_told(monkeypatch):
    """As in a compiler that does not support the model: then every mutation would seem to be refused."""

    def fail(*_, **__):
        raise RuntimeError("NYI: no such heads")

    monkeypatch.setattr(TreeAttention, "__call__", fail)
    with failures() as failed:
        info = load("qwen3", use_flex=False)
    assert info.layout == "padded"
    assert "NYI: no such heads" in failed[0]
    with pytest.raises(AssertionError, match="qwen3 without a mutation"):
        require_tree("qwen3", info)


def test_a_wrong_prefix_cache_is_refused():
    complete = KnownPrefixes.complete

    def rolled(self, layer, key, value):
        return tuple(states.roll(1, dims=0) for states in complete(self, layer, key, value))

    model = tiny_models.reward_model("qwen3")
    LocalExecutor().load(LoadSpec(model, HEAD, prefix_cache_tokens=2000))
    with mock.patch.object(KnownPrefixes, "complete", rolled), pytest.raises(ConfigError, match="prefix_cache_tokens"):
        LocalExecutor().load(LoadSpec(model, HEAD, prefix_cache_tokens=2000))


def test_a_prefix_cache_is_tried_without_the_wrong_positions_of_the_trial():
    model = tiny_models.reward_model("qwen3").to(torch.bfloat16)  # in low precision, the trial runs wrong positions
    info = LocalExecutor().load(LoadSpec(model, HEAD, prefix_cache_tokens=2000))
    assert (info.fused, info.batch_invariance) == (True, "bit-equal")
