import json

import pytest

from gym_rm.data.prompts import load_prompts
from tests import real_data
from tests.cli.command import runner, write

PAIR = {"prompt": "Which is larger, 12 or 30?", "chosen": "30", "rejected": "12 is."}
run = runner("data", "inspect")
judge = runner("data", "judgements")


def as_dict(*arguments):
    return json.loads(run(*arguments, "--json").stdout)


@pytest.mark.data
def test_the_report_of_a_real_file_names_what_was_understood():
    shown = run(real_data.FOLDER / "hh_harmless.jsonl.gz").stdout
    for text in ("1,147 of 1,150 rows are used (1,147 ranks)", "reply 1 of 2 is empty"):
        assert text in shown


def test_rows_of_no_use_are_shown_with_their_reasons(tmp_path):
    path = write(tmp_path / "p.jsonl", [PAIR, {**PAIR, "chosen": ""}, '{"prompt"'])
    found = as_dict(path)
    assert (found["rows"], found["shapes"]) == (3, {"binary": 1})
    assert [each["examples"] for each in found["dropped"]] == [[f"{path} line 2"], [f"{path} line 3"]]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nosuch.jsonl"], 1, "the file 'nosuch.jsonl' does not exist"),
        (["empty.jsonl"], 1, "has no rows"),
    ],
)
def test_an_error_is_one_message(tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "p.jsonl", [PAIR])
    write(tmp_path / "empty.jsonl", [])
    result = run(*arguments, code=code)
    assert result.stderr.startswith("error: ")
    assert message in " ".join(result.stderr.split())


def test_control_characters_of_the_data_are_escaped(tmp_path):
    path = write(tmp_path / "p.jsonl", [{**PAIR, "chosen": "\x1b[31mred", "source": "\x1b[2J"}])
    assert "\x1b" not in run(path).stdout


def test_pairs_become_prompts_of_a_judge(tmp_path):
    path, rows = write(tmp_path / "p.jsonl", [PAIR, {**PAIR, "chosen": ""}]), tmp_path / "rows" / "questions.jsonl"
    result = judge(path, "--style", "genrm", "--option", "principle=Be right.", "-o", rows)
    assert " ".join(result.stdout.split()) == f"2 rows of 1 comparisons, 1 were dropped: {rows}"
    first, second = load_prompts(rows)
    assert [message["role"] for message in first.messages] == ["user", "principle", "response_1", "response_2"]
    assert [each.metadata["preferred"] for each in (first, second)] == [1, 2]


def test_a_judge_that_does_not_compare_is_refused_and_writes_nothing(tmp_path):
    path, rows = write(tmp_path / "p.jsonl", [PAIR]), tmp_path / "questions.jsonl"
    result = judge(path, "--style", "rewardanything", "-o", rows, code=1)
    assert "has no mode 'pairwise'" in " ".join(result.stderr.split())
    assert not rows.exists()
    judge(path, "-o", path, code=1)
