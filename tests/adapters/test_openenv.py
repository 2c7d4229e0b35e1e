import pytest
from recording import RecordingScorer, chat

from gym_rm import ConfigError

pytest.importorskip("openenv.core.env_server", reason="OpenEnv is not installed")

from gym_rm.adapters.openenv import ConversationObservation, ReplyAction, RewardModelOpenEnv

PROMPTS = [{"prompt": "2 + 2?", "user_turns": ["sure?"]}]


def test_an_episode(recorder):
    env = RewardModelOpenEnv(reward_model=recorder, prompts=PROMPTS)
    observation = env.reset(seed=0, episode_id="e1")
    assert (observation.messages, observation.reward, observation.done) == (chat("2 + 2?"), None, False)
    observation = env.step(ReplyAction(reply="four"))
    assert (observation.reward, observation.done) == (1.0, False)
    assert observation.messages == [*chat("2 + 2?", "four"), {"role": "user", "content": "sure?"}]
    observation = env.step(ReplyAction(reply="yes"))
    assert (observation.reward, observation.done, observation.metadata["truncated"]) == (0.75, True, False)
    assert (env.state.episode_id, env.state.step_count) == ("e1", 2)
    with pytest.raises(ConfigError, match="reset first"):
        env.step(ReplyAction(reply="again"))
    env.close()


def test_openenvs_own_server():
    testclient = pytest.importorskip("fastapi.testclient")
    from openenv.core.env_server import create_fastapi_app

    def make():
        return RewardModelOpenEnv(reward_model=RecordingScorer(), prompts=PROMPTS)

    client = testclient.TestClient(create_fastapi_app(make, ReplyAction, ConversationObservation))
    assert client.get("/health").status_code == 200
    with client.websocket_connect("/ws") as socket:
        socket.send_json({"type": "reset", "data": {"seed": 0}})
        assert socket.receive_json()["data"]["observation"]["messages"] == chat("2 + 2?")
        socket.send_json({"type": "step", "data": {"reply": "four"}})
        data = socket.receive_json()["data"]
        assert (data["reward"], data["done"]) == (1.0, False)
