"""SmolLM2 as a judge by the probabilities of its verdicts, and as one that learns to write them."""

import random

import numpy as np
import torch
from conftest import assistant, user
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import gym_rm
from agents import grpo, judgements
from gym_rm.config import load_config
from gym_rm.data.comparisons import load_comparisons
from gym_rm.policy.grpo_settings import GRPOSettings
from gym_rm.reports.runs import read_run
from gym_rm.scorers.judge.training_rows import judgement_rows

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


STYLE = r"""
about: a short question, with an example
source: this test
modes:
  pairwise:
    messages:
      - {role: user, content: "What is rain? Is it A: It is wet. or B: asdf. Answer [[A]] or [[B]]."}
      - {role: assistant, content: "[[A]]"}
      - {role: user, content: "{{ question }} Is it A: {{ reply_a }} or B: {{ reply_b }} Answer [[A]] or [[B]]."}
    verdict: {form: last, pattern: '\[\[([AB])\]\]', values: {A: 1, B: 0}}
"""


def test_it_learns_to_write_verdicts_that_can_be_read(smollm2, tmp_path):
    style, questions = tmp_path / "style.yaml", tmp_path / "questions.jsonl"
    style.write_text(STYLE)
    rng = random.Random(1)
    pairs = load_comparisons([judgements.pair(rng, held_out=False) for _ in range(32)])
    judgements.write(questions, judgement_rows(pairs, style=str(style)))
    options = [
        f"policy.model={smollm2}",
        "policy.lora={rank: 16}",
        f"env.prompts={questions}",
        f"env.reward_model={{kind: verdict, style: {style}, unreadable: -1}}",
        "env.num_prompts=4",
        "sampling.max_new_tokens=8",
        "optimizer.learning_rate=1e-3",
        "steps=4",
    ]
    settings = load_config(GRPOSettings, None, [*options, "eval.num_prompts=0", f"output={tmp_path / 'run'}"])
    grpo.train(grpo.fill_defaults(settings), Console(quiet=True))
    unreadable = [row.get("verdict/unreadable") or 0.0 for row in read_run(tmp_path / "run").training]
    assert unreadable[0] > 0.5
    assert unreadable[-1] < 0.2
