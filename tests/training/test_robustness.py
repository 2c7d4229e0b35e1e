"""Runs that meet contradicting data, full disks, other runs, and parameters that nothing reads."""

import json
import os
import subprocess
import sys

import pytest
import tiny_models
from safetensors import SafetensorError

from gym_rm.errors import ConfigError
from gym_rm.training import checkpoints
from gym_rm.training.trainer import Trainer
from tests.training.runs import assert_served, curve, losses, pairs, settings_of, train


def test_a_new_head_forgets_the_weights_of_the_outputs_before(saved_model, tmp_path):
    two = ("model.new_head=true", "model.outputs=2", "loss.objective=preferences", "max_steps=1")
    _, finished = train(tmp_path, saved_model("qwen3"), None, *two)
    (tmp_path / "next").mkdir()
    three = ("model.new_head=true", "model.outputs=3", "loss.objective=preferences", "max_steps=1")
    trainer, last = train(tmp_path / "next", finished.model, None, *three)
    assert_served(trainer, last, pairs())


def test_one_objective_is_learned_by_its_name(saved_model, tmp_path):
    rows = [{"prompt": f"Say {n}.", "response": "yes " * (n + 1), "helpfulness": n} for n in range(5)]
    options = ("model.new_head=true", "model.outputs=[helpfulness]", "loss.objective=ratings", "epochs=4")
    _, finished = train(tmp_path, saved_model("qwen3"), rows, *options)
    found = losses(finished.folder)
    assert found[-1] < found[0]
    assert "mse_helpfulness" in curve(finished.folder / "metrics.csv")[0]


@pytest.mark.parametrize("option", ["seed=-1", "optimizer.betas=[1.5,0.9]", "loss.tie_parameter=0"])
def test_numbers_out_of_range_are_refused_by_name(option, saved_model, tmp_path):
    with pytest.raises(ConfigError, match=option.partition("=")[0]):
        settings_of(tmp_path, saved_model("qwen3"), None, option)


def test_a_run_does_not_go_on_with_another_metric_of_kept_models(saved_model, tmp_path):
    """The values that it has kept cannot be compared with those of another metric."""
    model, share = saved_model("qwen3"), "data.validation_share=0.3"
    train(tmp_path, model, None, share, "max_steps=1")
    with pytest.raises(ConfigError, match=r"checkpoint\.metric: now 'held_out/accuracy', before 'held_out/loss'"):
        Trainer(settings_of(tmp_path, model, None, share, "max_steps=1", "checkpoint.metric=held_out/accuracy"))


def test_a_backbone_of_another_shape_is_refused_with_a_new_head(tmp_path):
    policy = tiny_models.save_policy(tmp_path / "policy", "qwen3")
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(ConfigError, match="wrong shape"):
        Trainer(settings_of(tmp_path, policy, None, "model.new_head=true"))


def test_a_model_without_checkpointing_of_layers_is_a_clear_error(saved_model, tmp_path):
    with pytest.raises(ConfigError, match=r"batch\.gradient_checkpointing: XLNet"):
        Trainer(settings_of(tmp_path, saved_model("xlnet"), None, "batch.gradient_checkpointing=true"))


def test_adapters_for_modules_that_do_not_exist_are_a_clear_error(saved_model, tmp_path):
    pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=r"model\.lora=.*nope.* does not fit"):
        Trainer(settings_of(tmp_path, saved_model("qwen3"), None, "model.lora={target_modules: [nope]}"))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_full_disk_keeps_the_last_checkpoint_and_leaves_nothing_half_written(
    error, saved_model, tmp_path, monkeypatch
):
    settings = settings_of(tmp_path, saved_model("qwen3"), None, "epochs=2")
    save_file, calls = checkpoints.save_file, []

    def full(tensors, path):
        calls.append(path)
        if len(calls) == 4:
            raise error
        save_file(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", full)
        with pytest.raises(OSError, match=r"step-00000004' cannot be written .*No space left"):
            Trainer(settings).run()
    assert [each.name for each in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    Trainer(settings).run()
    assert len(losses(tmp_path / "run")) == 6


def test_a_folder_that_another_process_writes_is_refused(saved_model, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    code = (
        "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); print(1, flush=True); "
        "input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "1\n"
        with pytest.raises(ConfigError, match="another process writes"):
            Trainer(settings_of(tmp_path, saved_model("qwen3")))
        assert not list(folder.iterdir())
        other.communicate("\n")
    train(tmp_path, saved_model("qwen3"), None, "max_steps=1")


def test_an_output_that_is_a_file_is_a_clear_error(saved_model, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match=r"output='.*run' cannot be written: File exists"):
        Trainer(settings_of(tmp_path, saved_model("qwen3")))


@pytest.mark.slow
def test_two_processes_train_a_model_with_parameters_that_nothing_reads(saved_model, tmp_path):
    settings = settings_of(tmp_path, saved_model("xlnet"))
    arguments = [f"data.train={settings.data.train[0]}", f"model.path={settings.model.path}", "max_steps=2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "gym_rm"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    options = ["train", *arguments, f"output={tmp_path / 'run'}", "batch.batch_size=4", "threads=1"]
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(losses(tmp_path / "run")) == 2
