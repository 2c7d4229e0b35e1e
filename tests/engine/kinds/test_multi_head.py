"""Several outputs, weighted by name or by the configuration, compared with plain torch."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

import gym_rm
from gym_rm import ConfigError
from gym_rm.engine.kinds.multi_head import weights_of
from tests import tiny_models
from tests.checkpoints import CONVERSATIONS, token_ids

LABELS = {0: "helpful", 1: "honest", 2: "verbose"}
PLAIN = [c for c in CONVERSATIONS if "<|" not in c[-1]["content"]]


def save_objectives(folder):
    return tiny_models.save_reward_model(folder, num_labels=3, id2label=LABELS)


def plain_logits(folder, conversations):
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.inference_mode():
        return np.stack([model(torch.tensor([token_ids(folder, c)])).logits[0].numpy() for c in conversations])


def test_weights_and_components_by_name(tmp_path):
    save_objectives(tmp_path)
    scorer = gym_rm.load_scorer(str(tmp_path), kind="multi_head", weights={"helpful": 1.0, "verbose": -0.5})
    scores = scorer.score(PLAIN)
    logits = plain_logits(tmp_path, PLAIN)
    np.testing.assert_allclose(scores.rewards, logits @ [1.0, 0.0, -0.5], atol=1e-5)
    assert list(scores.components) == ["helpful", "honest", "verbose"]
    np.testing.assert_allclose(scores.components["honest"], logits[:, 1], atol=1e-5)
    assert scores.provenance.settings["weights"]["verbose"] == -0.5


def test_several_outputs_without_weights_are_refused(tmp_path):
    save_objectives(tmp_path)
    with pytest.raises(ConfigError, match=r"head with 3 outputs \['helpful', 'honest', 'verbose'\].*weights="):
        gym_rm.load_scorer(str(tmp_path))
    with pytest.raises(ConfigError, match="needs weights="):
        gym_rm.load_scorer(str(tmp_path), kind="multi_head")
    with pytest.raises(ConfigError, match="head with 3 outputs, but kind='decoder' needs exactly one"):
        gym_rm.load_scorer(str(tmp_path), kind="decoder")


def test_weights_take_names_and_lists():
    names = ["a", "b", "c"]
    assert weights_of(names, [1, 2, 3]).tolist() == [1, 2, 3]
    with pytest.raises(ConfigError, match="Did you mean 'helpful'"):
        weights_of(["helpful", "honest"], {"helpfull": 1.0})


@pytest.mark.parametrize("weights", [[1, 2], {}, [1, 2, float("nan")], {"a": None}])
def test_invalid_weights_are_config_errors(weights):
    with pytest.raises(ConfigError, match="weights"):
        weights_of(["a", "b", "c"], weights)
