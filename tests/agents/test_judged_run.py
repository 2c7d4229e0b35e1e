"""The embedded policy learns from comparisons of a judge, without a reward model."""

from pathlib import Path

import pytest
from rich.console import Console

from agents import grpo
from gym_rm.config import load_config
from gym_rm.reports.runs import read_run

CONFIG = Path(__file__).parents[2] / "configs/grpo/judged.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["grpo", "leave_one_out"])
def test_a_policy_that_is_judged_in_groups_learns_to_give_right_replies(tmp_path, estimator):
    changes = [f"output={tmp_path / 'run'}", "steps=30", f"advantage.estimator={estimator}", "eval.every=30"]
    grpo.train(grpo.fill_defaults(load_config(grpo.GRPOSettings, CONFIG, changes)), Console(quiet=True))
    before, after = read_run(tmp_path / "run").held_out
    assert before["accuracy"] < 0.5
    assert after["accuracy"] > 0.85
