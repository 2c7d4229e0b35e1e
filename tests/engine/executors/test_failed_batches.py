"""Switches for debugging, and failing batches that are saved and run again."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import gym_rm
from gym_rm import ConfigError
from gym_rm.cli.main import app
from gym_rm.engine.debugging import Switches, call_id, current_call, read_switches
from gym_rm.engine.executors.failed_batches import read_failed
from gym_rm.scores import ScoringError
from tests import tiny_models
from tests.checkpoints import CONVERSATIONS
from tests.engine.executors.batches import executor_of, spec_of, tree_with, trees, values_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Switches()),
        ("plain", Switches(plain=True)),
        ("skip_trial, rows=256", Switches(skip_trial=True, rows=256)),
        ("repeat_trial,layout=padded", Switches(repeat_trial=True, layout="padded")),
    ],
)
def test_switches(text, expected, monkeypatch):
    monkeypatch.setenv("GYM_RM_DEBUG", text)
    assert read_switches() == expected


@pytest.mark.parametrize("text", ["plan", "layout=trees", "rows=0", "rows", "plain=1"])
def test_wrong_switches_are_refused(text, monkeypatch):
    monkeypatch.setenv("GYM_RM_DEBUG", text)
    with pytest.raises(ConfigError, match="GYM_RM_DEBUG has"):
        read_switches()


@pytest.mark.parametrize(
    ("text", "layout", "rows"),
    [
        ("plain", "one_by_one", None),
        ("layout=padded", "padded", None),
        ("rows=64,repeat_trial", "tree", "multiples of 64"),
        ("skip_trial", "tree", None),
    ],
)
def test_the_switches_choose_the_forward(text, layout, rows, monkeypatch):
    monkeypatch.setenv("GYM_RM_DEBUG", text)
    expected = gym_rm.load_scorer().score(CONVERSATIONS[:2]).rewards
    monkeypatch.delenv("GYM_RM_DEBUG")
    scorer = gym_rm.load_scorer()
    np.testing.assert_allclose(scorer.score(CONVERSATIONS[:2]).rewards, expected, atol=1e-4)
    monkeypatch.setenv("GYM_RM_DEBUG", text)
    info = gym_rm.load_scorer().info
    assert info.layout == layout
    assert rows is None or info.rows == rows
    assert (info.batch_invariance is None) == (text in ("plain", "skip_trial"))


def test_one_table_in_the_log_has_what_was_compared(model, caplog):
    caplog.set_level("INFO", "gym_rm")
    executor_of(model)
    (table,) = [each.getMessage() for each in caplog.records if "chosen" in each.getMessage()]
    assert "from the plain forward" in table
    assert "bit-equal in two batches" in table
    assert "verified in" in table


def test_calls_inside_of_calls_have_their_names():
    with call_id("step") as step, call_id("score") as score:
        assert score.startswith(f"{step}/score-")
        assert current_call() == score
    assert current_call() == ""


def test_the_stages_of_a_call_have_ranges_in_the_profiler():
    scorer = gym_rm.load_scorer()
    with torch.profiler.profile() as profiler:
        scorer.score(CONVERSATIONS[:2])
    found = {event.key for event in profiler.key_averages()}
    assert {f"gym_rm: {name}" for name in ("render", "plan", "forward", "head", "copy back")} <= found


# --- saved batches


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GYM_RM_SAVE_FAILED", str(tmp_path / "failed"))
    monkeypatch.setattr("gym_rm.engine.executors.failed_batches.MOST_SAVED", 10**6)
    return tmp_path / "failed"


def replay(file):
    return CliRunner().invoke(app, ["doctor", "--replay", str(file)])


def test_a_batch_that_fails_is_saved_and_fails_again(folder, saved_model):
    from gym_rm.engine.executors.local import LocalExecutor

    executor = LocalExecutor()
    executor.load(spec_of(saved_model("qwen3")))
    batch = tree_with(1_000_000)
    (failed,) = executor.run([batch])
    (file,) = folder.iterdir()
    assert failed.saved == str(file)
    assert f"gym-rm doctor --replay {file}" in failed.error
    saved = read_failed(file)
    assert np.array_equal(saved.batch.input_ids, batch.input_ids)
    assert saved.about["info"]["torch"] == torch.__version__
    result = replay(file)
    assert result.exit_code == 1
    assert "it fails again: IndexError" in result.output


def test_the_error_of_a_row_names_the_batch_that_gave_no_number(folder, tmp_path):
    model = tiny_models.reward_model("qwen3")
    with torch.no_grad():
        model.score.weight[:] = float("nan")
    tiny_models.tokenizer("qwen").save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    scorer = gym_rm.load_scorer(str(tmp_path / "model"))
    with pytest.raises(ScoringError, match=r"returned nan; its batch is saved, see gym-rm doctor --replay .*batch-"):
        scorer.score(CONVERSATIONS[:2])
    result = replay(sorted(folder.iterdir())[0])
    assert result.exit_code == 1
    assert "values are not finite" in result.output


def test_a_batch_of_a_model_that_works_again_is_ok(folder, saved_model, monkeypatch):
    from gym_rm.engine.executors.local import LocalExecutor

    executor = LocalExecutor()
    executor.load(spec_of(saved_model("qwen3")))
    with monkeypatch.context() as patch:
        patch.setattr(type(executor._model.reward_model), "values", lambda *_: 1 / 0)
        executor.run(trees()[:1])
    (file,) = folder.iterdir()
    result = replay(file)
    assert result.exit_code == 0, result.output
    assert "all finite" in result.output


def test_nothing_is_saved_for_too_little_memory_or_without_the_folder(folder, model, monkeypatch):
    executor = executor_of(model)
    with monkeypatch.context() as patch:
        patch.setattr(type(executor._model.reward_model), "values", lambda *_: bytearray(10**18))
        (failed,) = executor.run(trees()[:1])
    assert failed.out_of_memory
    monkeypatch.delenv("GYM_RM_SAVE_FAILED")
    assert executor.run([tree_with(1_000_000)])[0].saved is None
    assert not folder.exists()
    assert values_of(executor, trees()).shape == (6, 1)


@pytest.mark.parametrize("folder", [__file__, "/proc"])  # no folder, and one in which nothing can be written
def test_a_batch_that_cannot_be_saved_keeps_its_error(folder, model, monkeypatch, caplog):
    monkeypatch.setenv("GYM_RM_SAVE_FAILED", folder)
    monkeypatch.setattr("gym_rm.engine.executors.failed_batches.MOST_SAVED", 10**6)
    failed, good = executor_of(model).run([tree_with(1_000_000), trees()[0]])
    assert failed.error.startswith("IndexError")
    assert failed.saved is None
    assert good.error is None
    assert "cannot be saved" in caplog.text


def test_a_file_that_is_no_batch_is_named(tmp_path):
    (tmp_path / "file").write_text("no batch")
    with pytest.raises(ConfigError, match="is not a batch that GYM_RM_SAVE_FAILED saved"):
        read_failed(tmp_path / "file")


def test_a_replay_tells_that_other_weights_failed_and_saves_nothing(folder, saved_model):
    scorer = gym_rm.load_scorer(saved_model("qwen3"))
    weights = scorer.executor.models[0].state_dict()
    scorer.update_weights({name: tensor * (1e38 if "score" in name else 1e3) for name, tensor in weights.items()})
    with pytest.raises(ScoringError, match="its batch is saved"):
        scorer.score(CONVERSATIONS[:1])
    (file,) = folder.iterdir()
    assert "the weights differ" in replay(file).output
    assert list(folder.iterdir()) == [file]


def test_the_last_batch_that_a_process_saves_is_told(folder, saved_model, monkeypatch, logged):
    monkeypatch.setattr("gym_rm.engine.executors.failed_batches.MOST_SAVED", 0)
    assert executor_of(tiny_models.reward_model("qwen3")).run([tree_with(1_000_000)])[0].saved is None
    assert "saves no more" in logged.text
