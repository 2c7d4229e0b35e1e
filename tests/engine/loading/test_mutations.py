"""The trial at load notices wrong attention, positions and products, also those that only long texts need."""

from unittest import mock

import pytest
import tiny_models
import torch

from gym_rm.engine.backbones.tree_attention import TreeAttention
from gym_rm.engine.executors.executor import LoadSpec
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.kinds.readouts import ModuleHead
from tests.engine.loading.mutations import MUTATIONS

# Windows of 4096 tokens, as in Gemma 2 and gpt-oss: no text of the trial is as long.
MODELS = {
    "qwen3": {},
    "mistral": {"sliding_window": 4096},
    "gemma2": {"sliding_window": 4096},
    "gpt_oss": {"sliding_window": 4096},
}
NEEDS = {"soft cap": ("gemma2",), "window": ("mistral", "gemma2", "gpt_oss"), "sinks": ("gpt_oss",)}
CASES = [
    (name, architecture, use_flex)
    for name in MUTATIONS
    for architecture in next((models for word, models in NEEDS.items() if word in name), ("qwen3",))
    for use_flex in (False, True)
    if not name.startswith("pages: " if use_flex else "flex: ")
]


def load(architecture, *, use_flex, dtype=torch.float32):
    """Load a model as on a GPU if `use_flex`; return its layout, and whether its products keep their bits."""
    model = tiny_models.reward_model(architecture, **MODELS[architecture]).to(dtype)
    init = TreeAttention.__init__

    def with_flex(self, *arguments, **options):
        init(self, *arguments, **(options | {"use_flex": use_flex}))

    with mock.patch.object(TreeAttention, "__init__", with_flex):
        return LocalExecutor().load(LoadSpec(model, ModuleHead("score")))


@pytest.mark.parametrize("use_flex", [False, True])
@pytest.mark.parametrize("architecture", MODELS)
def test_without_a_mutation_the_tree_is_used(architecture, use_flex):
    info = load(architecture, use_flex=use_flex)
    assert info.layout == "tree"
    assert info.tried_length == (401 if use_flex else 113)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "architecture", "use_flex"), CASES)
def test_a_mutation_is_refused(name, architecture, use_flex):
    with MUTATIONS[name]():
        assert load(architecture, use_flex=use_flex).layout != "tree"
