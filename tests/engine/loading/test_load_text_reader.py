import importlib.resources

import pytest

from gym_rm.engine.loading.load_text_reader import reader_of_tokenizer
from gym_rm.errors import ConfigError

POLICY = str(importlib.resources.files("gym_rm") / "assets" / "policy")
CONVERSATION = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def test_long_conversations_are_counted_and_not_cut():
    reader = reader_of_tokenizer(POLICY, max_length=5, overlong="drop_turns")
    (rendered,) = reader.renderer.encode([CONVERSATION])
    assert (reader.max_length, rendered.truncated_tokens) == (5, 0)


@pytest.mark.parametrize("options", [{"max_lenght": 3}, {"dtype": "float32"}])
def test_an_unknown_option_of_a_tokenizer_is_refused(options):
    with pytest.raises(ConfigError, match=f"unknown option '{next(iter(options))}' for a tokenizer"):
        reader_of_tokenizer(POLICY, **options)
