"""The server of a real model that other tests ask, and what a chat model makes of its faults."""

import json
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from generation.chat_servers import user
from generation.model_server import ModelApp
from reward_servers import serve

from gym_rm.checks import model_source
from gym_rm.generation.local_chat import LocalChatModel
from gym_rm.generation.remote_chat import RemoteChatModel

QUESTIONS = [f"Which is the largest, {a}, {a + 9} or {a + 4}?" for a in range(20, 50, 5)]


@pytest.fixture(scope="module")
def server():
    app = ModelApp(model_source("path", "embedded:policy"))
    with serve(app) as url:
        app.url = url
        yield app


@pytest.fixture
def app(server):
    server.requests, server.seen, server.faults, server.always = [], [], [], None
    return server


def post(app, text, **fields):
    """Return the answer to a plain request, without a client that tries again."""
    body = json.dumps({"model": "model", "messages": user(text), "seed": 3, **fields}).encode()
    request = urllib.request.Request(f"{app.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def ask(app, texts, **options):
    model = RemoteChatModel(app.url, **({"max_retries": 2, "max_new_tokens": 24} | options))
    return model.reply([user(text) for text in texts], seeds=range(len(texts)), deadline=time.monotonic() + 20)


def test_the_server_writes_what_the_model_writes_in_this_process(app):
    local = LocalChatModel("embedded:policy", temperature=1.0, max_new_tokens=24)
    expected = local.reply([user(text) for text in QUESTIONS], seeds=range(len(QUESTIONS)))
    assert ask(app, QUESTIONS, temperature=1.0) == expected


def test_usage_counts_tokens_and_the_start_that_an_earlier_request_had_too(app):
    read = len(app.renderer.encode([user(QUESTIONS[0])])[0].input_ids)
    cached = []
    for text in (QUESTIONS[0], QUESTIONS[0], QUESTIONS[1]):
        usage = post(app, text)["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        cached.append(usage.pop("prompt_tokens_details")["cached_tokens"])
        assert usage["prompt_tokens"] == read
    same = len(app.tokenizer("<|im_start|>user\nWhich is the largest,")["input_ids"])
    assert cached == [0, read, same]


def test_log_probabilities_are_those_of_the_written_tokens(app):
    answer = post(app, QUESTIONS[0], temperature=0, logprobs=True, top_logprobs=3)["choices"][0]
    places = answer["logprobs"]["content"]
    assert "".join(place["token"] for place in places) == answer["message"]["content"]
    assert all(place["logprob"] == place["top_logprobs"][0]["logprob"] for place in places)  # greedy
    assert all(np.exp([one["logprob"] for one in place["top_logprobs"]]).sum() <= 1 for place in places)


def test_an_answer_ends_at_max_tokens(app):
    answer = post(app, QUESTIONS[0], max_tokens=2)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2


def test_a_conversation_that_cannot_be_read_is_refused(app):
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post(app, "\ud800")


@pytest.mark.parametrize("fault", [(429, {}, {"Retry-After": "0.05"}), (503, b"loading"), "broken", "drop"])
def test_an_answer_that_does_not_come_is_asked_for_again(app, fault):
    (expected,) = ask(app, QUESTIONS[:1])
    app.requests, app.faults = [], [fault]
    assert ask(app, QUESTIONS[:1]) == [expected]
    assert len(app.requests) == 2


def test_a_slow_answer_is_asked_for_again(app):
    app.faults = [5.0]
    started = time.monotonic()
    assert ask(app, QUESTIONS[:1], attempt_timeout=0.3)[0].finished
    assert time.monotonic() - started < 4
    assert len(app.requests) == 2


@pytest.mark.parametrize("fault", ["cut", "empty"])
def test_an_answer_that_was_cut_or_is_empty_is_unfinished(app, fault):
    (whole,) = ask(app, QUESTIONS[:1])
    app.faults = [fault]
    (reply,) = ask(app, QUESTIONS[:1])
    assert not reply.finished
    assert whole.text.startswith(reply.text)
    assert len(reply.text) < len(whole.text)


def test_answers_in_another_order_belong_to_their_questions(app):
    expected = ask(app, QUESTIONS)
    app.faults = ["later", "later", "later"]
    assert ask(app, QUESTIONS) == expected
