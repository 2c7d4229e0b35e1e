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
    Path("my-prompts.jsonl").write_text(json.dumps(row) + "\n")
    Path("replies.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_the_python_blocks_run_and_show_what_the_comments_say(user_folder):
    names = run_blocks(ROOT / "README.md", python_blocks(ROOT / "README.md"))
    names["envs"].reset(options={"prompt_indices": [0, 1]})
    assert names["envs"].step(["4", "5"])[1].tolist() == [1.0, 0.0]


def test_the_first_example_has_at_most_ten_lines():
    assert len(blocks("python")[0].strip().splitlines()) <= 10


def test_the_gym_rm_command_runs(user_folder):
    (command,) = re.findall(r"^gym-rm score .*", README, re.MULTILINE)
    result = CliRunner().invoke(app, command.replace(".jsonl.gz", ".jsonl").split()[1:])
    assert result.exit_code == 0, result.output
    assert isinstance(json.loads(Path("scored.jsonl").read_text())["score"], float)


def test_the_plan_command_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"^gym-rm plan .*", README, re.MULTILINE)
    result = CliRunner().invoke(app, command.replace("configs/", f"{ROOT}/configs/").split()[1:])
    assert result.exit_code == 0, result.output
    assert re.search(r"gpus=16 +16 of 16", result.stdout)
    assert Path("plan.svg").is_file()


def test_the_make_targets_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^make ([\w-]+)", README, re.MULTILINE)) <= set(targets)


def test_linked_files_exist():
    missing = [link for link in re.findall(r"\]\(([^):]+)\)", README) if not (ROOT / link).exists()]
    assert not missing
