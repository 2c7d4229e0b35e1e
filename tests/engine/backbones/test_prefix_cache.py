import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gym_rm
import gym_rm.engine.backbones.decoder as decoder
from gym_rm import ConfigError
from gym_rm.engine.backbones.batch_invariance import BatchInvariant, rows_to_try
from gym_rm.engine.backbones.decoder import DecoderBackbone
from gym_rm.engine.backbones.prefix_cache import CACHE_BLOCK_SIZE, PrefixCache
from gym_rm.engine.backbones.tree_attention import TreeAttention
from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.token_tree import TokenSequence
from tests import tiny_models


def dialogues(hh_pairs, messages, count=8):
    return [pair[0][:messages] for pair in hh_pairs if len(pair[0]) >= 6][:count]


@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
def test_the_next_turn_computes_only_its_new_tokens(architecture, saved_model, hh_pairs):
    folder = saved_model(architecture)
    plain, cached = gym_rm.load_scorer(folder), gym_rm.load_scorer(folder, prefix_cache_tokens=20_000)
    before = 0
    for messages in (2, 4, 6):
        conversations = dialogues(hh_pairs, messages)
        expected, scores = plain.score(conversations), cached.score(conversations)
        assert np.array_equal(scores.rewards, expected.rewards)
        assert scores.workload.unique_tokens == expected.workload.unique_tokens
        # All tokens of earlier turns are reused, except incomplete blocks and tokens that are read.
        assert before - 2 * CACHE_BLOCK_SIZE * len(conversations) < scores.workload.reused_tokens <= before
        before = expected.workload.unique_tokens


@settings(max_examples=12, deadline=None)
@given(data=st.data(), capacity=st.integers(1, 12))
def test_values_have_the_same_bits_with_any_cached_prefixes(data, capacity):
    """The cache is cold, then warm, and blocks are evicted, because it is smaller than most trees."""
    model = fused_model()
    cache = PrefixCache(capacity * CACHE_BLOCK_SIZE)
    for _ in range(4):
        sequences = data.draw(st.lists(long_sequences(), min_size=1, max_size=5))
        for tree in plan_trees(sequences, max_num_batched_tokens=400).batches:
            model.prefix_cache = None
            expected = values(model, tree)
            model.prefix_cache = cache
            assert torch.equal(values(model, tree), expected)
            assert len(cache._blocks) + len(cache._free) == capacity
            assert len({*cache._blocks.values(), *cache._free}) == capacity


def long_sequences():
    """Sequences of few distinct pieces, so that prefixes repeat, with one or two reads."""
    pieces = st.lists(st.integers(0, 2), min_size=1, max_size=5)
    reads = st.tuples(st.floats(0, 1), st.just(1.0))

    def make(drawn):
        chosen, where, extra = drawn
        ids = np.concatenate([np.arange(20) + 30 * piece + 5 for piece in chosen] + [np.full(extra, 7)]).astype(
            np.int32
        )
        return TokenSequence(ids, np.unique([int(share * (len(ids) - 1)) for share in where]))

    return st.tuples(pieces, reads, st.integers(0, 9)).map(make)


def fused_model(architecture="qwen3", **overrides):
    backbone = DecoderBackbone(tiny_models.reward_model(architecture, **overrides))
    assert backbone.fuse
    return backbone


def values(model, tree):
    """Return the hidden states as an executor computes them."""
    rows, *_ = rows_to_try([model.model.base_model])
    with torch.inference_mode(), BatchInvariant(rows):
        return model.hidden_states(tree)


@pytest.mark.parametrize("use_flex", [False, True])
def test_a_sliding_window_over_cached_tokens(use_flex, monkeypatch):
    monkeypatch.setattr(
        decoder, "TreeAttention", lambda *given, **options: TreeAttention(*given, use_flex=use_flex, **options)
    )
    model = fused_model("mistral", sliding_window=24)
    ids = np.random.default_rng(0).integers(5, 300, 100).astype(np.int32)
    early, late = (
        plan_trees([TokenSequence(ids[:stop], np.array([stop - 1]))], max_num_batched_tokens=200).batches[0]
        for stop in (70, 100)
    )
    expected = values(model, late)
    model.prefix_cache = PrefixCache(200)
    values(model, early)
    got = values(model, late)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    assert use_flex or torch.equal(got, expected)  # on a CPU, flex_attention adds up all keys of the tree at once
    assert model.prefix_cache.reused_tokens == 64


def test_a_failed_forward_adds_nothing_to_the_cache(monkeypatch):
    model = fused_model()
    ids = np.arange(5, 85, dtype=np.int32)
    (tree,) = plan_trees([TokenSequence(ids, np.array([79]))], max_num_batched_tokens=200).batches
    expected = values(model, tree)
    cache = model.prefix_cache = PrefixCache(200)
    with monkeypatch.context() as patch:
        patch.setattr(
            decoder, "llama_forward", lambda *given, **options: (_ for _ in ()).throw(RuntimeError("half-way"))
        )
        with pytest.raises(RuntimeError, match="half-way"):
            values(model, tree)
    assert not cache._blocks
    assert len(cache._free) == cache.num_blocks
    assert torch.equal(values(model, tree), expected)


def test_sleep_clears_the_prefix_cache(saved_model, hh_pairs):
    scorer = gym_rm.load_scorer(saved_model("qwen3"), prefix_cache_tokens=20_000)
    scorer.score(dialogues(hh_pairs, 2, count=2))
    scorer.sleep()
    assert scorer.score(dialogues(hh_pairs, 4, count=2)).workload.reused_tokens == 0


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("qwen3", {"tree": False}, "layout 'padded'"),
        ("gpt2", {}, r"a type in \['llama', 'mistral', 'qwen2', 'qwen3'\]"),
        ("bert", {}, "got BertForSequenceClassification"),
    ],
)
def test_unsupported_options_are_refused(architecture, options, message, saved_model):
    with pytest.raises(ConfigError, match=message):
        gym_rm.load_scorer(saved_model(architecture), **{"prefix_cache_tokens": 1000, **options})
