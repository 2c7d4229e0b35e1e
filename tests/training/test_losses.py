import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.training.losses import bradley_terry

rewards = st.floats(-200, 200, allow_nan=False, width=32)


@given(rewards, rewards)
def test_loss_equals_the_formula(chosen, rejected):
    loss = bradley_terry(torch.tensor([chosen], dtype=torch.float64), torch.tensor([rejected], dtype=torch.float64))
    difference = chosen - rejected
    expected = math.log1p(math.exp(-difference)) if difference > 0 else math.log1p(math.exp(difference)) - difference
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("difference", [-200.0, 0.0, 200.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_finite(difference, dtype):
    chosen = torch.tensor([difference], dtype=dtype, requires_grad=True)
    loss = bradley_terry(chosen, torch.zeros(1, dtype=dtype), margin=0.0)
    loss.backward()
    assert loss.isfinite()
    assert chosen.grad.isfinite().all()


def test_a_very_wrong_pair_has_the_full_gradient():
    chosen = torch.tensor([-200.0], requires_grad=True)
    bradley_terry(chosen, torch.zeros(1)).backward()
    assert chosen.grad.item() == pytest.approx(-1.0)


@given(st.lists(st.tuples(rewards, rewards), min_size=1, max_size=8), st.floats(-50, 50))
def test_loss_depends_only_on_differences(pairs, shift):
    chosen, rejected = torch.tensor(pairs, dtype=torch.float64).T
    assert bradley_terry(chosen + shift, rejected + shift).item() == pytest.approx(
        bradley_terry(chosen, rejected).item(), abs=1e-9
    )


@given(st.lists(st.tuples(rewards, rewards, st.floats(0, 10)), min_size=1, max_size=8))
def test_a_margin_is_subtracted_from_the_chosen_reward(rows):
    chosen, rejected, margin = torch.tensor(rows, dtype=torch.float64).T
    shifted = bradley_terry(chosen - margin, rejected)
    assert bradley_terry(chosen, rejected, margin=margin).item() == pytest.approx(shifted.item(), rel=1e-9)


def test_one_margin_for_all_pairs():
    chosen, rejected = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0])
    assert torch.equal(
        bradley_terry(chosen, rejected, margin=0.5), bradley_terry(chosen, rejected, margin=torch.tensor([0.5, 0.5]))
    )
