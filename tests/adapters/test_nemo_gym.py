import contextlib

import pytest

pytest.importorskip("fastapi")
testclient = pytest.importorskip("starlette.testclient", reason="needs httpx")

from recording import RecordingScorer

from gym_rm.adapters.nemo_gym import make_app
from gym_rm.errors import ConfigError
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


def test_a_row_without_a_score_is_an_error_or_the_failed_row_of_nemo_gym():
    body = reply(message("42")) | {"expected_answer": None}
    with client_of() as client:
        refused = client.post("/verify", json=body)
    with client_of(failed_rows="judge_failed") as client:
        failed = client.post("/verify", json=body).json()
    assert refused.status_code == 422
    assert "no reference answer" in refused.json()["error"]["message"]
    assert failed["_ng_failure_class"] == "judge_failed"
    assert "no reference answer" in failed["_ng_failure_judge_error"]


def test_metrics_leave_out_rows_that_failed():
    rows = [{"reward": reward, "_ng_task_index": task} for task, reward in ((0, 1.0), (0, 0.0), (1, 4.0))]
    rows.append({"reward": 0.0, "_ng_task_index": 1, "_ng_failure_class": "judge_failed"})
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


def test_what_cannot_be_served_is_refused_at_the_start():
    class Ranks(Parts):
        relative = True

    for settings in (
        {"reward_model": Ranks()},
        {"prompts": ["Hi"]},
        {"max_turns": 2},
        {"tool": []},
        {"tools": ["calculator"]},
        {"failed_rows": "zero"},
    ):
        with pytest.raises(ConfigError):
            make_app(**settings)
