import html
import importlib.resources
import json

import pytest

import gym_rm
from gym_rm.reports.runs import RunWriter
from tests.cli.command import FIVE, FOUR, USER, LengthScorer, read, runner, write

run = runner("rescore")
ROLLOUTS = [
    {"step": 1, "prompt": f"{n} + 2?", "completion": "x" * (k + 1), "right": k == 2, "reward": -float(k)}
    for n in range(3)
    for k in range(4)
]


def test_a_run_is_scored_again(tmp_path, scorer):
    writer = RunWriter(tmp_path / "run", {})
    for reply, right, reward in ((FOUR, True, 0.25), (FIVE, False, 1.0)):
        writer.add_conversation(1, [USER, reply], prompt_id="p", phase="train", group=0, reward=reward, right=right)
    writer.add_conversation(1, [USER, {**FOUR, "content": "bad"}], prompt_id="p", phase="train", group=0, reward=0.0)
    source = tmp_path / "run" / "conversations.jsonl"
    table = run(source, "-o", tmp_path / "out", "--on-error", "skip", code=3).stdout
    rows = read(tmp_path / "out" / "rollouts.jsonl")
    assert [(row["reward"], row["new_reward"]) for row in rows] == [(0.25, 0.1), (1.0, 0.4), (0.0, None)]
    assert rows[2]["new_reward_error"] == "it is bad"
    numbers = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (numbers["without a new reward"], numbers["pairs"], numbers["accuracy, new"]) == (1, 1, 0.0)
    assert "without a new reward 1" in " ".join(table.split())


def test_it_resumes_and_refuses_mixtures_of_models(tmp_path, monkeypatch):
    source, output = write(tmp_path / "in.jsonl", ROLLOUTS), tmp_path / "out"
    for scorer, code in (
        (LengthScorer(raises=KeyboardInterrupt()), 130),
        (LengthScorer(), 0),
        (LengthScorer(model="b"), 1),
    ):
        monkeypatch.setattr(gym_rm, "load_scorer", lambda model, scorer=scorer: scorer)
        result = run(source, "-o", output, "--batch-size", 4, code=code)
        assert sum(scorer.calls) == {130: 12, 0: 4, 1: 1}[code]
        if not code:
            write(source, [*ROLLOUTS, {**ROLLOUTS[0], "completion": "new"}])
    assert "another model" in result.stderr


def test_the_page_has_the_numbers_and_no_markup_of_rows(tmp_path, scorer):
    hostile = "<script>alert(1)</script>"
    rows = [{**ROLLOUTS[0], "completion": hostile}, *ROLLOUTS, {**ROLLOUTS[0], "reward": None}]
    run(write(tmp_path / "in.jsonl", rows), "-o", tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert hostile not in page
    assert html.escape(hostile) in page
    assert page.count('<circle class="dot bad"') == 10
    assert page.count('<circle class="dot good"') == 3
    assert page.count("<article") == 10
    assert "mean change of an advantage" in page


def test_files_of_a_folder_are_read_in_the_order_of_their_steps(tmp_path, scorer):
    (tmp_path / "dumps").mkdir()
    for step in (10, 9):
        row = {"input": "user\n2 + 2?\nassistant\n", "output": "4", "gts": "4", "score": 1.0, "step": step, "acc": True}
        write(tmp_path / "dumps" / f"{step}.jsonl", [row, {**row, "output": "five", "score": 0.0, "acc": False}])
    run(tmp_path / "dumps", "-o", tmp_path / "out")
    assert [row["step"] for row in read(tmp_path / "out" / "rollouts.jsonl")] == [9, 9, 10, 10]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["accuracy, old"] == 1.0
    result = run(tmp_path / "dumps", "-o", tmp_path / "dumps", "--overwrite", code=2)
    assert "would be read again" in result.stderr
    (tmp_path / "empty").mkdir()
    assert "has no .jsonl and no .parquet file" in run(tmp_path / "empty", "-o", tmp_path / "two", code=1).stderr


def test_a_scorer_that_compares_replies_is_refused(tmp_path, scorer):
    scorer.relative = True
    source = write(tmp_path / "in.jsonl", ROLLOUTS)
    assert "rollouts are scored one by one" in run(source, "-o", tmp_path / "out", code=1).stderr


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--reward", "a=b"], "'a' must be a number"), (["--option", "x"], "name=value")]
)
def test_invalid_arguments_exit_with_code_2(tmp_path, arguments, message):
    assert message in run(write(tmp_path / "in.jsonl", ROLLOUTS), "-o", tmp_path / "out", *arguments, code=2).stderr


def test_columns_of_other_names_are_read(tmp_path, scorer):
    rows = [{"Question": "2 + 2?", "Reply": "x" * k, "old": k, "group": 0} for k in (1, 2)]
    arguments = ("--column", "prompt=Question", "--column", "response=Reply", "--reward", "old")
    run(write(tmp_path / "in.jsonl", rows), "-o", tmp_path / "out", *arguments)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["Pearson"] == pytest.approx(1.0)


@pytest.mark.slow
def test_completions_that_trl_logs_are_scored_again(tmp_path, scorer):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    def digits(completions, **_):
        return [float(sum(map(str.isdigit, each[-1]["content"]))) for each in completions]

    def even(completions, **_):
        return [None if place % 2 else -float(len(each[-1]["content"])) for place, each in enumerate(completions)]

    prompts = [{"prompt": [{"role": "user", "content": f"Which is the largest, {n}, 30 or 27?"}]} for n in (12, 45)]
    config = trl.GRPOConfig(
        str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=8,
        logging_steps=1, log_completions=True, report_to=[], use_cpu=True, bf16=False, save_strategy="no",
    )  # fmt: skip
    policy = str(importlib.resources.files("gym_rm") / "assets" / "policy")
    trl.GRPOTrainer(policy, [digits, even], config, datasets.Dataset.from_list(prompts)).train()
    folder = tmp_path / "run" / "completions"
    assert "the reward is one of ['digits', 'even']" in run(folder, "-o", tmp_path / "one", code=1).stderr
    run(folder, "-o", tmp_path / "out", "--reward", "digits", "--reward", "even=0.5")
    rows = read(tmp_path / "out" / "rollouts.jsonl")
    assert [row["new_reward"] for row in rows] == [
        pytest.approx(len(row["completion"][0]["content"]) / 10) for row in rows
    ]
    numbers = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (numbers["conversations"], numbers["groups"], numbers["pairs"]) == (8, 2, 12)
    assert numbers["without an old reward"] == 0
