"""`RewardModelScorer.score_texts`: texts and token ids that the caller rendered."""

import numpy as np
import pytest

import gym_rm
from gym_rm import ConfigError, ScoringError


def rendered(scorer, conversation):
    return scorer.renderer.tokenizer.apply_chat_template(conversation, tokenize=False)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma2"])
def test_a_rendered_text_has_the_score_of_its_conversation(scorer_of, architecture, real_conversations):
    scorer = scorer_of(architecture)
    texts = [rendered(scorer, conversation) for conversation in real_conversations]
    expected = scorer.score(real_conversations)
    scores = scorer.score_texts(texts)
    assert scores.rewards.tolist() == expected.rewards.tolist()
    assert scores.num_tokens.tolist() == expected.num_tokens.tolist()
    assert scores.workload.unique_tokens == expected.workload.unique_tokens


def test_token_ids_are_scored_as_they_are(scorer_of, real_conversations):
    scorer = scorer_of()
    texts = [rendered(scorer, conversation) for conversation in real_conversations]
    ids = [scorer.renderer.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    bare = scorer.score_texts(texts, add_special_tokens=False)
    assert scorer.score_texts(ids).rewards.tolist() == bare.rewards.tolist()
    assert scorer.score_texts([ids[0][:1]]).num_tokens.tolist() == [1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no tokens"),
        ([], "no tokens"),
        ([-1], "must not be negative"),
        ([10**6], "embeddings"),
        ("a \ud800 b", "lone surrogate"),
        ([5] * 100_000, "more than max_length"),
    ],
)
def test_a_text_that_cannot_be_scored_is_an_error_of_its_row(scorer_of, text, reason):
    with pytest.raises(ScoringError) as caught:
        scorer_of().score_texts(["hello", text])
    assert caught.value.scores.errors[0] is None
    assert reason in caught.value.scores.errors[1]
    assert np.isfinite(caught.value.scores.rewards[0])


PAIRS = [("how are you?", "I am fine."), ("Th", "e cat"), ("a [SEP] b", "c [CLS] d"), ("", "fine")]


@pytest.mark.parametrize("architecture", ["bert", "roberta", "qwen3"])
def test_a_pair_is_what_transformers_reads_for_two_texts(scorer_of, saved_model, architecture):
    import torch
    from transformers import AutoModelForSequenceClassification

    scorer, tokenizer = scorer_of(architecture), scorer_of(architecture).renderer.tokenizer
    model = AutoModelForSequenceClassification.from_pretrained(saved_model(architecture))
    inputs = [tokenizer(*pair, return_tensors="pt") for pair in PAIRS]
    with torch.no_grad():
        expected = [model(**each).logits.item() for each in inputs]
    scores = scorer.score_texts(PAIRS)
    assert scores.rewards == pytest.approx(expected, abs=1e-4)
    assert scores.num_tokens.tolist() == [each["input_ids"].shape[1] for each in inputs]


def test_a_pair_is_one_text_if_the_reward_is_a_logit_of_a_token(tmp_path):
    import tiny_models

    folder = tiny_models.save_policy(tmp_path)
    scorer = gym_rm.load_scorer(folder, kind="generative", question=None, answers=("1", "2"))
    ids = scorer.renderer.tokenizer("Th", "e cat")["input_ids"]
    pair, text, parts = scorer.score_texts([("Th", "e cat"), "The cat", ids]).rewards
    assert pair == text
    assert pair != parts


@pytest.mark.parametrize(
    ("pair", "reason"),
    [(("a", "b \ud800"), "lone surrogate"), (("a " * 90_000, "b"), "more than max_length"), (("", ""), "no tokens")],
)
def test_a_pair_that_cannot_be_scored_is_an_error_of_its_row(scorer_of, pair, reason):
    with pytest.raises(ScoringError) as caught:
        scorer_of().score_texts([("a", "b"), pair])
    assert caught.value.scores.errors[0] is None
    assert reason in caught.value.scores.errors[1]


def test_a_kind_that_needs_the_reply_refuses_texts(tmp_path):
    import tiny_models

    policy, reference = (str(tiny_models.save_policy(tmp_path / f"{seed}", seed=seed)) for seed in (1, 2))
    scorer = gym_rm.load_scorer(policy, kind="implicit", reference=reference)
    with pytest.raises(ConfigError, match="needs to know where the reply starts"):
        scorer.score_texts(["hello"])
