import socket

import httpx
import pytest
from recording import chat

ray = pytest.importorskip("ray")
pytest.importorskip("ray.serve")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url():
    from ray import serve

    def build():
        import gym_rm
        from gym_rm.server.app import make_app
        from gym_rm.server.options import ServerOptions

        return make_app(gym_rm.load_scorer(), ServerOptions(key="secret"))

    # "local": not the cluster of another test
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        deployment = serve.deployment(name="gym_rm", max_ongoing_requests=1024)
        serve.run(deployment(serve.ingress(build)()).bind(), name="gym_rm", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def test_the_deployment_answers_as_the_server_does(url, embedded):
    conversations = [chat("How much is 90 - 50?", reply) for reply in ("It is 40.", "It is 37.")]
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        assert client.post("/v1/rewards", json={"conversations": conversations}).status_code == 401
        reply = client.post("/v1/rewards", json={"conversations": conversations}, headers=headers)
        assert client.get("/health").json() == {"status": "ok"}
    assert reply.json()["rewards"] == embedded.score(conversations).rewards.tolist()
