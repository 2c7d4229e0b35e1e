"""The reset option `prompt_indices`."""

import numpy as np
import pytest

from gym_rm import ConfigError
from tests.envs.environments import each_mode, make, one_turn


def test_prompt_indices_set_the_prompt_of_each_row():
    envs = one_turn(3)
    observations, infos = envs.reset(seed=0, options={"prompt_indices": [2, 0, 2]})
    assert infos["prompt_id"].tolist() == ["p2", "p0", "p2"]
    assert [observation[0]["content"] for observation in observations] == ["question 2", "question 0", "question 2"]
    mask = np.array([False, True, False])
    _, infos = envs.reset(options={"prompt_indices": np.array([0, 1, 0]), "reset_mask": mask})
    assert (infos["prompt_id"][1], infos["_prompt_id"].tolist()) == ("p1", mask.tolist())


@each_mode
def test_prompt_indices_do_not_change_the_order_of_prompts(mode):
    envs, plain = one_turn(2, autoreset_mode=mode), one_turn(2, autoreset_mode=mode)
    envs.reset(seed=5, options={"prompt_indices": [0, 0]})
    assert envs.reset()[1]["prompt_id"].tolist() == plain.reset(seed=5)[1]["prompt_id"].tolist()


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
