"""The toy tasks: what they ask and reward, and (slow) that the embedded policy learns each of them."""

import os
import random
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
from rich.console import Console

from agents import arithmetic, grpo, judgements, number_steps, two_questions
from agents.three_numbers import Question
from gym_rm.config import load_config, settings_file
from gym_rm.data.formats.steps import read_steps
from gym_rm.data.prompts import load_prompts
from gym_rm.envs.tools.formats import hermes
from gym_rm.policy.grpo_settings import GRPOSettings
from gym_rm.policy.trained_policy import open_policy
from gym_rm.reports.runs import read_run
from gym_rm.scorers.load import load_scorer
from gym_rm.types import Prompt

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


def test_an_answer_is_good_if_the_steps_before_show_it():
    question = Question("What is the lowest of 53, 52 and 86?", (53, 52, 86), largest=False)
    steps = ["52 is lower than 53.", "86 is higher than 52.", "It is 52."]
    assert number_steps.labels(steps, question) == [True, True, True]
    assert number_steps.labels(steps[1:], question) == [True, False]
    wrong = ["52 is higher than 53.", "52 is lower than 85.", "52 is lower than 52.", "52 is", "It is 53."]
    assert number_steps.labels(wrong, question) == [False] * 5
    prompt = Prompt((), "p", answer="52")
    replies = [[{"role": "assistant", "content": said}] for said in ("\n\n".join(steps), "52")]
    assert number_steps.right(replies, [prompt] * 2) == [1.0, 0.0]


def test_rows_are_read_as_labels_of_steps():
    rng = random.Random(0)
    rows = [number_steps.step_row(rng, held_out=False) for _ in range(200)]
    labels = [label for row in rows for label in read_steps(row, "a row").step_labels[0]]
    assert 0.4 < sum(labels) / len(labels) < 0.8
    assert {len(row["completions"]) for row in rows} == {1, 2, 3, 4, 5, 6}


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


def test_a_careless_judge_names_the_first_reply_and_breaks_one_verdict_in_four():
    rng, scorer = random.Random(0), load_scorer(kind="verdict", style="genrm")
    prompt = Prompt(({"role": "user", "content": "Which?"},), "p", metadata={"preferred": 1})
    verdicts = [judgements.careless_verdict(rng) for _ in range(400)]
    scores = scorer.score(
        [[*prompt.messages, {"role": "assistant", "content": each}] for each in verdicts], [prompt] * 400
    )
    shares = {name: (scores.infos["verdict"] == name).mean() for name in ("right", "wrong", "unreadable")}
    assert shares == pytest.approx({"right": 0.5, "wrong": 0.25, "unreadable": 0.25}, abs=0.06)
    assert all(each["chosen"] != each["rejected"] for each in (judgements.pair(rng, held_out=True) for _ in range(50)))


def run(*command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# The agent that writes a task, options of the run, and bounds of the first and the last accuracy.
LEARNED = {
    "judged": (None, ["steps=20", "eval.every=20"], 0.5, 0.85),
    "two_questions": ("two_questions", ["steps=45", "eval.every=45"], 0.1, 0.8),
    "tool": ("arithmetic", ["policy.model={folder}/policy", "steps=10", "eval.every=10"], 0.65, 0.75),
}
LONG = {"tool"}  # its policy must first imitate dialogues


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in LEARNED])
def test_the_policy_learns_the_task(name, tmp_path):
    agent, options, before, after = LEARNED[name]
    if agent is not None:
        run(f"agents/{agent}.py", str(tmp_path))
        options = [*(each.format(folder=tmp_path) for each in options), f"env.prompts={tmp_path / 'prompts.jsonl'}"]
    run("agents/grpo.py", "--config", name, *options, f"output={tmp_path / 'run'}")
    first, *_, last = [row["accuracy"] for row in read_run(tmp_path / "run").held_out]
    assert first < before
    assert last > after


@pytest.mark.slow
def test_a_judge_learns_to_write_verdicts_and_to_compare(tmp_path, monkeypatch):
    for name, value in {"STEPS": 40, "PAIRS": 256, "HELD_OUT_PAIRS": 64}.items():
        monkeypatch.setattr(judgements, name, value)
    judgements.main(tmp_path)
    files = {"policy.model": "judge", "env.prompts": "questions.jsonl", "eval.prompts": "held_out_questions.jsonl"}
    options = [*(f"{name}={tmp_path / file}" for name, file in files.items()), "steps=10", "threads=1"]
    settings = load_config(GRPOSettings, settings_file("judge", "grpo"), [*options, f"output={tmp_path / 'run'}"])
    grpo.train(grpo.fill_defaults(settings), Console(quiet=True))
    first, last = read_run(tmp_path / "run").held_out
    assert first["verdict/unreadable"] > 0.15
    assert (last.get("verdict/unreadable") or 0.0) < 0.05
    assert last["verdict/right"] > first["verdict/right"] + 0.1
    assert last["position_consistent"] > 0.3


@pytest.mark.slow
@pytest.mark.long
def test_the_policy_learns_the_answers_in_no_more_steps(tmp_path):
    folder = ROOT / "outputs" / "number-steps"
    if not (folder / "reward-model" / "best").exists():
        run("agents/number_steps.py", str(folder))
        run("-m", "gym_rm", "train", "configs/rm/steps.yaml")
    run("agents/grpo.py", "--config", "steps", f"output={tmp_path / 'run'}", "steps=12")
    first, *_, last = read_run(tmp_path / "run").held_out
    assert last["accuracy"] > first["accuracy"] + 0.2
    assert last["completion_tokens"] < first["completion_tokens"]  # `min` never pays for more steps
