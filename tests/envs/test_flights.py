"""Send and receive: when replies are scored, together with which, in which thread, and what failures leave behind."""

import copy
import gc
import multiprocessing
import os
import pickle
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm import ActionError, Scores, ScoringError
from gym_rm.envs.flights import Flight, Landing, Outcome
from gym_rm.envs.infos import infos_of_row
from gym_rm.envs.vector import RewardVectorEnv
from gym_rm.scorer import NeverCopied
from gym_rm.testing import check_vector_env
from tests.envs.environments import PROMPTS, each_mode, make, prompt, say_more, until_long

SOON = 20  # seconds, for what takes milliseconds


class Waits(NeverCopied):
    """Scorer that rewards the length of a reply. A call with `wait` in a reply ends when `go` is set."""

    def __init__(self, max_concurrent_calls=1, *, relative=False, by_route=False):
        self.max_concurrent_calls = max_concurrent_calls
        self.relative = relative
        self.route_of = (lambda prompt: prompt.prompt_id) if by_route else None
        self.go, self.begun = threading.Event(), threading.Event()
        self.calls, self.threads = [], []
        self.num_running = self.most_running = 0

    def score(self, conversations, prompts=None):
        replies = [conversation[-1]["content"] for conversation in conversations]
        self.calls.append(replies)
        self.threads.append(threading.current_thread())
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if any("wait" in reply for reply in replies):
                self.begun.set()
                assert self.go.wait(SOON)
            if any("raise" in reply for reply in replies):
                raise ZeroDivisionError("asked to raise")
            if any("exit" in reply for reply in replies):
                raise SystemExit(3)
        finally:
            self.num_running -= 1
        scores = Scores.from_rewards([np.nan if "FAIL" in reply else len(reply) for reply in replies])
        if scores.failed_rows:
            raise ScoringError(scores)
        return scores


def started(num_envs=2, scorer=None, **options):
    """Environments with a reward of each reply's length, and their scorer."""
    scorer = scorer or Waits()
    envs = make(num_envs, **{"reward_model": scorer, "prompts": [prompt(0), prompt(1), prompt(2)], **options})
    envs.reset(seed=0)
    return envs, scorer


def send(envs, replies):
    """Send the replies of some rows."""
    rows = np.isin(np.arange(envs.num_envs), list(replies))
    envs.send([replies.get(row, "") for row in range(envs.num_envs)], rows=rows)


def received(envs, min_rows=1):
    """Return the rewards of the rows that are received."""
    _, rewards, *_, infos = envs.recv(min_rows, timeout=SOON)
    return {row: rewards[row] for row in np.flatnonzero(infos["rows"]).tolist()}


def until_ready(envs, rows):
    deadline = time.monotonic() + SOON
    while np.flatnonzero(envs.ready).tolist() != rows:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def apart(scorer, replies, envs):
    """Send rows in separate calls of the scorer, one after the other."""
    for row, reply in replies.items():
        count = len(scorer.calls)
        send(envs, {row: reply})
        deadline = time.monotonic() + SOON
        while len(scorer.calls) == count:
            assert time.monotonic() < deadline
            time.sleep(0.001)


# --- order and calls


def test_send_returns_at_once_and_a_look_finds_nothing():
    envs, scorer = started()
    envs.send(["wait", "waits"])
    assert scorer.begun.wait(SOON)
    observations, rewards, terminations, truncations, infos = envs.recv(2, timeout=0)
    assert not rewards.any()
    assert not (terminations | truncations).any()
    assert infos.keys() == {"rows", "_rows"}
    assert not infos["rows"].any()
    assert [len(each) for each in observations] == [1, 1]
    assert envs.in_flight.all()
    scorer.go.set()
    assert received(envs, 2) == {0: 4, 1: 5}
    assert not envs.in_flight.any()


def test_a_limit_of_seconds_returns_what_is_ready():
    envs, scorer = started(2, Waits(2))
    apart(scorer, {0: "wait", 1: "x"}, envs)
    _, rewards, *_, infos = envs.recv(2, timeout=0.2)
    assert (rewards.tolist(), infos["rows"].tolist()) == ([0, 1], [False, True])
    scorer.go.set()
    assert received(envs) == {0: 4}


def test_rows_come_in_the_order_in_which_they_are_ready():
    envs, scorer = started(3, Waits(3))
    apart(scorer, {0: "wait", 1: "x", 2: "yy"}, envs)
    until_ready(envs, [1, 2])
    assert received(envs) == {1: 1, 2: 2}
    scorer.go.set()
    assert received(envs) == {0: 4}
    assert scorer.most_running >= 2


def test_rows_that_are_sent_one_after_the_other_are_scored_in_one_call():
    envs, scorer = started(8)
    send(envs, {0: "wait"})
    assert scorer.begun.wait(SOON)
    for row in range(1, 8):
        send(envs, {row: "x" * row})
    scorer.go.set()
    assert received(envs, 8) == {0: 4, **{row: row for row in range(1, 8)}}
    assert [len(call) for call in scorer.calls] == [1, 7]


def test_a_call_has_no_more_tokens_than_the_budget_of_the_scorer():
    scorer = Waits()
    scorer.max_num_batched_tokens = 100
    envs, _ = started(3, scorer)
    for row in range(3):
        send(envs, {row: "x" * 400})
    received(envs, 3)
    assert [len(call) for call in scorer.calls] == [1, 1, 1]


@pytest.mark.parametrize("max_calls", [0, 1])
def test_a_scorer_with_no_concurrent_calls_runs_in_the_thread_that_receives(max_calls):
    envs, scorer = started(2, Waits(max_calls))
    envs.send(["a", "bb"])
    assert received(envs, 2) == {0: 1, 1: 2}
    assert (scorer.threads == [threading.current_thread()]) == (max_calls == 0)


def test_a_step_of_other_rows_waits_for_a_scorer_of_one_call_and_changes_nothing_in_flight():
    envs, scorer = started(2)
    send(envs, {0: "wait"})
    assert scorer.begun.wait(SOON)
    threading.Timer(0.05, scorer.go.set).start()
    assert envs.step(["", "yy"], rows=np.array([False, True]))[1].tolist() == [0, 2]
    assert envs.in_flight.tolist() == [True, False]
    assert received(envs) == {0: 4}
    assert scorer.most_running == 1


def test_two_environments_never_call_a_scorer_of_one_call_at_a_time():
    envs, scorer = started(2)
    others, _ = started(2, scorer)
    send(envs, {0: "wait"})
    assert scorer.begun.wait(SOON)
    threading.Timer(0.05, scorer.go.set).start()
    others.step(["a", "b"])
    assert received(envs) == {0: 4}
    assert scorer.most_running == 1


def test_routes_do_not_wait_for_each_other():
    envs, scorer = started(3, Waits(3, by_route=True))
    rows = {infos: row for row, infos in enumerate(envs.reset(seed=0)[1]["prompt_id"])}
    assert len(rows) > 1
    slow, *others = rows.values()
    send(envs, {slow: "wait"})
    assert scorer.begun.wait(SOON)
    send(envs, dict.fromkeys(others, "x"))
    assert received(envs, len(others)) == dict.fromkeys(others, 1)
    scorer.go.set()
    assert received(envs) == {slow: 4}


# --- groups


def test_a_comparing_scorer_waits_for_the_whole_group():
    envs, scorer = started(4, Waits(relative=True), group_size=2)
    send(envs, {0: "a", 3: "dddd"})
    assert not scorer.calls
    send(envs, {1: "bb"})
    assert received(envs, 2) == {0: 1, 1: 2}
    assert scorer.calls == [["a", "bb"]]
    with pytest.raises(ActionError, match=r"environments \[3\] wait for the other replies of their group"):
        envs.recv()
    send(envs, {2: "ccc"})
    assert received(envs, 2) == {2: 3, 3: 4}


@pytest.mark.parametrize("max_calls", [0, 1])
def test_an_incomplete_group_is_not_scored_by_a_look(max_calls):
    envs, scorer = started(2, Waits(max_calls, relative=True), group_size=2)
    send(envs, {0: "a"})
    assert not envs.recv(timeout=0)[-1]["rows"].any()
    assert not scorer.calls
    envs.cancel()
    assert envs.step(["a", "b"])[1].tolist() == [1, 1]


@pytest.mark.parametrize("play", ["step", "send"])
def test_groups_with_one_prompt_never_meet_in_a_call_of_a_comparing_scorer(play):
    scorer = Waits(relative=True)
    envs, _ = started(4, scorer, prompts=[prompt(0)], group_size=2)
    replies = ["a", "bb", "ccc", "dddd"]
    if play == "step":
        assert envs.step(replies)[1].tolist() == [1, 2, 3, 4]
    else:
        envs.send(replies)
        assert received(envs, 4) == {0: 1, 1: 2, 2: 3, 3: 4}
    assert sorted(scorer.calls) == [["a", "bb"], ["ccc", "dddd"]]


def test_a_group_that_fails_is_sent_again_whole_and_the_others_are_received():
    envs, _ = started(4, Waits(relative=True), group_size=2)
    envs.send(["FAIL", "b", "c", "d"])
    with pytest.raises(ScoringError) as failure:
        envs.recv(4)
    assert failure.value.rows == (0,)
    assert envs.in_flight.tolist() == [False, False, True, True]
    assert received(envs, 2) == {2: 1, 3: 1}
    send(envs, {0: "aa", 1: "b"})
    assert received(envs, 2) == {0: 2, 1: 1}


# --- failures


@pytest.mark.parametrize("max_calls", [0, 1, 3])
def test_rows_without_a_score_are_an_error_that_keeps_the_others(max_calls):
    envs, _ = started(3, Waits(max_calls))
    before = envs.state.episodes
    envs.send(["a", "FAIL", "ccc"])
    with pytest.raises(ScoringError, match="row 1") as failure:
        envs.recv(3)
    assert failure.value.rows == (1,)
    assert failure.value.__notes__ == ["environments [1] can be sent again; recv() returns the others in flight."]
    assert envs.in_flight.tolist() == [True, False, True]
    assert envs.state.episodes is before
    assert received(envs, 2) == {0: 1, 2: 3}
    send(envs, {1: "bb"})
    assert received(envs) == {1: 2}


def test_a_fallback_reward_is_received_as_from_a_step():
    results = []
    for play in ("step", "send"):
        envs, _ = started(2, fallback_reward=-1.0)
        if play == "send":
            envs.send(["a", "FAIL"])
            results.append(envs.recv(2))
            del results[-1][-1]["rows"], results[-1][-1]["_rows"]
        else:
            results.append(envs.step(["a", "FAIL"]))
    assert results[0][1].tolist() == [1, -1]
    assert data_equivalence(*results, exact=True)


@pytest.mark.parametrize(("word", "error"), [("raise", ZeroDivisionError), ("exit", RuntimeError)])
def test_an_exception_reaches_only_the_flight_that_caused_it(word, error):
    envs, scorer = started(4, fallback_reward=0.0)
    send(envs, {0: "wait"})
    assert scorer.begun.wait(SOON)
    for row, reply in {1: "x", 2: word, 3: "yy"}.items():
        send(envs, {row: reply})
    scorer.go.set()
    with pytest.raises(error):
        envs.recv(4)
    assert received(envs, 3) == {0: 4, 1: 1, 3: 2}
    send(envs, {2: "zzz"})
    assert received(envs) == {2: 3}


def test_cancel_takes_back_what_runs_and_what_waits():
    envs, scorer = started(2)
    send(envs, {0: "wait"})
    assert scorer.begun.wait(SOON)
    send(envs, {1: "never"})
    envs.cancel()
    scorer.go.set()
    assert envs.step(["a", "b"])[1].tolist() == [1, 1]
    assert scorer.calls == [["wait"], ["a", "b"]]


# --- the parts of an environment


def test_the_responder_is_asked_in_the_threads():
    threads = []

    def respond(conversations, prompts, scores):
        threads.append((threading.current_thread(), scores.rewards.tolist()))
        return ["more?"] * len(conversations)

    envs, _ = started(2, respond=respond)
    envs.send(["a", "bb"])
    observations, *_ = envs.recv(2)
    assert [each[-1]["content"] for each in observations] == ["more?", "more?"]
    assert threads[0][0] is not threading.current_thread()
    assert threads[0][1] == [1, 2]


def test_a_tool_is_executed_once_per_call_that_was_sent():
    executed = []

    def note(text: str) -> str:
        executed.append(text)
        return text

    envs, _ = started(2, tools=[note], respond=say_more)
    call = '<tool_call>{"name": "note", "arguments": {"text": "a"}}</tool_call>'
    envs.send([call, call.replace('"a"', '"b"')])
    until_ready(envs, [0, 1])
    assert sorted(executed) == ["a", "b"]
    observations, *_, infos = envs.recv(2)
    assert [each[-1]["content"] for each in observations] == ["a", "b"]
    assert infos["tool_calls"].tolist() == [1, 1]
    assert len(executed) == 2


def test_only_ended_episodes_are_scored_with_reward_on_end():
    envs, scorer = started(2, prompts=[prompt(0, "why?")], reward_on="end", respond=until_long)
    envs.send(["x", "long"])
    _, rewards, terminations, *_ = envs.recv(2)
    assert (rewards.tolist(), terminations.tolist()) == ([0, 4], [False, True])
    assert scorer.calls == [["long"]]


def test_transcripts_are_those_of_the_rows_that_came(capsys):
    envs, scorer = started(2, Waits(2), render_mode="human")
    capsys.readouterr()
    apart(scorer, {0: "wait", 1: "mine"}, envs)
    received(envs)
    printed = capsys.readouterr().out
    assert "environment 1" in printed
    assert "environment 0" not in printed
    scorer.go.set()
    received(envs)
    assert "environment 0" in capsys.readouterr().out


# --- close and copies


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


# --- against plain steps


class NowAndThen:
    """Scorer that waits up to 3 ms, and fails or raises in some calls; a conversation that failed may succeed later."""

    def __init__(self, seed, max_concurrent_calls=1, chance=0.15, *, relative=False):
        self.max_concurrent_calls, self.relative = max_concurrent_calls, relative
        self.random, self.chance = np.random.default_rng(seed), chance

    def score(self, conversations, prompts=None):
        time.sleep(self.random.random() * 0.003 * (self.chance > 0))
        if self.random.random() < self.chance / 3:
            raise ConnectionError("now and then")
        failed = self.random.random(len(conversations)) < self.chance
        lengths = np.array([sum(len(m["content"]) for m in each) for each in conversations]) / 7
        odd = [len(each[-1]["content"]) % 2 == 1 for each in conversations]
        infos = {
            "odd": [each or None for each in odd],
            "said": [each[-1]["content"] for each in conversations],
        }
        scores = Scores.from_rewards(np.where(failed, np.nan, lengths), components={"length": lengths}, infos=infos)
        if scores.failed_rows:
            raise ScoringError(scores)
        return scores


class Patient(RewardVectorEnv):
    """Environment whose plain steps are repeated until nothing fails."""

    def step(self, actions, *, rows=None):
        while True:
            try:
                return super().step(actions, rows=rows)
            except (ScoringError, ConnectionError):
                continue

    def recv(self, min_rows=1, timeout=None):
        flying = self.in_flight
        try:
            return super().recv(min_rows, timeout)
        except ConnectionError:  # its rows are sent again, as those without a score
            landed = np.flatnonzero(flying & ~self.in_flight).tolist()
            failed = Scores.from_rewards([np.nan] * len(landed)).mark_failures()
            raise ScoringError(failed.scatter(landed, self.num_envs)) from None


@each_mode
@pytest.mark.parametrize(
    "options",
    [{}, {"group_size": 2}, {"tools": ["calculator"]}, {"reward_on": "end"}, {"group_size": 2, "relative": True}],
    ids=str,
)
def test_an_environment_whose_scorer_fails_now_and_then_passes_check_vector_env(mode, options):
    chosen = {name: value for name, value in options.items() if name != "relative"}
    for seed in range(3):
        scorer = NowAndThen(seed, max_concurrent_calls=seed, relative="relative" in options)
        envs = Patient(4, reward_model=scorer, prompts=PROMPTS, autoreset_mode=AutoresetMode(mode), **chosen)
        check_vector_env(envs, seed=seed)
        envs.close()


def result_of(row, observations, *columns, infos):
    own = {name: value for name, value in infos_of_row(infos, row).items() if name != "rows"}
    return observations[row], *(column[row].item() for column in columns), own


def play(envs, mode, replies, seed, random=None):
    """Return what each row gets, from steps, or from sending and receiving rows in a random order."""
    size, steps = envs.num_envs, len(replies)
    *shown, infos = envs.reset(seed=seed)
    histories = [[result_of(row, *shown, infos=infos)] for row in range(size)]
    turns, nobody = np.zeros(size, dtype=int), np.zeros(size, dtype=bool)
    while turns.min() < steps:
        flying = envs.in_flight if random else nobody
        free = np.flatnonzero(~flying & (turns < steps))
        if random and len(free) and (not flying.any() or random.random() < 0.6):
            chosen = random.sample(free.tolist(), random.randint(1, len(free)))
            send(envs, {row: replies[turns[row]][row] for row in chosen})
            continue
        try:
            if random:
                limit = random.choice([None, 0, 0.002])
                *step, infos = envs.recv(random.randint(1, int(flying.sum())), limit)
            else:
                *step, infos = envs.step(replies[turns[0]])
        except (ScoringError, ConnectionError):
            continue
        came = infos["rows"] if random else ~nobody
        over = came & (step[2] | step[3])
        for row in np.flatnonzero(came):
            histories[row].append(result_of(row, *step, infos=infos))
        if mode == "Disabled" and over.any():
            *shown, infos = envs.reset(options={"reset_mask": over.copy()})
            for row in np.flatnonzero(over):
                histories[row].append(result_of(row, *shown, infos=infos))
        turns += came
    return histories


@each_mode
@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 100),
    max_calls=st.integers(0, 3),
    max_turns=st.sampled_from([None, 1, 2]),
    reward_on=st.sampled_from(["turn", "end"]),
    respond=st.sampled_from([None, say_more, until_long]),
    replies=st.lists(st.lists(st.text("ab é", max_size=6), min_size=3, max_size=3), min_size=1, max_size=6),
)
def test_rows_in_any_order_with_delays_and_failures_equal_sync_vector_env(
    mode, seed, max_calls, max_turns, reward_on, respond, replies
):
    options = {"prompts": PROMPTS, "max_turns": max_turns, "reward_on": reward_on, "respond": respond}
    sync = make(
        3,
        reward_model=NowAndThen(0, chance=0),
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode(mode)},
        **options,
    )
    native = make(3, reward_model=NowAndThen(seed, max_calls), autoreset_mode=mode, **options)
    found, expected = play(native, mode, replies, seed, Random(seed)), play(sync, mode, replies, seed)
    assert data_equivalence(found, expected, exact=True)
    native.close()
