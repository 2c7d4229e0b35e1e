import pytest
from typer.testing import CliRunner

from gym_rm.cli.main import app
from tests.reports.test_monitor import RUNS

RUN = str(RUNS / "proper_sentences")


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_page_is_one_file(tmp_path):
    result = report(RUN, "-o", tmp_path / "deep" / "page.html")
    assert result.exit_code == 0, result.output
    assert "wrote" in result.output
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["page.html"]
    text = (tmp_path / "deep" / "page.html").read_text()
    assert "No sign of reward hacking" in text


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["missing"], 1, "folder 'missing' must contain a run, but metrics.csv is missing"),
        ([RUN, "-o", "page.pdf"], 2, "-o must end in .html, got 'page.pdf'"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, code, words):
    result = report(*arguments)
    assert result.exit_code == code
    assert words in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_an_empty_or_broken_run_is_one_line(tmp_path):
    (tmp_path / "metrics.csv").write_text("")
    for contents, words in (("", "has no step yet"), ("step,seconds\n", "has no step yet")):
        (tmp_path / "metrics.csv").write_text(contents)
        result = report(tmp_path)
        assert (result.exit_code, len(result.output.strip().splitlines())) == (1, 1)
        assert words in result.output
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "contents", "words"),
    [
        ("conversations.jsonl", "{]\n", "line 1 of conversations.jsonl is no conversation"),
        ("conversations.jsonl", '{"step": 1}\n', "line 1 of conversations.jsonl is no conversation"),
        ("metrics.csv", "step,seconds,reward_mean\n1,2,x\n", "the column 'reward_mean' must have finite numbers"),
        ("metrics.csv", "step,seconds,kl\n1,2,1e400\n", "the column 'kl' must have finite numbers, got '1e400'"),
        ("metrics.csv", f"step,seconds,kl\n1,2,{'9' * 400}\n", "the column 'kl' must have finite numbers"),
        ("changed_settings.yaml", "1: 2\na: &a [*a]\n", "nested more than 100 levels deep"),
        ("settings.yaml", "a: [", "cannot be read"),
        ("held_out.csv", "a,b\n1,2\n", "held_out.csv has no column 'step'"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path, name, contents, words):
    (tmp_path / "metrics.csv").write_text("step,seconds\n1,2\n")
    (tmp_path / name).write_text(contents)
    result = report(tmp_path)
    assert (result.exit_code, len(result.output.strip().splitlines())) == (1, 1), result.output
    assert words in result.output
