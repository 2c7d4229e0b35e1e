import base64
import http.client
import importlib.resources
import json
import math
import re
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openrlhf_client import PROMPT, post, prompt_text, query
from recording import NO_ANSWERS, RecordingScorer, Verifier, answer_must_be_text, chat

from gym_rm import ConfigError
from gym_rm.adapters.openrlhf import RewardFunction
from gym_rm.server.get_reward import RewardServer

POLICY = str(importlib.resources.files("gym_rm") / "assets" / "policy")


def reward_function(reward_model, **options):
    return RewardFunction(reward_model, policy_tokenizer=POLICY, **options)


@pytest.fixture
def recorder():
    return RecordingScorer()


@pytest.fixture
def verifier():
    return Verifier()


@pytest.fixture
def server(recorder):
    with RewardServer(reward_function(recorder), port=0) as server:
        yield server


@pytest.fixture
def verifier_server(verifier):
    with RewardServer(reward_function(verifier), port=0) as server:
        yield server


# --- the protocol --------------------------------------------------------------------------------------------------


def test_the_endpoint_follows_the_protocol(server, recorder):
    body = {"query": [query("four"), query("4")], "prompts": [PROMPT] * 2, "labels": ["4", {"any": "thing"}]}
    status, reply = post(server.url, body)
    assert status == 200
    assert server.url.startswith("http://127.0.0.1:")
    assert reply["rewards"] == [1.0, 0.25]
    assert reply["scores"] == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-0.25))])
    assert reply["extra_logs"]["num_tokens"] == [24.0, 21.0]
    assert recorder.calls[0][0] == chat("How much is 90 - 50?", "four")


@pytest.mark.parametrize("body", [{"query": []}, {"query": [], "prompts": [], "labels": []}])
def test_an_empty_query_returns_empty_lists(server, body):
    status, reply = post(server.url, body)
    assert status == 200
    assert reply["rewards"] == reply["scores"] == []
    assert all(values == [] for values in reply["extra_logs"].values())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        ([], "query must be a list of texts in a JSON object"),
        ({"query": "text"}, "query must be a list of texts in a JSON object"),
        ({"query": [1]}, "query must be a list of texts in a JSON object"),
        ({"query": ["a"]}, "prompts must be a list of texts"),
        ({"query": ["a"], "prompts": []}, "expected one prompt and one label for each query, got 1 queries, 0 prompts"),
        ({"query": ["a"], "prompts": ["b"]}, "query 0: the text does not begin with its prompt"),
        ({"query": ["a"], "prompts": ["b"], "labels": "4"}, "labels must be a list or null"),
        ({"query": ["a"], "prompts": ["b"], "labels": ["4", "5"]}, "one label for each query, .* and 2 labels"),
        ({"query": ["a"], "prompts": ["b"], "labels": []}, "one label for each query, .* and 0 labels"),
        ({"query": [PROMPT + "FAIL"], "prompts": [PROMPT]}, "the reply contains FAIL"),
    ],
)
def test_an_invalid_request_gets_status_422_with_the_reason(server, body, reason):
    status, reply = post(server.url, body)
    assert status == 422
    assert re.search(reason, reply["error"])


def test_unknown_paths_and_the_health_check(server):
    status, reply = post(server.url.replace("get_reward", "score"), {})
    assert (status, "get_reward" in reply["error"]) == (404, True)
    with urllib.request.urlopen(server.url.replace("get_reward", "health"), timeout=3600) as response:
        assert json.loads(response.read()) == {"status": "ok"}


def test_the_size_of_a_request_is_limited(recorder):
    with RewardServer(reward_function(recorder), port=0, max_request_bytes=100) as server:
        connection = http.client.HTTPConnection(*server._http.server_address, timeout=3600)
        connection.putrequest("POST", "/get_reward")
        connection.putheader("Content-Length", str(10**12))
        connection.endheaders()
        response = connection.getresponse()
        assert response.status == 413
        assert response.getheader("Connection") == "close"
        connection.close()


def test_a_request_without_content_length_gets_status_411(server):
    with socket.create_connection(server._http.server_address, timeout=3600) as connection:
        connection.sendall(b"POST /get_reward HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b"411" in connection.recv(100)


# --- labels for verifiers ------------------------------------------------------------------------------------------


def test_a_verifier_receives_each_label_as_the_answer_of_its_query(verifier_server, verifier):
    body = {"query": [query("It is 40."), query("It is 41.")], "prompts": [PROMPT] * 2, "labels": ["40", "40"]}
    status, reply = post(verifier_server.url, body)
    assert (status, reply["rewards"]) == (200, [1.0, 0.0])
    assert [prompt.answer for prompt in verifier.prompts] == ["40", "40"]
    assert verifier.prompts[0].messages == tuple(chat("How much is 90 - 50?"))


def test_requests_that_are_scored_together_use_their_own_labels(verifier_server, verifier):
    def ask(number):
        prompt = prompt_text(f"How much is {number} + 0?")
        body = {"query": [query(f"{number % 7}", prompt)], "prompts": [prompt], "labels": [str(number)]}
        return post(verifier_server.url, body)[1]["rewards"]

    with ThreadPoolExecutor(32) as pool:
        rewards = list(pool.map(ask, range(32)))
    assert rewards == [[float(str(number) in str(number % 7))] for number in range(32)]
    assert sum(reward for (reward,) in rewards) == 7
    assert all(f" {p.answer} " in c[0]["content"] for c, p in verifier.rows)


def test_a_label_that_is_a_number_is_compared_as_text(verifier_server):
    body = {"query": [query("It is 40.")], "prompts": [PROMPT], "labels": [40]}
    assert post(verifier_server.url, body)[1]["rewards"] == [1.0]


@pytest.mark.parametrize("label", ["", *NO_ANSWERS])  # OpenRLHF sends an empty text if a label is missing
def test_a_missing_or_invalid_label_is_an_error_for_a_verifier(verifier_server, label):
    status, reply = post(
        verifier_server.url, {"query": [query("40")] * 2, "prompts": [PROMPT] * 2, "labels": ["40", label]}
    )
    assert status == 422
    assert "row 1: the reward function returned None" in reply["error"]


def test_a_request_without_labels_is_an_error_for_a_verifier(verifier_server):
    status, reply = post(verifier_server.url, {"query": [query("40")], "prompts": [PROMPT]})
    assert (status, "row 0" in reply["error"]) == (422, True)


def test_an_invalid_label_does_not_affect_other_requests():
    def ask(label):
        return post(server.url, {"query": [query("40")], "prompts": [PROMPT], "labels": [label]})

    with RewardServer(reward_function(answer_must_be_text), port=0) as server, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, ["40", None] * 4))
    assert [status for status, _ in answers] == [200, 500] * 4
    assert all("'strip'" in reply["error"] for _, reply in answers[1::2])


def test_the_command_accepts_a_verifier_by_name():
    command = [sys.executable, "-m", "gym_rm", "serve", "--policy-tokenizer", POLICY, "--port", "0"]
    command += ["--reward-model", "recording:holds_answer"]
    helpers = Path(__file__).parents[1] / "adapters"  # contains `recording`
    body = {"query": [query("It is 40."), query("It is 41.")], "prompts": [PROMPT] * 2, "labels": ["40", "40"]}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=helpers) as process:
        try:
            status, reply = post(process.stdout.readline().split()[-1], body)
        finally:
            process.terminate()
    assert (status, reply["rewards"]) == (200, [1.0, 0.0])


# --- keys ----------------------------------------------------------------------------------------------------------


def test_a_server_with_a_key_requires_the_key(recorder):
    with RewardServer(reward_function(recorder), port=0, key="secret") as server:
        assert post(server.url, {"query": []})[0] == 401
        assert post(server.url, {"query": []}, {"Authorization": "Bearer wrong"})[0] == 401
        assert post(server.url, {"query": []}, {"Authorization": "Basic ???"})[0] == 401
        assert post(server.url, {"query": []}, {"Authorization": "Bearer secret"})[0] == 200
        basic = base64.b64encode(b"any:secret").decode()
        assert post(server.url, {"query": []}, {"Authorization": f"Basic {basic}"})[0] == 200


def test_a_host_for_other_machines_requires_a_key(recorder):
    with pytest.raises(ConfigError, match="can be reached from other machines; pass key="):
        RewardServer(reward_function(recorder), host="0.0.0.0", port=0)


# --- load and failures ---------------------------------------------------------------------------------------------


def test_an_exception_of_the_scorer_is_reported_and_the_server_continues(server):
    crash = {"query": [query("CRASH")], "prompts": [PROMPT]}
    assert post(server.url, crash) == (500, {"error": "OSError: the scorer crashed"})
    assert post(server.url, {"query": [query("four")], "prompts": [PROMPT]})[0] == 200


@pytest.mark.parametrize(
    ("name", "value"), [("timeout", 0.0), ("timeout", math.nan), ("timeout", "5"), ("max_request_bytes", 0.5)]
)
def test_an_invalid_limit_is_an_error_of_the_constructor(recorder, name, value):
    with pytest.raises(ConfigError, match=f"{name} must be"):
        RewardServer(reward_function(recorder), port=0, **{name: value})


def test_a_request_over_the_timeout_gets_status_503():
    waits_forever = RewardFunction(RecordingScorer(), policy_tokenizer=POLICY, max_batch_size=2, max_wait=3600)
    with RewardServer(waits_forever, port=0, timeout=0.05) as server:
        status, reply = post(server.url, {"query": [query("four")], "prompts": [PROMPT]})
    assert (status, reply["error"]) == (503, "not scored within 0.05 seconds")


def test_256_single_requests_are_merged_into_one_score_call(recorder):
    merging = reward_function(recorder, max_batch_size=256, max_wait=3600)
    with RewardServer(merging, port=0, timeout=3600) as server:

        def ask(length):
            return post(server.url, {"query": [query("x" * length)], "prompts": [PROMPT], "labels": [""]})

        with ThreadPoolExecutor(256) as pool:
            answers = list(pool.map(ask, range(256)))
    assert [reply["rewards"] for _, reply in answers] == [[length / 4] for length in range(256)]
    assert [len(call) for call in recorder.calls] == [256]


def test_a_content_length_of_thousands_of_digits_is_refused(server):
    host, port = server.url.removeprefix("http://").partition("/")[0].split(":")
    with socket.create_connection((host, int(port)), timeout=3600) as connection:
        connection.sendall(b"POST /get_reward HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_key_with_umlauts_is_accepted_as_utf_8(recorder):
    with RewardServer(reward_function(recorder), port=0, key="schlüssel") as server:
        assert server.allows("Bearer " + "schlüssel".encode().decode("latin-1"))
        assert not server.allows("Bearer schlussel")


def test_the_reply_to_a_query_without_a_score_does_not_mention_python(server):
    status, reply = post(server.url, {"query": [query("FAIL")], "prompts": [PROMPT]})
    assert status == 422
    assert "row 0" in reply["error"]
    assert "attribute" not in reply["error"]
