"""Loading reads only safetensors, needs every weight, and runs no code of a checkpoint."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import gym_rm
from gym_rm import ConfigError
from gym_rm.engine.loading.files import tensor_files
from tests import tiny_models
from tests.checkpoints import CONVERSATIONS, HIDDEN, save_with_heads, tensor


def test_a_missing_head_is_an_error(tmp_path):
    folder = tiny_models.save_policy(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForSequenceClassification"]}))
    with pytest.raises(ConfigError, match=r"no weights for \['a head with 2 outputs'\].*random"):
        gym_rm.load_scorer(str(folder))


def without_num_labels(folder, **settings):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: config[key] for key in config if "label" not in key} | settings))
    return str(folder)


@pytest.mark.parametrize("architecture", ["qwen3", "bert", "roberta"])
def test_a_config_without_num_labels_has_those_of_the_head(tmp_path, architecture):
    folder = tiny_models.save_reward_model(tmp_path, architecture)
    expected = gym_rm.load_scorer(str(folder)).score(CONVERSATIONS[:1]).rewards
    rewards = gym_rm.load_scorer(without_num_labels(folder)).score(CONVERSATIONS[:1]).rewards
    assert rewards.tolist() == expected.tolist()
    with pytest.raises(ConfigError, match=r"has a head of 1 output\(s\), but config.json says 3"):
        gym_rm.load_scorer(without_num_labels(folder, num_labels=3))


@pytest.mark.parametrize("name", ["value_head.safetensors", "value_head.bin", "reward_head.safetensors"])
def test_a_head_in_a_file_of_its_own_is_refused(tmp_path, name):
    """As LLaMA-Factory saves it beside a whole language model."""
    folder = tiny_models.save_policy(tmp_path)
    save_file({"v_head.summary.weight": torch.ones(1, 32)}, folder / name)
    with pytest.raises(ConfigError, match=f"has a head in '{name}'.*which is not read"):
        gym_rm.load_scorer(str(folder))


def test_a_backbone_with_a_layer_missing_is_an_error(tmp_path):
    heads = {"score.0.weight": tensor(1, HIDDEN, seed=1)}
    folder = save_with_heads(tmp_path, heads, class_name="INFORMForSequenceClassification")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no weights for .*up_proj"):
        gym_rm.load_scorer(str(folder))


def test_pickled_weights_are_not_read(tmp_path):
    folder = tiny_models.save_reward_model(tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no safetensors weights, and pickled weights are not read.*refs/pr"):
        gym_rm.load_scorer(str(folder))


def test_sharded_checkpoints_are_read_by_their_index(tmp_path):
    heads = {"score.0.weight": tensor(1, HIDDEN, seed=1), "score.0.bias": tensor(1, seed=2)}
    folder = save_with_heads(tmp_path, heads, class_name="INFORMForSequenceClassification")
    whole = gym_rm.load_scorer(str(folder)).score(CONVERSATIONS).rewards
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for k, (name, value) in enumerate(tensors.items()):
        shards[sorted(shards)[k % 2]][name] = value
    for file, content in shards.items():
        save_file(content, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, content in shards.items() for name in content}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    files = tensor_files(str(folder))
    assert set(files) == set(tensors)
    np.testing.assert_array_equal(gym_rm.load_scorer(str(folder)).score(CONVERSATIONS).rewards, whole)


def test_code_that_is_not_needed_does_not_run(tmp_path):
    heads = {"score.0.weight": tensor(1, HIDDEN, seed=1), "score.0.bias": tensor(1, seed=2)}
    own = {"AutoConfig": "modeling_own.Bomb", "AutoModelForSequenceClassification": "modeling_own.Bomb"}
    folder = save_with_heads(tmp_path, heads, class_name="INFORMForSequenceClassification", auto_map=own)
    (folder / "modeling_own.py").write_text("raise SystemExit('this ran')")
    assert np.isfinite(gym_rm.load_scorer(str(folder)).score(CONVERSATIONS).rewards).all()


def test_half_precision_backbones_keep_a_float32_head(tmp_path):
    folder = tiny_models.save_reward_model(tmp_path)
    scorer = gym_rm.load_scorer(str(folder), dtype="bfloat16")
    rewards = scorer.score(CONVERSATIONS).rewards
    assert scorer.provenance.dtype == "bfloat16"
    # A head in bfloat16 would return only bfloat16 numbers.
    assert (torch.tensor(rewards).bfloat16().float() != torch.tensor(rewards)).any()
    exact = gym_rm.load_scorer(str(folder)).score(CONVERSATIONS).rewards
    np.testing.assert_allclose(rewards, exact, atol=0.5)
