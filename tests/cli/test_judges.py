"""Judges in `gym-rm evaluate` and `gym-rm audit`: a served one that refuses some rows, budgets, and samples of rows."""

import json

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")


from tests.cli.command import runner, write
from tests.scorers.judge.test_scorer import Judge, by_length

PAIRS = [{"prompt": f"question {i}", "chosen": "x" * (i + 5), "rejected": "y" * 4} for i in range(16)]
PAIRS += [{"prompt": f"question {i}", "chosen": "a secret", "rejected": "z"} for i in range(4)]
run = runner()


def answer(messages):
    refuses = "a secret" in messages[1]["content"]
    return "I cannot judge that." if refuses else Judge(by_length)._one(messages).text


@pytest.fixture
def judge(chat_server):
    """The judge on the command line; `requests` are those that its server got."""
    chat_server.__init__(answer)
    options = {
        "kind": "judge",
        "path": chat_server.url,
        "mode": "pairwise",
        "comparisons": "all_pairs",
        "max_retries": 0,
    }
    chat_server.argument = json.dumps({**options, "max_connections": 1, "name": "judge-7b"})
    return chat_server


def test_a_served_judge_that_refuses_some_rows_is_reported(judge, tmp_path):
    rows = write(tmp_path / "rows.jsonl", PAIRS)
    command = ["evaluate", rows, "--reward-model", judge.argument, "-o", tmp_path / "out"]
    shown = run(*command, code=3).stdout
    assert "questions without a verdict" in shown
    assert "- It gave no verdict on 20.0% of 40 questions." in shown
    found = json.loads((tmp_path / "out" / "report.json").read_text())["sets"][0]["preferences"]
    assert (found["accuracy"]["value"], found["num_failed"]) == (1.0, 4)
    assert (found["judge"]["refused"]["value"], found["judge"]["prefers_first"]["value"]) == (0.2, 0.5)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "verdicts for the reply shown first" in page
    assert "no verdict on 20.0%" in page
    judge.requests.clear()
    assert (
        json.loads(run(*command, "--json", code=3).stdout)["sets"][0]["preferences"]["judge"].keys()
        == found["judge"].keys()
    )
    assert len(judge.requests) == 8  # only the refused rows are asked again
    again = ["evaluate", rows, "--scores", tmp_path / "out" / "scores.jsonl", "--json"]
    assert json.loads(run(*again, code=3).stdout)["sets"][0]["preferences"]["judge"]["num_questions"] == 40


# --- audit -------------------------------------------------------------------------------------------------------


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """Folder with a module of a scripted judge, and a file of pairs."""
    (tmp_path / "judges_of_test.py").write_text(
        "from gym_rm.scorers.judge.scorer import JudgeScorer\n"
        "from tests.scorers.judge.test_scorer import Judge, by_length\n"
        "judge = JudgeScorer(Judge(by_length), mode='pairwise', comparisons='all_pairs')\n"
    )
    monkeypatch.chdir(tmp_path)
    pairs = [{"prompt": f"{n} + 1?", "chosen": f"It is {n + 1}. Yes.", "rejected": "No."} for n in range(16)]
    return write(tmp_path / "pairs.jsonl", pairs)


def test_an_audit_of_a_judge_compares_on_few_rows(scripted, tmp_path):
    shown = run("audit", "judges_of_test:judge", "--data", scripted, "-o", tmp_path / "audit.json").stdout
    values = json.loads((tmp_path / "audit.json").read_text())
    assert (values["compares"], values["num_rows"]) == (True, 14)
    assert "A change is the reward of the changed reply minus that of the good reply beside it." in shown
    assert values["record"]["level"] == 2
