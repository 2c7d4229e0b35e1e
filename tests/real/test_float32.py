"""How far float32 scores of SmolLM2 are from those of its weights in float64: what docs/scoring.md promises."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import gym_rm

SHARE = 3e-5  # of the largest score or logit
QUESTION = {"role": "user", "content": "Is the last reply correct? Answer Yes or No."}


@pytest.fixture(scope="module")
def conversations(hh_pairs, gsm8k_groups):
    short = [pair for pair in hh_pairs if sum(len(message["content"]) for message in pair[0]) < 500]
    return [*gsm8k_groups[3][:4], *(conversation for pair in short[3:6] for conversation in pair)]


@torch.inference_mode()
def last_logits(model, texts, **options):
    """Return the logits of the plain forward after each text, `[N, K]`."""
    outputs = (model(input_ids=torch.tensor([ids]), **options).logits[0] for ids in texts)
    return torch.stack([each.reshape(-1, each.shape[-1])[-1].double() for each in outputs]).numpy()


def test_scores_are_near_those_in_float64(smollm2, conversations):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForSequenceClassification.from_pretrained(smollm2, num_labels=64, dtype=torch.float32).eval()
    model.config.pad_token_id = tokenizer.pad_token_id
    scorer = gym_rm.RewardModelScorer(model, tokenizer, kind="multi_head", weights=[1.0] + [0.0] * 63)
    got = np.stack(list(scorer.score(conversations).components.values()), axis=1)
    texts = [tokenizer.apply_chat_template(each, return_dict=False) for each in conversations]
    plain, exact = last_logits(model, texts), last_logits(model.double(), texts)
    scale = abs(exact).max(axis=0)  # of each head
    error, of_plain = (abs(values - exact) / scale for values in (got, plain))
    assert error.max() < SHARE
    assert error.mean() < 2 * of_plain.mean()  # packed products add in long sums


def test_log_odds_are_near_those_in_float64(smollm2, conversations):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    scorer = gym_rm.RewardModelScorer(model, tokenizer, kind="generative", question=QUESTION["content"])
    got = scorer.score(conversations).rewards
    asked = [[*each, QUESTION] for each in conversations]
    texts = [tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False) for each in asked]
    answers = [tokenizer(answer, add_special_tokens=False)["input_ids"][0] for answer in ("Yes", "No")]
    exact = last_logits(model.double(), texts, logits_to_keep=1)[:, answers]
    assert abs(got - (exact[:, 0] - exact[:, 1])).max() < SHARE * abs(exact).max()
