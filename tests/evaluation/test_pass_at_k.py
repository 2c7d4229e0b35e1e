import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.errors import ConfigError
from gym_rm.evaluation.best_of_n import pass_at_k


@given(st.lists(st.integers(0, 1), min_size=1, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_the_mean_over_all_subsets(rewards, k):
    k = min(k, len(rewards))
    subsets = [max(each) for each in itertools.combinations(rewards, k)]
    assert pass_at_k([rewards], k) == pytest.approx(np.mean(subsets))


def test_prompts_have_the_same_weight_whatever_their_number_of_samples():
    assert pass_at_k([[1], [0, 0, 0, 0]], k=1) == 0.5


@pytest.mark.parametrize("rewards", [[[1, 0]], [[]], [], [[0.5, 1, 1]], [[float("nan"), 1, 1]]])
def test_too_few_samples_and_rewards_that_are_not_0_or_1_are_refused(rewards):
    with pytest.raises(ConfigError, match="must be 0 or 1, and at least k=3"):
        pass_at_k(rewards, k=3)
