"""What the check at load finds for real weights."""

import pytest

import gym_rm
from gym_rm import ConfigError


@pytest.mark.parametrize(("dtype", "error", "flips"), [("float32", 1e-4, 0), ("bfloat16", 0.1, 1)])
def test_the_scores_of_a_decoder_are_those_of_its_weights(dtype, error, flips, smollm2_reward_model):
    found = gym_rm.load_scorer(smollm2_reward_model, dtype=dtype).provenance.fidelity
    assert (found.mean_error < error, found.flips <= flips, found.pairs) == (True, True, 8)


def test_a_decoder_in_8_bits_is_refused(smollm2_reward_model):
    with pytest.raises(ConfigError, match="'int8' is refused for decoders"):
        gym_rm.load_scorer(smollm2_reward_model, quantization="int8")


def test_an_encoder_in_8_bits_is_near_its_weights(minilm_reward_model):
    found = gym_rm.load_scorer(minilm_reward_model, quantization="int8").provenance.fidelity
    assert (found.mean_error < 0.1, found.flips <= 1) == (True, True)
