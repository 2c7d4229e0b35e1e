"""Requests in the shapes of SGLang 0.5."""

import base64

import numpy as np
import pytest
from recording import chat

TEXT = "<|im_start|>user\nHow much is 90 - 50?<|im_end|>\n<|im_start|>assistant\nIt is 40.<|im_end|>\n"
QUESTION, REPLIES = "How much is 90 - 50?", ["It is 40.", "It is 37."]


@pytest.fixture
def rewards(embedded):
    return embedded.score([chat(QUESTION, reply) for reply in REPLIES]).rewards.tolist()


def test_verls_request_for_sglang_gets_the_plain_reward(model_client, rewards):
    output = model_client.post("/v1/embeddings", json={"model": "any/name", "input": TEXT}).json()
    assert output["data"][-1]["embedding"][-1] == rewards[0]
    assert output["data"][0]["object"] == "embedding"
    assert output["usage"]["prompt_tokens"] == output["usage"]["total_tokens"] > 0


def test_embeddings_as_openais_client_asks_for_them(model_client, rewards):
    body = {"model": "m", "input": [TEXT], "encoding_format": "base64"}
    coded = model_client.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == rewards[:1]


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_classify_of_sglang_returns_an_object_or_a_list(model_client, rewards, method):
    one = model_client.request(method, "/classify", json={"text": TEXT, "rid": "r1"}).json()
    many = model_client.request(method, "/classify", json={"text": [TEXT]}).json()
    assert one["embedding"] == many[0]["embedding"] == rewards[:1]
    assert one["meta_info"]["id"] == "r1"
    assert one["meta_info"].keys() == {"id", "finish_reason", "prompt_tokens", "e2e_latency"}


def test_classify_of_sglang_takes_token_ids(model_client, embedded, rewards):
    ids = embedded.renderer.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert model_client.post("/classify", json={"input_ids": ids}).json()["embedding"] == rewards[:1]
    assert model_client.post("/classify", json={"input_ids": [ids]}).json()[0]["embedding"] == rewards[:1]


@pytest.mark.parametrize(
    "body", [{"text": "a", "input_ids": [1]}, {"text": []}, {"text": [["a", "b"]]}, {"input_ids": [-1]}]
)
def test_an_invalid_request_of_sglang_gets_its_error(model_client, body):
    reply = model_client.post("/classify", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"]


@pytest.mark.parametrize("body", [{"input": []}, {"input": "a", "dimensions": 7}, {"model": "m"}])
def test_an_invalid_request_for_embeddings_gets_the_error_of_openais_protocol(model_client, body):
    reply = model_client.post("/v1/embeddings", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"].keys() == {"message", "type", "param", "code"}
