"""Scorers at a URL: real servers that are slow, busy, dead, wrong or malicious."""

import contextlib
import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

import gymnasium as gym
from conftest import assistant, user
from reward_servers import (
    FAST,
    RewardApp,
    bound,
    conversations,
    error,
    reward_of,
    rewards,
    scorer_at,
    serve,
    sigmoid,
    start_process,
    url_of,
)

from gym_rm import ConfigError, RemoteError, ScoringError, load_scorer
from gym_rm.testing import check_scorer
from tests.cli.command import runner


def test_a_remote_scorer_keeps_the_contract_of_scorers(url):
    with scorer_at(url) as scorer:
        check_scorer(scorer, atol=0.0)


@pytest.mark.parametrize(
    "bad", [[], "text", [{"role": "user"}], [user("x"), assistant(7)], [user("x"), {**assistant("y"), "z": {1}}]]
)
def test_a_conversation_that_cannot_be_sent_fails_alone(url, bad):
    good = conversations(2)
    with scorer_at(url) as scorer, pytest.raises(ScoringError) as raised:
        scorer.score([good[0], bad, good[1]])
    assert raised.value.rows == (1,)


def test_thinking_is_not_sent(app, url):
    given = [[user("x"), assistant(text)] for text in ("<think>ab</think>four", "<think>ab", "five")]
    with scorer_at(url, judged="answer", unfinished=-7.0) as scorer:
        scores = scorer.score(given)
    expected = rewards([[user("x"), assistant(text)] for text in ("four", "five")])
    assert scores.rewards.tolist() == [expected[0], -7.0, expected[1]]
    assert scores.infos["thinking_characters"][:2].tolist() == [2, 2]
    assert scores.provenance.settings["judged"] == "answer"


def test_requests_keep_the_limits_of_the_server(app, url):
    app.limits.update(max_body_bytes=2000, max_conversations=7)
    given = conversations(50)
    with scorer_at(url) as scorer:
        assert scorer.score(given).rewards.tolist() == rewards(given)
        with pytest.raises(ScoringError, match=r"row 1: the conversation has .* bytes, the server accepts"):
            scorer.score([given[0], [user("x" * 3000), assistant("y")]])
    sizes = [len(request["conversations"]) for _, _, request in app.requests]
    assert 1 < max(sizes) <= 7


def test_provenance_is_that_of_the_server_with_the_url_and_without_the_key(app):
    app.key = "secret"
    with serve(app) as url, scorer_at(url, key="secret") as scorer:
        made = scorer.score(conversations(1)).provenance
        shown = repr((scorer, made, scorer.options))
    assert (made.scorer, made.model, made.revision) == ("RemoteScorer", "fake", "sha256:1")
    assert made.settings["url"] == url
    assert made.settings["kind"] == "decoder"
    assert "secret" not in shown


def test_many_threads_share_a_scorer_within_the_bound_of_connections(app, url):
    app.delay = 0.005
    with scorer_at(url, max_connections=4) as scorer, ThreadPoolExecutor(24) as pool:
        calls = [pool.submit(scorer.score, conversations(3, start)) for start in range(40)]
        for start, call in enumerate(calls):
            assert call.result().rewards.tolist() == rewards(conversations(3, start))
    assert 1 < app.most_running <= 4


def test_a_pickled_scorer_and_a_fork_of_it_score_too(url):
    with scorer_at(url) as scorer:
        expected = scorer.score(conversations(2)).rewards.tolist()
        assert copy.deepcopy(scorer) is scorer
        other = pickle.loads(pickle.dumps(scorer))
        assert other.score(conversations(2)).rewards.tolist() == expected
        other.close()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            found = None
            with contextlib.suppress(BaseException):
                found = scorer.score(conversations(2)).rewards.tolist()
            os._exit(0 if found == expected else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert scorer.score(conversations(2)).rewards.tolist() == expected


@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(0, 400), max_size=40),
    failing=st.sets(st.integers(0, 39)),
    refused=st.sets(st.integers(0, 39), max_size=5),
    limits=st.tuples(st.integers(600, 3000), st.integers(1, 20)),
)
def test_scores_are_in_order_for_all_sizes_and_failures(shared_app, lengths, failing, refused, limits):
    app, url = shared_app
    app.limits.update(max_body_bytes=limits[0], max_conversations=limits[1])
    marks = ["FAIL" if row in failing else "REFUSE" if row in refused else "" for row in range(len(lengths))]
    app.refuse = lambda conversation: "refused" if "REFUSE" in conversation[-1]["content"] else None
    given = [
        [user("?"), assistant(f"{row} {mark} {'x' * size}")]
        for row, (size, mark) in enumerate(zip(lengths, marks, strict=True))
    ]
    with scorer_at(url) as scorer:
        try:
            scores = scorer.score(given)
        except ScoringError as failure:
            scores = failure.scores
    bad = [row for row, mark in enumerate(marks) if mark]
    too_large = [row for row, size in enumerate(lengths) if size + 100 > limits[0] - 256]
    assert set(bad) <= set(scores.failed_rows) <= {*bad, *too_large}
    for row in set(range(len(given))) - set(scores.failed_rows):
        assert scores.rewards[row] == reward_of(given[row])


@pytest.fixture(scope="module")
def shared_app():
    app = RewardApp()
    with serve(app) as url:
        yield app, url


def test_a_server_that_does_not_answer_is_an_error_with_its_url():
    with pytest.raises(RemoteError, match=r"no answer from http://127.0.0.1:\d+: .*Check that the server runs"):
        load_scorer(url_of(bound()), startup_timeout=0.3)


@pytest.mark.parametrize(
    "fault", [error(500, "oops"), error(502, "proxy"), (200, {}, b"<html>"), (204, {}, b""), "drop"]
)
def test_an_attempt_that_fails_is_repeated(app, url, fault):
    with scorer_at(url) as scorer:
        app.faults += [fault, fault]
        assert scorer.score(conversations(3)).rewards.tolist() == rewards(conversations(3))


def test_what_the_server_cannot_do_is_not_tried_again(app, url):
    with scorer_at(url) as scorer:
        app.always = error(501, "cannot score all turns")
        seen = len(app.requests)
        with pytest.raises(ConfigError, match=r"cannot do this .*cannot score all turns"):
            scorer.score(conversations(64), turns="all")
        assert len(app.requests) == seen + 1


def test_a_call_ends_at_its_deadline(app, url):
    with scorer_at(url, timeout=1.0) as scorer:
        app.always = "hang"
        with pytest.raises(RemoteError, match="timeout="):
            scorer.score(conversations(3))


def test_a_busy_server_is_asked_again_as_often_as_it_says_when(app, url):
    with scorer_at(url, max_retries=0) as scorer:
        app.faults += [error(429, "busy", **{"Retry-After": "0.05"})] * 2
        assert len(scorer.score(conversations(1))) == 1


def test_a_redirect_is_not_followed_with_the_key(app, url):
    other = RewardApp()
    app.key = "secret"
    with serve(other) as elsewhere, scorer_at(url, key="secret") as scorer:
        app.always = (307, {"Location": f"{elsewhere}/v1/rewards"}, b"")
        with pytest.raises(RemoteError, match=r"redirects to .*which is not followed"):
            scorer.score(conversations(1))
    assert not other.requests


def test_a_wrong_key_is_named_and_not_repeated(app, url, monkeypatch):
    app.key = "secret"
    for key in (None, "wrong"):
        with pytest.raises(ConfigError, match=r"refused the key .*pass key="):
            load_scorer(url, key=key, **FAST)
    monkeypatch.setenv("REWARD_KEY", "secret")
    with scorer_at(url, key="env:REWARD_KEY") as scorer:
        assert len(scorer.score(conversations(1))) == 1


def test_interrupting_a_call_stops_its_requests(app, url):
    def interrupt():
        deadline = time.monotonic() + 60
        seen = len(app.requests)
        while len(app.requests) == seen and time.monotonic() < deadline:
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with scorer_at(url) as scorer:
        app.always = "hang"
        threading.Thread(target=interrupt).start()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                scorer.score(conversations(1))
        finally:
            signal.signal(signal.SIGINT, before)
        app.always = None
        assert len(scorer.score(conversations(1))) == 1
        assert all(endpoint.open_requests == 0 for endpoint in scorer._client.endpoints)


def test_two_servers_share_the_work():
    apps = [RewardApp(delay=0.01), RewardApp(delay=0.01)]
    with serve(apps[0]) as one, serve(apps[1]) as other, scorer_at(f"{one},{other}", max_conversations=4) as scorer:
        assert scorer.score(conversations(100)).rewards.tolist() == rewards(conversations(100))
    assert all(len(app.requests) > 2 for app in apps)


def test_a_sick_server_is_taken_out_and_comes_back():
    well, sick = RewardApp(), RewardApp()
    with serve(well) as one, serve(sick) as other, scorer_at([one, other], max_conversations=4) as scorer:
        sick.always = error(500, "broken")
        for start in range(0, 200, 20):
            assert scorer.score(conversations(20, start)).rewards.tolist() == rewards(conversations(20, start))
        seen = len(sick.requests)
        assert seen <= 12  # a few first requests and the probes
        sick.always = None
        deadline = time.monotonic() + 60
        while len(sick.requests) < seen + 10 and time.monotonic() < deadline:
            scorer.score(conversations(20))
            time.sleep(0.05)
        assert len(sick.requests) >= seen + 10


def test_a_server_that_is_down_at_the_start_joins_later():
    late, listener = RewardApp(), bound()
    with serve(RewardApp()) as one, scorer_at([one, url_of(listener)], startup_timeout=0.3) as scorer:
        assert len(scorer.score(conversations(4))) == 4
        with serve(late, listener):
            deadline = time.monotonic() + 60
            while not late.requests and time.monotonic() < deadline:
                scorer.score(conversations(4))
                time.sleep(0.05)
            assert late.requests


def test_servers_of_different_models_are_refused():
    newer = RewardApp(provenance={"revision": "sha256:2"})
    with serve(RewardApp()) as one, serve(newer) as other:  # noqa: SIM117
        with pytest.raises(ConfigError, match=r"all servers must serve the same model.*sha256:[12].*sha256:[12]"):
            load_scorer([one, other], **FAST)


def test_a_call_during_a_change_of_the_model_has_scores_of_one_model(app, url):
    app.limits["max_conversations"] = 4

    def new_reward(conversation):
        return reward_of(conversation) + 100

    def change(reply):
        app.reward, app.provenance = new_reward, {**app.provenance, "revision": "sha256:2"}
        return json.dumps(reply).encode()

    with scorer_at(url, max_connections=1) as scorer:
        app.faults += [lambda reply: json.dumps(reply).encode(), change]
        scores = scorer.score(conversations(16))
    assert scores.rewards.tolist() == [new_reward(each) for each in conversations(16)]
    assert scores.provenance.revision == "sha256:2"


def test_the_provenance_is_that_of_the_call_and_not_of_one_beside_it(app, url):
    with scorer_at(url) as scorer:
        run = scorer._client.run

        def beside(coroutine):
            scores, scorer._client.run = run(coroutine), run
            app.provenance = {**app.provenance, "revision": "sha256:2"}
            assert scorer.score(conversations(1)).provenance.revision == "sha256:2"
            return scores

        scorer._client.run = beside
        assert scorer.score(conversations(1)).provenance.revision == "sha256:1"


def test_concurrent_calls_get_their_own_scores(app, url):
    with scorer_at(url) as scorer, ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda each: scorer.score([each]).rewards[0], conversations(64)))
    assert found == [reward_of(each) for each in conversations(64)]


def test_no_score_is_lost_while_servers_are_killed_and_restarted():
    """The test holds the ports, so a server that is started again gets its own."""
    listeners = [bound(), bound()]
    running = [start_process(listener, delay=0.02) for listener in listeners]
    found, stop = {}, threading.Event()

    def load(worker):
        first = worker
        while not stop.is_set():
            found[first] = scorer.score(conversations(5, first)).rewards.tolist()
            first += 4

    def wait_for_scores():
        """Wait until scores come, however busy the machine is."""
        wanted, deadline = len(found) + 5, time.monotonic() + 50
        while len(found) < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    try:
        urls = [url_of(listener) for listener in listeners]
        with scorer_at(urls, timeout=60, startup_timeout=20) as scorer, ThreadPoolExecutor(4) as pool:
            workers = [pool.submit(load, worker) for worker in range(4)]
            try:
                for kill in range(2):
                    wait_for_scores()
                    running[kill].kill()
                    running[kill].wait()
                    running[kill] = start_process(listeners[kill], delay=0.02)
                wait_for_scores()
            finally:
                stop.set()
            for worker in workers:
                worker.result()
    finally:
        for process, listener in zip(running, listeners, strict=True):
            process.kill()
            process.wait()
            listener.close()
    assert all(values == rewards(conversations(5, start)) for start, values in found.items())


def test_a_server_that_gives_other_rewards_than_it_says_is_refused(app, url):
    app.calibration["rewards"] = [each + 1 for each in app.calibration["rewards"]]
    with pytest.raises(ConfigError, match=r"gives other rewards than its /info says: 34.6 instead of 35.6"):
        load_scorer(url, **FAST)


def test_a_server_that_does_not_know_its_rewards_is_not_compared(app, url):
    app.calibration["rewards"] = [None] * len(app.calibration["rewards"])
    with scorer_at(url) as scorer:
        assert scorer.score(conversations(1)).rewards.tolist() == rewards(conversations(1))


def test_an_activation_in_the_server_is_named(app, url):
    app.always = lambda reply: json.dumps({**reply, "rewards": [sigmoid(each) for each in reply["rewards"]]}).encode()
    with pytest.raises(ConfigError, match="may apply an activation"):
        load_scorer(url, **FAST)


def test_an_environment_takes_a_url(url):
    envs = gym.make_vec("RewardModel-v0", num_envs=4, reward_model=url)
    observations, _ = envs.reset(seed=0)
    _, found, *_ = envs.step(["12", "30", "I do not know.", "27"])
    expected = [
        [*one, assistant(reply)] for one, reply in zip(observations, ["12", "30", "I do not know.", "27"], strict=True)
    ]
    assert found.tolist() == rewards(expected)
    envs.close()


def test_the_command_scores_with_a_url_and_stores_no_key(app, url, tmp_path):
    app.key = "secret"
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"messages": each}) + "\n" for each in conversations(5)))
    model = json.dumps({"path": url, "key": "secret"})
    runner("score")(source, "--reward-model", model, "-o", output)
    assert [json.loads(line)["score"] for line in output.read_text().splitlines()] == rewards(conversations(5))
    assert not [each.name for each in tmp_path.iterdir() if "secret" in each.read_text()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timout": 3}, "unknown option 'timout'.*Did you mean 'timeout'"),
        ({"timeout": 0}, "timeout"),
        ({"device": "cuda"}, "unknown option 'device'"),
        ({"key": "env:NO_SUCH_NAME"}, "NO_SUCH_NAME is not set"),
        ({"key": "a\nb"}, "key must be printable ASCII"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        load_scorer("http://127.0.0.1:1", **options)


def test_a_missing_httpx_is_explained():
    code = (
        "import sys; sys.modules['httpx'] = None; import gym_rm\n"
        "for use in (lambda: gym_rm.load_scorer('http://127.0.0.1:1'), lambda: gym_rm.RemoteScorer):\n"
        "    try: use()\n"
        "    except gym_rm.ConfigError as error: assert 'gym-rm[server]' in str(error)\n"
        "    else: raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_real_server_gives_the_rewards_of_the_local_model(scorer_of, real_conversations):
    application = pytest.importorskip("gym_rm.server.app")
    local = scorer_of("qwen3")
    app = application.make_app(local)
    with serve(app) as url, scorer_at(url, timeout=60) as scorer:
        for turns in ("last", "all"):
            mine, theirs = local.score(real_conversations, turns=turns), scorer.score(real_conversations, turns=turns)
            assert theirs.rewards.tolist() == mine.rewards.tolist()
            assert theirs.num_tokens.tolist() == mine.num_tokens.tolist()
        assert [each.tolist() for each in theirs.turn_rewards] == [each.tolist() for each in mine.turn_rewards]
        assert theirs.provenance.revision == mine.provenance.revision
        check_scorer(scorer)
