"""A folder has the same revision as its copies, and another one after any of its weights changed."""

import os
import shutil

import pytest
from safetensors.torch import load_file, save_file

from gym_rm.engine.loading.checkpoint import LoadOptions, open_checkpoint
from tests import tiny_models
from tests.engine.loading.test_lora import needs_peft, save_adapter


@pytest.fixture
def folder(tmp_path):
    return tiny_models.save_reward_model(tmp_path / "model")


def revision(path):
    return open_checkpoint(LoadOptions(path=str(path))).read_revision()


def change_one_weight(file):
    """Change one number of one tensor; the size of the file stays the same."""
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    tensors[name][1, 1] += 1
    size = file.stat().st_size
    save_file(tensors, file, metadata={"format": "pt"})
    assert file.stat().st_size == size


def test_a_copied_and_touched_folder_has_the_same_revision(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    assert revision(copy) == revision(folder)
    assert revision(folder).startswith("sha256:")


def test_one_changed_weight_changes_the_revision(folder):
    before = revision(folder)
    change_one_weight(folder / "model.safetensors")
    assert revision(folder) != before


def test_the_configuration_counts_and_other_files_do_not(folder):
    before = revision(folder)
    (folder / "optimizer.pt").write_bytes(b"state")
    (folder / "README.md").write_text("notes")
    assert revision(folder) == before
    (folder / "config.json").write_text((folder / "config.json").read_text().replace("{", "{ ", 1))
    assert revision(folder) != before


def test_the_tokenizer_of_another_folder_counts(folder, tmp_path):
    tiny_models.tokenizer("qwen").save_pretrained(tmp_path / "tokenizer")

    def read():
        return open_checkpoint(LoadOptions(path=str(folder), tokenizer=str(tmp_path / "tokenizer"))).read_revision()

    before = read()
    assert before.startswith(f"{revision(folder)}+sha256:")
    file = tmp_path / "tokenizer" / "tokenizer_config.json"
    file.write_text(file.read_text().replace("{", "{ ", 1))
    assert read() != before


@needs_peft
@pytest.mark.parametrize("changed", ["base/model.safetensors", "adapter/adapter_model.safetensors"])
def test_an_adapter_and_its_base_both_count(tmp_path, changed):
    base = tiny_models.save_reward_model(tmp_path / "base")
    adapter, _ = save_adapter(tmp_path, base)
    before = revision(adapter)
    change_one_weight(tmp_path / changed)
    assert revision(adapter) != before
