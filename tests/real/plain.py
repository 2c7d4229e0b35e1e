"""Values of real models by transformers alone, to compare with. Not a test."""

import functools

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

logging.disable_progress_bar()


def short(pairs, count, *, most=900):
    """Return the conversations of the first pairs of up to so many characters, with a reply."""
    texts = ([sum(len(m["content"]) for m in each) for each in pair if each[-1]["content"]] for pair in pairs)
    kept = [pair for pair, lengths in zip(pairs, texts, strict=True) if len(lengths) == 2 and max(lengths) < most]
    return [conversation for pair in kept[:count] for conversation in pair]


@functools.lru_cache(maxsize=1)
def classifier(folder):
    """Return a reward model in float32, and its tokenizer; the last one stays in memory."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def rewards(folder, conversations, *, padded=False):
    """Return rewards in float32, one conversation at a time or all in one padded batch."""
    model, tokenizer = classifier(folder)
    rows = [tokenizer.apply_chat_template(each, return_dict=False) for each in conversations]
    if padded:
        batch = tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
        return model(**batch).logits[:, 0].numpy()
    return np.array([model(input_ids=torch.tensor([ids])).logits.item() for ids in rows])


@torch.inference_mode()
def log_probs(folder, conversation):
    """Return the log-probability of each token of the last reply, and of what the template writes after it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(conversation[:-1], add_generation_prompt=True, return_dict=False)
    ids = torch.tensor(tokenizer.apply_chat_template(conversation, return_dict=False))
    scores = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    return scores[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0].numpy()


def assert_near(got, expected, *, share=3e-5):
    """Assert that numbers agree to a share of the largest expected one."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=share * np.abs(expected).max())
