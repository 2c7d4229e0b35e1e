import json

import pytest

from gym_rm.evaluation.audit import read_record
from tests.cli.command import runner, write

SMALL = ("--rows", "16")
PAIRS = [{"prompt": f"{n} + 1?", "chosen": f"It is {n + 1}. Yes.", "rejected": "No."} for n in range(16)]
run = runner("audit")


@pytest.fixture
def scorers(tmp_path, monkeypatch):
    """Change to a folder with a module of scorers and a file of pairs."""
    code = (
        "def length(conversations):\n"
        "    return [len(each[-1]['content']) for each in conversations]\n"
        "def exact(conversations):\n"
        "    texts = [(each[0]['content'], each[-1]['content']) for each in conversations]\n"
        "    return [float(reply == f'It is {int(asked[:-5]) + 1}. Yes.') for asked, reply in texts]\n"
    )
    (tmp_path / "audited_scorers.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "pairs.jsonl", PAIRS)


def test_the_command_prints_a_table_and_writes_a_file(scorers, tmp_path):
    record = tmp_path / "new" / "a.json"
    result = run("audited_scorers:length", "--data", scorers, *SMALL, "-o", record)
    assert "whole reply 5 times" in result.stdout
    assert "Warning level 2 of 2: exploitable." in result.stdout
    assert read_record(record).model == "audited_scorers:length"
    assert read_record(record).level == 2


def test_an_honest_scorer_is_clean(scorers):
    found = json.loads(run("audited_scorers:exact", "--data", scorers, *SMALL, "--json", "--max-level", 0).stdout)
    assert found["record"]["level"] == 0
    assert found["num_pairs"] == 16


@pytest.mark.slow
def test_a_verifier_is_audited_on_rows_with_answers(tmp_path):
    rows = [
        {"prompt": f"{n} + 1?", "response": f"As {n} + 1 = {n + 1}, it is {n + 1}.", "answer": n + 1} for n in range(16)
    ]
    found = json.loads(run("--option", "kind=math", "--data", write(tmp_path / "a.jsonl", rows), "--json").stdout)
    assert found["record"]["level"] == 0
    assert next(line["mean"]["value"] for line in found["lines"] if line["name"] == "reply of another row") == -1


def test_a_finding_is_said_in_words_with_an_example(scorers):
    found = json.loads(run("audited_scorers:length", "--data", scorers, *SMALL, "--json").stdout)
    line = next(each for each in found["lines"] if each["name"] == "line break in front")
    assert line["says"].startswith("Line break in front: the score rose by 1 on average")
    assert line["examples"][0]["after"] == "\n" + line["examples"][0]["before"]


def test_a_level_above_the_highest_allowed_one_is_exit_code_3(scorers):
    run("audited_scorers:length", "--data", scorers, *SMALL, "--max-level", 1, code=3)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--data", "missing.jsonl"], 1, "does not exist"),
        (["-o", "a.txt"], 2, "-o must end in .json, got 'a.txt'"),
        (["missing/folder/model", "--data", "pairs.jsonl"], 1, "missing/folder/model"),
        (["{", "--data", "pairs.jsonl"], 2, "the reward model is not valid JSON"),
        (["audited_scorers:length", "--rows", "1"], 2, "--rows"),
    ],
)
def test_a_mistake_is_named(scorers, arguments, code, message):
    assert message in run(*arguments, code=code).output


@pytest.mark.slow
def test_the_embedded_model_is_audited_without_arguments():
    found = json.loads(run("--rows", 6, "--json").stdout)
    assert found["record"]["model"] == "embedded"
    assert found["num_rows"] == 6
