import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.errors import ConfigError
from gym_rm.evaluation.pass_at_k import pass_at_k


@given(st.lists(st.integers(0, 1), min_size=1, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_the_mean_over_all_subsets(rewards, k):
    k = min(k, len(rewards))
    subsets = [max(each) for each in itertools.combinations(rewards, k)]
    assert pass_at_k([rewards], k) == pytest.approx(np.mean(subsets))


def test_prompts_have_the_same_weight_whatever_their_number_of_samples():
    assert pass_at_k([[1], [0, 0, 0, 0]], k=1) == 0.5


def test_rewards_that_are_not_binary_need_a_threshold():
    with pytest.raises(ConfigError, match=r"must be 0 or 1, got 0\.5; pass threshold="):
        pass_at_k([[0.5, 1.0]], k=1)
    assert pass_at_k([[0.5, 1.0]], k=1, threshold=0.6) == 0.5


@pytest.mark.parametrize("rewards", [[[1, 0]], [[]], []])
def test_k_above_the_number_of_samples_is_refused(rewards):
    with pytest.raises(ConfigError, match="at least"):
        pass_at_k(rewards, k=3)


def test_missing_rewards_are_refused():
    with pytest.raises(ConfigError, match="missing"):
        pass_at_k([[float("nan"), 1.0]], k=1)
