"""The order of prompts, seeds, groups, and the options of a reset."""

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from hypothesis import given
from hypothesis import strategies as st

from gym_rm import ConfigError
from gym_rm.envs.episodes import PromptOrder, PromptOrders
from tests.envs.environments import make, one_turn, prompt, prompt_ids

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
    with pytest.raises(ConfigError, match="prompt_indices is for whole groups, but reset_mask has only a part of"):
        orders.check(np.array([3, 3, 3, 3]), np.array([True, False, True, True]))
    with pytest.raises(ConfigError, match=r"prompt_indices\[2\] must be from 0 to 4, got 5"):
        orders.check(np.array([0, 0, 5, 5]), ALL)


def test_environments_of_a_group_get_the_same_prompts_and_groups_differ():
    orders = prompt_ids(make(6, group_size=3, prompts=[prompt(i) for i in range(50)]), 20, seed=0)
    assert (orders[0] == orders[1]).all()
    assert (orders[0] == orders[2]).all()
    assert (orders[3] == orders[5]).all()
    assert (orders[0] != orders[3]).any()


def test_group_ids_are_unique_per_group_and_episode():
    envs = one_turn(4, group_size=2)
    ids = [envs.reset(seed=0)[1]["group_id"]]
    ids += [envs.step(["x"] * 4)[-1]["group_id"] for _ in range(5)]
    assert ids[0].dtype == np.int64
    assert all(a == b and c == d for a, b, c, d in ids)
    assert len({int(number) for row in ids for number in row}) == 12
    assert "group_id" not in one_turn(4).reset(seed=0)[1]


def test_a_seed_for_part_of_a_group_raises_config_error():
    envs = one_turn(4, group_size=2)
    envs.reset(seed=0)
    with pytest.raises(ConfigError, match="only a part of group 1"):
        envs.reset(seed=1, options={"reset_mask": np.array([True, True, True, False])})


def test_np_random_seed_returns_the_seed_of_each_environment():
    envs = one_turn(3)
    assert len({*envs.np_random_seed}) == 3
    envs.reset(seed=4)
    assert envs.np_random_seed == (4, 5, 6)
    envs.reset(seed=[9, None, 2])
    assert envs.np_random_seed == (9, 5, 2)
    assert len(envs.np_random) == 3


def test_the_first_reset_must_include_every_row():
    with pytest.raises(ResetNeeded, match="reset_mask must include every environment in the first reset"):
        make(2).reset(options={"reset_mask": np.array([True, False])})


@pytest.mark.parametrize("rows", [np.array([0, 1]), [True, False], np.array([True]), np.array([1, 0])])
def test_the_rows_of_a_step_must_be_a_mask(rows):
    envs = make(2)
    envs.reset(seed=0)
    with pytest.raises((TypeError, ValueError), match="rows must"):
        envs.step(["a", "b"], rows=rows)


@pytest.mark.parametrize(
    "seed", ["a", "12", b"12", 1.5, {0: 1, 1: 2}, {1, 2}, iter([1, 2]), [1, "a"], [1, 2.0], {}.keys]
)
def test_a_seed_of_another_type_is_refused(seed):
    with pytest.raises(ConfigError, match="seed must be an integer, None, or a list of integers and None; got "):
        make(2).reset(seed=seed)


@pytest.mark.parametrize("seed", [[1], [1, 2, 3], []])
def test_a_list_of_seeds_must_have_one_per_environment(seed):
    with pytest.raises(ValueError, match="seed must have one entry for each of the 2 environments"):
        make(2).reset(seed=seed)


@pytest.mark.parametrize("options", [5, [], "", "prompt_indices", [("prompt_indices", [0])], {5: 1}, {"prompt": 3}])
def test_options_that_are_no_mapping_of_options_are_refused(options):
    with pytest.raises(ConfigError, match=r"options of reset must be a mapping|unknown reset options"):
        make(2).reset(options=options)


def test_prompt_indices_set_the_prompt_of_each_row():
    envs = one_turn(3)
    observations, infos = envs.reset(seed=0, options={"prompt_indices": [2, 0, 2]})
    assert infos["prompt_id"].tolist() == ["p2", "p0", "p2"]
    assert [observation[0]["content"] for observation in observations] == ["question 2", "question 0", "question 2"]
    mask = np.array([False, True, False])
    _, infos = envs.reset(options={"prompt_indices": np.array([0, 1, 0]), "reset_mask": mask})
    assert (infos["prompt_id"][1], infos["_prompt_id"].tolist()) == ("p1", mask.tolist())


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 3], r"prompt_indices\[1\] must be from 0 to 2, got 3"),
        ([0, -1], r"prompt_indices\[1\] must be from 0 to 2, got -1"),
        ([0], "must be 2 integers, one for each environment, got .0."),
        ([0.0, 1.0], "must be 2 integers"),
        ("ab", "must be 2 integers"),
        ([True, False], "must be 2 integers"),
    ],
)
def test_invalid_prompt_indices_raise_config_error(indices, message):
    with pytest.raises(ConfigError, match=message):
        one_turn(2).reset(options={"prompt_indices": indices})


def test_a_reset_with_invalid_prompt_indices_changes_nothing():
    envs, plain = make(4, group_size=2), make(4, group_size=2)
    for each in (envs, plain):
        each.reset(seed=0)
    for indices in ([0, 1, 2, 2], [0, 0, 77, 77]):
        with pytest.raises(ConfigError):
            envs.reset(seed=99, options={"prompt_indices": indices})
    assert envs.reset()[1]["prompt_id"].tolist() == plain.reset()[1]["prompt_id"].tolist()
    assert envs.np_random_seed == plain.np_random_seed
