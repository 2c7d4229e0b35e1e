"""Environments of a group answer the same prompts."""

import numpy as np
import pytest

from gym_rm import ConfigError
from tests.envs.environments import make, one_turn, prompt, prompt_ids, until_long


def test_environments_of_a_group_get_the_same_prompts_and_groups_differ():
    orders = prompt_ids(make(6, group_size=3, prompts=[prompt(i) for i in range(50)]), 20, seed=0)
    assert (orders[0] == orders[1]).all()
    assert (orders[0] == orders[2]).all()
    assert (orders[3] == orders[5]).all()
    assert (orders[0] != orders[3]).any()


def test_environments_of_a_group_get_the_same_prompts_at_different_speeds():
    envs = make(2, group_size=2, prompts=[prompt(i, "a", "b", "c") for i in range(5)], respond=until_long)
    _, infos = envs.reset(seed=0)
    orders = [[prompt_id] for prompt_id in infos["prompt_id"]]
    ids = [[group_id] for group_id in infos["group_id"]]
    for _ in range(40):  # the first environment ends an episode at every step, the second at every fourth step
        _, _, terminations, truncations, infos = envs.step(["long", "x"])
        for row in np.flatnonzero(terminations | truncations):
            orders[row].append(infos["prompt_id"][row])
            ids[row].append(infos["group_id"][row])
    assert len(orders[0]) > 2 * len(orders[1]) > 10
    assert orders[0][: len(orders[1])] == orders[1]
    assert ids[0][: len(ids[1])] == ids[1]
    assert len({*ids[0]}) == len(ids[0])


def test_group_ids_are_unique_per_group_and_episode():
    envs = one_turn(4, group_size=2)
    ids = [envs.reset(seed=0)[1]["group_id"]]
    ids += [envs.step(["x"] * 4)[-1]["group_id"] for _ in range(5)]
    assert ids[0].dtype == np.int64
    assert all(a == b and c == d for a, b, c, d in ids)
    assert len({int(number) for row in ids for number in row}) == 12
    assert "group_id" not in one_turn(4).reset(seed=0)[1]


def test_a_full_reset_aligns_the_environments_of_a_group():
    envs = make(2, group_size=2, prompts=[prompt(i, "a", "b", "c") for i in range(9)], respond=until_long)
    envs.reset(seed=0)
    for _ in range(2):
        envs.step(["long", "x"])
    _, infos = envs.reset()
    assert infos["prompt_id"][0] == infos["prompt_id"][1]
    assert infos["group_id"][0] == infos["group_id"][1]


def test_a_seed_for_part_of_a_group_raises_config_error():
    envs = one_turn(4, group_size=2)
    envs.reset(seed=0)
    with pytest.raises(ConfigError, match="only a part of group 1"):
        envs.reset(seed=1, options={"reset_mask": np.array([True, True, True, False])})
