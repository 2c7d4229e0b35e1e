"""The loss over flat tokens: formulas, gradients and what is counted."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.policy.grpo_settings import PolicyLossSettings
from gym_rm.policy.losses import LossInputs, divergence, policy_loss

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
LENGTHS = (3, 1, 5, 2)
ROWS = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))  # completion of each token


def tokens(seed=0, spread=0.6, dtype=torch.float64):
    """Return random tensors `[N]` of completions of these lengths, by name."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size=11):
        return torch.randn(size, generator=generator, dtype=dtype)

    log_probs = -normal().abs() - 0.1
    return {
        "log_probs": log_probs.requires_grad_(),
        "old_log_probs": log_probs.detach() + spread * normal(),
        "advantages": normal(len(LENGTHS))[ROWS],
        "weights": torch.rand(len(ROWS), generator=generator, dtype=dtype),
        "reference_log_probs": log_probs.detach() + 0.4 * normal(),
        "sampler_log_probs": log_probs.detach() + 0.5 * normal(),
        "entropy": normal().abs(),
    }


def loss(given, **options):
    inputs = {name: tensor for name, tensor in given.items() if name not in ("log_probs", "entropy")}
    settings = PolicyLossSettings(**{**CLIP, "importance_cap": None, **options})
    return policy_loss(given["log_probs"], given["entropy"], LossInputs(**inputs), settings)


def gradient(given, **options):
    log_probs = given["log_probs"].detach().requires_grad_()
    loss({**given, "log_probs": log_probs}, **options).loss.backward()
    return log_probs.grad


def pick(given, chosen):
    return {name: tensor[chosen] for name, tensor in given.items()}


def token_by_token(given, *, kl_coef, importance_cap, entropy_coef):
    """Compute the loss in plain Python."""
    given = {name: tensor.tolist() for name, tensor in given.items()}
    total = 0.0
    for n, weight in enumerate(given["weights"]):
        lp, old, a = given["log_probs"][n], given["old_log_probs"][n], given["advantages"][n]
        r = math.exp(lp - old)
        gain = min(r * a, min(max(r, 0.8), 1.3) * a)
        if importance_cap is not None:
            gain *= min(math.exp(old - given["sampler_log_probs"][n]), importance_cap)
        d = given["reference_log_probs"][n] - lp
        total += weight * (kl_coef * (math.exp(d) - 1 - d) - gain - entropy_coef * given["entropy"][n])
    return total


@pytest.mark.parametrize("importance_cap", [None, 1.2])
def test_the_loss_equals_the_formula_token_by_token(importance_cap):
    options = {"importance_cap": importance_cap, "kl_coef": 0.3, "entropy_coef": 0.01}
    for seed in range(5):
        given = tokens(seed)
        assert loss(given, **options).loss.item() == pytest.approx(token_by_token(given, **options))


def test_the_gradient_of_fresh_samples_is_the_policy_gradient():
    given = tokens(spread=0.0)
    assert torch.allclose(gradient(given), -given["advantages"] * given["weights"])


def test_tokens_beyond_a_bound_have_no_gradient():
    given = tokens(1, spread=2.0)
    terms = loss(given)
    ratios = (given["log_probs"] - given["old_log_probs"]).exp()
    stopped = ((ratios > 1.3) & (given["advantages"] > 0)) | ((ratios < 0.8) & (given["advantages"] < 0))
    assert stopped.any()
    assert torch.equal(gradient(given) == 0, stopped)
    assert terms.clipped_low + terms.clipped_high == pytest.approx(given["weights"][stopped].sum().item())


def test_the_value_and_gradient_of_the_divergence_over_a_whole_vocabulary():
    generator = torch.Generator().manual_seed(3)
    policy = torch.randn(50, generator=generator, dtype=torch.float64).requires_grad_()
    reference = (policy.detach() + 0.05 * torch.randn(50, generator=generator, dtype=torch.float64)).log_softmax(0)
    log_probs = policy.log_softmax(0)
    exact = (log_probs.exp() * (log_probs - reference)).sum()
    (expected,) = torch.autograd.grad(exact, policy, retain_graph=True)
    # Each token counts with its probability, as in samples, where that probability has no gradient.
    mean = (log_probs.detach().exp() * divergence(log_probs, reference)).sum()
    (found,) = torch.autograd.grad(mean, policy)
    assert mean.item() == pytest.approx(exact.item(), abs=1e-12)
    assert ((found @ expected) / (expected @ expected)).item() == pytest.approx(1.0, abs=0.1)


EVERYTHING = {"kl_coef": 0.1, "entropy_coef": 0.02, "importance_cap": 1.1}


@settings(max_examples=25)
@given(st.integers(0, 50), st.lists(st.integers(0, 2), min_size=11, max_size=11))
def test_losses_and_counts_of_micro_batches_add_up(seed, parts):
    given = tokens(seed)
    whole = vars(loss(given, **EVERYTHING))
    place = torch.tensor(parts)
    pieces = [vars(loss(pick(given, place == part), **EVERYTHING)) for part in set(parts)]
    for name, value in whole.items():
        assert sum(piece[name] for piece in pieces).item() == pytest.approx(value.item(), abs=1e-9)


def test_what_happened_is_counted_with_the_weights_of_the_tokens():
    given = tokens(4)
    terms = loss(given, **EVERYTHING)
    mean = lambda values: np.average(values.detach(), weights=given["weights"])  # noqa: E731
    importance = (given["old_log_probs"] - given["sampler_log_probs"]).exp()
    d = (given["reference_log_probs"] - given["log_probs"]).detach()
    assert terms.kl / terms.weight == pytest.approx(mean(d.exp() - 1 - d))
    assert terms.entropy / terms.weight == pytest.approx(mean(given["entropy"]))
    assert terms.importance / terms.weight == pytest.approx(mean(importance.clamp(max=1.1)))
    assert terms.capped / terms.weight == pytest.approx(mean((importance > 1.1).double()))
    assert not any(value.requires_grad for name, value in vars(terms).items() if name != "loss")


@pytest.mark.parametrize("size", [1e4, -1e4, 100.0, -100.0])
def test_extreme_probabilities_give_finite_losses_and_gradients(size):
    given = tokens(6, dtype=torch.float32)
    log_probs = given["log_probs"].detach()
    for name in ("old_log_probs", "reference_log_probs", "sampler_log_probs"):
        extreme = {**given, name: log_probs + size}
        assert all(value.isfinite() for value in vars(loss(extreme, **EVERYTHING)).values())
        assert gradient(extreme, **EVERYTHING).isfinite().all()
