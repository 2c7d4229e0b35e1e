"""Components, token counts and metrics of the rewards."""

import numpy as np
import pytest

from tests.envs.environments import Recorder, make, one_turn, prompt


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


def test_metrics_have_the_totals_of_the_reward_and_of_its_components_over_the_episode():
    envs = make(2, reward_model=Recorder(), prompts=[prompt(0, "more?", "more?")], fallback_reward=-1.0)
    envs.reset(seed=0)
    *_, infos = envs.step(["four", "FAIL"])
    assert infos["metrics"]["component_totals"]["_length"].tolist() == [True, False]
    envs.step(["eight888", "xx"])
    *_, infos = envs.step(["xx", "yyyy"])
    metrics = infos["final_info"]["metrics"]
    assert metrics["total"].tolist() == [14.0, 6.0]
    assert metrics["component_totals"]["length"].tolist() == [14.0, 6.0]
    assert metrics["component_totals"]["half"].tolist() == [7.0, 3.0]
