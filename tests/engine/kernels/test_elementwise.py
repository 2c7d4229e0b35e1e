"""The elementwise kernels equal torch's operations, forward and backward."""

from types import SimpleNamespace

import pytest
import torch

from gym_rm.engine.backbones import llama
from tests.engine.kernels.triton_device import DEVICE, needs_triton

pytestmark = needs_triton
if needs_triton.args[0] is False:
    from gym_rm.engine.kernels import elementwise

SHAPES = [(70, 4, 16), (33, 20, 80), (5, 3, 64), (1, 1, 128), (0, 4, 16)]
DTYPES = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def inputs(count, heads, size, dtype=torch.float32):
    """Return states, the weight of a norm, and cos and sin of positions."""
    torch.manual_seed(0)
    angles = torch.rand(count, size // 2).repeat(1, 2) * 6
    given = torch.randn(count, heads, size), torch.randn(size), angles.cos(), angles.sin()
    return [each.to(DEVICE, dtype) for each in given]


def norm_of(weight):
    return None if weight is None else SimpleNamespace(weight=weight, variance_epsilon=1e-6)


def normed_and_rotated(states, weight, cos, sin):
    if weight is not None:
        states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-6) * weight
    first, second = states.chunk(2, dim=-1)
    return states * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_and_rotation(shape, normed, dtype):
    states, weight, cos, sin = inputs(*shape, dtype)
    weight = weight if normed else None
    exact = (None if each is None else each.double() for each in (states, weight, cos, sin))
    expected = normed_and_rotated(*exact)
    with torch.no_grad():
        got = elementwise.norm_rotate(states, norm_of(weight), cos, sin)
    assert got.data_ptr() == states.data_ptr(), "in place"
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(got.double(), expected, atol=scale * DTYPES[dtype], rtol=0)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_of_norm_and_rotation(shape, normed):
    states, weight, cos, sin = inputs(*shape)
    given = [states, weight] if normed else [states]
    exact = [each.double().requires_grad_() for each in given]
    given = [each.requires_grad_() for each in given]
    kept = states.detach().clone()
    output = elementwise.norm_rotate(states, norm_of(weight if normed else None), cos, sin)
    assert torch.equal(states, kept), "the backward needs the states"
    with torch.no_grad():
        assert torch.equal(elementwise.norm_rotate(kept, norm_of(weight if normed else None), cos, sin), output)
    expected = normed_and_rotated(exact[0], exact[1] if normed else None, cos.double(), sin.double())
    weights = torch.randn_like(output)
    got = torch.autograd.grad((output * weights).sum(), given)
    gradients = torch.autograd.grad((expected * weights).sum(), exact)
    for one, other in zip(got, gradients, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(70, 100), (3, 3000), (0, 16)], ids=str)
def test_activation_and_its_gradients(shape, dtype):
    torch.manual_seed(0)
    gate, up = (5 * torch.randn(shape).to(DEVICE, dtype) for _ in range(2))
    exact = [each.double().requires_grad_() for each in (gate, up)]
    expected = torch.nn.functional.silu(exact[0]) * exact[1]
    given = [each.clone().requires_grad_() for each in (gate, up)]
    output = elementwise.silu_mul(*given)
    with torch.no_grad():
        assert torch.equal(elementwise.silu_mul(gate.clone(), up), output)
    weights = torch.randn_like(expected).to(dtype)
    got = output, *torch.autograd.grad((output * weights).sum(), given)
    expected = expected, *torch.autograd.grad((expected * weights.double()).sum(), exact)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=DTYPES[dtype], rtol=10 * torch.finfo(dtype).eps)


def test_numbers_that_are_not_finite_stay_so():
    gate = torch.tensor([[torch.nan, 100.0, -100.0, 1.0]], device=DEVICE)
    up = torch.tensor([[1.0, 2.0, 2.0, torch.inf]], device=DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(elementwise.silu_mul(gate.clone(), up), llama.silu_times(gate, up), equal_nan=True)
