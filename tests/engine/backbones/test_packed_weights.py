"""Products in oneDNN equal torch's, and so do their gradients."""

import pytest
import torch
from torch.nn.functional import linear

from gym_rm.engine.backbones.packed_weights import PackedWeights, onednn_linear, packs

pytestmark = pytest.mark.skipif(not packs(), reason="this build of torch has no oneDNN")
SHAPES = [(1, 16, 16), (2, 7, 20), (33, 20, 7), (256, 64, 48), (65, 1, 3), (5, 3, 1)]


def inputs(rows, width, outputs):
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, width), (outputs, width), (outputs,), (rows, outputs))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def check_gradients(product, expected, tensors):
    factors = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-5)
    got, wanted = (torch.autograd.grad((each * factors).sum(), tensors) for each in (product, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_linear_with_a_bias_a_sum_a_view_and_a_packed_weight(shape):
    x, weight, bias, plus = inputs(*shape)
    product = onednn_linear(x, weight, bias, plus=plus)
    check_gradients(product, linear(x, weight, bias) + plus, (x, weight, bias, plus))
    check_gradients(onednn_linear(x, weight)[::2, :5].t(), linear(x, weight)[::2, :5].t(), (x, weight))
    check_gradients(PackedWeights().linear(x, weight, bias), linear(x, weight, bias), (x, weight, bias))


def test_same_bits_with_and_without_gradients():
    x, weight, bias, plus = inputs(33, 20, 12)
    product = onednn_linear(x, weight, bias, plus=plus)
    with torch.no_grad():
        assert torch.equal(onednn_linear(x, weight, bias, plus=plus), product)


def test_a_weight_that_changes_through_data_is_used_as_it_is_now():
    x, weight, _, _ = inputs(33, 20, 12)
    onednn_linear(x, weight)
    weight.data.mul_(2)
    torch.testing.assert_close(onednn_linear(x, weight), linear(x, weight), rtol=1e-5, atol=1e-5)
