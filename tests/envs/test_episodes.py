import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm import ConfigError
from gym_rm.envs import episodes
from gym_rm.envs.episodes import PromptOrder, PromptOrders, seed_of_each
from tests.envs.environments import interrupt_at

ALL = np.ones(4, dtype=bool)


def order(num_prompts, seed=0):
    return PromptOrder(num_prompts, np.random.default_rng(seed))


def first(stream, count):
    return [stream.prompt(place) for place in range(count)]


def groups_of_two(seeds=(0, 1, 2, 3), num_prompts=5):
    return PromptOrders.of(num_prompts, num_envs=4, group_size=2).seeded(seeds, ALL)


@given(st.integers(1, 40), st.integers(0, 2**32), st.integers(1, 4))
def test_every_epoch_contains_every_prompt_once(num_prompts, seed, epochs):
    drawn = np.array(first(order(num_prompts, seed), epochs * num_prompts)).reshape(epochs, num_prompts)
    assert (np.sort(drawn) == np.arange(num_prompts)).all()


def test_epochs_differ_and_equal_seeds_give_equal_orders():
    drawn = first(order(50), 100)
    assert drawn[:50] != drawn[50:]
    assert drawn == first(order(50), 100)


def test_every_order_is_equally_likely():
    counts = {}
    generator = np.random.default_rng(0)
    for _ in range(6000):
        key = tuple(first(PromptOrder(3, generator), 3))
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 6
    assert all(850 < count < 1150 for count in counts.values())  # 1,000 expected, standard deviation 29


def test_old_prompts_are_not_stored():
    stream = order(1000)
    for place in range(500):
        stream.prompt(place, oldest=place)
    assert len(stream._drawn) == 1
    assert not stream._choices


@pytest.mark.parametrize("num_prompts", [1, 2, 5])
def test_a_draw_that_was_interrupted_at_any_line_is_completed_by_the_next_one(num_prompts):
    expected = first(order(num_prompts), 30)
    interrupts = 0
    for line in range(1, 30):
        stream = order(num_prompts)
        for place in range(30):
            try:
                with interrupt_at(line, files=[episodes.__file__]):
                    stream.prompt(place, oldest=place)
            except KeyboardInterrupt:
                interrupts += 1
            assert stream.prompt(place, oldest=place) == expected[place]
    assert interrupts > 300


@given(st.lists(st.integers(0, 2), max_size=60))
def test_readers_get_the_same_order_at_different_speeds(reads):
    orders = PromptOrders.of(5, num_envs=3, group_size=3).seeded([0, 1, 2], np.ones(3, dtype=bool))
    expected = list(enumerate(first(order_of(seed=0), len(reads))))
    taken = [0, 0, 0]
    for reader in reads:
        orders, started = orders.next(np.arange(3) == reader)
        assert started == [expected[taken[reader]]]
        taken[reader] += 1


def order_of(seed):
    return PromptOrders.of(5, 1, 1).seeded([seed], np.ones(1, dtype=bool)).each()[0]


def test_aligned_environments_continue_at_the_same_prompt():
    orders = groups_of_two()
    for _ in range(3):
        orders, _ = orders.next(np.array([True, False, True, True]))
    _, ((number, index), other, *_) = orders.aligned(ALL).next(ALL)
    assert (number, index) == other
    assert number == 3


@given(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=8))
def test_chosen_prompts_come_next_and_do_not_change_the_order(num_prompts, chosen):
    orders, plain = groups_of_two(num_prompts=num_prompts), groups_of_two(num_prompts=num_prompts)
    for number, index in enumerate(chosen):
        orders, started = orders.aligned(ALL).next(ALL, np.full(4, index))
        assert started == [(2 * number, index)] * 4
        (orders, started), (plain, expected) = orders.next(ALL), plain.next(ALL)
        assert [index for _, index in started] == [index for _, index in expected]


def test_prompts_must_be_chosen_for_complete_groups():
    orders = groups_of_two()
    orders.check(np.array([4, 4, 1, 1]), ALL)
    with pytest.raises(ConfigError, match=r"equal for all 2 environments of group 1, got .3, 2."):
        orders.check(np.array([0, 0, 3, 2]), ALL)
    with pytest.raises(ConfigError, match="needs whole groups, but reset_mask has only a part of group 0"):
        orders.check(np.array([3, 3, 3, 3]), np.array([True, False, True, True]))
    with pytest.raises(ConfigError, match=r"prompt_indices\[2\] must be from 0 to 4, got 5"):
        orders.check(np.array([0, 0, 5, 5]), ALL)


@pytest.mark.parametrize("seed", [0, 7])
def test_seed_of_each_environment(seed):
    assert seed_of_each(seed, 3) == [seed, seed + 1, seed + 2]
    assert seed_of_each([seed, None], 2) == [seed, None]
    assert seed_of_each(None, 2) == [None, None]
