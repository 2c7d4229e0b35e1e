from typing import Any

import pydantic
import pytest
from gymnasium.error import ResetNeeded
from recording import RecordingScorer, chat

from gym_rm import ConfigError, ScoringError

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


def test_a_prompt_without_an_answer_is_an_error_for_a_verifier(adapter, verifier):
    env = adapter.RewardModelOpenEnv(reward_model=verifier, prompts=["2 + 2?"])
    env.reset(seed=0)
    with pytest.raises(ScoringError, match="row 0: the reward function returned None"):
        env.step(adapter.ReplyAction(reply="4"))


def test_a_prompt_without_an_answer_gets_the_fallback_reward_and_score_ok_is_false(adapter, verifier):
    env = adapter.RewardModelOpenEnv(reward_model=verifier, prompts=["2 + 2?"], fallback_reward=-2.0)
    env.reset(seed=0)
    observation = env.step(adapter.ReplyAction(reply="4"))
    assert (observation.reward, observation.metadata["score_ok"]) == (-2.0, False)


def test_an_answer_that_is_neither_text_nor_a_number_is_refused(adapter, verifier):
    with pytest.raises(ConfigError, match="'answer' must be a text or a number"):
        adapter.RewardModelOpenEnv(reward_model=verifier, prompts=[{"prompt": "2 + 2?", "answer": ["4"]}])


# --- OpenEnv's server ----------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    """Function that returns a client of OpenEnv's server, which runs in this process."""
    pytest.importorskip("openenv.core.env_server", reason="OpenEnv is not installed")
    testclient = pytest.importorskip("fastapi.testclient")
    from openenv.core.env_server import create_fastapi_app

    from gym_rm.adapters.openenv import ConversationObservation, ReplyAction, RewardModelOpenEnv

    def serve(reward_model):
        def make():
            return RewardModelOpenEnv(reward_model=reward_model, prompts=PROMPTS)

        return testclient.TestClient(create_fastapi_app(make, ReplyAction, ConversationObservation))

    return serve


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
