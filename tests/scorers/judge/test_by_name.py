"""Public generative reward models by their names: a forward of ours, a chat, or a refusal."""

import numpy as np
import pytest
import tiny_models
import torch
from conftest import assistant, user
from transformers import AutoModelForCausalLM, AutoTokenizer

import gym_rm
from gym_rm import ConfigError, Prompt
from gym_rm.scorer import try_score
from gym_rm.scorers.judge.styles import load_style
from gym_rm.scorers.reference import ReferenceScorer

QUESTION = (
    "Evaluate the response to the previous prompt in terms of whether it satisfies this principle: correctness. "
    "Only answer Yes or No."
)
SUM = [user("What is 2 + 2?"), assistant("It is 4.")]


def save_policy(folder, *words, **options):
    """Save a random chat model with whole words in its vocabulary."""
    tiny_models.save_policy(folder, initializer_range=0.3, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(words))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_principle_model_is_the_log_odds_of_its_two_answers(tmp_path):
    path = save_policy(tmp_path / "Llama-3.3-Nemotron-70B-Reward-Principle", "Yes", "No")
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).eval()
    ids = tokenizer.apply_chat_template(
        [*SUM, user(QUESTION)], add_generation_prompt=True, return_dict=False, return_tensors="pt"
    )
    with torch.inference_mode():
        logits = model(ids).logits[0, -1]
    yes, no = tokenizer.convert_tokens_to_ids(["Yes", "No"])
    scorer = gym_rm.load_scorer(path, principle="correctness")
    np.testing.assert_allclose(scorer.score([SUM]).rewards, [float(logits[yes] - logits[no])], atol=1e-5)
    asked = gym_rm.load_scorer(path, kind="judge", style="nemotron-reward-principle", principle="correctness")
    np.testing.assert_allclose(asked.score([SUM]).rewards, scorer.score([SUM]).rewards)
    by_row = gym_rm.load_scorer(path, top_logprobs=1000)
    prompts = [Prompt((SUM[0],), "p", metadata={"principle": "correctness"}), None]
    scores = try_score(by_row, [SUM, SUM], prompts)
    np.testing.assert_allclose(scores.rewards[0], scorer.score([SUM]).rewards[0], atol=1e-5)
    assert "the judge needs a principle" in scores.errors[1]


def test_a_polar_model_reads_the_reply_beside_the_reference(tmp_path):
    path = tmp_path / "POLAR-7B"
    tiny_models.save_reward_model(path, "llama")
    tokenizer = AutoTokenizer.from_pretrained(path)
    scorer = gym_rm.load_scorer(str(path))
    assert isinstance(scorer, ReferenceScorer)
    prompts = [Prompt((SUM[0],), "p", metadata={"reference_reply": "4"}), Prompt((SUM[0],), "p", answer="5"), None]
    scores = try_score(scorer, [SUM] * 3, prompts)
    text = "What is 2 + 2?\n4<|reward|>What is 2 + 2?\nIt is 4.[UNUSED_TOKEN_130]"
    (ids,) = scorer.scorer.renderer.encode([_three("4")])
    assert tokenizer.decode(ids.input_ids).endswith(text)
    assert scores.failed_rows == (2,)
    assert "needs `reference_reply` or `answer`" in scores.errors[2]
    assert scores.rewards[0] != scores.rewards[1]


def _three(reference):
    return [user("What is 2 + 2?"), {"role": "reference", "content": reference}, SUM[1]]


def test_a_chat_model_of_a_known_name_is_asked_in_its_form(tmp_path):
    path = save_policy(tmp_path / "Skywork-Critic-Llama-3.1-8B")
    judge = gym_rm.load_scorer(path, max_new_tokens=4)
    assert judge.provenance.settings["style"] == "skywork-critic"
    assert judge.options.style == "skywork-critic"
    assert judge.model.options.max_new_tokens == 4


def test_a_model_without_the_roles_of_a_style_is_an_error_and_not_a_judgement_of_nothing(tmp_path):
    template = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}"
    judge = gym_rm.load_scorer(save_policy(tmp_path), style="genrm", chat_template=template, max_new_tokens=4)
    scores = try_score(judge, [SUM, [*SUM[:1], assistant("5")]])
    assert "does not write message 1 with the role 'response_1'" in scores.errors[0]


def test_a_style_can_be_a_file(tmp_path):
    messages = "    messages:\n      - {role: user, content: 'Rate {{ reply }}'}\n"
    verdict = "    verdict: {form: last, pattern: '(\\d+) points'}\n    scale: [0, 20]\n"
    written = f"about: mine\nsource: here\nmodes:\n  score:\n{messages}{verdict}"
    (tmp_path / "mine.yaml").write_text(written)
    assert load_style(str(tmp_path / "mine.yaml")).modes["score"].scale == (0, 20)
    (tmp_path / "broken.yaml").write_text("about: mine\nsource: here\nmoods: {}\n")
    with pytest.raises(ConfigError, match="moods"):
        load_style(str(tmp_path / "broken.yaml"))
