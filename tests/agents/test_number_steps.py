"""The task of small steps: its labels, its rows, and (slow) that the three commands of its config learn."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from agents import number_steps
from agents.three_numbers import Question
from gym_rm.data.formats.steps import read_steps
from gym_rm.reports.runs import read_run
from gym_rm.types import Prompt

ROOT = Path(__file__).parents[2]
QUESTION = Question("What is the lowest of 53, 52 and 86?", (53, 52, 86), largest=False)


def test_an_answer_is_good_if_the_steps_before_show_it():
    steps = ["52 is lower than 53.", "86 is higher than 52.", "It is 52."]
    assert number_steps.labels(steps, QUESTION) == [True, True, True]
    assert number_steps.labels(steps[1:], QUESTION) == [True, False]
    wrong = ["52 is higher than 53.", "52 is lower than 85.", "52 is lower than 52.", "52 is", "It is 53."]
    assert number_steps.labels(wrong, QUESTION) == [False] * 5
    prompt = Prompt((), "p", answer="52")
    replies = [[{"role": "assistant", "content": said}] for said in ("\n\n".join(steps), "52")]
    assert number_steps.right(replies, [prompt] * 2) == [1.0, 0.0]


def test_rows_are_read_as_labels_of_steps():
    rng = random.Random(0)
    rows = [number_steps.step_row(rng, held_out=False) for _ in range(200)]
    labels = [label for row in rows for label in read_steps(row, "a row").step_labels[0]]
    assert 0.4 < sum(labels) / len(labels) < 0.8
    assert {len(row["completions"]) for row in rows} == {1, 2, 3, 4, 5, 6}


@pytest.mark.slow
def test_the_policy_learns_the_answers_in_no_more_steps(tmp_path):
    folder, environment = ROOT / "outputs" / "number-steps", {**os.environ, "PYTHONPATH": str(ROOT)}
    commands = [["agents/grpo.py", "--config", "configs/grpo/steps.yaml", f"output={tmp_path / 'run'}", "steps=30"]]
    if not (folder / "reward-model" / "best").exists():
        commands = [
            ["agents/number_steps.py", str(folder)],
            ["-m", "gym_rm", "train", "configs/rm/steps.yaml"],
            *commands,
        ]
    for command in commands:
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    held_out = read_run(tmp_path / "run").held_out
    assert held_out[-1]["accuracy"] > held_out[0]["accuracy"] + 0.2
    assert held_out[-1]["completion_tokens"] < held_out[0]["completion_tokens"]  # `min` never pays for more steps
