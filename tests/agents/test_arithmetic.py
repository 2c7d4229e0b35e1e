"""The task with a calculator: what the careless user writes, and that a policy learns to call the calculator."""

import csv
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from agents import arithmetic
from gym_rm.envs.tools.formats import hermes
from gym_rm.policy.trained_policy import open_policy

ROOT = Path(__file__).parents[2]


def test_calls_are_read_but_broken_ones_are_not():
    rng = random.Random(0)
    for _ in range(50):
        _, text, _ = arithmetic.question(rng, easy=0.0)
        call = arithmetic.call_of(text)
        assert hermes(call).calls == [{"name": "calculator", "arguments": {"expression": f" {text}"}}]
        assert arithmetic.mistyped(text, rng) != text
        parsed = hermes(arithmetic.broken(call, rng))
        assert parsed.problems
        assert not parsed.calls


def test_the_policy_imitates_what_the_user_wrote_and_nothing_else():
    tokenizer, rng = open_policy(None).tokenizer, random.Random(0)
    tokenizer.chat_template = arithmetic.TEMPLATE
    for careful in [True, False] * 20:
        messages, tools = arithmetic.dialogue(rng, careful=careful)
        tokens, labels = arithmetic.tokens_of(tokenizer, messages, tools)
        text = tokenizer.decode(tokens)
        assert ("calculator(expression)" in text) == (tools is not None)
        written = tokenizer.decode([label for label in labels if label >= 0]).split("<|im_end|>")[:-1]
        said = [part.split("<|im_end|>")[0] for part in text.split("<|im_start|>assistant\n")[1:]]
        assert written == said
        assert said[-1] == messages[-1]["content"]


@pytest.mark.slow
def test_the_policy_learns_to_call_the_calculator(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def execute(*command):
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    execute("agents/arithmetic.py", str(tmp_path))
    files = (f"policy.model={tmp_path / 'policy'}", f"env.prompts={tmp_path / 'prompts.jsonl'}")
    execute("agents/grpo.py", "--config", "configs/grpo/tool.yaml", *files, f"output={tmp_path / 'run'}")
    with (tmp_path / "run" / "held_out.csv").open() as file:
        accuracies = [float(row["accuracy"]) for row in csv.DictReader(file)]
    assert accuracies[0] < 0.65
    assert accuracies[-1] > 0.85
