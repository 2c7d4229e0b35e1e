"""Merged calls: every caller gets the scores of its own rows."""

import asyncio
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording import RecordingScorer, chat, merged

import gym_rm
from gym_rm import ConfigError, Prompt, Scores, ScoringError
from gym_rm.scorers.batching import MicroBatchingScorer, serial_calls
from gym_rm.types import Provenance
from tests.scorers.test_combined import Simulator


def prompt_of(answer):
    return Prompt(tuple(chat("q")), f"q {answer}", answer=answer)


def length(conversations):
    return [len(conversation[-1]["content"]) for conversation in conversations]


class BlockedScorer:
    """Scorer that blocks its first call until `gate` is set, and stores the calls of the inner scorer."""

    def __init__(self, scorer):
        self.scorer = scorer
        self.started, self.gate = threading.Event(), threading.Event()
        self.asked = []

    def score(self, conversations, prompts=None):
        self.started.set()
        self.gate.wait()
        self.asked.append(([c[-1]["content"] for c in conversations], prompts))
        return self.scorer.score(conversations, prompts)


def score_merged(scorer, requests, **options):
    """Merge requests that wait at the same time; return their futures and the calls of the scorer."""
    blocked = BlockedScorer(scorer)
    merging = MicroBatchingScorer(blocked, **options)
    merging.submit([])
    blocked.started.wait()
    futures = [merging.submit(conversations, prompts) for conversations, prompts in requests]
    blocked.gate.set()
    merging.close()
    return futures, blocked.asked[1:]


@pytest.fixture
def recorder():
    return RecordingScorer()


def ask(scorer, replies):
    with ThreadPoolExecutor(len(replies)) as pool:
        return list(pool.map(lambda reply: scorer.score([chat("q", reply)]), replies))


def test_concurrent_calls_are_merged_and_return_their_own_rows(recorder):
    scorer = merged(recorder, 64)
    replies = ["x" * length for length in range(64)]
    results = ask(scorer, replies)
    assert [scores.rewards.tolist() for scores in results] == [[length / 4] for length in range(64)]
    assert scorer.num_conversations == recorder.num_conversations == 64
    assert scorer.num_batches == len(recorder.calls) == 1
    assert threading.get_ident() not in recorder.threads
    scorer.close()


def test_a_batch_has_at_most_max_batch_size_conversations(recorder):
    scorer = MicroBatchingScorer(recorder, max_batch_size=4, max_wait=0.2)
    ask(scorer, ["x"] * 16)
    assert max(map(len, recorder.calls)) <= 4
    scorer.close()


def test_a_cancelled_request_does_not_affect_other_requests(recorder):
    blocked = BlockedScorer(recorder)
    scorer = MicroBatchingScorer(blocked)
    scorer.submit([])
    blocked.started.wait()
    before, cancelled, after = (scorer.submit([chat("q", "x" * length)]) for length in (1, 2, 3))
    assert cancelled.cancel()
    blocked.gate.set()
    assert before.result(timeout=5).rewards.tolist() == [0.25]
    assert after.result(timeout=5).rewards.tolist() == [0.75]
    assert scorer.submit([chat("q", "abcd")]).result(timeout=5).rewards.tolist() == [1.0]
    scorer.close()


def test_close_scores_waiting_requests_and_later_requests_raise(recorder):
    scorer = MicroBatchingScorer(recorder)
    futures = [scorer.submit([chat("q", "abcd")]) for _ in range(3)]
    scorer.close()
    scorer.close()
    assert [future.result().rewards.tolist() for future in futures] == [[1.0]] * 3
    with pytest.raises(RuntimeError, match="is closed"):
        scorer.score([chat("q", "a")])


@pytest.mark.parametrize("options", [{"max_batch_size": 0}, {"max_batch_size": "a"}, {"max_wait": -1.0}])
def test_an_invalid_setting_raises_config_error(recorder, options):
    with pytest.raises(gym_rm.ConfigError, match=f"{next(iter(options))} must"):
        MicroBatchingScorer(recorder, **options)


@pytest.mark.parametrize("thing", [None, iter([]), 3])
def test_conversations_that_are_not_a_list_are_refused_and_later_calls_answered(recorder, thing):
    scorer = MicroBatchingScorer(recorder)
    with pytest.raises(gym_rm.ConfigError, match="conversations must be a list"):
        scorer.score(thing)
    assert len(scorer.score([chat("q", "a")])) == 1


class Unprintable(BaseException):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), Unprintable()])
def test_a_scorer_that_raises_a_base_exception_does_not_stop_later_calls(error):
    def fails(conversations):
        if conversations[0][-1]["content"] == "bad":
            raise error
        return [1.0] * len(conversations)

    scorer = MicroBatchingScorer(gym_rm.load_scorer(fails))
    with pytest.raises(RuntimeError, match=f"the scorer raised {type(error).__name__}"):
        scorer.submit([chat("q", "bad")]).result(timeout=10)
    assert scorer.submit([chat("q", "good")]).result(timeout=10).rewards.tolist() == [1.0]


def test_a_scorer_that_calls_its_own_batches_is_an_error():
    scorer = MicroBatchingScorer(gym_rm.load_scorer(lambda conversations: scorer.score(conversations).rewards))
    with pytest.raises(RuntimeError, match="would wait for itself"):
        scorer.submit([chat("q", "a")]).result(timeout=10)


# --- prompts


def test_a_wrong_number_of_prompts_raises_before_requests_are_merged(recorder):
    scorer = MicroBatchingScorer(recorder)
    with pytest.raises(ConfigError, match="prompts must have one entry per conversation, got 1 entries for 2"):
        scorer.score([chat("q", "a"), chat("q", "b")], [prompt_of("a")])
    assert recorder.calls == []
    scorer.close()


# --- random requests


class PromptScorer:
    """Scorer of reply and prompt: FAIL has a missing score, CRASH raises OSError."""

    def score(self, conversations, prompts=None):
        prompts = [None] * len(conversations) if prompts is None else prompts
        replies = [conversation[-1]["content"] for conversation in conversations]
        if "CRASH" in replies:
            raise OSError("the scorer crashed")
        answers = [None if prompt is None else prompt.answer for prompt in prompts]
        rewards = [
            np.nan if reply == "FAIL" else len(reply) + (10.0 if reply == answer else 0.0 if answer is None else 5.0)
            for reply, answer in zip(replies, answers, strict=True)
        ]
        return Scores.from_rewards(
            rewards,
            components={"length": np.array([len(reply) for reply in replies], dtype=np.float32)},
            infos={"answer": np.array(answers, dtype=object)},
        ).raise_for_errors()


@st.composite
def requests_of_callers(draw):
    """Requests of 0 to 3 rows; some requests have prompts for some rows."""
    replies = st.sampled_from(["", "a", "bb", "ccc", "FAIL", "CRASH"])
    answers = st.none() | st.sampled_from(["a", "bb", "d"])
    requests = []
    for rows in draw(st.lists(st.lists(st.tuples(replies, answers), max_size=3), min_size=1, max_size=8)):
        prompts = [None if answer is None else prompt_of(answer) for _, answer in rows]
        requests.append(([chat("q", reply) for reply, _ in rows], prompts if draw(st.booleans()) else None))
    return requests


def outcome(score):
    """Return every column of the scores, or the exception."""
    try:
        return score().to_dict()
    except ScoringError as error:
        return error.rows, error.scores.to_dict()
    except OSError as error:
        return str(error)


@given(requests=requests_of_callers(), max_batch_size=st.integers(1, 12))
def test_merging_does_not_change_the_result_of_any_request(requests, max_batch_size):
    futures, _ = score_merged(PromptScorer(), requests, max_batch_size=max_batch_size)
    alone = [outcome(lambda request=request: PromptScorer().score(*request)) for request in requests]
    assert [outcome(future.result) for future in futures] == alone


def test_the_user_simulator_of_the_scorer_is_kept():
    simulator = Simulator()
    assert MicroBatchingScorer(simulator).respond == simulator.respond
    assert MicroBatchingScorer(gym_rm.load_scorer(length)).respond is None


def score_into(scorer, queue):
    queue.put(scorer.score([chat("abc")]).rewards.tolist())


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system has no fork")
def test_a_scorer_that_was_used_before_a_fork_answers_in_the_forked_process():
    scorer = MicroBatchingScorer(gym_rm.load_scorer(length))
    expected = scorer.score([chat("abc")]).rewards.tolist()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=score_into, args=(scorer, queue))
    process.start()
    try:
        assert queue.get(timeout=60) == expected
    finally:
        process.kill()
        process.join()


# --- callers that take turns


class Turns:
    """Scorer of lengths whose first call blocks until `others` callers wait; it stores the replies of each call."""

    def __init__(self, others, error=None, **attributes):
        self.others, self.error, self.calls, self.threads = others, error, [], []
        vars(self).update(attributes)
        self.at_work = threading.Lock()

    def score(self, conversations, prompts=None):
        assert self.at_work.acquire(blocking=False), "called by two threads at the same time"
        replies = [conversation[-1]["content"] for conversation in conversations]
        self.calls.append(replies)
        self.threads.append(threading.current_thread())
        try:
            while len(self.calls) == 1 and len(serial_calls(self)._waiting) <= self.others:
                time.sleep(0.001)
            if "bad" in replies and self.error is not None:
                raise self.error
            return Scores.from_rewards([np.nan if reply == "none" else len(reply) for reply in replies])
        finally:
            self.at_work.release()

    def score_all(self, *replies):
        """Score the first reply, and the others while it is scored; return the outcome of each."""
        calls = serial_calls(self)

        def of(reply):
            try:
                return calls.try_score([chat("q", reply)]).rewards_or_none()[0]
            except BaseException as error:
                return error

        with ThreadPoolExecutor(len(replies)) as threads:
            first = threads.submit(of, replies[0])
            while not self.calls:
                time.sleep(0.001)
            others = [threads.submit(of, reply) for reply in replies[1:]]
            return [each.result() for each in [first, *others]]


def test_calls_that_wait_for_a_scorer_are_merged_and_get_their_own_rows():
    scorer = Turns(6)
    assert scorer.score_all("first", "a", "bb", "none", "dddd", "eeeee", "ffffff") == [5, 1, 2, None, 4, 5, 6]
    assert [len(call) for call in scorer.calls] == [1, 6]
    assert serial_calls(scorer)._waiting == []


def test_a_call_that_waits_for_none_is_scored_in_its_thread():
    scorer = Turns(0)
    with pytest.raises(KeyError) as caught:
        serial_calls(Turns(0, KeyError("x"))).try_score([chat("q", "bad")])
    assert str(caught.value.__notes__).count("raised by the scorer Turns") == 1
    serial_calls(scorer).try_score([chat("q", "a")])
    assert scorer.threads == [threading.current_thread()]


def test_an_error_is_raised_only_in_the_call_that_caused_it():
    scorer = Turns(3, OSError("down"))
    first, good, bad, last = scorer.score_all("first", "a", "bad", "cc")
    assert [first, good, last] == [5, 1, 2]
    assert isinstance(bad, OSError)


def test_a_caller_that_is_interrupted_leaves_the_others_to_themselves():
    scorer = Turns(4, KeyboardInterrupt())
    outcomes = scorer.score_all("first", "a", "bad", "cc", "ddd")
    assert isinstance(outcomes[2], KeyboardInterrupt)
    ended = [outcome for outcome in outcomes if isinstance(outcome, KeyboardInterrupt)]
    assert 1 <= len(ended) <= 4  # callers that scored the bad row beside theirs
    assert [outcome for outcome in outcomes if outcome not in ended] == [
        len(reply)
        for reply, outcome in zip(("first", "a", "bad", "cc", "ddd"), outcomes, strict=True)
        if outcome not in ended
    ]


def test_a_scorer_that_calls_itself_does_not_score_its_own_call_again():
    class Twice(Turns):
        def score(self, conversations, prompts=None):
            self.calls.append([conversation[-1]["content"] for conversation in conversations])
            if len(self.calls) > 1:
                return Scores.from_rewards([1.0] * len(conversations))
            return serial_calls(self).try_score([chat("q", "inner")])

    scorer = Twice(0)
    assert serial_calls(scorer).try_score([chat("q", "outer")]).rewards.tolist() == [1.0]
    assert scorer.calls == [["outer"], ["inner"]]


def test_calls_of_a_relative_scorer_are_not_merged():
    scorer = Turns(3, relative=True)
    assert scorer.score_all("first", "a", "bb", "ccc") == [5, 1, 2, 3]
    assert [len(call) for call in scorer.calls] == [1] * 4


def test_a_merged_call_has_about_as_many_tokens_as_a_batch():
    scorer = Turns(6, max_num_batched_tokens=10)
    replies = [letter * 14 for letter in "abcdef"]
    assert scorer.score_all("first", *replies) == [5] + [14] * 6
    assert [len(call) for call in scorer.calls] == [1, 2, 2, 2]


def test_models_on_one_device_take_turns():
    made = Provenance("model", "m", device="cuda:0")
    first, second, other = (
        serial_calls(Turns(0, executor=None, provenance=each)) for each in (made, made, replace(made, device="cuda:1"))
    )
    assert first._lock is second._lock
    assert first._lock is not other._lock


# --- coroutines that wait for their turn


def awaited(scorer, sizes):
    """Return coroutines that score this many conversations each."""
    return [scorer.score_async([chat("q", "x" * (k + 1))] * size) for k, size in enumerate(sizes)]


def test_coroutines_of_several_loops_share_batches():
    scorer = MicroBatchingScorer(gym_rm.load_scorer(length))

    async def ask():
        return [scores.rewards[0] for scores in await asyncio.gather(*awaited(scorer, [1] * 20))]

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: asyncio.run(ask()), range(4)))
    assert results == [[k + 1 for k in range(20)]] * 4
    scorer.close()
