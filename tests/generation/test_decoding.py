"""Decoding with cached keys and values equals the plain forward, whatever rows share, end or leave."""

import functools

import numpy as np
import pytest
import torch
from generation import sampled_models
from generation.sampled_models import prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import DEVICE

from gym_rm.generation import decoding
from gym_rm.generation.decoding import LeanDecoder, Slots, lean_obstacle
from gym_rm.generation.model_decoding import ModelDecoder
from gym_rm.generation.sampling import trial

policy = functools.partial(sampled_models.policy, device=DEVICE)


@torch.no_grad()
def check(decoder, model, texts, prompt_of_row, drops, steps):
    """Grow the rows by random tokens, drop some after each step, and compare all logits with the plain forward."""
    rng = np.random.default_rng(0)
    logits = decoder.start(texts, np.array(prompt_of_row), steps)[torch.as_tensor(prompt_of_row, device=DEVICE)]
    rows = [texts[prompt].tolist() for prompt in prompt_of_row]
    for step in range(steps):
        for row, got in zip(rows, logits, strict=True):
            expected = model(input_ids=torch.tensor([row], device=DEVICE), use_cache=False).logits[0, -1]
            torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
        kept = [place for place in range(len(rows)) if place not in drops.get(step, ())]
        if len(kept) < len(rows):
            decoder.keep(torch.tensor(kept, device=DEVICE))
            rows = [rows[place] for place in kept]
        new = rng.integers(5, 300, size=len(rows))
        rows = [[*row, int(token)] for row, token in zip(rows, new, strict=True)]
        if step + 1 < steps:
            logits = decoder.step(torch.as_tensor(new, device=DEVICE))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_lean_decoding_equals_the_forward_while_rows_leave(architecture):
    model, tokenizer = policy(architecture)
    texts = prompts(tokenizer, (13, 4, 21))
    check(LeanDecoder(model), model, texts, [0, 0, 0, 1, 1, 2, 2, 2], {1: [1], 2: [0, 3, 5], 4: [0, 1]}, 7)


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "bloom", "opt"])
def test_the_models_own_decoding_equals_the_forward_while_rows_leave(architecture):
    model, tokenizer = policy(architecture)
    texts = prompts(tokenizer, (9, 4))
    check(ModelDecoder(model), model, texts, [0, 1, 1, 0], {1: [1], 2: [0]}, 5)


def test_sliding_windows_hide_the_prompt_and_then_own_tokens():
    model, tokenizer = policy("mistral", sliding_window=5)
    check(LeanDecoder(model), model, prompts(tokenizer, (3, 9)), [0, 0, 1], {}, 9)


def test_windows_of_some_layers_only():
    layers = ["full_attention", "sliding_attention"]
    model, tokenizer = policy(
        "qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1, layer_types=layers
    )
    check(LeanDecoder(model), model, prompts(tokenizer, (6, 8)), [0, 1, 1], {}, 7)


def test_scaled_rotary_positions_are_those_of_the_model():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    model, tokenizer = policy("llama", rope_parameters=rope)
    check(LeanDecoder(model), model, prompts(tokenizer, (40, 8)), [0, 1, 1], {}, 4)


def test_uneven_groups_share_their_prompts():
    model, tokenizer = policy()
    texts = prompts(tokenizer, (5, 5, 7, 9))
    check(LeanDecoder(model), model, texts, [2, 0, 2, 1, 2, 3, 2, 2, 2], {0: [1, 2], 1: [0, 6]}, 4)


def test_prompts_in_several_parts_equal_those_in_one(monkeypatch):
    monkeypatch.setattr(decoding, "PROMPT_TOKENS", 16)
    model, tokenizer = policy()
    check(LeanDecoder(model), model, prompts(tokenizer, (20, 9, 7, 3)), [0, 1, 2, 3], {}, 3)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_every_row_has_a_slot_of_its_own_beside_its_prompt(owners):
    slots = Slots(np.array(owners))
    assert len(set(slots.rows.tolist())) == len(owners)
    assert slots.prompts[slots.rows // slots.width].tolist() == owners
    assert slots.count <= 4 * len(owners) + 4 * len(set(owners))


def test_other_models_say_why_they_have_no_lean_decoding():
    assert "GPT2LMHeadModel" in lean_obstacle(policy("gpt2")[0])
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    assert "length" in lean_obstacle(policy("llama", rope_parameters=rope)[0])
    hooked, _ = policy()
    hooked.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert "hooks" in lean_obstacle(hooked)


def test_the_trial_notices_a_wrong_step(monkeypatch):
    model, _ = policy()
    decoder, in_slots = LeanDecoder(model), decoding._in_slots
    assert trial(model, decoder) < 1e-5
    monkeypatch.setattr(decoding, "_in_slots", lambda states, rows, count: 1.5 * in_slots(states, rows, count))
    assert trial(model, decoder) > 1e-3
