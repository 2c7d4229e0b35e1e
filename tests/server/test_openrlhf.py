import importlib.resources
import json
import math
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from recording import NO_ANSWERS, RecordingScorer, Verifier, answer_must_be_text, chat

import gym_rm
from gym_rm.server.trainers import lists_of

POLICY = str(importlib.resources.files("gym_rm") / "assets" / "policy")
PROMPT = "<|im_start|>user\nHow much is 90 - 50?<|im_end|>\n<|im_start|>assistant\n"


def prompt_text(question):
    return PROMPT.replace("How much is 90 - 50?", question)


def query(reply, prompt=PROMPT):
    return prompt + reply + "<|im_end|>"


def post(url, body, headers=None):
    """Post a body (bytes, or an object that is sent as JSON) and return the status and the JSON response."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=3600) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.fixture(scope="module")
def policy():
    from gym_rm.engine.text.tokenizers import load_tokenizer

    return load_tokenizer(POLICY)


@pytest.fixture(scope="module")
def recording(serving, policy):
    recorder = RecordingScorer()
    with serving(recorder, policy_tokenizer=policy) as (server, _):
        yield recorder, server.url + "/get_reward"


@pytest.fixture
def url(recording):
    recording[0].calls.clear()
    return recording[1]


@pytest.fixture
def verifying(serving, policy):
    verifier = Verifier()
    with serving(gym_rm.load_scorer(verifier), policy_tokenizer=policy) as (server, _):
        verifier.rows.clear()
        yield verifier, server.url + "/get_reward"


def test_the_endpoint_follows_the_protocol(url, recording):
    body = {"query": [query("four"), query("4")], "prompts": [PROMPT] * 2, "labels": ["4", {"any": "thing"}]}
    status, reply = post(url, body)
    assert status == 200
    assert reply["rewards"] == [1.0, 0.25]
    assert reply["scores"] == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-0.25))])
    assert reply["extra_logs"]["num_tokens"] == [24.0, 21.0]
    assert reply["extra_logs"]["component_length"] == [4.0, 1.0]
    assert recording[0].calls[0][0] == chat("How much is 90 - 50?", "four")


@pytest.mark.parametrize("body", [{"query": []}, {"query": [], "prompts": [], "labels": []}])
def test_an_empty_query_returns_empty_lists(url, body):
    status, reply = post(url, body)
    assert status == 200
    assert reply["rewards"] == reply["scores"] == []
    assert all(values == [] for values in reply["extra_logs"].values())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"query": "text"}, "query: Input should be a valid list"),
        ({"query": [1]}, "query.0: Input should be a valid string"),
        ({"query": ["a"], "prompts": []}, "expected one prompt and one label for each query, got 1 queries, 0 prompts"),
        ({"query": ["a"], "prompts": ["b"]}, "query 0: the text does not begin with its prompt"),
        ({"query": ["a"], "prompts": ["b"], "labels": "4"}, "labels: Input should be a valid list"),
        ({"query": ["a"], "prompts": ["b"], "labels": ["4", "5"]}, "one label for each query, .* and 2 labels"),
        ({"query": ["a"], "prompts": ["b"], "labels": []}, "one label for each query, .* and 0 labels"),
        ({"query": [PROMPT + "FAIL"], "prompts": [PROMPT]}, "the reply contains FAIL"),
        ({"query": [], "label": []}, "unknown field 'label'. Did you mean 'labels'?"),
    ],
)
def test_an_invalid_request_gets_status_422_with_the_reason(url, body, reason):
    status, reply = post(url, body)
    assert status == 422
    assert re.search(reason, reply["error"])


def test_a_verifier_receives_each_label_as_the_answer_of_its_query(verifying):
    verifier, url = verifying
    body = {"query": [query("It is 40."), query("It is 41.")], "prompts": [PROMPT] * 2, "labels": ["40", 41]}
    status, reply = post(url, body)
    assert (status, reply["rewards"]) == (200, [1.0, 1.0])
    assert [prompt.answer for prompt in verifier.prompts] == ["40", "41"]
    assert verifier.prompts[0].messages == tuple(chat("How much is 90 - 50?"))


def test_requests_that_are_scored_together_use_their_own_labels(verifying):
    verifier, url = verifying

    def ask(number):
        prompt = prompt_text(f"How much is {number} + 0?")
        body = {"query": [query(f"{number % 7}", prompt)], "prompts": [prompt], "labels": [str(number)]}
        return post(url, body)[1]["rewards"]

    with ThreadPoolExecutor(32) as pool:
        rewards = list(pool.map(ask, range(32)))
    assert rewards == [[float(str(number) in str(number % 7))] for number in range(32)]
    assert all(f" {p.answer} " in c[0]["content"] for c, p in verifier.rows)


@pytest.mark.parametrize("label", ["", *[each for each in NO_ANSWERS if each == each]])
def test_a_missing_or_invalid_label_is_an_error_for_a_verifier(verifying, label):
    body = {"query": [query("40")] * 2, "prompts": [PROMPT] * 2, "labels": ["40", label]}
    status, reply = post(verifying[1], body)
    assert status == 422
    assert "row 1: the reward function returned None" in reply["error"]


def test_an_invalid_label_does_not_affect_other_requests(serving, policy):
    def ask(label):
        body = {"query": [query("40")], "prompts": [PROMPT], "labels": [label]}
        return post(server.url + "/get_reward", body)

    scorer = gym_rm.load_scorer(answer_must_be_text)
    with serving(scorer, policy_tokenizer=policy) as (server, _), ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, ["40", None] * 4))
    assert [status for status, _ in answers] == [200, 500] * 4
    assert all("'strip'" in reply["error"] for _, reply in answers[1::2])


def test_the_password_of_the_url_is_the_key(serving, policy):
    import httpx

    with serving(RecordingScorer(), policy_tokenizer=policy, key="secret") as (server, _):
        address = server.url.removeprefix("http://")
        for password, status in (("secret", 200), ("wrong", 401)):
            url = f"http://any:{password}@{address}/get_reward"
            assert httpx.post(url, json={"query": []}, trust_env=False).status_code == status


def test_every_sample_has_the_same_logs():
    components = {"right": [1.0, np.nan], "style": [0.5, 0.5]}
    logs = lists_of(gym_rm.Scores.from_rewards([1.5, 0.5], components=components), None)["extra_logs"]
    assert (logs["component_right"], logs["has_right"]) == ([1.0, 0.0], [1.0, 0.0])
    assert (logs["component_style"], logs["has_style"]) == ([0.5, 0.5], [1.0, 1.0])
