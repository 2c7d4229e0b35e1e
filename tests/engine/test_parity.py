"""Scores equal those of plain transformers, one conversation at a time in float32, for every architecture."""

from itertools import combinations

import numpy as np
import pytest
import tiny_models

import gym_rm
from gym_rm.engine.backbones.llama import MODEL_TYPES

TOLERANCE = 1e-5 if tiny_models.DEVICE.type == "cpu" else 1e-4  # of float32 sums in another order than on the CPU


def assert_same_rewards(scorer, folder, conversations):
    """Assert that the rewards are within the tolerance and in the same order."""
    expected = tiny_models.plain_rewards(folder, conversations)
    rewards = scorer.score(conversations).rewards
    np.testing.assert_allclose(rewards, expected, atol=TOLERANCE, rtol=0)
    distinct = [(i, j) for i, j in combinations(range(len(expected)), 2) if abs(expected[i] - expected[j]) > TOLERANCE]
    flipped = [(i, j) for i, j in distinct if (rewards[i] > rewards[j]) != (expected[i] > expected[j])]
    assert not flipped
    assert expected.std() > 100 * TOLERANCE, "the test needs scores that differ clearly"


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_equals_the_plain_forward(architecture, scorer_of, saved_model, real_conversations):
    scorer = scorer_of(architecture)
    assert scorer.layout in tiny_models.layouts(architecture)
    assert scorer.info.fused == (architecture in MODEL_TYPES)
    assert scorer.provenance.layout == scorer.layout
    assert_same_rewards(scorer, saved_model(architecture), real_conversations)


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 600}, {"tree": False}])
@pytest.mark.parametrize("architecture", ["qwen3", "deberta_v2"])
def test_equals_the_plain_forward_with_every_option(architecture, options, saved_model, real_conversations):
    folder = saved_model(architecture)
    assert_same_rewards(gym_rm.load_scorer(folder, **options), folder, real_conversations)


# Configurations that behave differently on longer texts or in rare layers.
VARIANTS = {
    "window longer than the trial": ("mistral", {"sliding_window": 64}, "tree"),
    "window in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1},
        "tree",
    ),
    "window that is not used": ("llama", {"sliding_window": 32}, "tree"),
    "linear rotary scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        "tree",
    ),
    "longrope frequencies": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.5, 1.5],
                "original_max_position_embeddings": 128,
            },
            "original_max_position_embeddings": 128,
            "max_position_embeddings": 4096,
        },
        "tree",
    ),
    "soft caps": ("gemma2", {"attn_logit_softcapping": 3.0}, "tree"),
    "attention bias": ("qwen3", {"attention_bias": True}, "tree"),
    "one key head": ("llama", {"num_key_value_heads": 1}, "tree"),
    "no parallel residual": ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 0.5}, "tree"),
    "norm after the layer": ("opt", {"do_layer_norm_before": False}, "tree"),
    "token types": ("bert", {"type_vocab_size": 2}, "padded"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_plain_forward_for_every_kind_of_attention(variant, saved_model, real_conversations):
    architecture, config, layout = VARIANTS[variant]
    folder = saved_model(architecture, **config)
    scorer = gym_rm.load_scorer(folder, max_length=4096)
    assert scorer.layout == layout
    assert_same_rewards(scorer, folder, real_conversations)
    short = [[conversation[0], {"role": "assistant", "content": "No."}] for conversation in real_conversations[::3]]
    assert_same_rewards(scorer, folder, [*short, real_conversations[-1]])


def test_long_dialogues_of_many_turns(saved_model, hh_pairs):
    conversations = sorted(hh_pairs, key=lambda pair: len(pair[0]))[-3]
    assert len(conversations[0]) >= 20
    for architecture in ("qwen3", "mistral"):
        folder = saved_model(architecture)
        assert_same_rewards(gym_rm.load_scorer(folder, max_length=16384), folder, conversations)


def test_a_model_whose_values_depend_on_earlier_texts_is_refused():
    """Plain transformers keeps dynamic rotary frequencies of the longest text so far."""
    model = tiny_models.reward_model(
        "llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    with pytest.raises(gym_rm.ConfigError, match="rotary positions of type 'dynamic'"):
        gym_rm.RewardModelScorer(model, tiny_models.tokenizer("llama3"))
