import importlib.resources

import pytest

import gym_rm
from gym_rm.engine.loading.load_text_reader import reader_of_reward_model, reader_of_tokenizer
from gym_rm.errors import ConfigError

POLICY = str(importlib.resources.files("gym_rm") / "assets" / "policy")
CONVERSATION = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def test_a_reward_model_is_read_as_its_scorer_reads_it():
    reader, scorer = reader_of_reward_model(), gym_rm.load_scorer()
    (ours,), (theirs,) = reader.renderer.encode([CONVERSATION]), scorer.renderer.encode([CONVERSATION])
    assert ours.input_ids.tolist() == theirs.input_ids.tolist()
    assert reader.max_length == scorer.renderer.max_length


def test_long_conversations_are_counted_and_not_cut():
    reader = reader_of_reward_model(max_length=5, overlong="drop_turns")
    (rendered,) = reader.renderer.encode([CONVERSATION])
    assert (reader.max_length, rendered.truncated_tokens) == (5, 0)


@pytest.mark.parametrize("options", [{"max_lenght": 3}, {"dtype": "float32"}])
def test_an_unknown_option_of_a_tokenizer_is_refused(options):
    with pytest.raises(ConfigError, match=f"unknown option '{next(iter(options))}' for a tokenizer"):
        reader_of_tokenizer(POLICY, **options)
