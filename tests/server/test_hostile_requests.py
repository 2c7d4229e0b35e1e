"""Bodies and bytes that no client sends, and clients that are too slow."""

import contextlib
import json
import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import RecordingScorer

JSON = {"content-type": "application/json"}
DEEP = '{"conversations": ' + "[" * 300 + "]" * 300 + "}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe{}",
        b"null",
        b"[" * 100_000,
        DEEP.encode(),
        b'{"conversations": [[Infinity]]}',
        b'{"conversations": [], "turns": "all", "turns": "last"}',
        b'{"conversations": [[{"role": "user", "content": "Hi"}]], "prompts": [{"metadata": {"a": 1e400}}]}',
        b'{"conversations": [' + b"9" * 10_000 + b"]}",
    ],
)
def test_a_body_that_is_not_strict_json_gets_a_status_of_4xx(client, body):
    reply = client.post("/v1/rewards", content=body, headers=JSON)
    assert reply.status_code in (400, 422)
    assert "error" in reply.json()


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_another_content_type_is_refused(client, kind):
    reply = client.post(
        "/v1/rewards", content=b'{"conversations": []}', headers={} if kind is None else {"content-type": kind}
    )
    assert reply.status_code == 415


def test_a_content_type_with_a_character_set_is_accepted(client):
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert client.post("/v1/rewards", content=b'{"conversations": []}', headers=headers).status_code == 200


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
messages = st.fixed_dictionaries({}, optional={"role": values | st.just("user"), "content": values, "name": values})


@settings(max_examples=15)
@given(st.lists(values | st.lists(messages | values, max_size=3), max_size=4))
def test_any_json_value_as_a_conversation_is_scored_or_an_error_of_its_row(model_client, conversations):
    body = json.dumps({"conversations": conversations})
    reply = model_client.post("/v1/rewards", content=body, headers=JSON)
    if reply.status_code == 200:
        assert len(reply.json()["rewards"]) == len(conversations)
        for reward, error in zip(reply.json()["rewards"], reply.json()["errors"], strict=True):
            assert (reward is None) == (error is not None)
    else:
        assert reply.status_code in (400, 422)  # NaN and integers of more than 64 bits


@pytest.fixture(scope="module")
def impatient(serving):
    """A server that gives headers and bodies 0.2 seconds."""
    limits = {"header_timeout": 0.2, "body_timeout": 0.2, "max_body_bytes": 10_000}
    with serving(RecordingScorer(), limits=limits) as (server, _):
        yield server


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def read_all(connection):
    """Return what the server sends until it closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            data += chunk
    return data


HEAD = b"POST /v1/rewards HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_a_hidden_second_request_is_not_answered_with_the_first(impatient):
    """With Content-Length and Transfer-Encoding, proxies and servers can disagree where the request ends."""
    hidden = b"GET /info HTTP/1.1\r\nHost: localhost\r\n\r\n"
    body = b"0\r\n\r\n" + hidden
    with connect(impatient) as connection:
        length = str(len(body)).encode()
        connection.sendall(HEAD + b"Content-Length: " + length + b"\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        reply = read_all(connection)
    assert reply.startswith(b"HTTP/1.1 400")
    assert reply.count(b"HTTP/1.1") == 1


def test_a_refused_client_that_sends_its_body_late_gets_the_refusal(impatient):
    with connect(impatient) as connection:
        connection.sendall(HEAD.replace(b"localhost", b"attacker.example") + b"Content-Length: 4\r\n\r\n")
        for part in (b"{ ", b"} "):
            time.sleep(0.05)
            connection.sendall(part)
        assert read_all(connection).startswith(b"HTTP/1.1 421")


def test_a_body_that_dribbles_gets_status_408(impatient):
    with connect(impatient) as connection:
        connection.sendall(HEAD + b"Content-Length: 1000\r\n\r\n")
        reply = dribble(connection, b" ")
    assert reply.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["first", "kept"])
def test_headers_that_dribble_are_cut_off(impatient, before):
    with connect(impatient) as connection:
        connection.sendall(before)
        reply = b""
        while before and not reply.endswith(b'{"status":"ok"}'):
            reply += connection.recv(1000)
        assert dribble(connection, b"a") == b""


def dribble(connection, byte):
    """Send a byte every 50 ms until the server replies or closes the connection."""
    connection.settimeout(0.05)
    for _ in range(600):
        try:
            connection.sendall(byte)
            return connection.recv(65536)
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            return b""
    pytest.fail("the connection is still open after 30 seconds")


def test_a_websocket_is_refused(impatient):
    with connect(impatient) as connection:
        connection.sendall(
            b"GET /v1/rewards HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        assert read_all(connection).startswith(b"HTTP/1.1 4")
