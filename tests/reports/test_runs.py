import json
import re

import pytest

from gym_rm.errors import ConfigError
from gym_rm.reports.runs import RunWriter, read_run
from tests.reports.example_run import SETTINGS, conversation


def test_read_run_returns_the_written_values(folder):
    run = read_run(folder)
    assert run.settings == SETTINGS
    assert [row["step"] for row in run.training] == list(range(1, 21))
    assert [row["step"] for row in run.held_out] == [0, 10, 20]
    assert run.conversations[0]["messages"] == conversation("What is 1 + 0?", "It is 0.")


def test_every_line_is_written_immediately(tmp_path):
    writer = RunWriter(tmp_path, {})
    writer.add_metrics("train", 1, {"reward_mean": 0.5})
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert row["reward_mean"] == 0.5
    assert row["seconds"] >= 0


def test_a_metric_that_is_not_finite_raises_value_error(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        RunWriter(tmp_path, {}).add_metrics("train", 1, {"reward_mean": float("nan")})


def test_a_run_is_not_overwritten(folder):
    with pytest.raises(ConfigError, match="already contains a run"):
        RunWriter(folder, {})


def test_a_folder_without_a_run_raises_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"must contain a run, but metrics\.jsonl is missing"):
        read_run(tmp_path)


def test_the_caption_names_policy_and_reward_model(folder):
    caption = read_run(folder).caption
    assert re.fullmatch(r"20 steps in \d+ s, seed 7, policy embedded, reward model org/model", caption)


def test_a_repeated_prompt_gives_one_pair(folder):
    pairs = read_run(folder).before_and_after()
    assert [(before["step"], after["step"], before["prompt_id"]) for before, after in pairs] == [
        (0, 20, "p0"),
        (0, 20, "p1"),
    ]
    assert all(before["prompt_id"] == after["prompt_id"] for before, after in pairs)


def test_a_run_with_one_measurement_has_no_pairs(tmp_path):
    writer = RunWriter(tmp_path, {})
    writer.add_metrics("held_out", 0, {"reward_mean": 0.0})
    writer.add_conversation(0, conversation("What?", "That."), prompt_id="p", reward=0.0)
    assert read_run(tmp_path).before_and_after() == []
