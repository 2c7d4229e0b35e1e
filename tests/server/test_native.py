import dataclasses
import json

import numpy as np
import pytest
from recording import NO_ANSWERS, RecordingScorer, Verifier, chat, rating_steps

import gym_rm
from gym_rm.scorers.remote.protocols import GymRMProtocol


def failing(conversations):
    raise OSError("the scorer crashed")


def test_rewards_are_those_of_the_scorer_for_real_conversations(model_client, embedded, real_conversations):
    reply = model_client.post("/v1/rewards", json={"conversations": real_conversations})
    expected = embedded.score(real_conversations).to_dict()
    got = reply.json()
    assert reply.status_code == 200
    assert {name: got[name] for name in expected if name != "workload"} == {
        name: expected[name] for name in expected if name != "workload"
    }
    assert got["model"] == "embedded"


def test_turn_rewards_come_only_for_all_turns(model_client, embedded, hh_pairs):
    dialogues = [pair[0] for pair in hh_pairs if 4 <= len(pair[0]) <= 6][:4]
    every = model_client.post("/v1/rewards", json={"conversations": dialogues, "turns": "all"}).json()
    last = model_client.post("/v1/rewards", json={"conversations": dialogues}).json()
    assert every["turn_rewards"] == embedded.score(dialogues, turns="all").to_dict()["turn_rewards"]
    assert "turn_rewards" not in last
    assert every["rewards"] == last["rewards"]


def test_a_row_that_fails_keeps_the_others(client):
    conversations = [chat("a", "four"), chat("a", "FAIL"), "no list", [], [{"role": 3}], chat("a", "x")]
    reply = client.post("/v1/rewards", json={"conversations": conversations})
    assert reply.status_code == 200
    assert reply.json()["rewards"] == [1.0, None, None, None, None, 0.25]
    errors = reply.json()["errors"]
    assert errors[0] is None
    assert "FAIL" in errors[1]
    assert [error.split(";")[0] for error in errors[2:4]] == [
        "a conversation must be a list of {'role', 'content'} messages",
        "the conversation is empty",
    ]


def test_a_malformed_row_does_not_reach_a_function(serving):
    seen = []

    def lengths(conversations):
        seen.extend(conversations)
        return [len(each[-1]["content"]) for each in conversations]

    with serving(gym_rm.load_scorer(lengths)) as (_, client):
        seen.clear()
        reply = client.post("/v1/rewards", json={"conversations": [chat("a", "four"), None]})
    assert reply.json()["rewards"] == [4.0, None]
    assert seen == [chat("a", "four")]


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        (chat("a", "four", "Thanks."), "must be a reply"),
        ([{"role": "system", "content": "Be brief."}], "must be a reply"),
        (chat("a", "\ud800"), "lone surrogate"),
    ],
    ids=["user", "system", "surrogate"],
)
def test_a_conversation_without_a_readable_reply_has_an_error_instead_of_a_reward(model_client, conversation, message):
    body = {"conversations": [conversation, chat("a", "four")]}
    reply = model_client.post("/v1/rewards", content=json.dumps(body), headers={"content-type": "application/json"})
    assert reply.json()["rewards"][0] is None
    assert message in reply.json()["errors"][0]
    assert reply.json()["rewards"][1] is not None


@pytest.mark.parametrize("path", ["/health", "/ready", "/info", "/metrics", "/v1/models"])
def test_head_has_the_status_of_get_and_no_body(client, path):
    reply = client.head(path)
    assert (reply.status_code, reply.content) == (200, b"")


def test_a_verifier_gets_the_prompts(serving):
    verifier = Verifier()
    with serving(gym_rm.load_scorer(verifier)) as (_, client):
        tools = [{"type": "function", "name": "now"}]
        of_first = {"id": "p0", "answer": "40", "metadata": {"source": "gsm8k"}, "tools": tools}
        prompts = [of_first, {"answer": "7"}, None]
        body = {"conversations": [chat("90 - 50?", "40")] * 3, "prompts": prompts}
        reply = client.post("/v1/rewards", json=body)
    assert reply.json()["rewards"] == [1.0, 0.0, None]
    assert "requires the prompt" in reply.json()["errors"][2]
    first = verifier.prompts[-2]
    assert (first.prompt_id, first.answer, first.metadata) == ("p0", "40", {"source": "gsm8k"})
    assert first.messages == tuple(chat("90 - 50?"))
    assert first.tools[0]["function"]["name"] == "now"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "conversations: Field required"),
        ({"conversations": "text"}, "conversations: Input should be a valid list"),
        ({"conversations": [], "turn": "all"}, "unknown field 'turn'. Did you mean 'turns'?"),
        ({"conversations": [], "turns": "some"}, "turns: Input should be 'last' or 'all'"),
        ({"conversations": [], "prompts": [None]}, "one entry per conversation, got 1 for 0"),
        (
            {"conversations": [[]], "prompts": [{"anwser": "4"}]},
            "prompts.0: unknown field 'anwser'. Did you mean 'answer'?",
        ),
        ({"conversations": [[]], "prompts": [{"answer": 4}]}, "prompts.0.answer: Input should be a valid string"),
        ({"conversations": [[]], "prompts": [{"tools": [4]}]}, "tools[0] must be a tool schema"),
        ([], "Input should be a valid dictionary"),
    ],
)
def test_an_invalid_request_gets_status_422_with_the_reason(client, body, reason):
    reply = client.post("/v1/rewards", json=body)
    assert reply.status_code == 422
    assert reason in reply.json()["error"]["message"]
    assert reply.json()["error"].keys() == {"message", "type", "code"}


@pytest.mark.parametrize("value", [value for value in NO_ANSWERS if value == value and value is not None])
def test_an_error_never_repeats_a_value(client, value):
    body = {"conversations": [chat("a", "b")], "prompts": [{"answer": value, "metadata": "SECRET"}]}
    reply = client.post("/v1/rewards", json=body)
    assert reply.status_code == 422
    assert "SECRET" not in reply.text


def test_steps_are_sent_and_read_again(serving):
    with serving(gym_rm.load_scorer(rating_steps)) as (_, client):
        replies = ["One.\n\nTwo two.", "", "One."]
        sent = client.post("/v1/rewards", json={"conversations": [chat("a", reply) for reply in replies]}).json()
    scores = GymRMProtocol().read(sent, [()] * 3, "last")
    assert [each.tolist() for each in scores.step_rewards] == [[0.4, 0.8], [0.0], [0.4]]
    assert [each.tolist() for each in scores.step_ends] == [[4, 14], [0], [4]]
    assert scores.failed_rows == (1,)


def test_all_turns_of_a_scorer_without_turns_are_refused(client):
    reply = client.post("/v1/rewards", json={"conversations": [chat("a", "b")], "turns": "all"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (501, "not_supported")


def test_info_has_the_model_the_limits_and_known_conversations(model_client, embedded):
    info = model_client.get("/info").json()
    assert info["model"] == "embedded"
    assert info["provenance"] == json.loads(json.dumps(dataclasses.asdict(embedded.provenance)))
    assert info["limits"]["max_conversations"] == 1024
    known = info["calibration"]
    assert known["rewards"] == embedded.score(known["conversations"]).rewards.tolist()


def test_a_scorer_that_cannot_score_the_known_conversations_has_null_rewards(serving):
    with serving(gym_rm.load_scorer(failing)) as (_, client):
        assert client.get("/info").json()["calibration"]["rewards"] == [None] * 4
        assert client.get("/ready").status_code == 200


def test_health_ready_metrics_and_the_page(serving):
    with serving(RecordingScorer()) as (_, client):
        _check_open_routes(client)


def _check_open_routes(client):
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").status_code == 200
    assert client.get("/").status_code == 200
    client.post("/v1/rewards", json={"conversations": [chat("a", "SECRET"), chat("a", "FAIL")]})
    metrics = client.get("/metrics").text
    assert 'gym_rm_requests_total{route="/v1/rewards",status="200"} 1.0' in metrics
    assert "gym_rm_conversations_total 2.0" in metrics
    assert "gym_rm_failed_rows_total 1.0" in metrics
    assert "gym_rm_batch_size_sum 2.0" in metrics
    assert "SECRET" not in metrics


def test_metrics_count_unique_tokens(serving, embedded):
    with serving(embedded) as (_, client):
        client.post("/v1/rewards", json={"conversations": [chat("2 + 2?", "4"), chat("2 + 2?", "5")]})
        lines = dict(line.split(" ") for line in client.get("/metrics").text.splitlines() if line[0] != "#")
    assert 0 < float(lines["gym_rm_unique_tokens_total"]) < float(lines["gym_rm_num_tokens_total"])


def test_requests_of_different_protocols_share_one_batch_and_keep_their_rows(serving, embedded):
    from concurrent.futures import ThreadPoolExecutor

    question, reply = "How much is 90 - 50?", "It is 40."
    text = "<|im_start|>user\nhello<|im_end|>\n"
    bodies = [
        ("/v1/rewards", {"conversations": [chat(question, reply)]}),
        ("/v1/rewards", {"conversations": [chat(question, reply)], "turns": "all"}),
        ("/v1/embeddings", {"input": text}),
        ("/score", {"queries": question, "documents": reply, "use_activation": False}),
    ]
    with serving(embedded, max_batch_size=16, max_wait=3600) as (server, client), ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda each: client.post(each[0], json=each[1]).json(), bodies * 4))
        batches = server.service.batching.num_batches
    reward = embedded.score([chat(question, reply)]).rewards[0]
    plain, pair = embedded.score_texts([text, (question, reply)]).rewards
    assert [each["rewards"][0] for each in replies if "rewards" in each] == [reward] * 8
    assert [each["data"][0]["embedding"] for each in replies[2::4]] == [[plain]] * 4
    assert [each["data"][0]["score"] for each in replies[3::4]] == [pair] * 4
    assert batches == 1
    assert ["turn_rewards" in each for each in replies] == [False, True, False, False] * 4
    assert np.isfinite(reward)
