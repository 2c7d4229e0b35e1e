"""SmolLM2 as a reward model without a head: implicit, generative, and as a judge that writes its verdict."""

import math

import numpy as np
import pytest
import torch
from conftest import assistant, user
from transformers import AutoModelForCausalLM, AutoTokenizer

import gym_rm
from gym_rm.scorer import try_score
from tests.real import plain

FLOAT32 = {"device": "cpu", "dtype": "float32"}
ASKED = "Is the last reply correct? Answer Yes or No."
REPLIES = ["The capital of France is Paris.", "The capital of France is Rome.", "I like cheese."]


@pytest.fixture(scope="module")
def conversations():
    return [[user("What is the capital of France?"), assistant(reply)] for reply in REPLIES]


@pytest.fixture(scope="module")
def other(smollm2, tmp_path_factory):
    """Folder of a second policy: the same with other weights in its last layers."""
    folder = tmp_path_factory.mktemp("other")
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for each in model.model.layers[-4:].parameters():
            each.mul_(1 + 0.1 * torch.randn_like(each))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder)
    return folder


def test_the_implicit_reward_is_the_log_ratio_of_two_models(smollm2, other, conversations):
    scorer = gym_rm.load_scorer(str(smollm2), kind="implicit", reference=str(other), beta=0.1, **FLOAT32)
    scores = scorer.score(conversations)
    policy, reference = (
        np.array([plain.log_probs(folder, each).sum() for each in conversations]) for folder in (smollm2, other)
    )
    plain.assert_near(scores.components["policy_logprob"], policy, share=1e-5)
    plain.assert_near(scores.components["reference_logprob"], reference, share=1e-5)
    assert scores.rewards == pytest.approx(0.1 * (policy - reference), abs=1e-4)


def test_the_generative_reward_is_the_log_odds_of_two_answers(smollm2, conversations):
    scorer = gym_rm.load_scorer(str(smollm2), kind="generative", question=ASKED, answers=("Yes", "No"), **FLOAT32)
    scores = scorer.score(conversations)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    yes, no = (tokenizer(answer, add_special_tokens=False)["input_ids"][0] for answer in ("Yes", "No"))
    expected = []
    for each in conversations:
        ids = tokenizer.apply_chat_template([*each, user(ASKED)], add_generation_prompt=True, return_dict=False)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        expected.append(float(logits[yes] - logits[no]))
    np.testing.assert_allclose(scores.rewards, expected, atol=1e-4)


def test_a_judge_writes_what_generate_writes(smollm2, conversations):
    judge = gym_rm.load_scorer(str(smollm2), kind="judge", marked=False, temperature=0, max_new_tokens=8, **FLOAT32)
    sample, seen = judge.model._sampler.sample, []

    def watched(rows, **options):
        completions = sample(rows, **options)
        seen.extend(zip(rows, completions, strict=True))
        return completions

    judge.model._sampler.sample = watched
    scores = try_score(judge, conversations[:2])
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    for row, completion in seen[:2]:
        ids = torch.from_numpy(row.astype(np.int64))[None]
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(row) :]
        assert completion.token_ids.tolist() == expected.tolist()
    for row, reward in enumerate(scores.rewards):  # so small a judge hardly ever ends with a verdict
        assert math.isnan(reward) == (row in scores.failed_rows)
        assert "verdict" in scores.errors[row] if row in scores.failed_rows else 1 <= reward <= 10
