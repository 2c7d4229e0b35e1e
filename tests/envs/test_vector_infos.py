"""Components, token counts and metrics of the rewards."""

import numpy as np
import pytest

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


def test_metrics_of_a_step_cover_all_environments():
    envs = one_turn(4, reward_model=Recorder())
    envs.reset(seed=0)
    assert envs.metrics.num_samples == 0
    envs.step(["a", "bb", "ccc", "dddd"])
    metrics = envs.metrics
    assert (metrics.num_samples, metrics.mean, metrics.min, metrics.max) == (4, 2.5, 1.0, 4.0)
    assert metrics.length_correlation == pytest.approx(1.0)
    assert metrics.components == {"length": 2.5, "half": 1.25}
