"""SmolLM2 as a judge by the probabilities of its verdicts."""

import numpy as np
import torch
from conftest import assistant, user
from transformers import AutoModelForCausalLM, AutoTokenizer

import gym_rm

CAPITAL = "What is the capital of France?"
GIVEN = [[user(CAPITAL), assistant(reply)] for reply in ("It is Paris.", "I like bananas.", "Rome, I think.")]


def test_every_question_has_a_verdict_with_the_probabilities_of_the_plain_forward(smollm2):
    judge = gym_rm.load_scorer(
        str(smollm2), kind="judge", verdict="probabilities", mode="pairwise", comparisons="all_pairs"
    )
    asked, scores = [], judge.score(GIVEN)
    choose = judge.model.choose
    judge.model.choose = lambda given, *others, **options: asked.extend(given) or choose(given, *others, **options)
    judge.score(GIVEN)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    letters = torch.tensor([[tokenizer.encode(space + letter)[0] for space in ("", " ")] for letter in "AB"])
    masses = []
    for question in asked:
        text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True) + "Verdict:"
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[0, -1]
        masses.append(logits.softmax(-1)[letters].sum(1))
    (ab, ba), (ac, ca), (bc, cb) = torch.stack([a / (a + b) for a, b in masses]).view(3, 2).tolist()
    one, two, three = (ab + 1 - ba) / 2, (ac + 1 - ca) / 2, (bc + 1 - cb) / 2
    expected = [(one + two) / 2, (1 - one + three) / 2, (2 - two - three) / 2]
    np.testing.assert_allclose(scores.rewards, expected, rtol=0, atol=1e-4)
    assert scores.infos["verdict_mass"].min() > 0.5
    assert scores.infos["judge_unread"].sum() == 0
