"""The HTTP client beside what remote scorers test of it: waits, statuses, addresses and forks."""

import pytest

pytest.importorskip("httpx")

from gym_rm.errors import ConfigError, RemoteError
from gym_rm.http_client.addresses import parse_urls
from gym_rm.http_client.client import HTTPClient, backoff
from gym_rm.http_client.responses import (
    Busy,
    FailedAttempt,
    InvalidReply,
    NoSuchRoute,
    Refused,
    check_status,
    parse_body,
    retry_after,
)


def test_waits_grow_with_jitter_up_to_a_bound():
    assert 0.1 <= backoff(1) <= 0.2
    assert len({backoff(3) for _ in range(20)}) > 1
    assert 7.5 <= backoff(10_000) <= 15


def test_retry_after_is_a_number_and_nonsense_is_ignored():
    assert retry_after("3") == 3.0
    assert [retry_after(value) for value in (None, "soon", "nan", "-1", "inf", "")] == [None] * 6


@pytest.mark.parametrize(
    ("status", "headers", "error"),
    [
        (204, {}, FailedAttempt),
        (302, {"Location": "http://other"}, RemoteError),
        (400, {}, Refused),
        (401, {}, ConfigError),
        (404, {}, NoSuchRoute),
        (429, {}, FailedAttempt),
        (429, {"Retry-After": "1"}, Busy),
        (500, {}, FailedAttempt),
        (501, {}, ConfigError),
        (503, {"Retry-After": "1"}, Busy),
    ],
)
def test_a_status_has_a_meaning(status, headers, error):
    with pytest.raises(error) as raised:
        check_status("http://a/b", status, headers, b'{"error": {"message": "why"}}')
    assert type(raised.value) is error
    assert "why" in str(raised.value) or status == 302


def test_a_model_that_does_not_exist_is_not_a_wrong_url():
    with pytest.raises(NoSuchRoute) as raised:
        check_status("http://a/b", 404, {}, b'{"error": {"message": "The model `c` does not exist."}}')
    assert str(raised.value) == "http://a/b answers: The model `c` does not exist."


@pytest.mark.parametrize(
    "body", [b"", b"{", b"NaN", b'{"a": Infinity}', b"\xff", b"[" * 100_000, b'{"a": [{"b": 1, "b": 2}]}']
)
def test_what_is_no_json_is_invalid(body):
    with pytest.raises(InvalidReply):
        parse_body(body)


@pytest.mark.parametrize(
    "bad",
    [
        "http://",
        "http://host:99999",
        "http://host:port",
        "http://host?x=1",
        "http://a,http://a",
        "http://a,",
        "http://u:p@a",
    ],
)
def test_invalid_urls_are_refused(bad):
    with pytest.raises(ConfigError, match="URL"):
        parse_urls(bad)


def test_failures_at_the_same_time_count_once():
    client = HTTPClient(["http://127.0.0.1:1"], attempt_timeout=1, max_retries=0, max_connections=4)
    (endpoint,) = client.endpoints

    async def fail():
        for _ in range(10):
            client.rest(endpoint, FailedAttempt("no"))

    client.run(fail())
    assert endpoint.failures == 1
