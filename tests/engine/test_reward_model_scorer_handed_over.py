"""Scoring does not change a model that was passed to the scorer, for example one in training."""

import functools

import numpy as np
import pytest
import tiny_models
import torch
from torch import nn

import gym_rm
from gym_rm.errors import ConfigError
from gym_rm.scores import ScoringError
from tests.engine.watching import dialogue, raising

HOOKS = [name for name in vars(nn.Module()) if "hook" in name]
CONVERSATIONS = [
    dialogue("What is 12 + 30?", "The sum is 42."),
    dialogue("What is 12 + 30?", "I don't think so.", "why?", "It is more."),
    dialogue("q", "a"),
    dialogue("Tell me", "yes " * 100),
]

CASES = [
    ("qwen3", {}, "tree"),
    ("qwen3", {"tree": False}, "padded"),
    ("gemma2", {}, "tree"),  # runs the model's own forward with tree attention
    ("bert", {}, "padded"),
]
each_case = pytest.mark.parametrize(("architecture", "options", "layout"), CASES)


def model_in_training(architecture, **overrides):
    """Return a model with gradients, frozen weights, and one module in evaluation mode."""
    model = tiny_models.reward_model(architecture, **overrides).train()
    next(model.base_model.children()).eval()
    for parameter in list(model.parameters())[::3]:
        parameter.requires_grad_(False)
    model(input_ids=torch.arange(5, 25)[None]).logits.sum().backward()
    return model


def scorer_of_model(model, architecture, **options):
    return gym_rm.RewardModelScorer(model, tokenizer_of(architecture), **options)


@functools.cache
def tokenizer_of(architecture):
    return tiny_models.tokenizer(tiny_models.ARCHITECTURES[architecture][1])


def bits(tensor):
    return None if tensor is None else tensor.detach().numpy().tobytes()


def state_of(model):
    """Return everything of a model that scoring must not change."""
    state = {("config",): model.config.to_dict()}
    for name, module in model.named_modules():
        state["module", name] = (id(module), type(module))
        state["attributes", name] = sorted(vars(module))
        state["hooks", name] = [list(getattr(module, hook).items()) for hook in HOOKS if getattr(module, hook)]
        state["training", name] = module.training
        state["attention", name] = getattr(getattr(module, "config", None), "_attn_implementation", None)
    for name, parameter in model.named_parameters():
        state["parameter", name] = (id(parameter), parameter.data_ptr(), parameter.requires_grad, bits(parameter))
        state["gradient", name] = (id(parameter.grad), bits(parameter.grad))
    for name, buffer in model.named_buffers():
        state["buffer", name] = (id(buffer), bits(buffer))
    return state


def assert_same_state(model, before):
    after = state_of(model)
    assert after.keys() == before.keys()
    assert [key for key in before if after[key] != before[key]] == []


@each_case
def test_scoring_does_not_change_the_model(architecture, options, layout, real_conversations):
    model = model_in_training(architecture)
    before = state_of(model)
    scorer = scorer_of_model(model, architecture, **options)
    assert scorer.layout == layout
    random = torch.get_rng_state()
    for _ in range(2):
        scorer.score(CONVERSATIONS)
        scorer.score(real_conversations, turns="all")
    assert_same_state(model, before)
    scorer.clear_cache()
    scorer.sleep()
    scorer.score(CONVERSATIONS)
    scorer.close()
    assert_same_state(model, before)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("error", [RuntimeError("broken"), torch.OutOfMemoryError("out of memory")])
@pytest.mark.parametrize(("architecture", "options"), [(case[0], case[1]) for case in CASES])
def test_a_failed_forward_does_not_change_the_model(architecture, options, error):
    model = model_in_training(architecture)
    before = state_of(model)
    scorer = scorer_of_model(model, architecture, **options)
    with raising(scorer.executor.models[0], error), pytest.raises(ScoringError, match=str(error)):
        scorer.score(CONVERSATIONS)
    assert_same_state(model, before)


@pytest.mark.parametrize(("architecture", "options"), [("qwen3", {}), ("qwen3", {"tree": False}), ("bert", {})])
def test_hooks_of_the_model_stay_and_run(architecture, options):
    model = tiny_models.reward_model(architecture)
    plain = scorer_of_model(model, architecture, **options)
    expected = plain.score(CONVERSATIONS).rewards
    calls = []
    handle = model.base_model.register_forward_hook(lambda *_: calls.append("hook"))
    before = state_of(model)
    for scorer in (plain, scorer_of_model(model, architecture, **options)):
        calls.clear()
        np.testing.assert_allclose(scorer.score(CONVERSATIONS).rewards, expected, atol=1e-5)
        assert calls
    assert_same_state(model, before)
    handle.remove()


def quantize(model):
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)


def add_adapter(model):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["q_proj"]), model)


def subclass(model):
    model.model.layers[0].mlp.up_proj.__class__ = type("Quantized", (nn.Linear,), {})


CHANGES = {
    "quantised": quantize,
    "quantised by its class": subclass,
    "another precision": lambda model: model.bfloat16(),
    "one layer in another precision": lambda model: model.model.layers[1].mlp.bfloat16(),
    "an adapter": add_adapter,
    "fewer layers": lambda model: setattr(model.model, "layers", model.model.layers[:1]),
    "another function": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.GELU()),
    "a parametrised weight": lambda model: nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj),
    "more tokens": lambda model: model.resize_token_embeddings(500),
}


@pytest.mark.filterwarnings("ignore:torch.ao.quantization")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("borrowed", [True, False])
def test_a_model_that_is_another_one_now_needs_a_new_scorer(change, borrowed, tmp_path):
    """What the scorer tried when it was made, such as equal bits in every batch, does not hold for it."""
    folder = tiny_models.save_reward_model(tmp_path)
    scorer = scorer_of_model(tiny_models.reward_model("qwen3"), "qwen3") if borrowed else gym_rm.load_scorer(folder)
    CHANGES[change](scorer.executor.models[0])
    with pytest.raises(ConfigError, match=r"have changed since the scorer was made, such as .*new scorer"):
        scorer.score(CONVERSATIONS)


def test_new_parameters_of_the_same_kind_are_other_weights():
    model = tiny_models.reward_model("qwen3")
    scorer = scorer_of_model(model, "qwen3")
    before = scorer.score(CONVERSATIONS).rewards
    model.score = nn.Linear(32, 1, bias=False)
    model.train().requires_grad_(False)
    after = scorer.score(CONVERSATIONS)
    assert np.abs(after.rewards - before).max() > 1e-3
    assert after.provenance.batch_invariance == "bit-equal"


@pytest.mark.parametrize("options", [{}, {"tokenizer": "x"}])
def test_a_hugging_face_model_is_refused_with_what_to_do(options):
    for model in (tiny_models.reward_model("qwen3"), tiny_models.reward_model("bert")):
        with pytest.raises(ConfigError, match=r"got the model \w+; pass gym_rm.RewardModelScorer\(model, tokenizer\)"):
            gym_rm.load_scorer(model, **options)


@pytest.mark.parametrize("architecture", ["qwen3", "bert"])
def test_the_caller_can_swap_the_parameters(architecture):
    """Swapping refuses parameters that something has a weak reference to."""
    model = tiny_models.reward_model(architecture)
    scorer = gym_rm.RewardModelScorer(model, tiny_models.tokenizer(tiny_models.ARCHITECTURES[architecture][1]))
    before = scorer.score(CONVERSATIONS).rewards
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.bfloat16().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert scorer.score(CONVERSATIONS).rewards.tolist() != before.tolist()
