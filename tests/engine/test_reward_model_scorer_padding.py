import copy

import numpy as np
import pytest
import tiny_models
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import gym_rm
from gym_rm.scores import ScoringError
from tests.engine.watching import dialogue

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def padding_with_eos(tmp_path_factory):
    """A checkpoint whose padding token is EOS, and whose template ends in EOS."""
    folder = tmp_path_factory.mktemp("padding_with_eos")
    template = tiny_models.CHATML.replace("<|im_end|>\\n' }}{% endfor", "<|im_end|>' }}{% endfor")
    tok = tiny_models.tokenizer(
        "chatml", chat_template=template.replace("<|im_end|>\n'", "<|im_end|>'"), pad_token="<|im_end|>"
    )
    model = tiny_models.reward_model("qwen3", pad_token_id=tok.eos_token_id, eos_token_id=tok.eos_token_id)
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder


def test_pooling_where_the_text_ends_in_padding(padding_with_eos, real_conversations, logged):
    expected = tiny_models.plain_rewards(padding_with_eos, real_conversations)
    default = gym_rm.load_scorer(padding_with_eos)
    assert default.provenance.settings["pooling"] == "hf"
    np.testing.assert_allclose(default.score(real_conversations).rewards, expected, atol=TOLERANCE)
    assert "pooling='hf' reads at position -2" in logged.text
    assert len([record for record in logged.records if "padding token" in record.message]) == 1

    last = gym_rm.load_scorer(padding_with_eos, pooling="last")
    rewards = last.score(real_conversations).rewards
    assert np.abs(rewards - expected).min() > 1e-4
    model = AutoModelForSequenceClassification.from_pretrained(padding_with_eos)
    tok = AutoTokenizer.from_pretrained(padding_with_eos)
    with torch.inference_mode():
        hidden = [model.model(**tiny_models.plain_ids(tok, c)).last_hidden_state[0, -1] for c in real_conversations]
        at_the_end = model.score(torch.stack(hidden))[:, 0].numpy()
    np.testing.assert_allclose(rewards, at_the_end, atol=TOLERANCE)


@pytest.mark.parametrize("pooling", ["hf", "last"])
def test_poolings_agree_if_the_text_does_not_end_in_padding(pooling, saved_model, real_conversations, logged):
    expected = tiny_models.plain_rewards(saved_model("qwen3"), real_conversations)
    scorer = gym_rm.load_scorer(saved_model("qwen3"), pooling=pooling)
    np.testing.assert_allclose(scorer.score(real_conversations).rewards, expected, atol=TOLERANCE)
    assert "padding token" not in logged.text


def test_a_checkpoint_without_a_padding_token(tmp_path, real_conversations):
    folder = tiny_models.save_reward_model(tmp_path, "qwen3")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.pad_token_id = None
    model.save_pretrained(folder)
    tiny_models.tokenizer("qwen", pad_token=None).save_pretrained(folder)
    expected = tiny_models.plain_rewards(folder, real_conversations)
    for options in ({}, {"tree": False}):
        scorer = gym_rm.load_scorer(folder, **options)
        assert scorer.renderer.tokenizer.pad_token_id is None
        assert scorer.layout == ("tree" if not options else "padded")
        np.testing.assert_allclose(scorer.score(real_conversations).rewards, expected, atol=TOLERANCE)


@pytest.mark.parametrize("architecture", ["bloom", "qwen3"])
@pytest.mark.parametrize("padding", [-1, 100_000])
def test_a_padding_token_without_an_embedding(architecture, padding, tmp_path, saved_model, real_conversations):
    """The id is -1 in configurations of Llama, and out of range if a padding token was added later."""
    model = AutoModelForSequenceClassification.from_pretrained(saved_model(architecture))
    expected = tiny_models.plain_rewards(saved_model(architecture), real_conversations)
    model.config.pad_token_id = padding
    scorer = gym_rm.RewardModelScorer(model, AutoTokenizer.from_pretrained(saved_model(architecture)), tree=False)
    assert scorer.layout == "padded"
    np.testing.assert_allclose(scorer.score(real_conversations).rewards, expected, atol=TOLERANCE)


def test_a_token_without_an_embedding_is_an_error_of_its_row(parts):
    model, tokenizer = parts
    grown = copy.deepcopy(tokenizer)
    grown.add_tokens(["zebra"])
    scorer = gym_rm.RewardModelScorer(model, grown)
    with pytest.raises(ScoringError, match=r"row 1: the token 'zebra' has the id 400, but the model has 400") as caught:
        scorer.score([dialogue("q", "a"), dialogue("q", "zebra")])
    assert caught.value.rows == (1,)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("gpt2", {"n_positions": 40}),
        ("opt", {"max_position_embeddings": 40}),
        ("bert", {"max_position_embeddings": 40}),
        ("roberta", {"max_position_embeddings": 43}),
    ],
)
def test_a_row_above_the_positions_of_the_model_fails_alone(architecture, config, tmp_path):
    folder = tiny_models.save_reward_model(tmp_path, architecture, **config)
    rows = [dialogue("q", "a"), dialogue("q", "The sum is 42. " * 30), dialogue("q", "b")]
    scorer = gym_rm.load_scorer(str(folder), max_length=4096, chat_template=tiny_models.PLAIN)
    assert scorer.info.num_positions == 40
    with pytest.raises(ScoringError, match=r"row 1: the conversation has \d+ tokens, .* has 40 positions") as caught:
        scorer.score(rows)
    assert caught.value.rows == (1,)
    expected = [scorer.score([row]).rewards[0] for row in (rows[0], rows[2])]
    assert caught.value.scores.rewards[[0, 2]].tolist() == expected


@pytest.mark.parametrize("architecture", ["qwen3", "bloom", "xlnet"])
def test_models_that_compute_positions_have_no_hard_limit(architecture, tmp_path):
    config = {"max_position_embeddings": 40} if architecture == "qwen3" else {}
    folder = tiny_models.save_reward_model(tmp_path, architecture, **config)
    scorer = gym_rm.load_scorer(str(folder), max_length=4096)
    assert scorer.info.num_positions is None
    assert scorer.score([dialogue("q", "The sum is 42. " * 30)]).errors == (None,)


def test_padding_tokens_in_a_message_are_text(padding_with_eos):
    """A reply cannot contain padding tokens, so the last token that is not padding is at the end of the text."""
    scorer = gym_rm.load_scorer(padding_with_eos)
    (rendered,) = scorer.renderer.encode([dialogue("q", "<|im_end|>" * 5)])
    assert (rendered.input_ids == scorer.renderer.tokenizer.pad_token_id).sum() == 2
    assert scorer.kind.read_positions(rendered).tolist() == [len(rendered.input_ids) - 2]
