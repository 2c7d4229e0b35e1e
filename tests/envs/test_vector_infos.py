"""Components and token counts of the rewards."""

import numpy as np

from tests.envs.environments import Recorder, one_turn


def test_infos_contain_components_and_token_counts():
    envs = one_turn(2, reward_model=Recorder(), autoreset_mode="NextStep")
    envs.reset(seed=0)
    *_, infos = envs.step(["four", "~~"])
    assert infos["components"]["half"].tolist() == [2.0, 1.0]
    assert infos["_components"].tolist() == infos["components"]["_half"].tolist() == [True, True]
    assert infos["num_tokens"].tolist() == [len("question 0") + 4, len("question 0") + 2]
    assert infos["truncated_tokens"].tolist() == [0, 2]
    assert infos["truncated_tokens"].dtype == np.int64
