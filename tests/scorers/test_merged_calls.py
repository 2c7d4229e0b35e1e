"""Requests that wait for a function are answered together, in threads."""

import threading
from concurrent.futures import CancelledError, wait

import pytest

from gym_rm.scorers.batching import ScoreRequest
from gym_rm.scorers.merged_calls import MergedCalls


class Job(ScoreRequest):
    def __init__(self, name):
        super().__init__([], None)
        object.__setattr__(self, "name", name)


class Gated:
    """Calls that block until `gate` is set; `begun` counts them, and `calls` has their jobs."""

    def __init__(self, **options):
        self.begun, self.gate = threading.Semaphore(0), threading.Event()
        self.calls, self.threads = [], set()
        self.merged = MergedCalls(
            self.answer, lambda job: 1, **{"max_size": 1, "max_wait": 0.0, "name": "Gated", **options}
        )

    def answer(self, jobs):
        self.calls.append([job.name for job in jobs])
        self.threads.add(threading.current_thread())
        self.begun.release()
        assert self.gate.wait(timeout=30)
        for job in jobs:
            job.future.set_result(job.name)

    def put(self, *names):
        jobs = [Job(name) for name in names]
        for job in jobs:
            self.merged.put(job)
        return jobs


def test_calls_run_at_the_same_time_and_never_more_than_max_calls():
    gated = Gated(max_calls=3)
    jobs = gated.put(*"abcde")
    for _ in range(3):
        assert gated.begun.acquire(timeout=30)
    assert not gated.begun.acquire(timeout=0.05)
    gated.gate.set()
    gated.merged.close()
    assert [job.future.result() for job in jobs] == [*"abcde"]
    assert len(gated.threads) == 3


def test_requests_that_wait_for_a_busy_thread_are_called_together():
    gated = Gated(max_size=3)
    gated.put("first")
    assert gated.begun.acquire(timeout=30)
    gated.put(*"abcd")
    gated.gate.set()
    gated.merged.close()
    assert gated.calls == [["first"], ["a", "b", "c"], ["d"]]


def test_a_thread_starts_only_when_all_others_are_in_a_call():
    gated = Gated(max_calls=8)
    gated.gate.set()
    for name in "abcdefgh":
        gated.put(name)[0].future.result(timeout=30)
        wait_until_free(gated.merged)
    gated.merged.close()
    assert len(gated.threads) == 1


def wait_until_free(calls):
    while all(calls._threads.values()):
        pass


def test_a_request_that_was_cancelled_or_put_twice_is_left_out():
    gated = Gated(max_size=8)
    (first,) = gated.put("first")
    assert gated.begun.acquire(timeout=30)
    cancelled, twice, last = gated.put("cancelled", "twice", "last")
    assert cancelled.future.cancel()
    for job in (cancelled, twice, first):
        gated.merged.put(job)
    gated.gate.set()
    gated.merged.close()
    assert gated.calls == [["first"], ["twice", "last"]]
    assert wait([cancelled.future, last.future], timeout=30).not_done == set()


def test_a_close_that_does_not_wait_cancels_what_waits_and_the_threads_end_after_their_call():
    gated = Gated(max_calls=2)
    jobs = gated.put(*"abc")
    for _ in range(2):
        assert gated.begun.acquire(timeout=30)
    gated.merged.close(wait=False)
    with pytest.raises(CancelledError):
        jobs[2].future.result(timeout=30)
    with pytest.raises(RuntimeError, match="this Gated is closed"):
        gated.put("d")
    gated.gate.set()
    for thread in gated.threads:
        thread.join(timeout=30)
    assert [job.future.result() for job in jobs[:2]] == ["a", "b"]


def test_a_close_by_a_call_does_not_wait_for_itself():
    closed = threading.Event()

    def close(jobs):
        calls.close()
        closed.set()

    calls = MergedCalls(close, lambda job: 1, max_size=1, max_wait=0.0, name="Closing")
    calls.put(Job("a"))
    assert closed.wait(timeout=30)
