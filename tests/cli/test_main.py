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


COMMANDS = ["plan --json", "score p.jsonl --reward-model f.py:f"]


def ended(folder, redirected):
    """Run a command line in a shell; return its exit code and its errors."""
    write(folder / "p.jsonl", [{"prompt": "2?", "chosen": "4", "rejected": "five"}] * 4000)
    (folder / "f.py").write_text("def f(conversations):\n    return [1.0] * len(conversations)\n")
    line = f"{sys.executable} -m gym_rm {redirected}"
    result = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True)
    return result.returncode, result.stderr


def test_an_output_that_nobody_reads_ends_the_command_without_a_traceback(tmp_path):
    assert ended(tmp_path, COMMANDS[1] + " | true; exit ${PIPESTATUS[0]}") == (1, "")


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_full_or_closed_output_is_no_traceback(tmp_path, arguments):
    code, errors = ended(tmp_path, arguments + " > /dev/full")
    assert (code, "No space left on device" in errors, "Traceback" in errors) == (1, True, False)
    code, errors = ended(tmp_path, arguments + " >&-")
    assert (code, "Traceback" in errors) == (2 if arguments.startswith("score") else 0, False)


def test_a_closed_input_is_a_clear_error(tmp_path):
    code, errors = ended(tmp_path, "score - <&-")
    assert (code, errors) == (2, "error: standard input or output is closed; name a file for INPUT, and for -o.\n")


@pytest.mark.parametrize("home", [None, r"C:\Users\1\g<2>"])
def test_a_home_that_is_missing_or_odd_is_no_traceback(tmp_path, home):
    without = "import os, pwd, sys\n" + "def none(*_): raise KeyError\n" + "pwd.getpwuid = pwd.getpwnam = none\n"
    change = "os.environ.pop('HOME', None)\n" if home is None else f"os.environ['HOME'] = {home!r}\n"
    run = "from gym_rm.cli.main import app; app(['score', '~/in.jsonl'])"
    result = subprocess.run([sys.executable, "-c", without + change + run], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("error: cannot read ")


@pytest.mark.parametrize(
    "arguments",
    [
        *("score NAME.jsonl", "score in.jsonl -o NAME.jsonl", "data inspect NAME", "evaluate NAME.jsonl"),
        *("report NAME", "plan NAME.yaml", "plan -o NAME.json", "train NAME", "serve --key-file NAME"),
        *("audit --data NAME.json", "evaluate in.jsonl --scores NAME"),
    ],
)
def test_a_name_of_300_bytes_is_a_clear_error(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", ROWS)
    result = CliRunner().invoke(app, arguments.replace("NAME", "x" * 300).split())
    assert result.exit_code in (1, 2)
    assert "error: " in result.output
