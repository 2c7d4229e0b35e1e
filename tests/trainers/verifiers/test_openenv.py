"""openenv serves the environment of its page, to its own client."""

import contextlib
import socket
import threading
import time

import pytest

pytest.importorskip("openenv.core.env_server")
import uvicorn
from openenv.core import GenericEnvClient
from openenv.core.env_server import create_fastapi_app

import gym_rm
from tests.trainers.pages import QUESTION, REPLIES, fails, module_of_page, said


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return module_of_page("openenv", tmp_path_factory.mktemp("page"))


@contextlib.contextmanager
def client_of(page, reward_model, **settings):
    """Yield openenv's client of openenv's server on a free port of this machine."""

    def make():
        return page.RewardModelOpenEnv([QUESTION["content"]], reward_model, **settings)

    app = create_fastapi_app(make, page.ReplyAction, page.ConversationObservation)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        with GenericEnvClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}").sync() as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


def rewards_of(client, replies):
    rewards = []
    for reply in replies:
        assert client.reset().observation["messages"] == [QUESTION]
        rewards.append(client.step({"reply": reply}).reward)
    return rewards


def test_a_client_gets_the_rewards_of_the_scorer(page):
    with client_of(page, None) as client:
        assert rewards_of(client, REPLIES) == gym_rm.load_scorer().score(said(*REPLIES)).rewards.tolist()


def test_a_client_of_a_step_without_a_score_raises_and_goes_on(page):
    with client_of(page, fails) as client:
        client.reset()
        with pytest.raises(RuntimeError, match="returned None"):
            client.step({"reply": "FAIL"})
        assert rewards_of(client, ["It is 71."]) == fails(said("It is 71."))
