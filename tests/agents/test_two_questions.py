"""The task with two questions: its rewards, its prompts, and that the embedded policy learns it."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest

from agents import two_questions
from gym_rm.data.prompts import load_prompts

ROOT = Path(__file__).parents[2]


def test_each_reply_has_a_reward_for_its_own_question():
    rows = [{"prompt": "What is the lowest of 22, 88 and 86?", "user_turns": ["And what is the highest?"]}] * 4
    envs = gym.make_vec("RewardModel-v0", 4, prompts=rows, reward_model=two_questions.score, max_turns=2)
    envs.reset(seed=0)
    _, first, *_ = envs.step(["It is 22.", "It is 88.", "22", "It is 13."])
    assert first == pytest.approx([1.4, 0.4, 1.3, 0.1])
    _, second, terminations, _, infos = envs.step(["That is 88.", "That is 88.", "That is 86.", "It is 88 or 22."])
    assert second == pytest.approx([1.4, 1.1, 0.4, 0.0])
    assert terminations.all()
    assert infos["final_info"]["components"]["right"].tolist() == [1, 1, 0, 0]


def test_the_prompts_are_the_embedded_ones_with_the_opposite_question(tmp_path):
    two_questions.write_prompts(tmp_path)
    for embedded, ours in zip(load_prompts(None), load_prompts(tmp_path / "prompts.jsonl"), strict=True):
        question = embedded.messages[-1]["content"]
        assert two_questions.answers(question) == (embedded.answer, ours.answer)


@pytest.mark.slow
def test_the_embedded_policy_learns_to_answer_the_second_question(tmp_path):
    two_questions.write_prompts(tmp_path)
    settings = [f"env.prompts={tmp_path / 'prompts.jsonl'}", f"output={tmp_path / 'run'}"]
    command = ["-m", "gym_rm", "grpo", "--config", "two_questions", *settings]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "run" / "held_out.csv").open() as file:
        accuracies = [float(row["accuracy"]) for row in csv.DictReader(file)]
    assert accuracies[0] < 0.1
    assert accuracies[-1] > 0.8
