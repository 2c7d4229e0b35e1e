import pytest

from gym_rm.scores import ScoringError
from tests.engine.watching import dialogue, size_of, watched_scorer


def test_cached_conversations_are_not_computed_again(parts, real_conversations):
    scorer = watched_scorer(parts, cache_size=100)
    first = scorer.score(real_conversations)
    scorer.executor.batches.clear()
    again = scorer.score(real_conversations[::-1])
    assert again.rewards.tolist() == first.rewards[::-1].tolist()
    assert again.workload.num_batches == again.workload.unique_tokens == 0
    assert again.num_tokens.tolist() == first.num_tokens[::-1].tolist()
    assert not scorer.executor.batches
    new = dialogue("q", "something new")
    mixed = scorer.score([real_conversations[0], new, real_conversations[1], new])
    assert [size_of(batch) for batch in scorer.executor.batches] == [mixed.num_tokens[1]]
    assert mixed.rewards[[0, 2]].tolist() == first.rewards[:2].tolist()


def test_the_cache_is_bounded_and_removes_the_least_recently_used(parts, real_conversations):
    scorer = watched_scorer(parts, cache_size=3)
    scorer.score(real_conversations)
    assert len(scorer._cache) == 3
    a, b, c, d = real_conversations[:4]
    scorer.clear_cache()
    scorer.score([a, b, c])
    scorer.score([a])  # a is now more recently used than b
    scorer.score([d])
    scorer.executor.batches.clear()
    scorer.score([a, c, d])
    assert not scorer.executor.batches
    scorer.score([b])
    assert scorer.executor.batches


def test_failures_are_not_cached(parts):
    scorer = watched_scorer(parts, cache_size=10, fails=lambda batch, call: RuntimeError("x") if call <= 2 else None)
    with pytest.raises(ScoringError):
        scorer.score([dialogue("q", "a")])
    assert scorer.score([dialogue("q", "a")]).failed_rows == ()


def test_writing_to_scores_does_not_change_later_answers(parts, real_conversations):
    scorer = watched_scorer(parts, cache_size=100)
    first = scorer.score(real_conversations, turns="all")
    expected = first.rewards.tolist()
    first.rewards[:] = 0
    for column in (*first.components.values(), *first.turn_rewards):
        column[:] = 0
    assert scorer.score(real_conversations).rewards.tolist() == expected
