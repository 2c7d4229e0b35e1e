import functools
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.training.losses import bradley_terry, plackett_luce, process_supervision, rao_kupper, regression

rewards = st.floats(-200, 200, allow_nan=False, width=32)
small = st.floats(-5, 5, allow_nan=False)


def column(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def log_sigmoid(z):
    return -math.log1p(math.exp(-z)) if z > 0 else z - math.log1p(math.exp(z))


@given(rewards, rewards, st.floats(0, 10))
def test_bradley_terry_equals_the_formula(chosen, rejected, margin):
    loss = bradley_terry(column([chosen]), column([rejected]), margin=margin)
    assert loss.item() == pytest.approx(-log_sigmoid(chosen - rejected - margin), rel=1e-9, abs=1e-300)


def test_a_very_wrong_pair_has_the_full_gradient():
    chosen = torch.tensor([-200.0], requires_grad=True)
    bradley_terry(chosen, torch.zeros(1)).sum().backward()
    assert chosen.grad.item() == pytest.approx(-1.0)


@given(small, small, st.floats(0.01, 3))
def test_rao_kupper_equals_the_formula_and_its_probabilities_sum_to_one(first, second, log_theta):
    a, b, theta = math.exp(first), math.exp(second), math.exp(log_theta)
    expected = {
        1: a / (a + theta * b),
        -1: b / (b + theta * a),
        0: (theta**2 - 1) * a * b / ((a + theta * b) * (theta * a + b)),
    }
    loss = functools.partial(rao_kupper, column([first]), column([second]), log_theta=log_theta)
    given_by_loss = {outcome: math.exp(-loss(torch.tensor([outcome])).item()) for outcome in expected}
    assert given_by_loss == pytest.approx(expected, rel=1e-7)
    assert sum(given_by_loss.values()) == pytest.approx(1.0, rel=1e-9)


def ranking_loss(group):
    """Negative log-likelihood of one ranking `[(reward, rank), ...]`, choice by choice."""
    total = 0.0
    for reward, rank in group:
        rivals = [other for other, other_rank in group if other_rank >= rank]
        total += math.log(sum(math.exp(other) for other in rivals)) - reward
    return total


rankings = st.lists(st.lists(st.tuples(small, st.integers(0, 3)), min_size=1, max_size=5), min_size=1, max_size=4)


def flat(groups):
    rows = [(reward, rank, number) for number, group in enumerate(groups) for reward, rank in group]
    scores, ranks, numbers = zip(*rows, strict=True)
    return column(scores), torch.tensor(ranks), torch.tensor(numbers)


@given(rankings, st.randoms(use_true_random=False))
def test_plackett_luce_equals_the_formula_for_ragged_groups_in_any_order(groups, random):
    scores, ranks, numbers = flat(groups)
    order = list(range(len(scores)))
    random.shuffle(order)
    losses = plackett_luce(scores[order], ranks[order], numbers[order] * 7 - 3)
    assert losses.tolist() == pytest.approx([ranking_loss(group) for group in groups], abs=1e-9)


def test_the_likelihoods_of_all_rankings_sum_to_one():
    scores = column([0.3, -1.2, 2.0, 0.7])
    likelihoods = [
        math.exp(-plackett_luce(scores, torch.tensor(ranks), torch.zeros(4)).item())
        for ranks in itertools.permutations(range(4))
    ]
    assert sum(likelihoods) == pytest.approx(1.0, rel=1e-12)


@given(st.lists(st.tuples(rewards, rewards), min_size=1, max_size=8))
def test_plackett_luce_of_pairs_is_bradley_terry(pairs):
    groups = [[(chosen, 0), (rejected, 1)] for chosen, rejected in pairs]
    chosen, rejected = column(pairs).T
    assert plackett_luce(*flat(groups)).tolist() == pytest.approx(bradley_terry(chosen, rejected).tolist(), abs=1e-9)


def test_missing_ratings_are_skipped_and_get_no_gradient():
    predictions = column([[1.0, 5.0], [2.0, 0.0]]).requires_grad_()
    loss = regression(predictions, column([[0.0, math.nan], [4.0, 3.0]]))
    loss.sum().backward()
    assert loss.flatten().tolist() == [1.0, 0.0, 4.0, 9.0]
    assert predictions.grad.flatten().tolist() == [2.0, 0.0, -4.0, -6.0]


@given(st.lists(st.tuples(small, small, st.floats(0, 1)), min_size=1, max_size=8))
def test_two_outputs_per_step_are_the_cross_entropy_of_two_classes(steps):
    bad, good, labels = column(steps).T
    classes = torch.stack([1 - labels, labels], -1)
    expected = torch.nn.functional.cross_entropy(torch.stack([bad, good], -1), classes, reduction="none").tolist()
    assert process_supervision(good - bad, labels).tolist() == pytest.approx(expected, rel=1e-9)


def test_a_step_has_the_binary_cross_entropy_of_its_label_if_it_is_present():
    logits, labels = column([2.0, -1.0, 0.5]), column([1.0, math.nan, 0.25])
    expected = [-log_sigmoid(2.0), 0.0, -(0.25 * log_sigmoid(0.5) + 0.75 * log_sigmoid(-0.5))]
    assert process_supervision(logits, labels).tolist() == pytest.approx(expected, rel=1e-12)


OUTCOMES = torch.tensor([1, 0, -1, 0, 1, -1])
LABELS = torch.tensor([1.0, 0.0, math.nan, 0.3, 1.0, 0.0], dtype=torch.float64)


def ranked_pairs(first, second):
    return plackett_luce(torch.cat([first, second]), torch.cat([-OUTCOMES, OUTCOMES]), torch.arange(6).repeat(2))


# Losses of two columns of six values.
LOSSES = {
    "margin": lambda first, second: bradley_terry(first, second, margin=0.5),
    "ties": lambda first, second: rao_kupper(first, second, OUTCOMES, log_theta=0.4),
    "rankings": ranked_pairs,
    "ratings": lambda first, second: regression(torch.stack([first, second], -1), torch.stack([LABELS, LABELS], -1)),
    "steps": lambda first, second: process_supervision(first - second, LABELS),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_finite_differences(name):
    first, second = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.autograd.gradcheck(LOSSES[name], (first.requires_grad_(), second.requires_grad_()))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_finite_at_large_differences(name, dtype):
    for difference in (-1000.0, -200.0, 0.0, 200.0, 1000.0):
        first = torch.full([6], difference, dtype=dtype, requires_grad=True)
        second = torch.zeros(6, dtype=dtype, requires_grad=True)
        losses = LOSSES[name](first, second)
        losses.sum().backward()
        assert losses.isfinite().all()
        assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert first.grad.isfinite().all()
        assert second.grad.isfinite().all()
