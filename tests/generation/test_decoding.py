"""Decoding with cached keys and values equals the plain forward, whatever rows share, end or leave."""

import functools

import numpy as np
import pytest
import tiny_models
import torch
from generation import sampled_models
from generation.cpu_graphs import on_the_cpu
from generation.sampled_models import prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import DEVICE

from gym_rm.generation import decoding
from gym_rm.generation.decoding import GraphDecoder, LeanDecoder, Slots, lean_obstacle
from gym_rm.generation.model_decoding import ModelDecoder
from gym_rm.generation.sampling import trial
from tests.engine.fake_cuda import DEVICE as FAKE
from tests.engine.fake_cuda import fake_gpu, on_gpu
from tests.generation.live_memory import LiveMemory


@pytest.fixture(params=[LeanDecoder, GraphDecoder])
def kind(request, monkeypatch):
    """The class of a decoder; graphs have 4 keys more than the last one."""
    if request.param is GraphDecoder:
        request.getfixturevalue("cpu_graphs")
        monkeypatch.setattr(GraphDecoder, "multiple", 4)
    return request.param


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
def test_lean_decoding_equals_the_forward_while_rows_leave(architecture, kind):
    model, tokenizer = policy(architecture)
    texts = prompts(tokenizer, (13, 4, 21))
    check(kind(model), model, texts, [0, 0, 0, 1, 1, 2, 2, 2], {1: [1], 2: [0, 3, 5], 4: [0, 1]}, 7)


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "bloom", "opt"])
def test_the_models_own_decoding_equals_the_forward_while_rows_leave(architecture):
    model, tokenizer = policy(architecture)
    texts = prompts(tokenizer, (9, 4))
    check(ModelDecoder(model), model, texts, [0, 1, 1, 0], {1: [1], 2: [0]}, 5)


def test_sliding_windows_hide_the_prompt_and_then_own_tokens(kind):
    model, tokenizer = policy("mistral", sliding_window=5)
    check(kind(model), model, prompts(tokenizer, (3, 9)), [0, 0, 1], {}, 12)


def test_windows_of_some_layers_only(kind):
    layers = ["full_attention", "sliding_attention"]
    model, tokenizer = policy(
        "qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1, layer_types=layers
    )
    check(kind(model), model, prompts(tokenizer, (6, 8)), [0, 1, 1], {}, 10)


def test_scaled_rotary_positions_are_those_of_the_model():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    model, tokenizer = policy("llama", rope_parameters=rope)
    check(LeanDecoder(model), model, prompts(tokenizer, (40, 8)), [0, 1, 1], {}, 4)


def test_uneven_groups_share_their_prompts(kind):
    model, tokenizer = policy()
    texts = prompts(tokenizer, (5, 5, 7, 9))
    check(kind(model), model, texts, [2, 0, 2, 1, 2, 3, 2, 2, 2], {0: [1, 2], 1: [0, 6]}, 7)


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


# --- graphs ----------------------------------------------------------------------------------------------------------


def greedy(decoder, texts, prompt_of_row, drops, steps):
    """Return the logits of each step, and grow the rows by their most likely tokens."""
    logits = [decoder.start(texts, prompt_of_row, steps)[torch.as_tensor(prompt_of_row)]]
    for step in range(steps):
        tokens = logits[-1].argmax(-1)
        if (kept := drops.get(step)) is not None:
            decoder.keep(kept)
            tokens = tokens[kept]
        logits.append(decoder.step(tokens).clone())
    return logits


@settings(max_examples=15)
@given(st.integers(0, 10_000))
def test_graphs_have_the_logits_of_single_operations(seed):
    rng = np.random.default_rng(seed)
    window = {"sliding_window": int(rng.integers(1, 30))} if seed % 2 else {}
    model, tokenizer = policy("mistral" if window else "qwen3", **window)
    texts = prompts(tokenizer, rng.integers(1, 20, size=rng.integers(1, 4)))
    prompt_of_row = rng.permutation(np.r_[np.arange(len(texts)), rng.integers(len(texts), size=5)])
    kept = torch.as_tensor(np.sort(rng.permutation(len(prompt_of_row))[:4]))
    work = (texts, prompt_of_row, {int(rng.integers(1, 12)): kept}, 14)
    with pytest.MonkeyPatch.context() as patch:
        captured = on_the_cpu(patch)
        patch.setattr(GraphDecoder, "multiple", int(rng.integers(3, 9)))
        found, expected = greedy(GraphDecoder(model), *work), greedy(LeanDecoder(model), *work)
    assert sum(graph.replays for graph in captured) >= 5
    for got, logits in zip(found, expected, strict=True):
        torch.testing.assert_close(got, logits, atol=2e-5, rtol=0)


def test_a_graph_is_captured_in_the_second_step_of_every_64_and_after_rows_left(cpu_graphs):
    model, tokenizer = policy()
    decoder, texts, captures = GraphDecoder(model), prompts(tokenizer, (3, 5)), []
    for _ in range(2):
        decoder.start(texts, np.array([0, 1]), 140)
        tokens = torch.tensor([5, 6])
        for step in range(130):
            if step == 100:
                decoder.keep(torch.tensor([1]))
                tokens = tokens[1:]
            before = len(cpu_graphs)
            decoder.step(tokens)
            captures += [step] * (len(cpu_graphs) - before)
    assert captures == 2 * [1, 65, 101, 129]
    assert len({graph.pool() for graph in cpu_graphs}) == 1, "each computes in the memory of the one before"


def test_a_capture_that_fails_is_ended(cpu_graphs, monkeypatch):
    model, tokenizer = policy()
    decoder = GraphDecoder(model)
    decoder.start(prompts(tokenizer, (3,)), np.array([0]), 4)
    decoder.step(torch.tensor([5]))
    monkeypatch.setattr(decoding, "_in_slots", None)
    with pytest.raises(TypeError):
        decoder.step(torch.tensor([5]))
    assert len(cpu_graphs) == 1
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_memory_that_nothing_was_written_to_is_never_read(kind):
    model, tokenizer = policy()
    torch.use_deterministic_algorithms(True)  # which fills it with NaN
    try:
        logits = greedy(kind(model), prompts(tokenizer, (3, 5)), np.array([0, 1, 1]), {3: torch.tensor([0, 2])}, 9)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(each).all() for each in logits)


@pytest.mark.parametrize("window", [{}, {"sliding_window": 5}])
def test_the_steps_of_a_graph_are_the_same_kernels_without_waits(window):
    with fake_gpu() as gpu:
        decoder = GraphDecoder(on_gpu(tiny_models.policy, "mistral", **window))
        decoder.start([np.arange(5, 8, dtype=np.int32), np.arange(5, 9, dtype=np.int32)], np.array([0, 0, 1]), 70)
        decoder.step(torch.zeros(3, dtype=torch.int64, device=FAKE))
        steps = []
        for _ in range(2):
            gpu.clear()
            with torch.inference_mode():
                decoder._step()
            steps.append(list(gpu.kernels))
            assert gpu.waits == []
    assert steps[0] == steps[1]


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_of_row", [np.repeat(np.arange(4), 8), np.arange(32)])
def test_rows_leave_with_a_copy_of_one_layer(prompt_of_row):
    model, tokenizer = policy(num_hidden_layers=12)
    decoder = LeanDecoder(model)
    decoder.start(prompts(tokenizer, [20] * (prompt_of_row.max() + 1)), prompt_of_row, 40)
    for _ in range(35):
        decoder.step(torch.full((32,), 7))
    layer = max(each.nbytes for each in (*decoder._suffixes, *decoder._shared))
    memory = LiveMemory([*decoder._suffixes, *decoder._shared])
    before = memory.now()
    with memory:
        decoder.keep((torch.arange(32) % 8 < 7).nonzero()[:, 0])
    assert memory.most - before < 1.6 * layer  # the new layer, and half of it on its way there
    assert memory.now() < before


def test_a_new_start_frees_the_old_keys_and_values_first(cpu_graphs):
    model, tokenizer = policy(num_hidden_layers=12)
    decoder, texts = LeanDecoder(model), prompts(tokenizer, (20, 20))
    decoder.start(texts, np.repeat([0, 1], 8), 40)
    memory = LiveMemory([*decoder._suffixes, *decoder._shared])
    before = memory.now()
    with memory:
        decoder.start(texts, np.repeat([0, 1], 8), 40)
    assert memory.most < 1.1 * before
