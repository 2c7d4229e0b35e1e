import importlib.resources

import pytest

from gym_rm.data.comparisons import load_comparisons
from gym_rm.data.token_lengths import measure_tokens
from gym_rm.engine.loading.load_text_reader import reader_of_tokenizer

POLICY = str(importlib.resources.files("gym_rm") / "assets" / "policy")
PAIR = {"prompt": "Which is larger, 12 or 30?", "chosen": "12", "rejected": "It is 30."}


@pytest.fixture(scope="module")
def reader():
    return reader_of_tokenizer(POLICY, max_length=100)


def ids_of(reader, conversation):
    return reader.renderer.tokenizer.apply_chat_template(conversation, return_dict=False)


def test_tokens_are_those_of_the_chat_template(reader):
    found = load_comparisons([PAIR, {**PAIR, "rejected": "30 " * 100}]).comparisons
    lengths = [len(ids_of(reader, list(each))) for comparison in found for each in comparison.conversations]
    measured = measure_tokens(found, reader)
    assert (measured.comparisons, measured.tokens) == (2, sum(lengths))
    assert (measured.quantiles[0], measured.quantiles[-1]) == (min(lengths), max(lengths))
    assert (measured.max_length, measured.too_long) == (100, 1)


def test_shared_tokens_are_counted_once(reader):
    found = load_comparisons(
        [{"prompt": "2 + 2?", "responses": ["4", "5", "40", "4"], "ranks": [0, 1, 2, 0]}]
    ).comparisons
    sequences = [ids_of(reader, list(each)) for each in found[0].conversations]
    nodes = {tuple(ids[:stop]) for ids in sequences for stop in range(1, len(ids) + 1)}
    assert measure_tokens(found, reader).unique_tokens == len(nodes)


def test_a_conversation_that_the_model_cannot_read_is_counted_with_the_reason(reader):
    template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    strict = reader_of_tokenizer(POLICY, chat_template=template + "{{ m.role + ': ' + m.content }}\n{% endfor %}")
    system = {**PAIR, "prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}
    found = load_comparisons([PAIR, system]).comparisons
    (failed,) = measure_tokens(found, strict).failed
    assert (failed.count, failed.examples) == (1, ("comparisons[1]",))
    assert "no system role" in failed.text
