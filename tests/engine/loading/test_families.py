"""Public families with their own class names, tensors and templates, each compared with plain torch."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

import gym_rm
from gym_rm import ConfigError
from gym_rm.engine.kinds import KINDS
from gym_rm.engine.loading.families import FAMILIES, choose_family
from tests import tiny_models
from tests.checkpoints import (
    CONVERSATIONS,
    HIDDEN,
    conversation,
    hidden_states,
    save_with_heads,
    tensor,
    token_ids,
)

PLAIN = [messages for messages in CONVERSATIONS if "<|" not in messages[-1]["content"]]
MLP = {"0.weight": (HIDDEN, HIDDEN), "0.bias": (HIDDEN,), "2.weight": (1, HIDDEN), "2.bias": (1,)}


def tensors_of(prefix, shapes):
    return {f"{prefix}.{name}": tensor(*shape, seed=k) for k, (name, shape) in enumerate(shapes.items())}


def apply_mlp(heads, prefix, hidden):
    x = torch.relu(heads[f"{prefix}.0.weight"] @ hidden + heads[f"{prefix}.0.bias"])
    return float(heads[f"{prefix}.2.weight"] @ x + heads[f"{prefix}.2.bias"])


@pytest.mark.parametrize(
    ("class_name", "architecture", "prefix", "config"),
    [
        ("INFORMForSequenceClassification", "llama", "score", {"num_labels": 1}),
        ("Qwen2ForRewardModel", "qwen2", "score", {}),
    ],
    ids=["INF-ORM", "Qwen2.5-Math-RM"],
)
def test_heads_of_two_layers(tmp_path, class_name, architecture, prefix, config):
    heads = tensors_of(prefix, MLP)
    folder = save_with_heads(tmp_path, heads, architecture=architecture, class_name=class_name, **config)
    scores = gym_rm.load_scorer(str(folder)).score(PLAIN)
    expected = [apply_mlp(heads, prefix, hidden_states(folder, token_ids(folder, m))[-1]) for m in PLAIN]
    np.testing.assert_allclose(scores.rewards, expected, atol=1e-5)
    assert scores.provenance.layout == "tree"


def test_a_template_appends_the_token_that_the_head_reads(tmp_path):
    """As for Athene-RM, which is loaded by its options."""
    tokenizer = tiny_models.tokenizer("llama3")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved_special_token_1|>"]})
    heads = {"v_head.weight": tensor(1, HIDDEN, seed=1)}
    folder = save_with_heads(
        tmp_path, heads, class_name="AtheneForSequenceClassification", tokenizer=tokenizer, vocab_size=len(tokenizer)
    )
    template = tokenizer.chat_template + "<|reserved_special_token_1|>"
    scorer = gym_rm.load_scorer(str(folder), head="v_head", pooling="last", chat_template=template)
    last = tokenizer.convert_tokens_to_ids("<|reserved_special_token_1|>")
    expected = [float(heads["v_head.weight"] @ hidden_states(folder, [*token_ids(folder, m), last])[-1]) for m in PLAIN]
    np.testing.assert_allclose(scorer.score(PLAIN).rewards, expected, atol=1e-5)


def test_the_logit_of_a_token_is_the_reward_by_its_options(tmp_path):
    """As for a copy of Nemotron reward in a folder, which nothing but its hub id tells from a policy."""
    folder = tiny_models.save_policy(tmp_path / "Llama-3.1-Nemotron-70B-Reward-HF", "llama", initializer_range=0.3)
    with pytest.raises(ConfigError, match=r"without a known reward head.*token_id=0"):
        gym_rm.load_scorer(str(folder))
    with pytest.raises(ConfigError, match="has no head 'score'"):
        gym_rm.load_scorer(str(folder), kind="decoder")
    scores = gym_rm.load_scorer(str(folder), kind="decoder", token_id=0, pooling="last").score(PLAIN)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = [float(model(torch.tensor([token_ids(folder, m)])).logits[0, -1, 0]) for m in PLAIN]
    np.testing.assert_allclose(scores.rewards, expected, atol=1e-5)
    assert scores.provenance.settings["token_id"] == 0


@pytest.mark.parametrize(
    ("name", "vocab_size"),
    [
        ("nvidia/Llama-3.3-Nemotron-70B-Reward-Principle", 128_256),
        ("me/Llama-3.1-Nemotron-70B-Reward-HF", 128_256),
        ("nvidia/Llama-3.1-Nemotron-70B-Reward-HF", 32_000),
        ("/models/nvidia/Llama-3.1-Nemotron-70B-Reward-HF", 128_256),
        ("nemotron-grpo-reward-shaping", 128_256),
    ],
)
def test_a_family_is_recognised_by_its_exact_hub_id_and_vocabulary(name, vocab_size):
    config = LlamaConfig(architectures=["LlamaForCausalLM"], vocab_size=128_256)
    known = choose_family(config, [], "nvidia/Llama-3.1-Nemotron-70B-Reward-HF")
    assert known.options == {"token_id": 0, "pooling": "last"}
    config.vocab_size = vocab_size
    with pytest.raises(ConfigError, match="without a known reward head"):
        choose_family(config, [], name)


def test_open_assistant_encodes_question_and_answer_as_a_pair(tmp_path):
    folder = tiny_models.save_reward_model(tmp_path, "deberta_v2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    pair = tokenizer("What is the sum of 12 and 30?", "The sum is 42.", return_tensors="pt")
    with torch.inference_mode():
        expected = float(model(input_ids=pair["input_ids"]).logits[0, 0])
    scores = gym_rm.load_scorer(str(folder)).score([conversation("What is the sum of 12 and 30?", "The sum is 42.")])
    assert scores.rewards[0] == pytest.approx(expected, abs=1e-5)


def test_an_unknown_architecture_is_refused_with_the_options_to_pass(tmp_path):
    heads = tensors_of("my_head", {"weight": (1, HIDDEN)})
    folder = save_with_heads(tmp_path, heads, class_name="LlamaForSomething")
    with pytest.raises(ConfigError, match=r"LlamaForSomething'.*\['my_head'\].*head="):
        gym_rm.load_scorer(str(folder))
    scores = gym_rm.load_scorer(str(folder), head="my_head").score(PLAIN)
    expected = [float(heads["my_head.weight"] @ hidden_states(folder, token_ids(folder, m))[-1]) for m in PLAIN]
    np.testing.assert_allclose(scores.rewards, expected, atol=1e-5)
    with pytest.raises(ConfigError, match=r"has no tensors 'your_head\.\*'"):
        gym_rm.load_scorer(str(folder), head="your_head")


def test_a_value_head_of_reinforcement_learning_is_not_used_as_a_reward_head(tmp_path):
    heads = tensors_of("v_head.summary", {"weight": (1, HIDDEN), "bias": (1,)})
    folder = save_with_heads(tmp_path, heads, class_name="LlamaForCausalLM")
    with pytest.raises(
        ConfigError, match=r"without a known reward head\. It has tensors \['v_head'\].*pass head='v_head'"
    ):
        gym_rm.load_scorer(str(folder))
    rewards = gym_rm.load_scorer(str(folder), head="v_head", pooling="last").score(PLAIN).rewards
    last = [hidden_states(folder, token_ids(folder, m))[-1] for m in PLAIN]
    expected = [float(heads["v_head.summary.weight"] @ x + heads["v_head.summary.bias"]) for x in last]
    np.testing.assert_allclose(rewards, expected, atol=1e-5)


def test_every_family_has_valid_options_and_is_recognised(caplog):
    caplog.set_level("INFO", "gym_rm")
    for family in FAMILIES:
        assert set(family.options) <= {*KINDS[family.kind].Options.model_fields}
        for name, vocab_size in (family.vocabularies or {"some/model": 10}).items():
            config = LlamaConfig(architectures=[family.architectures[0]], vocab_size=vocab_size)
            assert choose_family(config, [f"{head}.weight" for head in family.heads], name) is family
        assert f"is of the family {family.name}, by its" in caplog.text
