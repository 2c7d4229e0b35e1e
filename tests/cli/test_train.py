"""`gym-rm train`: settings, messages, exit codes, and the folder that it writes."""

from pathlib import Path

import pytest
import yaml

import gym_rm
from gym_rm.config import load_config
from gym_rm.training.reward_model_settings import RewardModelTraining
from tests.cli.command import runner
from tests.training.runs import curve, pairs, write_rows

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "rm").glob("*.yaml"))
run = runner("train")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_loads(path):
    settings = load_config(RewardModelTraining, path)
    assert settings.model.path
    metric = settings.checkpoint.metric
    assert metric is None or settings.data.validation_share or metric.split("/")[0] in settings.data.validation
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            assert "gym-rm train" in line or "gym_rm train" in line
            assert path.stem in line


def test_a_run_from_a_file_of_settings_to_a_scorer(saved_model, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", pairs())
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"data": {"train": str(rows)}, "model": {"path": saved_model("qwen3")}}))
    out = tmp_path / "run"
    result = run(config, f"output={out}", "batch.batch_size=4", "data.validation_share=0.3", "evaluate_every=2")
    assert f"last model: {out / 'final'}, best model: {out / 'best'}" in result.output
    assert "held_out" in result.output
    assert len(curve(out / "metrics.csv")) == 2
    assert gym_rm.load_scorer(str(out / "final")).score([[{"role": "user", "content": "2 + 2?"}]]).rewards.shape == (1,)
    card = (out / "final" / "README.md").read_text()
    command = card.split("```")[-2]
    assert "batch.batch_size=4" in command
    assert load_config(RewardModelTraining, out / "settings.yaml").batch.batch_size == 4


def test_without_arguments_an_example_is_shown():
    assert "gym-rm train data.train=pairs.jsonl" in run(code=2).output


@pytest.mark.parametrize(
    ("argument", "message", "code"),
    [
        ("optimizer.learning_rat=1", "learning_rate", 2),
        ("optimiser.learning_rate=1", "optimizer", 2),
        ("loss.preferences=bradley", "bradley_terry", 2),
        ("batch.batch_size=0", "batch_size", 2),
        ("other.yaml", "other.yaml", 2),
        ("seed=1", "data.train is missing", 1),
        ("batch.fsdp=true", "torchrun", 1),
    ],
)
def test_invalid_settings_are_named(argument, message, code, tmp_path):
    arguments = ["data.train=x.jsonl", "model.path=x"] if "fsdp" in argument else []
    assert message in run(argument, *arguments, code=code).output


def test_a_model_without_a_head_is_refused_with_advice(tmp_path):
    from tests import tiny_models

    policy = tiny_models.save_policy(tmp_path / "policy", "qwen3")
    rows = write_rows(tmp_path / "rows.jsonl", pairs(2))
    result = run(f"data.train={rows}", f"model.path={policy}", f"output={tmp_path / 'run'}", code=1)
    assert "model.new_head=true" in result.output


def test_an_output_that_is_a_file_is_an_error(saved_model, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", pairs(2))
    result = run(f"data.train={rows}", f"model.path={saved_model('qwen3')}", f"output={rows}", code=1)
    assert "error: " in result.output


def test_a_nan_is_an_error_with_advice(saved_model, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", pairs(4))
    out = tmp_path / "run"
    options = [f"data.train={rows}", f"model.path={saved_model('qwen3')}", f"output={out}", "epochs=3"]
    result = run(*options, "optimizer.learning_rate=1e30", "optimizer.warmup_share=0", code=1)
    assert "the gradient norm of update 2 is nan" in result.output
    assert not (out / "final").exists()


def test_a_run_of_other_settings_is_refused(saved_model, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", pairs(4))
    options = [f"data.train={rows}", f"model.path={saved_model('qwen3')}", f"output={tmp_path / 'run'}"]
    run(*options)
    assert "seed: now 2, before 1" in run(*options, "seed=2", code=1).output


def test_a_run_without_a_model_says_that_it_starts_from_the_small_one(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", pairs(4))
    done = run(f"data.train={rows}", f"output={tmp_path / 'run'}", "max_steps=1", "threads=1")
    assert "model.path is missing" in " ".join(done.stderr.split())
