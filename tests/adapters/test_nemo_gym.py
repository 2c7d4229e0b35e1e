import asyncio
import contextlib
import math
import time

import pytest

pytest.importorskip("fastapi")
testclient = pytest.importorskip("starlette.testclient", reason="needs httpx")

import httpx
from recording import RecordingScorer

from gym_rm.adapters.nemo_gym import make_app
from gym_rm.errors import ConfigError
from gym_rm.generation.chat import ChatReply
from gym_rm.scores import Scores
from gym_rm.server.options import ServerLimits, ServerOptions

PARAMS = {"input": [{"role": "user", "content": "6 * 7?"}], "parallel_tool_calls": True, "instructions": None}
ROW = {"responses_create_params": PARAMS, "expected_answer": "42", "_ng_task_index": 5, "level": 3}


def message(text):
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


def call(call_id, arguments, name="multiply"):
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def reply(*output):
    fixed = {"id": "resp_1", "created_at": 0, "model": "m", "object": "response", "parallel_tool_calls": True}
    return ROW | {"response": fixed | {"tool_choice": "auto", "tools": [], "output": list(output)}}


@contextlib.contextmanager
def client_of(**settings):
    app = make_app(**{"reward_model": {"kind": "math"}, **settings})
    yield testclient.TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
    app.state.service.close()


def two_parts(conversations):
    return [1.5] * len(conversations)


class Parts:
    def score(self, conversations, prompts=None):
        size = len(conversations)
        return Scores.from_rewards([1.5] * size, components={"right": [1.0] * size, "form": [0.5] * size})


class Ranks:
    """Rewards are the places of the replies among those of the call; "?" has none."""

    relative = True

    def score(self, conversations, prompts=None):
        texts = [conversation[-1]["content"] for conversation in conversations]
        order = sorted(set(texts))
        return Scores.from_rewards([None if text == "?" else order.index(text) for text in texts]).raise_for_errors()


class SlowAtFirst(Ranks):
    calls = 0

    def score(self, conversations, prompts=None):
        self.calls += 1
        time.sleep(0.3 if self.calls == 2 else 0)  # after the known conversations of /info
        return super().score(conversations, prompts)


def verify_all(*bodies, **settings):
    """Send rows at the same time, with a moment between them, and return the replies in order."""

    async def send():
        app = make_app(**{"reward_model": Ranks(), "group_size": 3, "group_timeout": 0.3, **settings})
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            tasks = []
            for body in bodies:
                tasks.append(asyncio.create_task(client.post("/verify", json=body)))
                await asyncio.sleep(0.02)
            return await asyncio.gather(*tasks)

    return asyncio.run(send())


def member(text, index, **row):
    return reply(message(text)) | {"_ng_rollout_index": index, **row}


def test_a_verified_row_keeps_its_fields_and_its_components_sum_to_the_reward():
    with client_of(reward_model=Parts()) as client:
        verified = client.post("/verify", json=reply(message("It is 42."))).json()
    assert reply(message("It is 42.")).items() <= verified.items()
    assert verified["reward"] == 1.5
    assert verified["reward_components"] == {"right": 1.0, "form": 0.5}
    assert verified["component_form"] == 0.5


def test_components_that_are_no_parts_of_a_sum_are_only_metrics():
    parts = {"a": two_parts, "b": two_parts}
    with client_of(reward_model={"kind": "weighted", "scorers": parts, "weights": {"a": 0.5, "b": 0.5}}) as client:
        verified = client.post("/verify", json=reply(message("42"))).json()
    assert (verified["reward"], verified["component_a"], "reward_components" in verified) == (1.5, 1.5, False)


def test_the_scorer_reads_the_whole_rollout_without_results_that_the_policy_never_saw():
    recorder = RecordingScorer()
    with client_of(reward_model=recorder) as client:
        recorder.calls.clear()
        output = [call("c1", '{"a": 6, "b": 7}'), {"type": "function_call_output", "call_id": "c1", "output": "42"}]
        client.post("/verify", json=reply(*output, message("42"), *output))
        client.post("/verify", json=reply())
    roles = [[turn["role"] for turn in conversation] for said in recorder.calls for conversation in said]
    assert roles == [["user", "assistant", "tool", "assistant"], ["user", "assistant"]]


def test_a_row_without_a_score_is_an_error_or_masked():
    body = reply(message("42")) | {"expected_answer": None, "instance_config": {"seed": 1}}
    with client_of() as client:
        refused = client.post("/verify", json=body)
    assert refused.status_code == 422
    assert "no reference answer" in refused.json()["error"]["message"]
    with client_of(failed_rows="mask") as client:
        masked = client.post("/verify", json=body).json()
        in_an_episode = client.post("/verify", json={key: body[key] for key in body if key[0] != "_"}).json()
    assert (masked["mask_sample"], masked["failure_kind"]) == (True, "verifier_error")
    assert "no reference answer" in masked["failure_reason"]
    assert masked["instance_config"] == {"seed": 1, "mask_sample": True}
    assert masked["_ng_failure_class"] == "verifier_error"
    assert in_an_episode["mask_sample"] is True
    assert not [name for name in in_an_episode if name.startswith("_ng_")]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(ChatReply("I cannot say.", finished=True), "judge_unparseable"), (ChatReply(error="down"), "judge_failed")],
)
def test_the_failure_of_a_judge_has_its_name(answer, kind):
    class Model:
        def reply(self, conversations, *, seeds=None, deadline=None):
            return [answer] * len(conversations)

    with client_of(reward_model={"kind": "judge", "model": Model()}, failed_rows="mask") as client:
        assert client.post("/verify", json=reply(message("42"))).json()["failure_kind"] == kind


def test_metrics_leave_out_rows_that_failed():
    rows = [{"reward": reward, "_ng_task_index": task} for task, reward in ((0, 1.0), (0, 0.0), (1, 4.0))]
    rows.append({"reward": 0.0, "_ng_task_index": 1, "_ng_failure_class": "judge_failed"})
    rows.append({"reward": 0.0, "_ng_task_index": 1, "mask_sample": True})
    with client_of() as client:
        metrics = client.post("/aggregate_metrics", json={"verify_responses": rows}).json()
        assert client.get("/reverify_mode").json() == "stateless"
    assert metrics["agent_metrics"] == metrics["key_metrics"] == {"mean/reward": 5 / 3}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/verify", b"[1]"),
        ("/verify", b"{" * 100_000),
        ("/verify", b"{}"),
        ("/verify", b'{"responses_create_params": {"input": "Hi"}}'),
        ("/verify", b'{"responses_create_params": {"input": "Hi"}, "response": {"output": [{"type": "x"}]}}'),
        ("/verify", b'{"responses_create_params": {"input": "Hi", "tools": 7}, "response": {"output": []}}'),
        ("/seed_session", b'{"responses_create_params": {"input": [{"role": "user", "content": [7]}]}}'),
        ("/seed_session", b'{"responses_create_params": {"input": []}}'),
        ("/seed_session", b'{"responses_create_params": {"input": "\\ud800"}}'),
        ("/aggregate_metrics", b'{"verify_responses": [7]}'),
        ("/aggregate_metrics", b'{"verify_responses": [{"reward": 1' + b"0" * 400 + b"}]}"),
        ("/aggregate_metrics", b'{"verify_responses": [{"reward": 1e999}]}'),
    ],
)
def test_hostile_bodies_are_refused_with_a_reason(path, body):
    with client_of() as client:
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["message"]


def test_limits_key_and_host_are_those_of_the_server():
    limits = ServerLimits(max_body_bytes=1000)
    with client_of(options=ServerOptions(key="secret", limits=limits)) as client:
        assert client.post("/verify", json=reply(message("42"))).status_code == 401
        headers = {"Authorization": "Bearer secret", "Host": "cluster"}
        assert client.post("/verify", json=reply(message("42")), headers=headers).json()["reward"] == 1.0
        assert client.post("/verify", json=reply(message("4" * 2000)), headers=headers).status_code == 413
    with client_of() as client:
        assert client.post("/verify", json=reply(message("42")), headers={"Host": "other"}).status_code == 421
    with testclient.TestClient(make_app(reward_model={"kind": "math"}), base_url="http://192.0.2.1:8000") as client:
        assert client.post("/verify", json=reply(message("42"))).json()["reward"] == 1.0  # NeMo Gym's by their address


def test_what_cannot_be_served_is_refused_at_the_start():
    for settings in (
        {"reward_model": Ranks()},
        {"group_size": 2},
        {"reward_model": Ranks(), "group_size": 1},
        {"reward_model": Ranks(), "group_size": 2, "group_timeout": math.inf},
        {"prompts": ["Hi"]},
        {"max_turns": 2},
        {"tool": []},
        {"tools": ["calculator"]},
        {"failed_rows": "zero"},
    ):
        with pytest.raises(ConfigError):
            make_app(**settings)


# --- groups --------------------------------------------------------------------------------------------------------


def test_the_replies_of_a_group_are_compared_with_each_other():
    others = [member(text, index, _ng_task_index=6) for index, text in enumerate("xay")]
    said = verify_all(member("c", 2), others[0], member("a", 0), others[2], others[1], member("b", 1))
    assert [each.json()["reward"] for each in said] == [2, 1, 0, 2, 0, 1]


def test_a_row_of_a_group_that_fails_leaves_the_others_their_scores():
    said = verify_all(member("b", 0), member("?", 1), member("a", 2), failed_rows="mask")
    assert [each.json()["mask_sample"] for each in said if "mask_sample" in each.json()] == [True]
    assert (said[0].json()["reward"], said[2].json()["reward"]) == (2, 1)


def test_a_request_that_is_sent_again_gets_the_same_score_also_after_the_group():
    named = {"_ng_group_id": "g", "_ng_group_attempt": 1}
    b, a, c = (member(text, index, **named) for index, text in enumerate("bac"))
    said = verify_all(b, b, a, c, a, member("other", 1, **named))
    assert [each.json().get("reward") for each in said] == [1, 1, 0, 2, 0, None]
    assert said[-1].status_code == 409


@pytest.mark.parametrize(
    "changed",
    [{"response": reply(message("other"))["response"]}, {"responses_create_params": {"input": "8 * 7?"}}],
)
def test_another_reply_in_the_same_place_is_a_conflict(changed):
    said = verify_all(member("a", 0), member("a", 0) | changed)
    assert [each.status_code for each in said] == [422, 409]


def test_a_group_that_is_not_complete_in_time_has_failed():
    said = verify_all(member("a", 0), member("b", 2))
    assert [each.status_code for each in said] == [422, 422]
    assert "only 2 of the 3 replies" in said[0].json()["error"]["message"]
    (said,) = verify_all(member("a", 0), failed_rows="mask")
    assert said.json()["failure_kind"] == "cohort_incomplete"


def test_replies_that_wait_do_not_shut_out_the_others_of_their_group():
    limits = ServerLimits(max_memory_bytes=2_000_000)
    large = [member(text, index, padding="x" * 80_000) for index, text in enumerate("bac")]
    said = verify_all(*large, options=ServerOptions(limits=limits))
    assert [each.json()["reward"] for each in said] == [1, 0, 2]


def test_a_group_that_was_not_scored_in_time_is_scored_when_it_comes_again():
    group = [member(text, index, _ng_group_id="g") for index, text in enumerate("bac")]
    options = ServerOptions(limits=ServerLimits(request_timeout=0.05))
    said = verify_all(
        *group, *[member("x", 0)] * 20, *group, options=options, reward_model=SlowAtFirst(), group_timeout=2
    )
    assert [each.status_code for each in said[:3]] == [503] * 3
    assert [each.json()["reward"] for each in said[-3:]] == [1, 0, 2]


@pytest.mark.parametrize("row", [{"_ng_rollout_index": 3}, {"_ng_rollout_index": None}, {"_ng_task_index": None}])
def test_a_row_without_its_place_in_a_group_is_refused(row):
    (said,) = verify_all(member("a", 0) | row)
    assert said.status_code == 422
    assert "_ng_rollout_index" in said.json()["error"]["message"]


# --- sessions ------------------------------------------------------------------------------------------------------


def test_sessions_of_an_environment_server_are_named_and_have_a_cookie():
    session = {"resources_session_id": "s1", "episode_id": {"rollout_id": "0-0", "attempt": 0}}
    with client_of() as client:
        seeded = client.post("/seed_session", json={**session, "task_id": {}, "task_data": {}})
        assert seeded.json() == {"resources_session_id": "s1"}
        assert seeded.cookies
        for _ in range(2):
            assert client.post("/close_session", json=session).json() == {"resources_session_id": "s1"}
        assert client.post("/close_session", json={"resources_session_id": ""}).status_code == 422
