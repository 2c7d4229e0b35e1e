import json
import re
from pathlib import Path

import pytest
import tiny_models
from typer.testing import CliRunner

from gym_rm.cli.main import app
from tests.snippets import python_blocks, run_blocks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_models.save_reward_model("my-reward-model")
    row = {"prompt": "What is 2 + 2?", "response": "4"}
    Path("replies.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_the_python_block_runs_and_shows_what_the_comments_say():
    run_blocks(ROOT / "README.md", python_blocks(ROOT / "README.md"))


def test_the_first_example_has_at_most_ten_lines():
    assert len(blocks("python")[0].strip().splitlines()) <= 10


def command(name: str) -> list[str]:
    (found,) = re.findall(rf"^gym-rm {name} [^#\n]*", README, re.MULTILINE)
    return found.split()[1:]


def test_the_score_command_runs(user_folder):
    result = CliRunner().invoke(app, command("score"))
    assert result.exit_code == 0, result.output
    assert isinstance(json.loads(Path("scored.jsonl").read_text())["score"], float)


def test_the_plan_command_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command("plan"))
    assert result.exit_code == 0, result.output
    assert re.search(r"gpus=16 +16 of 16", result.stdout)
    assert Path("plan.svg").is_file()


def test_the_commands_and_their_options_exist():
    for line in re.findall(r"^gym-rm ([^#\n]+)", README, re.MULTILINE):
        name, *words = line.split()
        result = CliRunner().invoke(app, [name, "--help"], terminal_width=200)
        assert result.exit_code == 0, name
        assert [word for word in words if word.startswith("-") and word not in result.output] == [], name


def test_the_make_targets_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^make ([\w-]+)", README, re.MULTILINE)) <= set(targets)


def test_linked_files_exist():
    missing = [link for link in re.findall(r"\]\(([^):]+)\)", README) if not (ROOT / link).exists()]
    assert not missing
