import importlib.resources

import numpy as np
import pytest

import gym_rm
from gym_rm.data.comparisons import load_comparisons
from gym_rm.data.token_lengths import make_examples
from gym_rm.engine.loading.load_text_reader import reader_of_reward_model, reader_of_tokenizer
from gym_rm.engine.text.rendered import Rendered
from gym_rm.errors import ConfigError
from tests import tiny_models

POLICY = str(importlib.resources.files("gym_rm") / "assets" / "policy")
CONVERSATION = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def test_a_reward_model_is_read_as_its_scorer_reads_it():
    reader, scorer = reader_of_reward_model(), gym_rm.load_scorer()
    (ours,), (theirs,) = reader.renderer.encode([CONVERSATION]), scorer.renderer.encode([CONVERSATION])
    assert ours.input_ids.tolist() == theirs.input_ids.tolist()
    assert list(reader.read_positions(ours)) == list(scorer.kind.read_positions(theirs))
    assert reader.max_length == scorer.renderer.max_length


def test_long_conversations_are_counted_and_not_cut():
    reader = reader_of_reward_model(max_length=5, overlong="truncate_left")
    (rendered,) = reader.renderer.encode([CONVERSATION])
    assert (reader.max_length, rendered.truncated_tokens) == (5, 0)


def test_a_model_that_is_no_reward_model_is_read_at_the_last_token():
    reader = reader_of_tokenizer(POLICY)
    assert list(reader.read_positions(Rendered(np.arange(7, dtype=np.int32)))) == [6]


@pytest.mark.parametrize("options", [{"max_lenght": 3}, {"dtype": "float32"}])
def test_an_unknown_option_of_a_tokenizer_is_refused(options):
    with pytest.raises(ConfigError, match=f"unknown option '{next(iter(options))}' for a tokenizer"):
        reader_of_tokenizer(POLICY, **options)


def test_the_reply_of_a_judge_and_of_an_encoder_begins_at_its_text(tmp_path):
    tiny_models.save_policy(tmp_path / "judge", "qwen3")
    tiny_models.save_reward_model(tmp_path / "encoder", architecture="bert")
    (comparison,) = load_comparisons([{"prompt": "2 + 2?", "chosen": "it is 4", "rejected": "5"}]).comparisons
    judge = reader_of_reward_model(str(tmp_path / "judge"), kind="generative", answers=("4", "5"))
    for reader in (judge, reader_of_reward_model(str(tmp_path / "encoder"))):
        (example,) = make_examples([comparison], reader, 1)
        reply = example.replies[0]
        assert "".join(reply.tokens[reply.reply_start :]).replace(" ", "").startswith("itis4")
