"""LoRA adapters are merged into their base, head included; a head that was never saved is an error."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

import gym_rm
from gym_rm import ConfigError
from gym_rm.engine.loading.lora import find_adapter
from tests import tiny_models
from tests.checkpoints import CONVERSATIONS, token_ids

try:
    import peft
except ImportError:
    peft = None
needs_peft = pytest.mark.skipif(peft is None, reason="peft is not installed: pip install 'gym-rm[lora]'")

PLAIN = [messages for messages in CONVERSATIONS if "<|" not in messages[-1]["content"]]


def save_adapter(
    tmp_path,
    base,
    model_class=AutoModelForSequenceClassification,
    task_type="SEQ_CLS",
    added=0,
    save_embedding_layers="auto",
    num_labels=None,
    **options,
):
    """Save a random LoRA adapter over a base; return its folder and the adapted model."""
    options = {"target_modules": ["q_proj", "up_proj"]} | options
    config = peft.LoraConfig(task_type=task_type, r=4, lora_alpha=8, **options)
    torch.manual_seed(3)
    model = model_class.from_pretrained(base, **({} if num_labels is None else {"num_labels": num_labels})).float()
    if added:
        model.resize_token_embeddings(model.config.vocab_size + added)
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=save_embedding_layers)
    return tmp_path / "adapter", model.eval()


@pytest.fixture
def adapter(tmp_path):
    """An adapter with its head over the language model in the folder `base`."""
    return save_adapter(tmp_path, tiny_models.save_policy(tmp_path / "base", initializer_range=0.3), num_labels=1)[0]


def plain_rewards(model, base):
    with torch.inference_mode():
        return [float(model(input_ids=torch.tensor([token_ids(base, m)])).logits[0, 0]) for m in PLAIN]


@needs_peft
def test_an_adapter_with_its_head_over_a_language_model(tmp_path):
    base = tiny_models.save_policy(tmp_path / "base", initializer_range=0.3)
    adapter, model = save_adapter(tmp_path, base, num_labels=1)
    scores = gym_rm.load_scorer(str(adapter)).score(PLAIN)
    np.testing.assert_allclose(scores.rewards, plain_rewards(model, base), atol=1e-5)
    assert scores.provenance.model == str(adapter)


@needs_peft
def test_an_adapter_over_a_reward_model_that_has_its_head(tmp_path):
    base = tiny_models.save_reward_model(tmp_path / "base")
    adapter, model = save_adapter(tmp_path, base, task_type="FEATURE_EXTRACTION")
    model = peft.PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(base), adapter).eval()
    assert not any(name.endswith("score.weight") for name in find_adapter(str(adapter), None, None).tensors)
    np.testing.assert_allclose(
        gym_rm.load_scorer(str(adapter)).score(PLAIN).rewards, plain_rewards(model, base), atol=1e-5
    )


@needs_peft
def test_a_head_that_was_never_saved_is_an_error(tmp_path):
    base = tiny_models.save_policy(tmp_path / "base", initializer_range=0.3)
    adapter, _ = save_adapter(tmp_path, base, task_type="FEATURE_EXTRACTION", num_labels=1)
    with pytest.raises(ConfigError, match=r"has weights for \['a head with 2 outputs'\].*modules_to_save"):
        gym_rm.load_scorer(str(adapter))


@needs_peft
@pytest.mark.parametrize(
    "options", [{}, {"modules_to_save": ["score", "embed_tokens"]}, {"target_modules": ["embed_tokens"]}]
)
def test_an_adapter_over_a_base_with_added_tokens_has_their_embeddings(tmp_path, options):
    base = tiny_models.save_policy(tmp_path / "base", initializer_range=0.3)
    adapter, model = save_adapter(tmp_path, base, num_labels=1, added=1, **options)
    np.testing.assert_allclose(gym_rm.load_scorer(adapter).score(PLAIN).rewards, plain_rewards(model, base), atol=1e-5)


@needs_peft
@pytest.mark.parametrize("option", [{"target_modules": ["embed_tokens"]}, {"trainable_token_indices": [400]}])
def test_an_adapter_without_the_embeddings_of_added_tokens_is_refused(tmp_path, option):
    base = tiny_models.save_policy(tmp_path / "base")
    adapter, _ = save_adapter(tmp_path, base, num_labels=1, added=1, save_embedding_layers=False, **option)
    with pytest.raises(ConfigError, match=r"does not fit its base .*must have embeddings of all tokens"):
        gym_rm.load_scorer(adapter)


@needs_peft
def test_another_base_can_be_passed_if_the_base_has_moved(tmp_path, adapter):
    before = gym_rm.load_scorer(str(adapter)).score(PLAIN).rewards
    shutil.move(tmp_path / "base", tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"base='.*base' does not exist and is not a hub id"):
        gym_rm.load_scorer(str(adapter))
    after = gym_rm.load_scorer(str(adapter), base=tmp_path / "moved").score(PLAIN).rewards
    np.testing.assert_array_equal(after, before)


def test_pickled_adapters_are_not_read(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "x/y"}))
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors, and pickled weights are not read"):
        gym_rm.load_scorer(str(tmp_path))


def test_a_base_without_an_adapter_is_refused(tmp_path):
    folder = str(tiny_models.save_reward_model(tmp_path))
    with pytest.raises(ConfigError, match=r"needs an adapter; .* is not an adapter"):
        gym_rm.load_scorer(folder, base="some/where")


@needs_peft
def test_an_adapter_of_a_deeper_model_is_refused(tmp_path, adapter):
    shallow = tiny_models.save_policy(tmp_path / "shallow", num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.raises(ConfigError, match=r"does not fit its base '.*shallow': .*unknown \['model\.layers\.1\."):
        gym_rm.load_scorer(str(adapter), base=shallow)


@needs_peft
def test_an_adapter_without_some_of_its_tensors_is_refused(adapter):
    tensors = load_file(adapter / "adapter_model.safetensors")
    del tensors["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"]
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"does not fit its base .*missing \['model\.layers\.0\.mlp\.up_proj\.lora_B"):
        gym_rm.load_scorer(str(adapter))


@needs_peft
def test_the_base_of_an_adapter_cannot_be_another_adapter(tmp_path, adapter):
    shutil.copytree(tmp_path / "base", tmp_path / "second")
    shutil.copy(adapter / "adapter_config.json", tmp_path / "second")
    with pytest.raises(ConfigError, match="is itself an adapter; merge it"):
        gym_rm.load_scorer(str(adapter), base=tmp_path / "second")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ("[1]", "must be a mapping with"),
        ("{", "cannot read the configuration of an adapter"),
        ('{"peft_type": "XLORA", "adapters": {"0": "/elsewhere"}}', "must be a LoRA adapter .* got peft_type='XLORA'"),
        ('{"peft_type": "LORA", "megatron_config": {}, "megatron_core": "antigravity"}', "without megatron_config"),
        ('{"peft_type": "LORA"}', "does not name its base model"),
        ('{"peft_type": "LORA", "base_model_name_or_path": 3}', "does not name its base model"),
    ],
)
def test_a_malformed_or_hostile_adapter_config_is_an_error(tmp_path, config, match):
    (tmp_path / "adapter_config.json").write_text(config)
    save_file({"base_model.model.score.weight": torch.ones(1, 32)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=match):
        gym_rm.load_scorer(str(tmp_path))
