import base64
import logging
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from recording import RecordingScorer, chat

import gym_rm
from gym_rm import ConfigError, Scores
from gym_rm.generation.chat import ChatReply
from gym_rm.scorer import is_relative, try_score
from gym_rm.server.options import ServerLimits, ServerOptions
from gym_rm.server.serve import RewardServer

ONE = {"conversations": [chat("a", "four")]}


class Gate:
    """Scorer that waits in every call until it is opened."""

    def __init__(self):
        self.open = threading.Event()
        self.sizes = []

    def score(self, conversations, prompts=None):
        self.sizes.append(len(conversations))
        if len(self.sizes) > 1:  # the first call is that of the start
            self.open.wait(60)
        return Scores.from_rewards([float(len(each[-1]["content"])) for each in conversations])


def code_of(reply):
    return reply.status_code, reply.json()["error"]["code"]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer", 401),
        ("Bearer secre", 401),
        ("Bearer secrets", 401),
        ("Basic ???", 401),
        ("secret", 401),
        ("Digest secret", 401),
        ("Bearer secret", 200),
        ("bearer secret", 200),
        ("Basic " + base64.b64encode(b"any:secret").decode(), 200),
    ],
)
def test_a_request_needs_the_key(keyed, header, status):
    reply = keyed.post("/v1/rewards", json=ONE, headers={} if header is None else {"Authorization": header})
    assert reply.status_code == status
    assert status == 200 or reply.headers["www-authenticate"] == "Bearer"


@pytest.fixture(scope="module")
def keyed(serving):
    with serving(RecordingScorer(), key="secret") as (_, client):
        yield client


@pytest.mark.parametrize("path", ["/info", "/metrics", "/openapi.json", "/nowhere"])
def test_what_tells_about_the_server_needs_the_key_too(keyed, path):
    assert keyed.get(path).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/"])
def test_health_checks_and_the_page_need_no_key(keyed, path):
    assert keyed.get(path).status_code == 200


def test_a_key_with_umlauts_is_accepted_as_utf_8():
    from gym_rm.server.request_guard import allows

    assert allows("schlüssel", "Bearer schlüssel".encode())
    assert not allows("schlüssel", b"Bearer schlussel")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_an_address_that_others_reach_requires_a_key(host):
    with pytest.raises(ConfigError, match="can be reached from other machines; pass a key"):
        RewardServer(RecordingScorer(), host=host, port=0)


@pytest.mark.parametrize("options", [{"key": ""}, {"key": " "}, {"allow_weight_updates": True}])
def test_options_that_are_not_safe_are_refused(options):
    with pytest.raises(ConfigError, match="key"):
        ServerOptions(**options)


@pytest.mark.parametrize(
    ("name", "value"),
    [("request_timeout", 0.0), ("request_timeout", float("nan")), ("body_timeout", "5"), ("max_body_bytes", 0.5)],
)
def test_an_invalid_limit_is_an_error(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be"):
        ServerLimits(**{name: value})


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:5000", 200),
        ("LocalHost:80", 200),
        ("localhost.", 200),
        ("[::1]:5000", 200),
        ("attacker.example", 421),
        ("attacker.example:5000", 421),
        ("localhost.attacker.example", 421),
        ("127.0.0.1.attacker.example", 421),
        ("192.0.2.1", 421),
        ("[2001:db8::1]", 421),
    ],
)
def test_without_a_key_the_host_of_a_request_must_be_this_machine(client, host, status):
    reply = client.post("/v1/rewards", json=ONE, headers={"Host": host})
    assert reply.status_code == status
    assert client.get("/info", headers={"Host": host}).status_code == status
    assert status == 200 or reply.json()["error"]["code"] == "wrong_host"


@pytest.fixture(scope="module")
def small(serving):
    limits = {"max_body_bytes": 5000, "max_conversations": 3}
    with serving(gym_rm.load_scorer(), limits=limits) as (_, client):
        yield client


@pytest.mark.parametrize("streamed", [False, True], ids=["length", "chunked"])
def test_a_body_over_the_limit_gets_status_413(small, streamed):
    body = b'{"conversations": []' + b" " * 20_000 + b"}"
    content = iter([body[k : k + 1000] for k in range(0, len(body), 1000)]) if streamed else body
    reply = small.post("/v1/rewards", content=content, headers={"content-type": "application/json"})
    assert code_of(reply) == (413, "body_too_large")
    assert reply.headers["connection"] == "close"


def test_too_many_conversations_get_status_413(small):
    assert code_of(small.post("/v1/rewards", json={"conversations": [chat("a", "b")] * 4})) == (
        413,
        "too_many_conversations",
    )


def test_a_queue_over_the_limit_gets_status_429_with_retry_after(serving, wait_until):
    gate = Gate()
    with serving(gate, limits={"max_queue": 4}) as (server, client), ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(client.post, "/v1/rewards", json=ONE) for _ in range(4)]
        wait_until(lambda: server.service._queued == 4)
        reply = client.post("/v1/rewards", json=ONE)
        gate.open.set()
        assert [each.result().status_code for each in waiting] == [200] * 4
    assert code_of(reply) == (429, "queue_full")
    assert int(reply.headers["retry-after"]) >= 1


def test_a_request_over_its_deadline_gets_status_503_and_leaves_the_queue(serving, wait_until):
    gate = Gate()
    with serving(gate, limits={"request_timeout": 0.1}) as (server, client):
        with ThreadPoolExecutor(1) as pool:
            busy = pool.submit(client.post, "/v1/rewards", json=ONE)
            wait_until(lambda: len(gate.sizes) == 2)
            reply = client.post("/v1/rewards", json=ONE)
            assert code_of(reply) == (503, "deadline")
            assert "retry-after" in reply.headers
            gate.open.set()
            busy.result()
        assert server.service._queued == 0
    assert gate.sizes == [4, 1]  # the expired request was not scored


def test_a_client_that_has_gone_is_not_scored(serving, wait_until):
    gate = Gate()
    with serving(gate) as (server, client), ThreadPoolExecutor(1) as pool:
        busy = pool.submit(client.post, "/v1/rewards", json=ONE)
        wait_until(lambda: len(gate.sizes) == 2)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/rewards", json=ONE, timeout=0.2, trust_env=False)
        wait_until(lambda: server.service._queued == 1)
        gate.open.set()
        assert busy.result().status_code == 200
    assert gate.sizes == [4, 1]


def test_256_posts_of_one_conversation_are_scored_in_batches_of_more_than_32(serving, wait_until):
    gate = Gate()
    with serving(gate) as (server, client), ThreadPoolExecutor(256) as pool:
        bodies = [{"conversations": [chat("a", "x" * length)]} for length in range(1, 257)]
        waiting = [pool.submit(client.post, "/v1/rewards", json=body) for body in bodies]
        wait_until(lambda: server.service._queued == 256)  # requests collect while a batch is scored
        gate.open.set()
        replies = [each.result().json() for each in waiting]
    assert [reply["rewards"] for reply in replies] == [[float(length)] for length in range(1, 257)]
    assert 256 / len(gate.sizes[1:]) > 32


def test_nothing_of_a_conversation_is_logged(serving, caplog, capfd, embedded):
    caplog.set_level(logging.DEBUG)
    secret = "SECRETROLE"

    def repeats(conversations):
        raise ValueError(f"cannot score {conversations}")

    with serving(gym_rm.load_scorer(repeats)) as (_, client):
        reply = client.post("/v1/rewards", json={"conversations": [chat("SECRET", "CRASH SECRET")]})
        assert reply.status_code == 500
        client.post("/SECRET", json={"SECRET": "SECRET"})
        client.post("/v1/rewards", content=b'{"SECRET', headers={"content-type": "application/json"})
    with serving(embedded) as (_, client):
        odd = [{"role": secret, "content": "SECRET"}]
        client.post("/v1/rewards", json={"conversations": [odd, [*odd, *chat("SECRET", "SECRET")], odd * 2]})
        client.post("/classify", json={"input": "SECRET"})
    server_log = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert server_log
    formatted = [logging.Formatter().format(record) for record in server_log]  # with the text of exceptions
    assert not [line for line in formatted if "SECRET" in line]
    assert "SECRET" not in "".join(capfd.readouterr())


def test_a_group_is_never_divided_over_requests_or_servers(serving):
    def answer(conversations):
        return [ChatReply('{"score_1": 1, "score_2": 2}', finished=True) for _ in conversations]

    model = types.SimpleNamespace(reply=lambda conversations, *, seeds, deadline: answer(conversations))
    judge = gym_rm.load_scorer({"kind": "judge", "model": model, "style": "genrm", "comparisons": "circular"})
    rows = [chat("2 + 2?", "b" * n) for n in range(1, 7)]
    with serving(judge) as (first, _), serving(judge) as (second, _):
        remote = gym_rm.load_scorer([first.url, second.url], max_conversations=2)
        assert is_relative(remote)
        assert remote.score(rows).rewards.tolist() == judge.score(rows).rewards.tolist()
    with serving(judge, limits={"max_conversations": 4}) as (server, _):
        remote = gym_rm.load_scorer(server.url)
        assert remote.score(rows[:4]).rewards.tolist() == [1.5] * 4
        assert "the server refused" in try_score(remote, rows).errors[0]
