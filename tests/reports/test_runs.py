import json
import re

import pytest

from gym_rm.errors import ConfigError
from gym_rm.reports.runs import RunWriter, read_run
from tests.reports.example_run import SETTINGS, conversation


def test_what_was_written_is_read_back(folder):
    run = read_run(folder)
    assert run.settings == SETTINGS
    assert [row["step"] for row in run.training] == list(range(1, 21))
    assert [row["step"] for row in run.held_out] == [0, 10, 20]
    assert run.conversations[0]["messages"] == conversation("What is 1 + 0?", "It is 0.")


def test_every_line_is_on_disk_at_once(tmp_path):
    writer = RunWriter(tmp_path, {})
    writer.add_metrics("train", 1, {"reward_mean": 0.5})
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert row["reward_mean"] == 0.5
    assert row["seconds"] >= 0


def test_a_metric_that_is_not_finite_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        RunWriter(tmp_path, {}).add_metrics("train", 1, {"reward_mean": float("nan")})


def test_a_run_is_not_written_over(folder):
    with pytest.raises(ConfigError, match="holds a run already"):
        RunWriter(folder, {})


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run: there is no metrics\.jsonl"):
        read_run(tmp_path)


def test_the_caption_names_what_was_trained(folder):
    caption = read_run(folder).caption
    assert re.fullmatch(r"20 steps in \d+ s, seed 7, policy embedded, reward model org/model", caption)


def test_a_prompt_that_was_asked_twice_is_paired_once(folder):
    pairs = read_run(folder).before_and_after()
    assert [(before["step"], after["step"], before["prompt_id"]) for before, after in pairs] == [
        (0, 20, "p0"),
        (0, 20, "p1"),
    ]
    assert all(before["prompt_id"] == after["prompt_id"] for before, after in pairs)


def test_a_run_that_was_measured_once_has_no_pairs(tmp_path):
    writer = RunWriter(tmp_path, {})
    writer.add_metrics("held_out", 0, {"reward_mean": 0.0})
    writer.add_conversation(0, conversation("What?", "That."), prompt_id="p", reward=0.0)
    assert read_run(tmp_path).before_and_after() == []
