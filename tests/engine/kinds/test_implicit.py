"""The implicit reward of DPO: log-probabilities from the tree, compared with the plain models one by one."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import gym_rm
from gym_rm import ConfigError, ScoringError
from tests import tiny_models
from tests.checkpoints import CONVERSATIONS, conversation

PLAIN = [messages for messages in CONVERSATIONS if "<|" not in messages[-1]["content"]]


def save_pair(tmp_path, architecture="qwen3"):
    policy = tiny_models.save_policy(tmp_path / "policy", architecture, seed=1, initializer_range=0.3)
    reference = tiny_models.save_policy(tmp_path / "reference", architecture, seed=2, initializer_range=0.3)
    return str(policy), str(reference)


def plain_logprobs(folder, messages):
    """Return the log-probabilities of the tokens after the prompt, as in TRL."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {"tokenize": True, "return_dict": False}
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
    ids = tokenizer.apply_chat_template(messages, **options)
    assert ids[: len(prompt)] == prompt
    with torch.inference_mode():
        logits = (
            AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
            .eval()(torch.tensor([ids]))
            .logits[0]
        )
    logprobs = torch.log_softmax(logits.float(), dim=1)
    return np.array([float(logprobs[k - 1, ids[k]]) for k in range(len(prompt), len(ids))])


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_the_reward_is_beta_times_the_log_ratio(tmp_path, architecture):
    policy, reference = save_pair(tmp_path, architecture)
    scorer = gym_rm.load_scorer(policy, kind="implicit", reference=reference, beta=0.05)
    scores = scorer.score(PLAIN)
    ours, theirs = ([plain_logprobs(folder, m).sum() for m in PLAIN] for folder in (policy, reference))
    np.testing.assert_allclose(scores.components["policy_logprob"], ours, rtol=2e-6)
    np.testing.assert_allclose(scores.components["reference_logprob"], theirs, rtol=2e-6)
    np.testing.assert_allclose(scores.rewards, 0.05 * (np.array(ours) - np.array(theirs)), atol=1e-5)
    assert scores.provenance.settings["reference"] == reference


def test_control_tokens_in_a_prompt_do_not_move_the_start_of_the_reply(tmp_path):
    policy, reference = save_pair(tmp_path)
    scorer = gym_rm.load_scorer(policy, kind="implicit", reference=reference)
    render = scorer.renderer.encode([conversation("<|im_end|> who?", "The sum")])[0]
    assert scorer.renderer.tokenizer.decode(render.input_ids[render.reply_start :]) == "The sum<|im_end|>\n"


def test_a_conversation_without_a_reply_is_an_error_of_its_row(tmp_path):
    policy, reference = save_pair(tmp_path)
    scorer = gym_rm.load_scorer(policy, kind="implicit", reference=reference)
    with pytest.raises(ScoringError, match="row 1: the conversation must end with a reply"):
        scorer.score([PLAIN[0], PLAIN[0][:1]])


def test_a_reference_with_the_same_vocabulary_is_required(tmp_path):
    policy, _ = save_pair(tmp_path)
    with pytest.raises(ConfigError, match="reference: missing; this setting has no default"):
        gym_rm.load_scorer(policy, kind="implicit")
    other = tiny_models.save_policy(tmp_path / "other", "qwen3", vocab_size=500)
    with pytest.raises(ConfigError, match="vocabularies of"):
        gym_rm.load_scorer(policy, kind="implicit", reference=str(other))
