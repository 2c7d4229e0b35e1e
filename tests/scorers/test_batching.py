import asyncio
import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from recording import RecordingScorer, chat

import gym_rm
from gym_rm.scorers.batching import MicroBatchingScorer, select_rows
from gym_rm.testing import check_scorer


@pytest.fixture
def slow():
    """Scores for long enough that the next requests collect meanwhile."""
    return RecordingScorer(seconds=0.05)


def ask(scorer, replies):
    with ThreadPoolExecutor(len(replies)) as pool:
        return list(pool.map(lambda reply: scorer.score([chat("q", reply)]), replies))


def test_it_is_a_scorer():
    scorer = MicroBatchingScorer(
        gym_rm.load_scorer(lambda conversations: [len(c[-1]["content"]) for c in conversations])
    )
    check_scorer(scorer)
    scorer.close()


def test_concurrent_calls_are_merged_and_everyone_gets_their_own(slow):
    scorer = MicroBatchingScorer(slow)
    replies = ["x" * length for length in range(64)]
    results = ask(scorer, replies)
    assert [scores.rewards.tolist() for scores in results] == [[length / 4] for length in range(64)]
    assert scorer.num_conversations == slow.num_conversations == 64
    assert scorer.num_batches == len(slow.calls) <= 8
    assert len(slow.threads) == 1
    assert threading.get_ident() not in slow.threads
    scorer.close()


def test_a_failed_row_stays_with_its_caller(slow):
    scorer = MicroBatchingScorer(slow)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(scorer.score, [chat("q", reply), chat("q", "ok")]) for reply in ["a", "FAIL", "c"] * 2]
    for future, failed in zip(futures, [False, True, False] * 2, strict=True):
        if failed:
            with pytest.raises(gym_rm.ScoringError) as caught:
                future.result()
            assert caught.value.rows == (0,)
            assert caught.value.scores.rewards[1] == 0.5
        else:
            assert future.result().rewards.tolist() == [0.25, 0.5]
    scorer.close()


def test_a_crash_stays_with_its_caller(slow):
    scorer = MicroBatchingScorer(slow, max_wait=0.2)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(scorer.score, [chat("q", reply)]) for reply in ["a", "CRASH", "c"]]
    assert futures[0].result().rewards.tolist() == futures[2].result().rewards.tolist() == [0.25]
    with pytest.raises(OSError, match="the scorer crashed"):
        futures[1].result()
    scorer.close()


def test_a_batch_is_closed_at_its_size(recorder):
    scorer = MicroBatchingScorer(recorder, max_batch_size=4, max_wait=0.2)
    ask(scorer, ["x"] * 16)
    assert max(map(len, recorder.calls)) <= 4
    scorer.close()


def test_coroutines_can_wait_for_it(slow):
    async def ask_all():
        return await asyncio.gather(*(asyncio.wrap_future(scorer.submit([chat("q", "x" * n)])) for n in range(32)))

    scorer = MicroBatchingScorer(slow)
    assert [scores.rewards[0] for scores in asyncio.run(ask_all())] == [n / 4 for n in range(32)]
    assert len(slow.calls) <= 2
    scorer.close()


def test_a_scorer_that_loses_rows_is_told():
    class Loses(RecordingScorer):
        def score(self, conversations, prompts=None):
            return super().score(conversations[1:])

    scorer = MicroBatchingScorer(Loses())
    with pytest.raises(gym_rm.ConfigError, match="returned 1 scores for 2 conversations"):
        scorer.score([chat("q", "a"), chat("q", "b")])
    scorer.close()


def test_close_answers_what_waits_and_refuses_the_rest(slow):
    scorer = MicroBatchingScorer(slow)
    futures = [scorer.submit([chat("q", "abcd")]) for _ in range(3)]
    scorer.close()
    scorer.close()
    assert [future.result().rewards.tolist() for future in futures] == [[1.0]] * 3
    with pytest.raises(RuntimeError, match="is closed"):
        scorer.score([chat("q", "a")])


def test_nothing_to_score(recorder):
    scorer = MicroBatchingScorer(recorder)
    assert len(scorer.score([])) == 0
    scorer.close()


def test_a_copy_is_the_same_one(recorder):
    scorer = MicroBatchingScorer(recorder)
    assert copy.deepcopy(scorer) is scorer


@pytest.mark.parametrize("options", [{"max_batch_size": 0}, {"max_wait": -1.0}])
def test_impossible_settings(recorder, options):
    with pytest.raises(gym_rm.ConfigError, match="max_batch_size must be"):
        MicroBatchingScorer(recorder, **options)


def test_select_rows_keeps_every_column(recorder):
    scores = recorder.score([chat("q", "a"), chat("q", "bb"), chat("q", "ccc")])
    picked = select_rows(scores, [2, 0])
    assert picked.rewards.tolist() == [0.75, 0.25]
    assert picked.components["length"].tolist() == [3.0, 1.0]
    assert picked.num_tokens.tolist() == [4, 2]
    assert picked.errors == (None, None)
    assert np.array_equal(picked.truncated_tokens, [0, 0])
