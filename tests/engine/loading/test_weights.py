"""Weights that do not belong together are refused; tensors that real checkpoints have in addition are not."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

import gym_rm
from gym_rm import ConfigError
from tests.checkpoints import CONVERSATIONS


@pytest.fixture
def changed(saved_model, tmp_path):
    """Function that copies a reward model, changes its tensors or configuration, and returns the folder."""

    def change(tensors=None, architecture="qwen3", **config):
        folder = shutil.copytree(saved_model(architecture), tmp_path / "model", dirs_exist_ok=True)
        if tensors is not None:
            state = load_file(folder / "model.safetensors")
            save_file(state | tensors(state), folder / "model.safetensors", metadata={"format": "pt"})
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**written, **config}))
        return str(folder)

    return change


def reward_of(folder, **options):
    return gym_rm.load_scorer(folder, **options).score(CONVERSATIONS[:1]).rewards[0]


# --- tensors that the configuration does not use -----------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen3", "gpt_neox", "bert"])
def test_a_config_with_fewer_layers_than_the_weights_is_an_error(changed, architecture):
    config = {} if architecture != "qwen3" else {"layer_types": ["full_attention"]}
    with pytest.raises(ConfigError, match=r"its configuration does not use: .*layers?\.1\..*num_hidden_layers"):
        gym_rm.load_scorer(changed(architecture=architecture, num_hidden_layers=1, **config))


@pytest.mark.parametrize("name", ["score.bias", "model.layers.0.extra_norm.weight", "model.norm2.weight"])
def test_a_tensor_that_its_module_does_not_have_is_an_error(changed, name):
    with pytest.raises(ConfigError, match=rf"its configuration does not use: \['{name}'\]"):
        gym_rm.load_scorer(changed(lambda state: {name: torch.ones(1)}))


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("qwen3", "lm_head.weight"),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt2", "transformer.h.0.attn.masked_bias"),
        ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias"),
        ("bert", "bert.embeddings.position_ids"),
        ("bert", "cls.predictions.bias"),
        ("roberta", "roberta.pooler.dense.weight"),
        ("deberta_v2", "lm_predictions.lm_head.bias"),
    ],
)
def test_tensors_of_real_checkpoints_that_change_no_score_are_ignored(changed, saved_model, architecture, name):
    expected = reward_of(saved_model(architecture))
    value = torch.ones(1, dtype=torch.long if name.endswith("_ids") else torch.float32)
    assert reward_of(changed(lambda state: {name: value}, architecture)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["normalizer.mean", "mean", "v_head.summary.weight", "model_2.embed.weight"])
@pytest.mark.parametrize("architecture", ["qwen3", "bert"])
def test_tensors_beside_backbone_and_head_must_be_ignored_by_name(changed, saved_model, architecture, name):
    folder, first = changed(lambda state: {name: torch.ones(1)}, architecture), name.partition(".")[0]
    with pytest.raises(ConfigError, match=rf"does not use: \['{name}'\].*ignored_tensors="):
        reward_of(folder)
    expected = reward_of(saved_model(architecture))
    assert reward_of(folder, ignored_tensors=[first]) == pytest.approx(expected, abs=1e-5)


def test_layers_that_predict_later_tokens_are_ignored(changed, saved_model):
    def with_a_third_layer(state):
        return {name.replace("layers.1", "layers.2"): tensor.clone() for name, tensor in state.items()}

    folder = changed(with_a_third_layer, num_nextn_predict_layers=1)
    assert reward_of(folder) == pytest.approx(reward_of(saved_model("qwen3")), abs=1e-5)


# --- types and shapes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2])
def test_weights_that_are_not_real_numbers_are_an_error(changed, dtype):
    with pytest.raises(ConfigError, match=r"must be floats of 16 bits or more; got \['score.weight"):
        gym_rm.load_scorer(changed(lambda state: {"score.weight": state["score.weight"].to(dtype)}))


@pytest.mark.parametrize("name", ["model.norm.weight", "score.weight"])
def test_weights_of_another_shape_are_an_error(changed, name):
    with pytest.raises(ConfigError, match=rf"wrong shape for its configuration: \['{name} .* instead of"):
        gym_rm.load_scorer(changed(lambda state: {name: torch.ones(1, 3)}))


# --- quiet loading -----------------------------------------------------------------------------------------------


def test_loading_prints_neither_bars_nor_reports(changed, capfd):
    folder = changed(lambda state: {"lm_head.weight": torch.ones(1)})
    transformers_logging.enable_progress_bar()
    gym_rm.load_scorer(folder)
    assert capfd.readouterr() == ("", "")
