"""Requests in the shapes of vLLM 0.33 (`vllm/entrypoints/pooling/*/protocol.py`) and of verl's client."""

import base64
import json
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


def test_verls_request_gets_the_reward_of_the_conversation(model_client, rewards):
    body = {"model": "any/name", "input": TEXT, "use_activation": False}
    output = model_client.post("/classify", json=body).json()
    assert output["data"][-1]["probs"][-1] == rewards[0]


def test_verls_earlier_field_is_refused_with_the_present_name(model_client):
    reply = model_client.post("/classify", json={"model": "m", "input": TEXT, "activation": False})
    assert reply.status_code == 400
    assert "Did you mean 'use_activation'?" in reply.json()["error"]["message"]
    assert reply.json()["error"].keys() == {"message", "type", "param", "code"}


def test_classify_has_vllms_shape_and_a_sigmoid_by_default(model_client, rewards, embedded):
    reply = model_client.post("/classify", json={"input": [TEXT, TEXT], "request_id": "r1"}).json()
    assert reply.keys() == {"id", "object", "created", "model", "data", "usage"}
    assert (reply["id"], reply["object"]) == ("classify-r1", "list")
    expected = {"index": 1, "label": "LABEL_0", "probs": [pytest.approx(sigmoid(rewards[0]))], "num_classes": 1}
    assert reply["data"][1] == expected
    tokens = 2 * len(embedded.renderer.tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == tokens


@pytest.mark.parametrize("batch", [False, True])
def test_classify_takes_token_ids(model_client, embedded, rewards, batch):
    ids = embedded.renderer.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    body = {"input": [ids] if batch else ids, "use_activation": False}
    reply = model_client.post("/classify", json=body)
    assert [each["probs"] for each in reply.json()["data"]] == [[rewards[0]]]


def test_classify_takes_one_conversation(model_client, rewards):
    body = {"messages": chat(QUESTION, REPLIES[1]), "use_activation": False, "add_generation_prompt": False}
    assert model_client.post("/classify", json=body).json()["data"][0]["probs"] == [rewards[1]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": {"a": 1}}, None),
        ({"input": [1, -5]}, None),
        ({"input": [1.5]}, None),
        ({"input": ["a", 3]}, None),
        ({"input": [10**9]}, "row 0"),
        ({"input": "a", "truncate_prompt_tokens": 5}, None),
        ({"input": "a", "cache_salt": ""}, None),
        ({"input": "a", "messages": chat("a", "b")}, None),
        ({"messages": chat("a", "b"), "chat_template": "{{ 7 * 7 }}"}, None),
        ({"messages": chat("a", "b"), "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": chat("a", "b"), "truncate_prompt_tokens": 5}, None),
        ({"messages": []}, "row 0"),
        ({"input": "a \ud800 b"}, None),
    ],
)
def test_an_invalid_classify_request_gets_vllms_status_400(model_client, body, param):
    reply = model_client.post("/classify", content=json.dumps(body), headers=JSON)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, 400)
    assert param is None or error["param"] == param


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("fields", [("queries", "documents"), ("text_1", "text_2")])
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score_takes_queries_or_texts(model_client, rewards, path, fields):
    reply = model_client.post(path, json={fields[0]: QUESTION, fields[1]: REPLIES, "use_activation": False}).json()
    assert [(each["index"], each["object"], each["score"]) for each in reply["data"]] == [
        (0, "score", rewards[0]),
        (1, "score", rewards[1]),
    ]


def test_score_of_n_to_n_pairs_has_a_sigmoid_by_default(model_client, rewards):
    reply = model_client.post("/score", json={"text_1": [QUESTION] * 2, "text_2": REPLIES}).json()
    assert [each["score"] for each in reply["data"]] == pytest.approx([sigmoid(reward) for reward in rewards])


@pytest.mark.parametrize(
    "body",
    [
        {"queries": ["a", "b"], "documents": ["c"]},
        {"queries": [], "documents": ["c"]},
        {"queries": "a", "documents": []},
        {"queries": "a"},
        {"queries": "a", "documents": "b", "text_1": "c"},
        {"queries": "a", "documents": "b", "instruction": "x"},
        {"queries": "a", "documents": "b", "truncate_prompt_tokens": 5},
    ],
)
def test_an_invalid_score_request_gets_vllms_status_400(model_client, body):
    assert model_client.post("/score", json=body).status_code == 400


def test_pooling_sends_numbers_and_base64(model_client, rewards):
    body = {"input": [TEXT], "task": "classify", "use_activation": False}
    number = model_client.post("/pooling", json=body).json()
    coded = model_client.post("/pooling", json={**body, "encoding_format": "base64"}).json()
    assert number["data"][0] == {"index": 0, "object": "pooling", "data": [rewards[0]]}
    assert base64.b64decode(coded["data"][0]["data"]) == np.array([rewards[0]], dtype="<f4").tobytes()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/classify", {"input": "a"}),
        ("/pooling", {"input": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/classify", {"text": "a"}),
    ],
)
def test_a_scorer_without_a_text_model_refuses_rendered_texts(client, path, body):
    reply = client.post(path, json=body)
    assert reply.status_code == 501
    assert "scores conversations" in reply.json()["error"]["message"]


def test_the_steps_of_vllms_own_client_examples(model_client):
    """`classification_online.py`, `sequence_reward_online.py` and `embedding_requests_base64_online.py` begin so."""
    model = model_client.get("/v1/models").json()["data"][0]["id"]
    prompts = ["Hello, my name is", "The capital of France is"]
    assert len(model_client.post("/classify", json={"model": model, "input": prompts}).json()["data"]) == 2
    parts = [{"role": "user", "content": [{"type": "text", "text": "vLLM is great!"}]}]
    for body in ({"input": "vLLM is great!"}, {"messages": parts}):
        assert len(model_client.post("/pooling", json={"model": model, **body}).json()["data"][0]["data"]) == 1
