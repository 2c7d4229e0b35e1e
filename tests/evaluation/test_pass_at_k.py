import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.errors import ConfigError
from gym_rm.evaluation.pass_at_k import cons_at_k, pass_at_k

SAMPLES = st.lists(st.sampled_from(["1", "2", "3", None]), min_size=1, max_size=7)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_the_mean_over_all_subsets(rewards, k):
    k = min(k, len(rewards))
    subsets = [max(each) for each in itertools.combinations(rewards, k)]
    assert pass_at_k([rewards], k) == pytest.approx(np.mean(subsets))


def vote(answers):
    counts = Counter(each for each in answers if each is not None)
    best = [each for each in counts if counts[each] == max(counts.values())]
    return best.count("1") / len(best) if best else 0.0


@given(SAMPLES, st.integers(1, 7))
def test_cons_at_k_is_the_mean_over_all_subsets_with_ties_shared(answers, k):
    k = min(k, len(answers))
    rewards = [float(each == "1") for each in answers]
    expected = np.mean([vote(each) for each in itertools.combinations(answers, k)])
    assert cons_at_k([answers], [rewards], k) == pytest.approx(expected)


def test_equal_numbers_vote_together():
    assert cons_at_k([["1,000", "$1000.00", "5", "6"]], [[1, 1, 0, 0]], k=4) == 1.0


def test_prompts_have_the_same_weight_whatever_their_number_of_samples():
    assert pass_at_k([[1], [0, 0, 0, 0]], k=1) == 0.5


def test_a_vote_without_answers_is_wrong():
    assert cons_at_k([[None, None]], [[0, 0]], k=1) == 0.0


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


def test_answers_and_rewards_of_different_lengths_are_refused():
    with pytest.raises(ConfigError, match="one entry per reward"):
        cons_at_k([["1"]], [[1, 0]], k=1)
