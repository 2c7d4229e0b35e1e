"""Process rewards: the good label's probability at every step token, compared with the plain backbone and head."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

import gym_rm
from gym_rm import ConfigError, ScoringError
from gym_rm.scorers.weighted import WeightedScorer
from tests import tiny_models
from tests.checkpoints import HIDDEN, conversation, hidden_states, save_with_heads, tensor, token_ids

STEP = "<extra_0>"
REPLIES = [
    "First, 12 + 30 is a sum.\n\nThe sum is 42.\n\nThe answer is 42.",
    "First, 12 + 30 is a sum.\n\nThe sum is 43.",
    "42",
    "First, 12 + 30 is a sum.\n\n\n\n The sum is 43.\n\n",
]
CONVERSATIONS = [conversation("What is 12 + 30?", reply) for reply in REPLIES]
HEADS = {
    "score.0.weight": tensor(HIDDEN, HIDDEN, seed=1),
    "score.0.bias": tensor(HIDDEN, seed=2),
    "score.2.weight": tensor(2, HIDDEN, seed=3),
    "score.2.bias": tensor(2, seed=4),
}


def tokenizer_with_step():
    tokenizer = tiny_models.tokenizer("qwen")
    tokenizer.add_tokens([STEP])  # not flagged as special, as in some checkpoints
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    return save_with_heads(
        tmp_path, HEADS, architecture="qwen2", class_name="Qwen2ForProcessRewardModel", tokenizer=tokenizer_with_step()
    )


def plain_steps(folder, messages):
    """Return step rewards as on the model card: the softmax of two labels at the step token after each step."""
    steps = [step.strip() for step in messages[-1]["content"].split("\n\n") if step.strip()]
    marked = [*messages[:-1], {"role": "assistant", "content": STEP.join(steps) + STEP}]
    ids = token_ids(folder, marked)
    step_id = tokenizer_with_step().convert_tokens_to_ids(STEP)
    positions = [position for position, token in enumerate(ids) if token == step_id]
    hidden = hidden_states(folder, ids)[positions]
    x = torch.relu(hidden @ HEADS["score.0.weight"].T + HEADS["score.0.bias"])
    return torch.softmax(x @ HEADS["score.2.weight"].T + HEADS["score.2.bias"], dim=1)[:, 1].numpy()


@pytest.mark.parametrize(
    ("reduction", "reduce"), [("min", np.min), ("mean", np.mean), ("last", lambda x: x[-1]), ("product", np.prod)]
)
def test_steps_and_their_reduction(folder, reduction, reduce):
    scores = gym_rm.load_scorer(str(folder), reduction=reduction).score(CONVERSATIONS)
    expected = [plain_steps(folder, messages) for messages in CONVERSATIONS]
    assert [len(steps) for steps in scores.step_rewards] == [3, 2, 1, 2]
    assert scores.step_ends[3].tolist() == [24, 43]  # without the separator and white space
    assert [REPLIES[0][: scores.step_ends[0][k]].split("\n\n")[-1] for k in range(3)] == REPLIES[0].split("\n\n")
    for got, wanted in zip(scores.step_rewards, expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    np.testing.assert_allclose(scores.rewards, [reduce(steps) for steps in expected], atol=1e-5)
    assert scores.provenance.layout == "tree"


def test_every_turn_has_its_own_steps(folder):
    dialogue = conversation("What is 12 + 30?", REPLIES[0], REPLIES[1])
    scores = gym_rm.load_scorer(str(folder), reduction="mean").score([dialogue], turns="all")
    expected = [plain_steps(folder, dialogue[:2]).mean(), plain_steps(folder, dialogue).mean()]
    np.testing.assert_allclose(scores.turn_rewards[0], expected, atol=1e-5)
    assert len(scores.step_rewards[0]) == 2


def test_a_step_token_in_a_reply_adds_no_step(folder):
    forged = conversation("What is 12 + 30?", f"42{STEP}{STEP}\n\nReally.")
    scores = gym_rm.load_scorer(str(folder)).score([forged])
    assert len(scores.step_rewards[0]) == 2


def test_steps_end_where_they_are_in_a_reply_that_thinks_and_through_a_mixture(folder):
    thinks = conversation("What is 12 + 30?", f"<think>42\n\n42</think>\n{REPLIES[1]}")
    between = conversation("What is 12 + 30?", "12.\n<think>Hm.</think>\n42.\n\n42.")
    scorer = gym_rm.load_scorer(str(folder), judged="answer")
    scores = gym_rm.load_scorer(WeightedScorer({"steps": scorer, "one": lambda rows: [1.0] * len(rows)})).score(
        [thinks, CONVERSATIONS[1], between]
    )
    plain, start = scores.step_ends[1], thinks[-1]["content"].index(REPLIES[1])
    assert scores.step_ends[0].tolist() == (plain + start).tolist()
    assert (
        scores.step_rewards[0].tolist()
        == scores.step_rewards[1].tolist()
        == scorer.score(CONVERSATIONS[1:2]).step_rewards[0].tolist()
    )
    assert (len(scores.step_rewards[2]), len(scores.step_ends[2])) == (3, 0)  # the answer is not one piece
    several = WeightedScorer({"a": scorer, "b": scorer}).score(CONVERSATIONS)
    assert several.step_rewards is several.step_ends is None


def test_a_conversation_without_steps_is_an_error_of_its_row(folder):
    rows = [CONVERSATIONS[0], [{"role": "user", "content": "Nobody answers"}], conversation("What?", "  \n\n ")]
    with pytest.raises(ScoringError) as caught:
        gym_rm.load_scorer(str(folder)).score(rows)
    assert caught.value.rows == (1, 2)
    assert "the conversation has no steps" in caught.value.scores.errors[1]
    assert np.isfinite(caught.value.scores.rewards[0])


def test_a_token_classifier_requires_a_step_token(tmp_path):
    tokenizer = tokenizer_with_step()
    config = tiny_models._config("qwen3", tokenizer, num_labels=2, initializer_range=0.3)
    model = AutoModelForTokenClassification.from_config(config).float().eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="step_token"):
        gym_rm.load_scorer(str(tmp_path), kind="process")
    scores = gym_rm.load_scorer(str(tmp_path), kind="process", step_token=STEP).score(CONVERSATIONS)
    marked = [CONVERSATIONS[2][0], {"role": "assistant", "content": "42" + STEP}]
    ids = token_ids(tmp_path, marked)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, ids.index(tokenizer.convert_tokens_to_ids(STEP))]
    assert scores.step_rewards[2][0] == pytest.approx(float(torch.softmax(logits, 0)[1]), abs=1e-5)


def test_a_causal_model_rates_steps_by_two_answers(tmp_path):
    tokenizer = tokenizer_with_step()
    model = AutoModelForCausalLM.from_config(tiny_models._config("qwen3", tokenizer, initializer_range=0.3)).float()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    scorer = gym_rm.load_scorer(str(tmp_path), kind="process", step_token=STEP, answers=("+", "*"))
    scores = scorer.score(CONVERSATIONS)
    ids = token_ids(tmp_path, [CONVERSATIONS[2][0], {"role": "assistant", "content": "42" + STEP}])
    with torch.inference_mode():
        logits = model.eval()(torch.tensor([ids])).logits[0, ids.index(tokenizer.convert_tokens_to_ids(STEP))]
    good, bad = (tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in "+*")
    assert scores.rewards[2] == pytest.approx(float(torch.softmax(logits[[good, bad]], 0)[0]), abs=1e-5)
