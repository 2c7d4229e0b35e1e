"""Requests in the shapes of SGLang 0.5 and TEI."""

import base64
import math

import numpy as np
import pytest
from recording import chat

TEXT = "<|im_start|>user\nHow much is 90 - 50?<|im_end|>\n<|im_start|>assistant\nIt is 40.<|im_end|>\n"
QUESTION, REPLIES = "How much is 90 - 50?", ["It is 40.", "It is 37."]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


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


def test_classify_of_sglang_takes_token_ids_and_pairs(model_client, embedded, rewards):
    ids = embedded.renderer.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert model_client.post("/classify", json={"input_ids": ids}).json()["embedding"] == rewards[:1]
    body = {"text": [[QUESTION, reply] for reply in REPLIES], "is_cross_encoder_request": True}
    assert [each["embedding"][0] for each in model_client.post("/classify", json=body).json()] == rewards


@pytest.mark.parametrize(
    "body", [{"text": "a", "input_ids": [1]}, {"text": []}, {"text": [["a", "b"]]}, {"input_ids": [-1]}]
)
def test_an_invalid_request_of_sglang_gets_its_error(model_client, body):
    reply = model_client.post("/classify", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"].keys() == {"message"}


@pytest.mark.parametrize("body", [{"input": []}, {"input": "a", "dimensions": 7}, {"model": "m"}])
def test_an_invalid_request_for_embeddings_gets_the_error_of_openais_protocol(model_client, body):
    reply = model_client.post("/v1/embeddings", json=body)
    assert reply.status_code == 400
    assert reply.json().keys() == {"object", "message", "type", "param", "code"}


def test_a_flat_pair_of_tei_is_a_pair_and_not_a_batch(model_client, rewards):
    reply = model_client.post("/predict", json={"inputs": [QUESTION, REPLIES[0]]})
    assert reply.json() == [{"score": pytest.approx(sigmoid(rewards[0])), "label": "LABEL_0"}]


def test_a_batch_of_tei_mixes_texts_and_pairs(model_client, rewards):
    body = {"inputs": [[TEXT], [QUESTION, REPLIES[1]]], "raw_scores": True}
    scores = [[each["score"] for each in row] for row in model_client.post("/predict", json=body).json()]
    assert scores == [[rewards[0]], [rewards[1]]]


def test_a_text_of_tei_is_scored_as_it_is(model_client, rewards):
    assert model_client.post("/predict", json={"inputs": TEXT}).json()[0]["score"] == pytest.approx(sigmoid(rewards[0]))


def test_rerank_of_tei_shares_the_path_of_vllm(model_client, rewards):
    body = {"query": QUESTION, "texts": REPLIES}
    ranks = model_client.post("/rerank", json=body).json()
    assert [rank["score"] for rank in ranks] == pytest.approx([sigmoid(max(rewards)), sigmoid(min(rewards))])
    assert ranks[0].keys() == {"index", "score"}
    raw = model_client.post("/rerank", json={**body, "raw_scores": True, "return_text": True}).json()
    assert raw[0] == {"index": int(np.argmax(rewards)), "text": REPLIES[int(np.argmax(rewards))], "score": max(rewards)}


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"inputs": ["a", "b", "c"]}, 422, "validation"),
        ({"inputs": []}, 400, "empty"),
        ({"inputs": [["a"], "b"]}, 422, "validation"),
        ({"inputs": ""}, 400, "empty"),
        ({"input": "a"}, 422, "validation"),
        ({"inputs": 3}, 422, "validation"),
    ],
)
def test_an_invalid_request_of_tei_gets_its_status_and_error_type(model_client, body, status, kind):
    reply = model_client.post("/predict", json=body)
    assert reply.status_code == status
    assert reply.json().keys() == {"error", "error_type"}
    assert reply.json()["error_type"] == kind


def test_a_text_of_tei_that_is_too_long_is_cut_only_when_asked(serving):
    import gym_rm

    with serving(gym_rm.load_scorer(max_length=8)) as (_, client):
        refused = client.post("/predict", json={"inputs": TEXT})
        assert (refused.status_code, refused.json()["error_type"]) == (422, "tokenizer")
        assert client.post("/predict", json={"inputs": TEXT, "truncate": True}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/embeddings", {"input": "a"}), ("/classify", {"text": "a"}), ("/predict", {"inputs": "a"})],
)
def test_a_scorer_without_a_text_model_refuses_rendered_texts(client, path, body):
    assert client.post(path, json=body).status_code == 501


def test_a_scorer_without_a_text_model_scores_pairs(client):
    assert client.post("/predict", json={"inputs": ["a", "four"], "raw_scores": True}).json()[0]["score"] == 1.0
