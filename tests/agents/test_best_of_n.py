"""The agent that checks a scorer by choosing the best of n replies."""

import csv
import itertools
import math

import numpy as np
import pytest

from agents import best_of_n
from gym_rm.errors import ConfigError


def test_the_curve_is_the_mean_over_all_subsets():
    random = np.random.default_rng(0)
    rewards, right = random.normal(size=(3, 5)), (random.random((3, 5)) < 0.4).astype(float)
    rows = best_of_n.curve(rewards, right)
    assert [row["n"] for row in rows] == [1, 2, 4, 5]
    for row in rows:
        subsets = [list(chosen) for chosen in itertools.combinations(range(5), row["n"])]
        best = [[chosen[rewards[prompt, chosen].argmax()] for chosen in subsets] for prompt in range(3)]
        expected = {
            "reward": np.mean([rewards[prompt, each] for prompt in range(3) for each in best[prompt]]),
            "accuracy": np.mean([right[prompt, each] for prompt in range(3) for each in best[prompt]]),
            "any_right": np.mean([right[prompt, chosen].any() for prompt in range(3) for chosen in subsets]),
            "kl": math.log(row["n"]) - (row["n"] - 1) / row["n"],
        }
        assert {name: row[name] for name in expected} == pytest.approx(expected)
        assert row["reward_low"] <= row["reward"] <= row["reward_high"]


def test_prompts_without_a_score_are_left_out_and_prompts_without_an_answer_have_no_accuracy():
    rewards = np.array([[1.0, np.nan], [1.0, 3.0], [0.0, 2.0]])
    right = np.array([[1.0, 1.0], [0.0, 1.0], [np.nan, np.nan]])
    first, last = best_of_n.curve(rewards, right)
    assert (first["reward"], first["accuracy"], last["reward"], last["accuracy"]) == (1.5, 0.5, 2.5, 1.0)
    assert "accuracy" not in best_of_n.curve(rewards, np.full((3, 2), np.nan))[0]
    with pytest.raises(ConfigError, match="no prompt has the scores"):
        best_of_n.curve(rewards[:1], right[:1])


def test_choosing_by_the_embedded_reward_model_makes_replies_right_more_often(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    monkeypatch.setattr("sys.argv", ["best_of_n.py", "n=8", "num_prompts=48", f"output={folder}"])
    best_of_n.main()
    with (folder / "best_of_n.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["n"] for row in rows] == ["1", "2", "4", "8"]
    rewards, accuracies = ([float(row[name]) for row in rows] for name in ("reward", "accuracy"))
    assert rewards == sorted(rewards)
    assert accuracies[-1] > accuracies[0] + 0.2
    assert (folder / "best_of_n.png").stat().st_size > 10_000
    assert "48 prompts" in capsys.readouterr().out


def test_a_wrong_setting_is_one_line_and_help_lists_every_setting(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["best_of_n.py", "num_prompt=4", f"output={tmp_path / 'run'}"])
    with pytest.raises(SystemExit, match="2"):
        best_of_n.main()
    assert "Did you mean 'num_prompts'" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr("sys.argv", ["best_of_n.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        best_of_n.main()
    text = capsys.readouterr().out
    assert all(f"  {name}  [" in text for name in best_of_n.BestOfNSettings.model_fields)
