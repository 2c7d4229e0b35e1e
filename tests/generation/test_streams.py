"""Completions that come as they end, of a model in this process."""

import itertools
import weakref
from unittest import mock

import numpy as np
import pytest
from generation.sampled_models import prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.errors import ConfigError
from gym_rm.generation.model_decoding import ModelDecoder
from gym_rm.generation.sampling import LocalSampler
from tests.generation import test_sampling
from tests.generation.test_sampling import policy

embedded = test_sampling.embedded


@pytest.fixture(scope="module")
def embedded_sampler(embedded):
    return LocalSampler(*embedded[:2], max_new_tokens=12)


def streamed(sampler, rows, cuts):
    """Return the completions of a stream to which the rows are added in parts, and it is asked after each."""
    stream, completions = sampler.stream(), {}
    for first, last in itertools.pairwise([0, *sorted(cuts), len(rows)]):
        stream.add(range(first, last), rows[first:last], seeds=range(first, last))
        completions |= stream.take(timeout=0.0)
    while stream.num_open:
        completions |= stream.take()
    return [completions[row] for row in range(len(rows))]


@settings(max_examples=20, deadline=None)
@given(
    chosen=st.lists(st.integers(0, 5), min_size=1, max_size=16),
    cuts=st.lists(st.integers(0, 16), max_size=4),
    size=st.none() | st.integers(1, 8),
)
def test_a_stream_has_the_completions_of_a_call(embedded, embedded_sampler, chosen, cuts, size):
    rows, sampler = [embedded[2][number] for number in chosen], embedded_sampler
    sampler.max_num_seqs = size
    expected = sampler.sample(rows, seeds=range(len(rows)))
    for mine, other in zip(streamed(sampler, rows, [min(cut, len(rows)) for cut in cuts]), expected, strict=True):
        assert (mine.token_ids.tolist(), mine.text) == (other.token_ids.tolist(), other.text)
        assert mine.finished == other.finished
        np.testing.assert_allclose(mine.log_probs, other.log_probs, atol=1e-4)  # of other sizes of a matrix product
    for mine, other in zip(streamed(sampler, rows, []), expected, strict=True):
        assert mine.log_probs.tobytes() == other.log_probs.tobytes()


def test_short_completions_of_a_stream_come_before_long_ones():
    model, tokenizer = policy("qwen3", max_position_embeddings=16)
    stream = LocalSampler(model, tokenizer, max_new_tokens=10).stream()
    long, short = prompts(tokenizer, (4, 13))
    stream.add([7, 5], [long, short], seeds=[0, 1])
    assert list(stream.take()) == [5]
    stream.add([5], [short], seeds=[2])
    with pytest.raises(ConfigError, match="a completion of key 7 is open"):
        stream.add([8, 7], [short, short], seeds=[3, 4])
    with pytest.raises(ConfigError, match="prompt 9 has no tokens"):
        stream.add([9], [short[:0]], seeds=[3])
    assert [list(stream.take()), list(stream.take())] == [[7], [5]]
    assert (stream.num_open, stream.take()) == (0, {})


def test_a_take_without_time_decodes_one_step():
    model, tokenizer = policy()
    stream = LocalSampler(model, tokenizer, max_new_tokens=3).stream()
    stream.add([0], prompts(tokenizer, (4,)), seeds=[0])
    taken = [list(stream.take(timeout=0.0)) for _ in range(3)]
    assert taken == [[], [], [0]]


@pytest.mark.parametrize("end", ["exhausted", "closed", "interrupted"])
def test_a_stream_leaves_the_model_as_it_was(end, monkeypatch):
    model, tokenizer = policy("gpt2")
    model.train()
    stream = LocalSampler(model, tokenizer, max_new_tokens=3).stream()
    stream.add(range(2), prompts(tokenizer, (4, 5)), seeds=range(2))
    stream.take(timeout=0.0)
    assert not model.training
    if end == "exhausted":
        assert len(stream.take()) == 2
    elif end == "closed":
        stream.close()
        stream.close()
    else:
        monkeypatch.setattr(ModelDecoder, "step", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stream.take()
    assert model.training
    assert stream.num_open == 0


def test_caches_end_with_a_stream():
    model, tokenizer = policy()
    sampler = LocalSampler(model, tokenizer, max_new_tokens=3)
    for end in (lambda stream: stream.close(), lambda stream: stream.take()):
        stream = sampler.stream()
        stream.add([0], prompts(tokenizer, (4,)), seeds=[0])
        stream.take(timeout=0.0)
        cache = weakref.ref(stream._decoding.gi_frame.f_locals["decoder"])
        assert cache() is not None
        end(stream)
        assert cache() is None
