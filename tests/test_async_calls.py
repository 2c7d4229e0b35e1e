"""Calls of coroutines from plain code: order, limits, failures, interrupts, and what is left behind."""

import asyncio
import concurrent.futures
import functools
import itertools
import os
import pickle
import signal
import threading
import time

import pytest

from gym_rm import ConfigError
from gym_rm.async_calls import AsyncCalls


@pytest.fixture
def calls():
    calls = AsyncCalls(max_concurrency=3, timeout=0.1)
    yield calls
    calls.close()


async def value(x, seconds=0.0):
    await asyncio.sleep(seconds)
    return x


async def forever(seen):
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        seen.append("cancelled")
        raise


def test_results_are_in_order_and_not_too_many_calls_run_at_a_time(calls):
    running, most = set(), []

    async def call(index):
        running.add(index)
        most.append(len(running))
        await asyncio.sleep(0.01 if index % 2 else 0.0)
        running.discard(index)
        return index

    assert calls.run([lambda index=index: call(index) for index in range(10)]) == list(range(10))
    assert max(most) == 3
    assert calls.run([]) == []


def test_a_call_that_fails_gives_its_exception_and_the_others_their_results(calls):
    async def fails(error):
        raise error

    async def cancels_itself():
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    found = calls.run(
        [
            lambda: value(1),
            lambda: fails(KeyError("x")),
            lambda: fails(SystemExit(2)),
            cancels_itself,
            lambda: 5,
            lambda: value(2),
        ]
    )
    assert [found[0], found[-1]] == [1, 2]
    assert [repr(each) for each in found[1:4]] == [
        "KeyError('x')",
        "RuntimeError('it raised SystemExit: 2')",
        "RuntimeError('it was cancelled')",
    ]
    assert isinstance(found[4], TypeError)


def test_a_call_over_its_time_is_cancelled(calls):
    seen = []
    slow, fast = calls.run([lambda: forever(seen), lambda: value(1)])
    assert (str(slow), fast, seen) == ("no result within 0.1 seconds", 1, ["cancelled"])
    assert isinstance(slow, TimeoutError)


def test_a_call_that_refuses_to_end_is_left_behind(calls, monkeypatch):
    monkeypatch.setattr("gym_rm.async_calls.GRACE", 0.05)
    free, ended = threading.Event(), threading.Event()

    async def stubborn():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.to_thread(free.wait, 60)
            ended.set()

    late, fine = calls.run([stubborn, lambda: value(1)])
    assert (type(late), fine) == (TimeoutError, 1)
    assert not ended.is_set()
    free.set()
    assert ended.wait(60)


def test_a_call_that_never_awaits_does_not_block_the_caller(monkeypatch):
    monkeypatch.setattr("gym_rm.async_calls.GRACE", 0.05)
    calls, free = AsyncCalls(max_concurrency=1, timeout=0.1), threading.Event()

    async def blocks():
        free.wait(30)

    start = time.monotonic()
    found = calls.run([blocks, *[lambda: value(2, 0.01)] * 1000])
    assert time.monotonic() - start < 5  # not the time of 1,000 calls
    free.set()
    assert all(isinstance(each, TimeoutError) and "blocks the event loop" in str(each) for each in found)
    assert calls.run([lambda: value(3)]) == [3]


def in_threads(*functions):
    """Return the results of functions that run at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(functions)) as threads:
        return [each.result() for each in [threads.submit(function) for function in functions]]


def test_not_too_many_calls_of_several_runs_are_awaited_at_a_time(calls):
    running, most = set(), []

    async def call(index):
        running.add(index)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.discard(index)
        return index

    runs = [[functools.partial(call, index) for index in range(start, start + 8)] for start in (0, 8, 16)]
    found = in_threads(*(functools.partial(calls.run, run) for run in runs))
    assert [*itertools.chain(*found)] == [*range(24)]
    assert max(most) == 3


def test_a_run_that_waits_for_another_is_not_blocked(monkeypatch):
    monkeypatch.setattr("gym_rm.async_calls.GRACE", 0.01)
    calls, begun = AsyncCalls(max_concurrency=1, timeout=0.5), threading.Event()

    async def slow():
        begun.set()
        return await value(1, 0.1)

    def second():
        assert begun.wait(60)
        return calls.run([lambda: value(2)])

    assert in_threads(lambda: calls.run([slow] * 8), second) == [[1] * 8, [2]]


def test_a_run_beside_one_that_blocks_is_late_too_and_not_closed(monkeypatch):
    monkeypatch.setattr("gym_rm.async_calls.GRACE", 0.2)
    calls, begun, free = AsyncCalls(timeout=0.1), threading.Event(), threading.Event()

    async def blocks():
        begun.set()
        free.wait(30)

    def first():
        found = calls.run([blocks])
        free.set()  # its loop ends, and cancels what else it has
        return found

    def second():
        assert begun.wait(60)
        return calls.run([lambda: value(1)])

    for (late,) in in_threads(first, second):
        assert isinstance(late, TimeoutError)
        assert "blocks the event loop" in str(late)
    assert calls.run([lambda: value(3)]) == [3]


def test_close_cancels_and_later_calls_raise(calls):
    seen, caught = [], []
    patient = AsyncCalls(timeout=None)
    started = threading.Event()

    async def call():
        started.set()
        await forever(seen)

    def caller():
        try:
            patient.run([call])
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=caller)
    thread.start()
    assert started.wait(60)
    patient.close()
    patient.close()
    thread.join(5)
    assert seen == ["cancelled"]
    assert caught == ["these AsyncCalls were closed while they ran."]
    with pytest.raises(RuntimeError, match="closed; make new ones"):
        patient.run([call])


def test_an_interrupt_cancels_the_calls(monkeypatch):
    calls, seen = AsyncCalls(timeout=None), []

    wait, waits = concurrent.futures.wait, threading.Event()
    monkeypatch.setattr(concurrent.futures, "wait", lambda *given: waits.set() or wait(*given))

    def interrupt_once(*_):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    async def call():
        await asyncio.to_thread(waits.wait, 60)
        try:
            while True:  # a signal just before the main thread waits for a lock does not wake it
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0.5)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    before = signal.signal(signal.SIGINT, interrupt_once)
    try:
        with pytest.raises(KeyboardInterrupt):
            calls.run([call])
        assert calls.run([lambda: value(1)]) == [1]
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["cancelled"]


def test_the_caller_may_be_in_an_event_loop_or_in_other_calls(calls):
    async def notebook():
        return calls.run([lambda: value(1)])

    async def nested():
        return calls.run([lambda: value(1)])

    assert asyncio.run(notebook()) == [1]
    (error,) = calls.run([nested])
    assert "waits for itself" in str(error)
    assert AsyncCalls().run([nested]) == [[1]]


def test_one_loop_serves_all_calls_and_every_copy_has_its_own(calls):
    async def loop():
        return asyncio.get_running_loop()

    (first,), (second,) = calls.run([loop]), calls.run([loop])
    assert first is second
    copy = pickle.loads(pickle.dumps(calls))
    assert (copy.max_concurrency, copy.timeout) == (3, 0.1)
    assert copy.run([loop]) != [first]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_gets_a_loop_of_its_own(calls):
    assert calls.run([lambda: value(1)]) == [1]
    child = os.fork()
    if child == 0:
        os._exit(0 if calls.run([lambda: value(2)]) == [2] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("options", [{"max_concurrency": 0}, {"timeout": 0}, {"timeout": "1"}])
def test_invalid_limits(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        AsyncCalls(**options)
