"""`gym-rm agent`, `gym-rm grpo` and `gym-rm demo`: the files in agents, run as scripts are."""

import sys

import pytest

from gym_rm.config import load_config, settings_file, shipped_folder
from gym_rm.policy.grpo_settings import GRPOSettings
from tests.cli.command import runner

run = runner()


@pytest.fixture(autouse=True)
def own_process(monkeypatch):
    """Restore what a command changes in its process, which usually ends with it."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_agents_are_listed_and_their_arguments_are_theirs():
    listed = run("agent").output
    assert "number_steps" in listed
    assert "three_numbers" not in listed  # is imported by agents, and is none
    for command in (["agent", "grpo"], ["grpo"]):
        assert "settings to change, such as policy.model=folder" in run(*command, "--help").output
    for command in (["agent", "two_questions"], ["agent", "two_questions", "--help"]):
        assert run(*command).output.startswith("A longer task")  # its page, and no folder called --help
    assert "unknown setting" in run("grpo", "polici.model=x", code=2).output
    assert "Did you mean 'grpo'?" in run("agent", "grop", code=2).output


def test_an_agent_finds_the_functions_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    missing = " ".join(run("grpo", "--config", "two_questions", code=2).output.split())
    assert "first: gym-rm agent two_questions outputs/two-questions" in missing
    run("agent", "two_questions", "outputs/two-questions")
    run("grpo", "--config", "two_questions", "steps=1", "eval.num_prompts=0", "output=run", "env.num_prompts=4")
    assert (tmp_path / "run" / "final").is_dir()


def test_the_demo_trains_the_embedded_policy(tmp_path):
    run("demo", "steps=1", "eval.num_prompts=0", "env.num_prompts=4", f"output={tmp_path / 'run'}")
    assert load_config(GRPOSettings, tmp_path / "run" / "settings.yaml").policy.model == "embedded:policy"


@pytest.mark.parametrize(
    ("command", "code"), [(["grpo", "--config", "mat"], 2), (["train", "stebs"], 2), (["plan", "h100"], 2)]
)
def test_an_unknown_name_of_settings_is_refused_with_the_known_ones(command, code):
    folder = {"grpo": "math", "train": "steps", "plan": "h100_1x8"}[command[0]]
    output = " ".join(run(*command, code=code).output.split())
    assert f"Did you mean {folder!r}?" in output
    assert "come with the package: " in output


def test_a_file_comes_before_a_name_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tool").mkdir()
    assert settings_file("tool", "grpo").suffix == ".yaml"
    assert settings_file("math", "grpo") == shipped_folder("configs") / "grpo" / "math.yaml"
    (tmp_path / "math").write_text("steps: 3")
    assert load_config(GRPOSettings, settings_file("math", "grpo")).steps == 3
