"""A judge that was trained to compare a reply with the reference answer grades right and wrong replies apart."""

import re

import numpy as np
import pytest
import torch
from conftest import assistant, user
from tiny_models import CHATML
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gym_rm.scorers.judge.prompts import Rubric
from gym_rm.scorers.judge.scorer import JudgeScorer
from gym_rm.types import Prompt

pytestmark = pytest.mark.slow

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
RUBRIC = "{reply}\n{reference}\n{verdict}"
MOST_STEPS = 600


def rows(numbers, seed):
    """Return questions with these numbers, random answers from 0 to 2, and replies that are right half of the time."""
    rng = np.random.default_rng(seed)
    answers, others = rng.integers(0, 3, (2, len(numbers))).tolist()
    replies = [answer if rng.random() < 0.3 else other for answer, other in zip(answers, others, strict=True)]
    prompts = [
        Prompt((user(f"{n} - {n - answer}?"),), "p", answer=str(answer))
        for n, answer in zip(numbers, answers, strict=True)
    ]
    return [[*p.messages, assistant(str(reply))] for p, reply in zip(prompts, replies, strict=True)], prompts


def lesson(conversation, prompt):
    """Return a conversation with a judge that grades correctly."""
    rubric = Rubric(RUBRIC, mode="score", scale=(1, 10), marked=True)
    asked = rubric.question(conversation[:-1], conversation[-1:], reference=prompt.answer, prompt=prompt)
    score = 10 if conversation[-1]["content"] == prompt.answer else 1
    return [*asked.messages, assistant(f"Score {asked.mark}: {score}")]


def letters_and_phrases(texts):
    """Return a tokenizer of single characters, and of the phrases between marks and numbers that all texts share."""
    phrases = {phrase for text in texts for phrase in re.split(r"\b[A-Z]{6}\b|[0-9]+", text) if len(phrase) > 1}
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("[0-9]+|."), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    pieces = sorted([*pre_tokenizers.ByteLevel.alphabet(), "10"])
    backend = Tokenizer(models.WordLevel({piece: k for k, piece in enumerate(pieces)}, unk_token="?"))
    backend.pre_tokenizer, backend.decoder = split, decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    backend.add_tokens([AddedToken(phrase, normalized=False) for phrase in sorted(phrases)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL[1], pad_token=SPECIAL[2], chat_template=CHATML
    )


def train(model, ids, start):
    """Train on the tokens from `start` on, until the scores are right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 20) * 0.995**step)
    wrong = 1.0
    for _ in range(MOST_STEPS):
        batch = torch.randint(len(ids), (32,))
        logits = model(input_ids=ids[batch]).logits[:, start - 1 : -1]
        losses = torch.nn.functional.cross_entropy(logits.mT, ids[batch][:, start:], reduction="none")
        of_score = losses[:, -3].mean()  # it comes before the end of the turn and a line break
        optimizer.zero_grad()
        (losses.mean() + of_score).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        wrong = 0.9 * wrong + 0.1 * losses.detach().amax(1).mean().item()
        if wrong < 0.03:
            break


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    lessons = [lesson(*row) for row in zip(*rows(range(3000), seed=0), strict=True)]
    tokenizer = letters_and_phrases({message["content"] for talk in lessons[:50] for message in talk})
    ids = torch.tensor([tokenizer.apply_chat_template(talk, return_dict=False) for talk in lessons])
    asked = tokenizer.apply_chat_template(lessons[0][:-1], add_generation_prompt=True, return_dict=False)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    train(model, ids, len(asked))
    folder = tmp_path_factory.mktemp("trained")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return JudgeScorer(str(folder), rubric=RUBRIC, max_new_tokens=32)


@pytest.mark.slow
def test_right_and_wrong_replies_to_new_questions_are_told_apart(judge):
    conversations, prompts = rows(range(5000, 5200), seed=1)
    scores = judge.score(conversations, prompts)
    pairs = zip(conversations, prompts, strict=True)
    right = np.array([conversation[-1]["content"] == prompt.answer for conversation, prompt in pairs])
    assert 80 < right.sum() < 120
    assert scores.rewards.tolist() == pytest.approx(np.where(right, 10, 1).tolist())
