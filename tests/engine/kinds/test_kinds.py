"""Kinds of reward model: detection, invalid options, and scores that do not depend on the batch."""

import pytest

import gym_rm
from gym_rm import ConfigError
from gym_rm.engine.kinds import KINDS
from tests import tiny_models


@pytest.fixture
def classifier():
    return tiny_models.reward_model("qwen3"), tiny_models.tokenizer("qwen")


def test_the_kind_of_a_model_object_is_detected(classifier):
    assert gym_rm.RewardModelScorer(*classifier).kind.name == "decoder"
    bert = tiny_models.reward_model("bert"), tiny_models.tokenizer("bert")
    assert gym_rm.RewardModelScorer(*bert).kind.name == "encoder"


def test_every_option_of_every_kind_has_help():
    for kind in KINDS.values():
        for name, field in kind.Options.model_fields.items():
            assert field.description, (kind.name, name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "decodr"}, "kind must be 'auto' or one of .*got 'decodr'. Did you mean 'decoder'"),
        ({"kind": 5}, "kind must be 'auto' or one of .*got 5"),
        ({"token_id": 10**6}, "token_id must be below 400, the size of the vocabulary; got 1000000"),
        ({"chat_template": "{% if %}"}, "chat_template is not valid Jinja"),
        ({"kind": "process", "step_token": "<|im_end|>", "step_separator": ""}, "step_separator"),
        ({"kind": "process", "step_token": "<|im_end|>", "answers": ("A", "A")}, "answers must be two different"),
        ({"pooling": "first"}, "pooling must be 'last' or 'hf', got 'first'"),
        ({"step_tokn": "x"}, "unknown option 'step_tokn' for a reward model of kind 'decoder'"),
        ({"poolin": "hf"}, "unknown option 'poolin'.*Did you mean 'pooling'"),
        ({"max_lenght": 5}, "unknown option 'max_lenght'.*Did you mean 'max_length'"),
        ({"kind": "process"}, "step_token: missing; this setting has no default"),
        ({"kind": "process", "step_token": "<|im_end|>", "pooling": "hf"}, "unknown option 'pooling' for .* 'process'"),
        ({"kind": "process", "step_token": "<no such token>"}, "not a single token"),
        ({"kind": "process", "step_token": "<|im_end|>", "reduction": "median"}, "reduction must be .*got 'median'"),
        ({"kind": "decoder", "head": "v_head"}, r"no head 'v_head'; it has \['score'\]"),
        ({"kind": "generative", "answers": ("The", "N")}, "no output layer over a vocabulary"),
    ],
)
def test_invalid_options_are_refused(classifier, options, message):
    with pytest.raises(ConfigError, match=message):
        gym_rm.RewardModelScorer(*classifier, **options)


def test_a_wrong_kind_for_a_checkpoint_is_refused(tmp_path):
    folder = str(tiny_models.save_reward_model(tmp_path))
    with pytest.raises(ConfigError, match="Did you mean 'process'"):
        gym_rm.load_scorer(folder, kind="proces")
