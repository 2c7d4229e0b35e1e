"""Weights that do not belong together are refused; tensors that real checkpoints have in addition are not."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

import gym_rm
from gym_rm import ConfigError
from tests import tiny_models
from tests.checkpoints import CONVERSATIONS, HIDDEN, save_with_heads, tensor


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


def reward_of(folder):
    return gym_rm.load_scorer(folder).score(CONVERSATIONS[:1]).rewards[0]


# --- tensors that the configuration does not use -----------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen3", "gpt_neox", "bert"])
def test_a_config_with_fewer_layers_than_the_weights_is_an_error(changed, architecture):
    config = {} if architecture != "qwen3" else {"layer_types": ["full_attention"]}
    with pytest.raises(ConfigError, match=r"its configuration does not use: .*layers?\.1\..*num_hidden_layers"):
        gym_rm.load_scorer(changed(architecture=architecture, num_hidden_layers=1, **config))


def test_a_backbone_without_prefix_and_fewer_layers_is_an_error(tmp_path):
    folder = save_with_heads(tmp_path, {"v_head.weight": tensor(1, HIDDEN, seed=1)}, class_name="AnyRewardModel")
    state = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): value for name, value in state.items()}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    expected = gym_rm.load_scorer(str(folder), head="v_head", pooling="last").score(CONVERSATIONS[:1])
    assert expected.errors == (None,)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(ConfigError, match=r"its configuration does not use: .*layers\.1\."):
        gym_rm.load_scorer(str(folder), head="v_head", pooling="last")


@pytest.mark.parametrize("name", ["score.bias", "model.layers.0.extra_norm.weight", "model.norm2.weight"])
def test_a_tensor_that_its_module_does_not_have_is_an_error(changed, name):
    with pytest.raises(ConfigError, match=rf"its configuration does not use: \['{name}'\]"):
        gym_rm.load_scorer(changed(lambda state: {name: torch.ones(1)}))


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("qwen3", "lm_head.weight"),
        ("qwen3", "v_head.summary.weight"),
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


def test_layers_that_predict_later_tokens_are_ignored(changed, saved_model):
    def with_a_third_layer(state):
        return {name.replace("layers.1", "layers.2"): tensor.clone() for name, tensor in state.items()}

    folder = changed(with_a_third_layer, num_nextn_predict_layers=1)
    assert reward_of(folder) == pytest.approx(reward_of(saved_model("qwen3")), abs=1e-5)


def test_deberta_checkpoints_may_have_positions_that_they_do_not_use(tmp_path):
    folder = tiny_models.save_reward_model(tmp_path, "deberta_v2", position_biased_input=False)
    expected = reward_of(str(folder))
    state = load_file(folder / "model.safetensors")
    state["deberta.embeddings.position_embeddings.weight"] = torch.ones(4096, HIDDEN)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert reward_of(str(folder)) == pytest.approx(expected, abs=1e-5)


# --- types and shapes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_weights_that_are_not_real_numbers_are_an_error(changed, dtype):
    with pytest.raises(ConfigError, match=r"must be floating-point numbers; got \['score.weight"):
        gym_rm.load_scorer(changed(lambda state: {"score.weight": state["score.weight"].to(dtype)}))


def test_a_quantisation_that_transformers_skips_does_not_allow_integers(changed):
    unknown = {"quant_method": "none of them"}
    folder = changed(lambda state: {"score.weight": state["score.weight"].long()}, quantization_config=unknown)
    with pytest.raises(ConfigError, match="must be floating-point numbers"):
        gym_rm.load_scorer(folder)


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


def test_settings_of_the_user_for_bars_and_logs_are_kept(changed):
    seen = []

    def hook(factory, args, kwargs):
        seen.append(kwargs.get("desc"))
        return factory(*args, **kwargs)

    before = transformers_logging.set_tqdm_hook(hook)
    filters = list(logging.getLogger("transformers.modeling_utils").filters)
    try:
        gym_rm.load_scorer(changed())
        with pytest.raises(ConfigError):
            gym_rm.load_scorer(changed(lambda state: {"score.weight": torch.ones(1, 3)}))
        assert seen == ["Loading weights"] * 2
    finally:
        assert transformers_logging.set_tqdm_hook(before) is hook
    assert logging.getLogger("transformers.modeling_utils").filters == filters
    assert transformers_logging.is_progress_bar_enabled()


def test_a_loading_bar_of_another_thread_is_shown(changed, monkeypatch):
    import threading

    from gym_rm.engine.loading.weights import _without_report

    disabled = []
    before = transformers_logging.set_tqdm_hook(lambda factory, args, kwargs: disabled.append(kwargs.get("disable")))
    try:
        with _without_report():
            thread = threading.Thread(target=lambda: transformers_logging.tqdm([1], desc="theirs"))
            thread.start()
            thread.join()
            transformers_logging.tqdm([1], desc="ours")
    finally:
        transformers_logging.set_tqdm_hook(before)
    assert disabled == [None, True]


def test_a_policy_is_not_mistaken_for_a_model_with_fewer_layers(tmp_path):
    folder = tiny_models.save_policy(tmp_path, "gemma2", initializer_range=0.3)
    scorer = gym_rm.load_scorer(str(folder), kind="generative", answers=("The", "N"))
    assert scorer.score(CONVERSATIONS[:1]).errors == (None,)
