import json

import pytest

from tests import real_data
from tests.cli.command import runner, write

PAIR = {"prompt": "Which is larger, 12 or 30?", "chosen": "30", "rejected": "12 is."}
run = runner("data", "inspect")


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
