"""Kinds of reward model: detection, invalid options, and scores that do not depend on the batch."""

import numpy as np
import pytest

import gym_rm
from gym_rm import ConfigError
from gym_rm.engine.kinds import KINDS
from gym_rm.testing import check_scorer
from tests import tiny_models
from tests.checkpoints import HIDDEN, conversation, save_with_heads, tensor


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
        ({"kind": "decoder", "head": "v_head"}, r"no head 'v_head'; it has \['score'\]"),
        ({"kind": "gated"}, "prompt_end has no default for models of type 'qwen3'"),
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


def gated(tmp_path):
    heads = {
        "regression_layer.weight": tensor(3, HIDDEN, seed=1),
        "gating.logit_scale": tensor(1, seed=3),
        "gating.layers.0.weight": tensor(3, HIDDEN, seed=4),
        "gating.layers.0.bias": tensor(3, seed=5),
    }
    return save_with_heads(tmp_path, heads, class_name="LlamaForRewardModelWithGating", gating_temperature=2.0), {}


def process(tmp_path):
    heads = {"score.0.weight": tensor(2, HIDDEN, seed=2)}
    folder = save_with_heads(tmp_path, heads, class_name="Qwen2ForProcessRewardModel", architecture="qwen2")
    return folder, {"step_token": "<|endoftext|>", "step_separator": ",", "reduction": "mean"}


def generative(tmp_path):
    folder = tiny_models.save_policy(tmp_path, "gemma2", initializer_range=0.3)
    return folder, {"kind": "generative", "question": "Is it?", "answers": ("The", "N")}


def implicit(tmp_path):
    policy, reference = (
        tiny_models.save_policy(tmp_path / str(seed), seed=seed, initializer_range=0.3) for seed in (1, 2)
    )
    return policy, {"kind": "implicit", "reference": str(reference)}


@pytest.mark.parametrize("make", [gated, process, generative, implicit])
def test_a_score_does_not_depend_on_the_other_conversations(make, tmp_path):
    folder, options = make(tmp_path)
    texts = ["a sum, I think", "the market, 42, in May", "No.", "", "a sum, I think so, yes"]
    conversations = [
        conversation(question, *replies)
        for question in ("What is the sum of 12 and 30?", "Who?")
        for replies in ([texts[0]], [texts[1]], [texts[0], texts[1]], [texts[0], texts[4]], [texts[2]])
    ]
    scorer = gym_rm.load_scorer(str(folder), **options)
    check_scorer(scorer, conversations)
    together = scorer.score(conversations)
    small = gym_rm.load_scorer(str(folder), max_num_batched_tokens=150, **options)
    order = np.random.default_rng(0).permutation(len(conversations))
    shuffled = small.score([conversations[row] for row in order])
    alone = [scorer.score([each]) for each in conversations]
    assert shuffled.rewards.tolist() == together.rewards[order].tolist()
    assert [each.rewards[0] for each in alone] == together.rewards.tolist()
    for name, values in together.components.items():
        assert [each.components[name][0] for each in alone] == values.tolist()
    assert (together.provenance.layout, together.provenance.batch_invariance) == ("tree", "bit-equal")
    assert together.workload.unique_tokens < together.workload.num_tokens
    assert shuffled.workload.num_batches > together.workload.num_batches
