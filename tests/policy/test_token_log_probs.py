"""Log-probabilities and entropies from hidden states equal log_softmax, with a bound on memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gym_rm.policy.token_log_probs import LogitOptions, token_log_probs

OPTIONS = {
    "plain": LogitOptions(),
    "temperature": LogitOptions(temperature=0.7),
    "scale": LogitOptions(temperature=1.3, scale=0.25),
    "soft cap": LogitOptions(temperature=0.7, scale=2.0, softcap=3.0),
}


def inputs(tokens, size, vocabulary, *, dtype=torch.float64, bias=True):
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=random, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, size, generator=random, dtype=dtype).requires_grad_()
    added = torch.randn(vocabulary, generator=random, dtype=dtype).requires_grad_() if bias else None
    return hidden, weight, added, torch.randint(vocabulary, (tokens,), generator=random)


def plain(hidden, weight, bias, targets, options):
    logits = torch.nn.functional.linear(hidden, weight, bias) * options.scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    log_probs = (logits / options.temperature).log_softmax(dim=1)
    return log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(dim=1)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_equal_log_softmax(name, chunk):
    given = inputs(7, 5, 11)
    got = token_log_probs(*given, options=OPTIONS[name], chunk_tokens=chunk)
    torch.testing.assert_close(got, plain(*given, OPTIONS[name]))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_the_values(name, bias):
    hidden, weight, added, targets = inputs(5, 3, 7, bias=bias)

    def function(*tensors):
        rest = tensors[2] if bias else None
        return token_log_probs(*tensors[:2], rest, targets, options=OPTIONS[name], chunk_tokens=2)

    assert torch.autograd.gradcheck(function, (hidden, weight, added) if bias else (hidden, weight))


def test_gradients_without_that_of_the_entropy_and_with_a_frozen_output_layer():
    hidden, weight, _, targets = inputs(7, 5, 11, bias=False)
    (expected,) = torch.autograd.grad(plain(hidden, weight, None, targets, LogitOptions())[0].sum(), hidden)
    token_log_probs(hidden, weight.detach(), None, targets, options=LogitOptions(), chunk_tokens=3)[0].sum().backward()
    torch.testing.assert_close(hidden.grad, expected)
    assert weight.grad is None


def test_a_wide_output_layer_has_the_values_and_gradients_of_linear():
    hidden, weight, _, targets = inputs(9, 512, 40, dtype=torch.float32, bias=False)
    both = token_log_probs(hidden, weight / 20, None, targets, options=LogitOptions(), chunk_tokens=4)
    expected = plain(hidden, weight / 20, None, targets, LogitOptions())
    torch.testing.assert_close(both, expected, rtol=1e-4, atol=1e-4)
    got, wanted = (torch.autograd.grad(each[0].sum(), (hidden, weight)) for each in (both, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_large_logits_do_not_overflow():
    hidden, weight, _, targets = inputs(4, 3, 7, dtype=torch.float32, bias=False)
    log_probs, entropy = token_log_probs(hidden * 1e4, weight, None, targets, options=LogitOptions())
    assert log_probs.isfinite().all()
    assert entropy.isfinite().all()


def test_logits_are_float32_under_autocast_and_for_bfloat16_weights():
    hidden, weight, _, targets = inputs(6, 64, 50, dtype=torch.bfloat16, bias=False)
    expected = plain(hidden.float(), weight.float(), None, targets, LogitOptions())
    got = token_log_probs(hidden, weight, None, targets, options=LogitOptions())
    torch.testing.assert_close(got, expected)
    with torch.autocast("cpu", torch.bfloat16):
        got = token_log_probs(hidden, weight.float(), None, targets, options=LogitOptions())
    torch.testing.assert_close(got, expected)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return made


def test_memory_is_bounded_by_the_chunk():
    hidden, weight, _, targets = inputs(400, 8, 1000, dtype=torch.float32, bias=False)
    with LargestTensor() as plain_largest:
        plain(hidden, weight, None, targets, LogitOptions())[0].sum().backward()
    assert plain_largest.elements == 400 * 1000
    with LargestTensor() as largest:
        log_probs, entropy = token_log_probs(hidden, weight, None, targets, options=LogitOptions(), chunk_tokens=10)
        (log_probs + entropy).sum().backward()
    assert largest.elements == 10 * 1000
