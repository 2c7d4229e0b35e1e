import json

import pytest

pytest.importorskip("fastapi", reason="the extra server is not installed")

from reward_servers import serve

import gym_rm
from gym_rm.adapters.nemo_gym import make_app
from gym_rm.data.prompts import load_prompts
from gym_rm.errors import ConfigError
from gym_rm.scores import ScoringError


def chats(*replies):
    return [[{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": reply}] for reply in replies]


class ResourcesServer:
    """Application with the routes of a resources server: the reward of a row is its session's number."""

    def __init__(self, fault=None):
        self.rows, self.sessions, self.faults = [], [], [fault] if fault else []

    async def __call__(self, scope, receive, send):
        body = b""
        more = True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = [(b"content-type", b"application/json")]
        status, answer, row = 200, {}, json.loads(body)
        if scope["path"] == "/seed_session":
            self.sessions.append(row["number"])
            headers.append((b"set-cookie", f"session={row['number']}; Path=/; HttpOnly".encode()))
        else:
            self.rows.append(row)
            cookie = dict(scope["headers"]).get(b"cookie", b"session=-1")
            status, answer = self.faults.pop() if self.faults else (200, {**row, "reward": int(cookie[8:])})
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


def test_a_server_of_ours_gives_the_rewards_of_its_scorer():
    prompts = load_prompts([{"prompt": "6 * 7?", "answer": "42"}]) * 2
    app = make_app(reward_model={"kind": "weighted", "scorers": {"math": {"kind": "math"}}})
    with serve(app) as url:
        scorer = gym_rm.load_scorer({"kind": "nemo_gym", "url": url})
        scores = scorer.score(chats("It is 42.", "It is 41."), prompts)
        with pytest.raises(ScoringError, match="no reference answer") as caught:
            scorer.score(chats("It is 42.", "It is 42."), [prompts[0], None])
        scorer.close()
    assert scores.rewards.tolist() == scores.components["math"].tolist() == [1.0, 0.0]
    assert caught.value.scores.rewards_or_none() == [1.0, None]


def test_each_conversation_is_a_session_of_its_own():
    app = ResourcesServer()
    prompts = load_prompts([{"prompt": "6 * 7?", "number": number} for number in range(20)])
    with serve(app) as url:
        scores = gym_rm.load_scorer({"kind": "nemo_gym", "url": url}).score(chats(*"4" * 20), prompts)
    assert scores.rewards.tolist() == list(range(20))
    assert sorted(app.sessions) == list(range(20))
    row = app.rows[0]
    assert row["response"]["output"][0]["content"][0]["text"] == "4"
    assert row["response"]["object"] == "response"


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ((200, {"reward": 0.0, "_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "busy"}), "busy"),
        ((422, {"detail": "no options"}), "no options"),
        ((200, {"reward": None}), "reward"),
        ((200, {"reward": 1.0, "reward_components": {"a": "x"}}), "components"),
    ],
)
def test_a_failed_row_is_an_error_and_never_a_reward(fault, error):
    with serve(ResourcesServer(fault)) as url:
        scorer = gym_rm.load_scorer({"kind": "nemo_gym", "url": url, "max_retries": 0})
        with pytest.raises(ScoringError, match=error):
            scorer.score(chats("42"), load_prompts([{"prompt": "6 * 7?", "number": 1}]))


def test_a_failed_attempt_is_repeated():
    with serve(ResourcesServer((500, {"detail": "try again"}))) as url:
        scorer = gym_rm.load_scorer({"kind": "nemo_gym", "url": url})
        assert scorer.score(chats("42"), load_prompts([{"prompt": "6 * 7?", "number": 1}])).rewards.tolist() == [1.0]


def test_another_server_is_a_wrong_configuration():
    async def nothing(scope, receive, send):
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with serve(nothing) as url, pytest.raises(ConfigError, match="no resources server"):
        gym_rm.load_scorer({"kind": "nemo_gym", "url": url}).score(chats("42"))
    with pytest.raises(ConfigError, match="maxretries"):
        gym_rm.load_scorer({"kind": "nemo_gym", "url": "http://127.0.0.1:1", "maxretries": 1})
