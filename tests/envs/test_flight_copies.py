"""What becomes of replies in flight when an environment is closed, copied, pickled, forked or interrupted."""

import copy
import gc
import multiprocessing
import os
import pickle
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from gymnasium.error import ClosedEnvironmentError

from gym_rm import ActionError, Scores
from gym_rm.envs.flights import Flight, Landing, Outcome
from tests.envs.environments import make, prompt
from tests.envs.test_flights import SOON, apart, received, send, started, until_ready


def test_close_does_not_wait_for_what_runs():
    envs, scorer = started(2)
    send(envs, {0: "wait"})
    assert scorer.begun.wait(SOON)
    send(envs, {1: "never"})
    begin = time.monotonic()
    envs.close()
    assert time.monotonic() - begin < 1
    assert not envs.in_flight.any()
    with pytest.raises(ClosedEnvironmentError):
        envs.recv()
    scorer.go.set()
    scorer.threads[0].join(SOON)
    assert not scorer.threads[0].is_alive()
    assert scorer.calls == [["wait"]]


@pytest.mark.parametrize("close", [True, False])
def test_nothing_keeps_an_environment_that_was_in_flight(close):
    envs, scorer = started(2)
    send(envs, {0: "wait"})
    assert scorer.begun.wait(SOON)
    alive = weakref.ref(envs.unwrapped)
    if close:
        envs.close()
    del envs
    gc.collect()
    assert alive() is None
    scorer.go.set()
    scorer.threads[0].join(SOON)
    assert not scorer.threads[0].is_alive()


def test_a_copy_receives_what_was_in_flight_and_ends_by_itself():
    envs, scorer = started(2)
    apart(scorer, {0: "x", 1: "wait"}, envs)
    until_ready(envs, [0])
    twin, third = copy.deepcopy(envs), copy.deepcopy(envs)
    third.cancel()
    third.close()
    scorer.go.set()
    assert received(envs, 2) == received(twin, 2) == {0: 1, 1: 4}
    envs.close()
    twin.send(["aa", "b"])
    assert received(twin, 2) == {0: 2, 1: 1}


def test_tools_are_called_once_if_the_score_of_another_row_raises():
    called = []

    def note(text: str) -> str:
        """Note a text.

        Args:
            text: what to note.
        """
        called.append(text)
        return text

    def end(conversations, prompts, scores):
        return [None] * len(conversations)

    envs, scorer = started(4, tools=[note], reward_on="end", respond=end)
    function = {"name": "note", "arguments": {"text": "a"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    send(envs, {3: "wait"})
    assert scorer.begun.wait(SOON)
    for row, reply in {0: call, 1: "raise", 2: "xx"}.items():  # which are scored together
        send(envs, {row: reply})
    scorer.go.set()
    with pytest.raises(ZeroDivisionError):
        received(envs, 4)
    assert received(envs, 3).keys() == {0, 2, 3}
    assert called == ["a"]


def test_who_waits_for_what_is_cancelled_gets_an_error():
    envs, scorer = started(2)
    send(envs, {0: "wait"})
    assert scorer.begun.wait(SOON)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(received, envs)
        time.sleep(0.05)
        envs.close()
        with pytest.raises(ActionError, match=r"^what was sent to environments \[0\] was cancelled\."):
            waiting.result(SOON)
    scorer.go.set()


class Later:
    """Reward function in processes: `slow` replies take a while, the first time in each process."""

    def __init__(self):
        self.calls = []

    def __call__(self, conversations):
        self.calls.append([conversation[-1]["content"] for conversation in conversations])
        if self.calls == [["slow"]]:
            time.sleep(0.3)
        return [len(conversation[-1]["content"]) for conversation in conversations]


def in_flight_in_a_thread():
    """Environments with a row that is being scored and one that waits."""
    later = Later()
    envs = make(2, reward_model=later, prompts=[prompt(0)]).unwrapped
    envs.reset(seed=0)
    send(envs, {0: "slow"})
    while not later.calls:
        time.sleep(0.001)
    send(envs, {1: "x"})
    return envs


def test_an_environment_that_is_pickled_in_flight_is_scored_by_its_copy():
    envs = in_flight_in_a_thread()
    twin = pickle.loads(pickle.dumps(envs))
    assert received(twin, 2) == received(envs, 2) == {0: 4, 1: 1}


def receive_into(envs, queue):
    queue.put(received(envs, 2))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system has no fork")
def test_a_fork_scores_itself_what_was_in_flight():
    envs = in_flight_in_a_thread()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=receive_into, args=(envs, queue))
    process.start()
    try:
        assert queue.get(timeout=SOON) == received(envs, 2) == {0: 4, 1: 1}
    finally:
        process.kill()
        process.join()


class LandsInBetween(Flight):
    """Flight whose outcome comes just after the first look at it."""

    @property
    def is_ready(self):
        seen = super().is_ready
        self.landing.outcome = Outcome({}, Scores.from_rewards([]), (), {})
        return seen


def test_an_outcome_that_comes_between_two_looks_is_received():
    envs, _ = started(2)
    flight = LandsInBetween((0,), landing=Landing(put=os.getpid()))
    assert envs.unwrapped._flights.wait([flight], 1, SOON) == [flight]
