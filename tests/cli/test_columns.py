"""Names of columns are texts, whatever else they could be read as."""

import json

import pytest

from gym_rm.config import load_config
from gym_rm.data.columns import parse_columns
from gym_rm.data.comparisons import load_comparisons
from gym_rm.errors import ConfigError
from gym_rm.training.reward_model_settings import RewardModelTraining
from tests.cli.command import runner, scores_of, write

NAMES = [
    "Reply #2", "0", "00", "1e3", "true", "null", "~", "no", "#x", "a.b", "{R}", "[x]", "a=b", "a: b", "a:b", "'x'",
    '"x"', "*a", "&a", "!x", "%", "@x", "`x`", "- x", "Réponse 回答", "2024-01-01", "0x10", "", " x ", "a\tb", "~/x",
    "|", ">", ".inf", ".nan", "x" * 300,
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_column_is_text(name):
    assert parse_columns([f"response={name}"]) == {"response": name}


@pytest.mark.parametrize("name", [name for name in NAMES if name == name.strip()])
def test_the_name_of_a_column_of_training_is_text(name):
    settings = load_config(RewardModelTraining, overrides=[f"data.columns.response={name}"])
    assert settings.data.columns == {"response": name}


@pytest.mark.parametrize("name", ["Reply #2", "1e3", "true", "{R}", "a: b", ""])
def test_a_file_is_scored_by_the_column_that_is_named(tmp_path, scorer, name):
    rows = [{"prompt": "2 + 2?", name: "x" * n, "Reply": "wrong", "1000.0": "wrong"} for n in (1, 2)]
    source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    runner("score")(source, "-o", output, "--column", f"response={name}")
    assert scores_of(output) == [0.1, 0.2]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("reponse", "response"), ("promt", "prompt"), ("Response", "response"), ("chosn", "chosen"), ("anwser", "answer")],
)
def test_a_misspelt_field_is_an_error_with_the_nearest_one(tmp_path, name, meant):
    source = write(tmp_path / "in.jsonl", [{"prompt": "2 + 2?", "Reply": "4"}])
    for command in ("score", "evaluate"):
        shown = runner(command)(source, "--column", f"{name}=Reply", code=2).output
        assert f"unknown field '{name}'. Did you mean '{meant}'?" in shown
    assert f"Did you mean '{meant}'?" in runner("data", "inspect")(source, "--column", f"{name}=Reply", code=2).output
    with pytest.raises(ConfigError, match=f"Did you mean '{meant}'"):
        load_comparisons([{}], columns={name: "Reply"}, on_error="drop")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["response"], "FIELD=COLUMN"),
        (["=Reply"], "FIELD=COLUMN"),
        ([""], "FIELD=COLUMN"),
        (["prompt=a", "prompt=b"], "one column for 'prompt'"),
    ],
)
def test_a_field_has_one_column(arguments, expected):
    with pytest.raises(ConfigError, match=f"--column must be {expected}"):
        parse_columns(arguments)


def test_a_column_of_a_users_own_is_no_mistake():
    own = ["ground_truth=Truth", "test_cases=Tests", "question_id=Q", "rubric=R"]
    assert json.dumps([*parse_columns(own)]) == '["ground_truth", "test_cases", "question_id", "rubric"]'
