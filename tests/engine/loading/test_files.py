"""Malformed, truncated and hostile files of a checkpoint are ConfigErrors; they are closed and run no code."""

import json
import os
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import gym_rm
from gym_rm import ConfigError
from gym_rm.engine.loading.files import INDEX, WEIGHTS
from tests import tiny_models
from tests.checkpoints import CONVERSATIONS, HIDDEN, tensor


@pytest.fixture
def folder(saved_model, tmp_path):
    """A reward model's folder that the test may change."""
    return shutil.copytree(saved_model("qwen3"), tmp_path / "model")


def open_files():
    return {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }


def assert_refused(folder, match, **options):
    with pytest.raises(ConfigError, match=match):
        gym_rm.load_scorer(str(folder), **options)
    if sys.platform == "linux":
        assert not [name for name in open_files() if name.startswith(str(folder))]


def shard(folder, file):
    """Replace the weights by an index that names one file."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / "shard.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file)}))


# --- the index ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "a/../../outside.safetensors"])
def test_an_index_cannot_name_a_file_outside_the_folder(folder, name):
    shard(folder, str(folder.parent / "outside.safetensors") if name.startswith("/") else name)
    (folder / "a").mkdir()
    shutil.copy(folder / "shard.safetensors", folder.parent / "outside.safetensors")
    assert_refused(folder, r"must name safetensors files inside the checkpoint; got '.*outside")


def test_an_index_cannot_name_a_pickle(folder, monkeypatch):
    shard(folder, "shard.bin")
    torch.save(load_file(folder / "shard.safetensors"), folder / "shard.bin")
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch.load was called"))
    assert_refused(folder, "must name safetensors files inside the checkpoint; got 'shard.bin'")


def test_weights_may_be_links_as_in_the_cache_of_the_hub(folder):
    expected = gym_rm.load_scorer(str(folder)).score(CONVERSATIONS[:1]).rewards
    (folder.parent / "blobs").mkdir()
    (folder / WEIGHTS).rename(folder.parent / "blobs" / "4f2a")
    (folder / WEIGHTS).symlink_to("../blobs/4f2a")
    assert gym_rm.load_scorer(str(folder)).score(CONVERSATIONS[:1]).rewards == expected


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ("[1]", "must be a mapping with"),
        ('{"weight_map": ["a"]}', "must have a weight_map"),
        ('{"weight_map": {"score.weight": 3}}', "inside the checkpoint; got 3"),
        ('{"weight_map": {"score.weight": "no.safetensors"}}', r"no file 'no.safetensors', which .*index.json names"),
        ('{"weight_map": {"score.x": "shard.safetensors"}}', "File does not contain tensor score.x"),
    ],
)
def test_a_malformed_index_is_an_error(folder, index, match):
    shard(folder, "shard.safetensors")
    (folder / INDEX).write_text(index)
    assert_refused(folder, match)


# --- the weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda data: data[:-100], "incomplete metadata"),
        (lambda data: (2**60).to_bytes(8, "little") + data[8:], "header too large"),
        (lambda data: data[:8] + b"[" * 100 + data[108:], "is not a whole safetensors file"),
    ],
    ids=["truncated", "a header of 2**60 bytes", "not JSON"],
)
def test_a_damaged_weights_file_is_an_error(folder, change, match):
    shard(folder, "shard.safetensors")
    file = folder / "shard.safetensors"
    file.write_bytes(change(file.read_bytes()))
    assert_refused(folder, match)


# --- JSON --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000, b"\xff\xfe"])
def test_a_config_that_is_not_a_json_object_is_an_error(folder, content):
    (folder / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_refused(folder, r"config.json' must be a mapping|cannot read a configuration")


@pytest.mark.parametrize(
    ("field", "match"),
    [
        ({"rope_parameters": "fast"}, r"must be a|cannot load"),
        # transformers would prefer it to the safetensors
        ({"transformers_weights": "adapter.bin"}, r"names its weights file in config.json \('adapter.bin'\)"),
    ],
)
def test_a_config_with_a_wrong_field_is_an_error(folder, field, match):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **field}))
    assert_refused(folder, match)


def test_a_folder_without_a_config_is_an_error(folder):
    (folder / "config.json").unlink()
    assert_refused(folder, r"has no config.json")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_malformed_tokenizer_files_are_errors(folder, file):
    (folder / file).write_text("[1]")
    assert_refused(folder, r"the tokenizer of '.*' cannot be loaded|has no tokenizer")


def test_another_tokenizer_can_be_passed(folder, saved_model):
    expected = gym_rm.load_scorer(str(folder)).score(CONVERSATIONS).rewards.tolist()
    (folder / "tokenizer.json").unlink()
    by_path = gym_rm.load_scorer(str(folder), tokenizer=saved_model("qwen3"))
    by_object = gym_rm.load_scorer(str(folder), tokenizer=tiny_models.tokenizer("qwen"))
    assert by_path.score(CONVERSATIONS).rewards.tolist() == expected
    assert by_object.score(CONVERSATIONS).rewards.tolist() == expected


def test_the_tokenizer_of_an_embedded_model_is_named():
    scorer = gym_rm.load_scorer(tokenizer="embedded:reward_model")
    assert scorer.score(CONVERSATIONS).rewards.tolist() == gym_rm.load_scorer().score(CONVERSATIONS).rewards.tolist()
    assert scorer.provenance.revision is not None


# --- code --------------------------------------------------------------------------------------------------------

RUN = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n"


@pytest.fixture
def no_answers(monkeypatch):
    """Nobody answers at the terminal; a question is a failure."""
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail(f"asked on stdin: {args}"))


def with_own_config(folder):
    """Let the configuration of a folder need the folder's own code."""
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "own.C", "AutoModelForSequenceClassification": "own.M", "AutoModelForCausalLM": "own.M"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": own}))
    (folder / "own.py").write_text(RUN)


def with_own_tokenizer(folder):
    """Let the tokenizer of a folder need the folder's own code."""
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.T", "own.T"]}}
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **own}))
    (folder / "own.py").write_text(RUN)


def adapter_over(tmp_path, base):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file({"base_model.model.score.weight": tensor(1, HIDDEN, seed=1)}, adapter / "adapter_model.safetensors")
    return adapter


@pytest.mark.parametrize("change", [with_own_config, with_own_tokenizer])
@pytest.mark.parametrize("use", ["model", "adapter", "reference", "tokenizer"])
def test_code_of_a_checkpoint_neither_runs_nor_is_asked_for(tmp_path, no_answers, change, use):
    hostile = tiny_models.save_policy(tmp_path / "hostile", "llama")
    change(hostile)
    options = {}
    match use:
        case "model":
            options = {"path": str(hostile), "kind": "generative", "answers": ("The", "N")}
        case "adapter":
            options = {"path": str(adapter_over(tmp_path, hostile))}
        case "reference":
            (hostile / "own.py").unlink()
            with_own_config(hostile)  # the policy's tokenizer is used
            policy = tiny_models.save_policy(tmp_path / "policy", "llama")
            options = {"path": str(policy), "kind": "implicit", "reference": str(hostile)}
        case "tokenizer":
            with_own_tokenizer(hostile)
            policy = tiny_models.save_reward_model(tmp_path / "policy", "llama")
            options = {"path": str(policy), "tokenizer": str(hostile)}
    with pytest.raises(ConfigError, match="trust_remote_code"):
        gym_rm.load_scorer(options)
    assert not (hostile / "ran").exists()


# --- sources -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["x" * 5000, "a/" + "x" * 5000, "nul\0byte", "", "..", "owner/name/more"])
def test_a_path_that_cannot_exist_is_an_error(path):
    with pytest.raises(ConfigError, match=r"^path='|cannot load|has no config.json"):
        gym_rm.load_scorer(path)


def test_a_path_to_a_file_is_an_error(folder):
    assert_refused(folder / WEIGHTS, "is a file; expected the folder")
