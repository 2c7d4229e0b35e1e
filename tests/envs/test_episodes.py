import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm import ConfigError
from gym_rm.envs.episodes import PromptOrder, PromptOrders, seed_of_each


def order(num_prompts, seed=0, num_readers=1):
    return PromptOrder(num_prompts, np.random.default_rng(seed), num_readers=num_readers)


@given(st.integers(1, 40), st.integers(0, 2**32), st.integers(1, 4))
def test_every_epoch_contains_every_prompt_once(num_prompts, seed, epochs):
    stream = order(num_prompts, seed)
    for _ in range(epochs):
        assert sorted(stream.next()[1] for _ in range(num_prompts)) == list(range(num_prompts))


def test_epochs_differ_and_equal_seeds_give_equal_orders():
    first, second = order(50), order(50)
    epochs = [[first.next()[1] for _ in range(50)] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert epochs[0] == [second.next()[1] for _ in range(50)]


def test_every_order_is_equally_likely():
    counts = {}
    generator = np.random.default_rng(0)
    for _ in range(6000):
        stream = PromptOrder(3, generator)
        key = tuple(stream.next()[1] for _ in range(3))
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 6
    assert all(850 < count < 1150 for count in counts.values())  # 1,000 expected, standard deviation 29


@given(st.lists(st.integers(0, 2), max_size=60))
def test_readers_get_the_same_order_at_different_speeds(reads):
    stream, alone = order(5, num_readers=3), order(5)
    expected = [alone.next() for _ in range(len(reads) + 1)]
    taken = [0, 0, 0]
    for reader in reads:
        assert stream.next(reader) == expected[taken[reader]]
        taken[reader] += 1


def test_prompts_that_every_reader_has_read_are_not_stored():
    stream = order(1000, num_readers=2)
    for _ in range(500):
        stream.next(0)
        stream.next(1)
    assert not stream._waiting


def test_aligned_readers_continue_at_the_same_prompt():
    stream = order(10, num_readers=2)
    for _ in range(3):
        stream.next(0)
    stream.align()
    assert stream.next(0) == stream.next(1)
    assert not stream._waiting


def test_an_order_survives_pickling():
    stream = order(10)
    stream.next()
    twin = pickle.loads(pickle.dumps(stream))
    assert [stream.next() for _ in range(20)] == [twin.next() for _ in range(20)]


@given(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=8), st.integers(1, 3))
def test_inserted_prompts_come_next_and_do_not_change_the_order(num_prompts, inserted, num_readers):
    stream, plain = order(num_prompts, num_readers=num_readers), order(num_prompts)
    for index in inserted:
        stream.insert(index)
        assert {stream.next(reader) for reader in range(num_readers)} == {(stream._next[0] - 1, index)}
        drawn = {stream.next(reader)[1] for reader in range(num_readers)}
        assert drawn == {plain.next()[1]}


def test_prompts_must_be_inserted_for_complete_groups():
    orders = PromptOrders(5, num_envs=4, group_size=2)
    rows = np.ones(4, dtype=bool)
    orders.seed([0, 1, 2, 3], rows)
    orders.check(np.array([4, 4, 1, 1]), rows)
    orders.insert(np.array([4, 4, 1, 1]), rows)
    assert [orders.next(row)[1] for row in range(4)] == [4, 4, 1, 1]
    with pytest.raises(ConfigError, match=r"equal for all 2 environments of group 1, got .3, 2."):
        orders.check(np.array([0, 0, 3, 2]), rows)
    with pytest.raises(ConfigError, match="needs whole groups, but reset_mask has only a part of group 0"):
        orders.check(np.array([3, 3, 3, 3]), np.array([True, False, True, True]))
    with pytest.raises(ConfigError, match=r"prompt_indices\[2\] must be from 0 to 4, got 5"):
        orders.check(np.array([0, 0, 5, 5]), rows)


@pytest.mark.parametrize("seed", [0, 7])
def test_seed_of_each_environment(seed):
    assert seed_of_each(seed, 3) == [seed, seed + 1, seed + 2]
    assert seed_of_each([seed, None], 2) == [seed, None]
    assert seed_of_each(None, 2) == [None, None]
