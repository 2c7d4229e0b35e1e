"""Decoding with packed weights: the same logits as without, and never those of an earlier generation."""

import numpy as np
import pytest
import torch
from generation.sampled_models import largest_error, policy, prompts

from gym_rm.generation import decoding, packed_layers
from gym_rm.generation.decoding import LeanDecoder
from gym_rm.generation.packed_layers import can_pack_layers
from gym_rm.generation.sampling import LocalSampler

pytestmark = pytest.mark.skipif(not packed_layers.packs(), reason="this build of torch has no oneDNN")


def logits_of(model, texts):
    """Return the logits after the prompts and after one more token; the first prompt has two rows."""
    decoder = LeanDecoder(model)
    first = decoder.start(texts, np.array([0, 0, 1]), 2)
    return torch.cat([first, decoder.step(torch.tensor([7, 8, 9]))])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_logits_are_those_without_packing(monkeypatch, architecture):
    model, tokenizer = policy(architecture)
    texts = prompts(tokenizer, (4, 9))
    packed = logits_of(model, texts)
    monkeypatch.setattr(decoding, "can_pack_layers", lambda model: False)
    torch.testing.assert_close(packed, logits_of(model, texts), atol=2e-5, rtol=2e-5)


def test_changes_without_a_trace_are_seen_by_the_next_generation():
    model, tokenizer = policy()
    rows = prompts(tokenizer, (5,))
    sampler = LocalSampler(model, tokenizer, max_new_tokens=4)
    sampler.sample(rows, seeds=[0])
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    assert largest_error(model, rows, sampler.sample(rows, seeds=[0])) < 1e-4


def test_packed_weights_and_caches_end_with_a_call():
    model, tokenizer = policy()
    sampler = LocalSampler(model, tokenizer, max_new_tokens=2)
    sampler.sample(prompts(tokenizer, (4,)), seeds=[0])
    assert vars(sampler._decoder).keys() == vars(LeanDecoder(model)).keys()


def test_only_plain_weights_in_float32_that_leave_memory_are_packed(monkeypatch):
    assert can_pack_layers(policy()[0])
    assert not can_pack_layers(policy(dtype=torch.bfloat16)[0])
    monkeypatch.setattr(packed_layers, "MOST_BYTES", 1000)
    assert not can_pack_layers(policy()[0])
