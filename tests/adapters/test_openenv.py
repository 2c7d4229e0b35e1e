from typing import Any

import pydantic
import pytest
from gymnasium.error import ResetNeeded
from recording import RecordingScorer, chat, merged

from gym_rm import ConfigError

PROMPTS = [{"prompt": "2 + 2?", "user_turns": ["sure?"], "answer": "4"}]


# --- episodes, with or without OpenEnv installed -------------------------------------------------------------------


class Observation(pydantic.BaseModel):
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = {}


class State(pydantic.BaseModel):
    episode_id: str | None = None
    step_count: int = 0


@pytest.fixture
def adapter(import_adapter):
    types = {"Action": pydantic.BaseModel, "Observation": Observation, "State": State}
    interfaces = {"Environment": type("Environment", (), {})}
    folder = "openenv.core.env_server"
    return import_adapter("openenv", {f"{folder}.interfaces": interfaces, f"{folder}.types": types})


def test_an_episode_is_reset_and_stepped_to_its_end(adapter, recorder):
    env = adapter.RewardModelOpenEnv(reward_model=recorder, prompts=PROMPTS)
    observation = env.reset(seed=0, episode_id="e1")
    assert (observation.messages, observation.reward, observation.done) == (chat("2 + 2?"), None, False)
    observation = env.step(adapter.ReplyAction(reply="four"))
    assert (observation.reward, observation.done) == (1.0, False)
    assert observation.messages == [*chat("2 + 2?", "four"), {"role": "user", "content": "sure?"}]
    observation = env.step(adapter.ReplyAction(reply="yes"))
    assert (observation.reward, observation.done, observation.metadata["truncated"]) == (0.75, True, False)
    assert (env.state.episode_id, env.state.step_count) == ("e1", 2)
    with pytest.raises(ResetNeeded):
        env.step(adapter.ReplyAction(reply="again"))
    env.close()


def test_a_verifier_compares_each_reply_with_the_answer_of_its_prompt(adapter, verifier):
    rows = [{"prompt": f"{n} + {n}?", "answer": str(2 * n), "user_turns": ["sure?"]} for n in range(1, 4)]
    env = adapter.RewardModelOpenEnv(reward_model=verifier, prompts=rows)
    questions = set()
    for seed in range(8):
        question = env.reset(seed=seed).messages[0]["content"]
        questions.add(question)
        assert env.step(adapter.ReplyAction(reply="?")).reward == 0.0
        observation = env.step(adapter.ReplyAction(reply=f"It is {2 * int(question[0])}."))
        assert (observation.reward, observation.done) == (1.0, True)
    assert len(questions) > 1
    assert all(conversation[0] == prompt.messages[0] for conversation, prompt in verifier.rows)


def test_the_client_gets_prompt_id_score_ok_and_truncated(adapter, recorder):
    env = adapter.RewardModelOpenEnv(reward_model=recorder, prompts=PROMPTS, max_turns=1, fallback_reward=-2.0)
    observation = env.reset(seed=0)
    assert (observation.prompt_id, observation.score_ok, observation.truncated) == ("0", None, False)
    observation = env.step(adapter.ReplyAction(reply="FAIL"))
    assert (observation.prompt_id, observation.score_ok, observation.truncated) == ("0", False, True)


def test_a_step_with_a_prompt_id_starts_from_this_prompt(adapter, recorder):
    rows = [{"prompt": f"{n}?", "prompt_id": f"sum {n}"} for n in range(4)]
    env = adapter.RewardModelOpenEnv(reward_model=recorder, prompts=rows)
    observation = env.step(adapter.ReplyAction(reply="four", prompt_id="sum 2"))
    assert (observation.messages, observation.reward) == (chat("2?", "four"), 1.0)
    assert env.reset(prompt_id="sum 3").messages == chat("3?")
    with pytest.raises(ConfigError, match=r"no prompt with prompt_id='sum 9'\. Did you mean"):
        env.step(adapter.ReplyAction(reply="four", prompt_id="sum 9"))


def test_a_step_without_an_episode_names_what_to_do(adapter, recorder):
    env = adapter.RewardModelOpenEnv(reward_model=recorder, prompts=PROMPTS)
    with pytest.raises(ResetNeeded, match="call reset first, or pass a prompt_id"):
        env.step(adapter.ReplyAction(reply="four"))


def test_environments_of_one_folder_share_one_model(adapter, loads, model_folder):
    for _ in range(3):  # one after the other, as the server makes them for HTTP requests
        adapter.RewardModelOpenEnv(reward_model=model_folder).close()
    assert loads == [model_folder]


# --- OpenEnv's server ----------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    """Function that returns a client of OpenEnv's server, which runs in this process."""
    pytest.importorskip("openenv.core.env_server", reason="OpenEnv is not installed")
    testclient = pytest.importorskip("fastapi.testclient")
    from gym_rm.adapters.openenv import create_app

    return lambda reward_model, **settings: testclient.TestClient(
        create_app(**{"reward_model": reward_model, "prompts": PROMPTS, **settings})
    )


def test_openenvs_server_resets_and_steps_the_environment(server):
    client = server(RecordingScorer())
    assert client.get("/health").status_code == 200
    with client.websocket_connect("/ws") as socket:
        socket.send_json({"type": "reset", "data": {"seed": 0}})
        assert socket.receive_json()["data"]["observation"]["messages"] == chat("2 + 2?")
        socket.send_json({"type": "step", "data": {"reply": "four"}})
        data = socket.receive_json()["data"]
        assert (data["reward"], data["done"]) == (1.0, False)


def test_openenvs_server_does_not_send_the_answer_to_the_client(server, verifier):
    with server(verifier).websocket_connect("/ws") as socket:
        socket.send_json({"type": "reset", "data": {"seed": 0}})
        received = [socket.receive_text()]
        socket.send_json({"type": "step", "data": {"reply": "five"}})
        received.append(socket.receive_text())
        socket.send_json({"type": "step", "data": {"reply": "It is 4."}})
        assert socket.receive_json()["data"]["reward"] == 1.0
    assert verifier.prompts[0].answer == "4"
    assert not any('"answer"' in text or '"4"' in text for text in received)


def test_plain_http_requests_score_a_reply_to_the_prompt_of_their_reset(server, recorder):
    client = server(recorder, prompts=[{"prompt": f"{n}?", "prompt_id": f"sum {n}"} for n in range(4)])
    observation = client.post("/reset", json={"seed": 1}).json()["observation"]
    action = {"reply": "four", "prompt_id": observation["prompt_id"]}
    response = client.post("/step", json={"action": action})
    assert response.status_code == 200
    assert (response.json()["reward"], response.json()["done"]) == (1.0, True)
    assert response.json()["observation"]["score_ok"] is True
    assert recorder.calls == [[chat(observation["messages"][0]["content"], "four")]]


def test_a_plain_http_request_that_cannot_be_answered_gets_the_reason(server, recorder):
    client = server(recorder)
    response = client.post("/step", json={"action": {"reply": "four"}})
    assert response.status_code == 422
    assert "pass a prompt_id" in response.json()["detail"]
    response = client.post("/step", json={"action": {"reply": "FAIL", "prompt_id": "0"}})
    assert response.status_code == 422
    assert "the reply contains FAIL" in response.json()["detail"]


def test_sessions_at_the_same_time_are_scored_in_one_batch(server, recorder):
    client = server(merged(recorder, 2), max_concurrent_envs=2)
    with client.websocket_connect("/ws") as one, client.websocket_connect("/ws") as two:
        for socket in (one, two):
            socket.send_json({"type": "reset", "data": {"seed": 0}})
            socket.receive_json()
        for socket in (one, two):
            socket.send_json({"type": "step", "data": {"reply": "four"}})
        assert [socket.receive_json()["data"]["reward"] for socket in (one, two)] == [1.0, 1.0]
    assert len(recorder.calls) == 1


def test_invalid_settings_of_a_server_are_an_error_before_it_starts(server, recorder):
    with pytest.raises(ConfigError, match="max_turn: unknown setting"):
        server(recorder, max_turn=1)
