"""Runs that meet contradicting data, full disks, other runs, and parameters that nothing reads."""

import contextlib
import json
import subprocess
import sys

import pytest
import tiny_models
from safetensors import SafetensorError

from gym_rm.errors import ConfigError
from gym_rm.training import checkpoints
from tests.training.runs import assert_served, open_run, pairs, settings_of, trained


def test_a_new_head_forgets_the_weights_of_the_outputs_before(saved_model, tmp_path):
    two = ("model.new_head=true", "model.outputs=2", "loss.objective=preferences", "max_steps=1")
    finished = trained(tmp_path, saved_model("qwen3"), None, *two)
    (tmp_path / "next").mkdir()
    three = ("model.new_head=true", "model.outputs=3", "loss.objective=preferences", "max_steps=1")
    last = trained(tmp_path / "next", finished.folder / "final", None, *three)
    assert_served(last, pairs())


def test_a_backbone_of_another_shape_is_refused_with_a_new_head(tmp_path):
    policy = tiny_models.save_policy(tmp_path / "policy", "qwen3")
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(ConfigError, match="wrong shape"):
        open_run(settings_of(tmp_path, policy, None, "model.new_head=true"))


def test_a_model_without_checkpointing_of_layers_is_a_clear_error(saved_model, tmp_path):
    with pytest.raises(ConfigError, match=r"gradient_checkpointing: XLNet"):
        open_run(settings_of(tmp_path, saved_model("xlnet"), None, "batch.gradient_checkpointing=true"))


def test_adapters_for_modules_that_do_not_exist_are_a_clear_error(saved_model, tmp_path):
    pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=r"model\.lora=.*nope.* does not fit"):
        open_run(settings_of(tmp_path, saved_model("qwen3"), None, "model.lora={target_modules: [nope]}"))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_full_disk_keeps_what_was_written_before(error, tmp_path):
    folder = tmp_path / "best"
    for content in ("before", "after"):
        with contextlib.suppress(OSError), checkpoints.atomic_folder(folder) as unfinished:
            (unfinished / "file").write_text(content)
            if content == "after":
                raise error
    assert (folder / "file").read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["best"]


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
            open_run(settings_of(tmp_path, saved_model("qwen3")))
        assert not list(folder.iterdir())
        other.communicate("\n")
    trained(tmp_path, saved_model("qwen3"), None, "max_steps=1")


def test_an_output_that_is_a_file_is_a_clear_error(saved_model, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match=r"output='.*run' cannot be written: File exists"):
        open_run(settings_of(tmp_path, saved_model("qwen3")))
