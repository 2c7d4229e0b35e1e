import subprocess
import sys

import pytest
from typer.testing import CliRunner

import gym_rm
from gym_rm import __main__ as command
from gym_rm.cli.main import app
from gym_rm.config import override_values
from tests.cli.command import ROWS, scores_of, write


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout


def test_the_version_is_printed_without_loading_torch():
    code = """
import sys, gym_rm.cli.main
gym_rm.cli.main.app(["--version"], standalone_mode=False)
assert "torch" not in sys.modules
"""
    assert python("-c", code) == f"gym-rm {gym_rm.__version__}\n"


def test_python_m_gym_rm_runs_the_command():
    shown = python("-m", "gym_rm", "--help")
    assert "score" in shown
    assert "serve" in shown


def test_an_interrupt_of_the_imports_ends_quietly(monkeypatch):
    class Interrupted:
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "gym_rm.cli.main", Interrupted())
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == 130


def test_the_home_folder_is_found_in_every_argument_and_setting(tmp_path, monkeypatch, scorer):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "in.jsonl", ROWS[:2])
    result = CliRunner().invoke(app, ["score", "~/in.jsonl", "--output=~/out.jsonl"])
    assert result.exit_code == 0, result.output
    assert scores_of(tmp_path / "out.jsonl") == [0.0, 0.1]
    found = override_values(["output=~/run", "data.train=[~/a.jsonl, org/~/name]"])
    assert found == {"output": f"{tmp_path}/run", "data": {"train": [f"{tmp_path}/a.jsonl", "org/~/name"]}}
