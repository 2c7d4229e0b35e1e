"""Send and receive: when replies are scored, together with which, in which thread, and what failures leave behind."""

import threading
import time

import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence

from gym_rm import ActionError, Scores, ScoringError
from gym_rm.scorer import NeverCopied
from tests.envs.environments import make, prompt, say_more, until_long

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
