"""SmolLM2 as a policy: its samples, log-probabilities, losses and gradients are those of transformers and of TRL."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gym_rm.generation.sampling import LocalSampler, end_tokens
from gym_rm.policy.grpo_settings import PolicyLossSettings
from gym_rm.policy.losses import LossInputs, policy_loss, token_weights
from gym_rm.policy.trained_policy import StartPolicy, TrainedPolicy
from gym_rm.policy.turn_batches import policy_batches
from gym_rm.training.layouts import choose_layout
from tests.policy import turns as policy_turns
from tests.real import plain

QUESTIONS = ["What is the capital of France?", "Write one sentence about the sea.", "How much is 17 + 25?"]


@pytest.fixture
def policy(smollm2):
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(smollm2)


def test_greedy_replies_are_those_of_generate(policy):
    model, tokenizer = policy
    asked = [[{"role": "user", "content": each}] for each in QUESTIONS]
    rows = [tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False) for each in asked]
    sampler = LocalSampler(model, tokenizer, max_new_tokens=16, temperature=0)
    completions = sampler.sample([np.array(row, dtype=np.int32) for row in rows], seeds=range(3))
    for row, completion in zip(rows, completions, strict=True):
        ids = torch.tensor([row])
        options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": end_tokens(model, tokenizer)}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        assert completion.token_ids.tolist() == expected[0, len(row) :].tolist()
    assert "Paris" in completions[0].text


@pytest.fixture
def turns(policy):
    return policy_turns.gsm8k_turns(policy[1], problems=2, length=24)


def batches_of(policy, turns):
    """Return the policy to train, and its batches of token trees."""
    model, tokenizer = policy
    trained = TrainedPolicy(StartPolicy(model, None, tokenizer, "smollm2"), temperature=0.9)
    layout = choose_layout(trained, model, tree=True, fuse=True)
    assert layout.layout == "tree"
    return trained, policy_batches(*turns, layout=layout.layout, max_num_batched_tokens=600)


def by_turn(batches, values, turns):
    """Return values of all batches, one array for each turn."""
    lengths = [len(each.completion.token_ids) for each in turns]
    found = {}
    for batch, of_batch in zip(batches, values, strict=True):
        ends = np.cumsum([lengths[turn] for turn in batch.turns])[:-1]
        found |= dict(zip(batch.turns, np.split(of_batch.detach().numpy(), ends), strict=True))
    return [found[turn] for turn in range(len(turns))]


def test_log_probs_and_entropies_are_those_of_transformers(policy, turns):
    trained, batches = batches_of(policy, turns)
    with torch.no_grad():
        values = list(zip(*map(trained, batches), strict=True))
        for got, which in zip(values, (0, 1), strict=True):
            expected = [policy_turns.plain(policy[0], each, 0.9)[which].numpy() for each in turns[0]]
            plain.assert_near(np.concatenate(by_turn(batches, got, turns[0])), np.concatenate(expected))


def test_three_steps_of_grpo_are_those_of_trl(policy, turns, tmp_path):
    pytest.importorskip("trl")
    from tests.policy.test_trl import loss_of_trl

    model, (turns, groups) = policy[0], turns
    model.requires_grad_(False)
    for layer in model.model.layers[-2:]:
        layer.requires_grad_(True)
    trained, batches = batches_of(policy, (turns, groups))
    lengths = np.array([len(each.completion.token_ids) for each in turns])
    with torch.no_grad():
        old = by_turn(batches, [trained(batch)[0] for batch in batches], turns)
    random = np.random.default_rng(0)
    old = [each + 0.1 * random.standard_normal(len(each)).astype(np.float32) for each in old]
    advantages = random.standard_normal(len(turns)).astype(np.float32)
    weights = token_weights(lengths, np.ones(len(turns), bool), normalisation="token_mean", max_new_tokens=24)
    settings = PolicyLossSettings(clip_high=0.3, importance_cap=None)
    optimizer, losses = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4), []
    for _ in range(3):
        expected = loss_of_trl("bnpo", (*policy, turns, groups), advantages, (old, old, old), tmp_path, beta=0.0)
        slopes = policy_turns.gradients(expected, model)
        loss = torch.zeros(())
        for batch in batches:
            of_old = torch.from_numpy(np.concatenate([old[turn] for turn in batch.turns]))
            of_rows = [torch.from_numpy(each[batch.rows]).float() for each in (advantages, weights)]
            loss = loss + policy_loss(*trained(batch), LossInputs(of_old, of_old, of_old, *of_rows), settings).loss
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
        ours = policy_turns.gradients(loss, model)
        assert policy_turns.difference(ours, slopes) < 1e-4
        for name, gradient in ours.items():
            model.get_parameter(name).grad = gradient
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
