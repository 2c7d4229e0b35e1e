"""Float32 copies of low-precision weights, and the states of optimizers by name."""

import pytest
import torch
from torch import nn

from gym_rm.training.optimizers import load_optimizer_state, make_optimizers, optimizer_state, set_learning_rates
from gym_rm.training.reward_model_settings import OptimizerSettings

STEPS = 40


def settings(name="adamw"):
    return OptimizerSettings(name=name, learning_rate=1e-4, muon_learning_rate=1e-3, warmup_share=0)


def network(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 1)).to(dtype)


def train(module, optimizers, *, options, steps=range(1, STEPS + 1)):
    """Train a network on random numbers and return its last loss."""
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 64, generator=random)
    dtype = next(module.parameters()).dtype
    for step in steps:
        set_learning_rates(optimizers, options, step=step, num_steps=STEPS)
        loss = (module(inputs.to(dtype)).float() - inputs.sum(dim=1, keepdim=True) / 10).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_bfloat16_weights_with_float32_copies_follow_float32_weights(name):
    def loss_of(dtype):
        module = network(dtype)
        return train(module, make_optimizers(module, settings(name)), options=settings(name))

    exact = loss_of(torch.float32)
    assert loss_of(torch.bfloat16) == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_resumed_run_has_the_same_bits(name, dtype):
    options = settings(name)
    whole = network(dtype)
    train(whole, make_optimizers(whole, options), options=options)

    first = network(dtype)
    optimizers = make_optimizers(first, options)
    train(first, optimizers, options=options, steps=range(1, 21))
    states = {entry: value.clone() for entry, value in optimizer_state(first, optimizers)}
    second = network(dtype)
    optimizers = make_optimizers(second, options)
    second.load_state_dict(first.state_dict())
    load_optimizer_state(second, optimizers, states)
    train(second, optimizers, options=options, steps=range(21, STEPS + 1))
    for name, expected in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], expected)
