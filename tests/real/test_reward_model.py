"""SmolLM2 as a reward model: its rewards are those of plain transformers, with the same bits in every batch."""

import functools

import numpy as np
import pytest
import torch
from conftest import assistant, user
from transformers import AutoModelForSequenceClassification

import gym_rm
from tests.real import plain


@pytest.fixture(scope="module")
def scorer(smollm2_reward_model):
    return gym_rm.load_scorer(str(smollm2_reward_model), device="cpu")


@pytest.fixture(scope="module")
def conversations(hh_pairs, gsm8k_groups):
    return [*plain.short(hh_pairs, 3, most=600), *gsm8k_groups[0][:2]]


@pytest.mark.parametrize("padded", [False, True])
def test_rewards_are_those_of_transformers(scorer, smollm2_reward_model, conversations, padded):
    assert (scorer.layout, scorer.info.fused) == ("tree", True)
    expected = plain.rewards(smollm2_reward_model, conversations, padded=padded)
    got = scorer.score(conversations).rewards
    plain.assert_near(got, expected)
    assert got.argsort().tolist() == expected.argsort().tolist()


def test_a_reward_has_the_same_bits_in_every_batch(scorer, conversations):
    assert scorer.provenance.batch_invariance == "bit-equal"
    together = scorer.score(conversations).rewards
    assert scorer.score(conversations[::-1]).rewards[::-1].tolist() == together.tolist()
    assert [scorer.score([each]).rewards[0] for each in conversations] == together.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prefix_cache_changes_no_bit(scorer, smollm2_reward_model, conversations, dtype):
    load = functools.partial(gym_rm.load_scorer, str(smollm2_reward_model), device="cpu", dtype=dtype)
    cached, scorer = load(prefix_cache_tokens=2000), scorer if dtype == "float32" else load()
    further = [*conversations[0], user("Are you sure? Why?"), assistant("I am sure, because it is well known.")]
    for group in (conversations[:2], [further, conversations[1]]):
        scores = cached.score(group)
        assert scores.rewards.tolist() == scorer.score(group).rewards.tolist()
    assert scores.workload.reused_tokens > 50


def test_a_dialogue_of_two_thousand_tokens(scorer, smollm2_reward_model, hh_pairs):
    turns = [message for pair in hh_pairs[:40] if len(pair[0]) % 2 == 0 for message in pair[0]]
    ends = np.cumsum([len(message["content"]) for message in turns])
    long = turns[: 2 * (int(np.searchsorted(ends, 9000)) // 2)]
    scores = scorer.score([long])
    assert scores.num_tokens[0] > 2000
    plain.assert_near(scores.rewards, plain.rewards(smollm2_reward_model, [long]))


def test_an_adapter_is_merged(smollm2_reward_model, conversations, tmp_path):
    peft = pytest.importorskip("peft")
    base = AutoModelForSequenceClassification.from_pretrained(smollm2_reward_model, dtype=torch.float32)
    options = {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 8, "init_lora_weights": False}
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", **options)).eval()
    adapted.save_pretrained(tmp_path)
    scorer = gym_rm.load_scorer(str(tmp_path), device="cpu")
    ids = [
        torch.from_numpy(each.input_ids.astype(np.int64))[None] for each in scorer.renderer.encode(conversations[:4])
    ]
    with torch.inference_mode():
        expected = np.array([adapted(input_ids=each).logits.item() for each in ids])
    plain.assert_near(scorer.score(conversations[:4]).rewards, expected)
    assert np.abs(expected - plain.rewards(smollm2_reward_model, conversations[:4])).min() > 1e-3
