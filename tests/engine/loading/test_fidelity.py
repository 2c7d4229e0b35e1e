"""Scores of natural conversations are compared at load with those of the stored weights."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import gym_rm
from gym_rm import ConfigError
from gym_rm.engine.backbones.low_precision import Int8Linear
from gym_rm.engine.loading.fidelity import SHIPPED, CheckedConversations
from gym_rm.types import NOT_CHECKED
from tests import tiny_models
from tests.engine.loading.test_lora import needs_peft, save_adapter


def conversations():
    rows = [json.loads(line) for line in SHIPPED.read_text().splitlines()]
    turns = ([("user", row["prompt"]), ("assistant", row[key])] for row in rows for key in ("chosen", "rejected"))
    return [[{"role": role, "content": content} for role, content in each] for each in turns]


def plain_scores(folder):
    """Return the scores of transformers alone, in the precision of the files."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template(each, tokenize=False) for each in conversations()]
    ids = [tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids for text in texts]
    with torch.no_grad():
        return np.array([model(each).logits.item() for each in ids])


def compare(scores, expected, prompts=(0, 0, 1, 1)):
    return CheckedConversations(None, (), prompts).compare(np.array(scores), np.array(expected), "float32")


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}])
def test_the_numbers_are_those_of_transformers(options, saved_model):
    scorer, expected = gym_rm.load_scorer(saved_model(), **options), plain_scores(saved_model())
    scores, found = scorer.score(conversations()).rewards, scorer.provenance.fidelity
    assert found.mean_error == pytest.approx(np.abs(scores - expected).mean() / expected.std(), rel=1e-3, abs=1e-5)
    assert found.flips == ((np.diff(scores)[::2] > 0) != (np.diff(expected)[::2] > 0)).sum()
    assert (found.pairs, found.conversations, found.dtype) == (8, 16, "float32")


@pytest.mark.parametrize("fault", ["scale", "four bits"])
def test_wrong_8_bit_weights_are_refused_unless_they_are_not_checked(fault, saved_model, monkeypatch):
    def assign(layer, weight):
        right(layer, weight)
        layer.scale *= 1 if fault == "four bits" else 2
        layer.weight = layer.weight // 64 * 64 if fault == "four bits" else layer.weight

    right = Int8Linear.assign
    monkeypatch.setattr(Int8Linear, "assign", assign)
    with pytest.raises(ConfigError, match=r"quantization='int8' has other scores.*: leave quantization out. check=Fal"):
        gym_rm.load_scorer(saved_model("bert"), quantization="int8")
    assert gym_rm.load_scorer(saved_model("bert"), quantization="int8", check=False).provenance.fidelity == NOT_CHECKED


@needs_peft
def test_an_adapter_merged_with_another_scale_is_refused(saved_model, tmp_path, monkeypatch):
    folder, _ = save_adapter(tmp_path, saved_model(), init_lora_weights=False)
    assert gym_rm.load_scorer(folder).provenance.fidelity.mean_error < 1e-3
    from peft.tuners.lora import Linear

    right = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, adapter: 8 * right(self, adapter))
    with pytest.raises(ConfigError, match="with a merged adapter has other scores than its stored weights"):
        gym_rm.load_scorer(folder)


def test_a_head_that_returns_one_number_has_no_error(saved_model, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(saved_model())
    torch.nn.init.zeros_(model.score.weight)
    scorer = gym_rm.RewardModelScorer(model, tiny_models.tokenizer())
    assert (scorer.provenance.fidelity.mean_error, scorer.provenance.fidelity.pairs) == (0, 0)


def test_flips_ties_and_lost_scores():
    assert compare([1, 2, 3, 3], [2, 1, 3, 3]).flips == 1
    assert compare([1, 1, 3, 4], [2, 1, 3, 3]).flips == 1
    assert compare([1, 2, 3, 3], [2, 1, 3, 3]).pairs == 1
    assert compare([1, np.nan, 3, 4], [1, 2, 3, 4]).mean_error == float("inf")
    assert compare([1, 2, 3, 4], [1, np.nan, 3, 4]).conversations == 3
    assert compare([1, 2, 3, 4], [np.nan] * 4).not_measured


def test_a_file_of_other_pairs_is_read_and_a_malformed_one_refused(saved_model, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "Hello?", "chosen": "Good day.", "rejected": "No."}))
    assert gym_rm.load_scorer(saved_model(), check=file).provenance.fidelity.pairs == 1
    file.write_text('{"text": "Hello"}')
    with pytest.raises(ConfigError, match=r"check must be True, False, or a file .* KeyError: 'prompt'"):
        gym_rm.load_scorer(saved_model(), check=str(file))
