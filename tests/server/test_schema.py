"""The whole HTTP surface with requests that schemathesis makes from the OpenAPI description."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from recording import chat

schemathesis = pytest.importorskip("schemathesis")

from schemathesis.checks import not_a_server_error  # noqa: E402

import gym_rm  # noqa: E402
from gym_rm.server.app import make_app  # noqa: E402
from gym_rm.server.options import ServerOptions  # noqa: E402


@pytest.fixture(scope="module")
def app(embedded):
    app = make_app(embedded, ServerOptions(max_wait=0.0))
    yield app
    app.state.service.close()


@pytest.fixture
def described(app):
    return schemathesis.openapi.from_asgi("/openapi.json", app)


schema = schemathesis.pytest.from_fixture("described")


@schema.parametrize()
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_generated_request_makes_the_server_fail(case):
    response = case.call()
    if response.status_code not in (501, 503):
        case.validate_response(response, checks=[not_a_server_error])


def test_the_description_names_every_route(app):
    paths = app.openapi()["paths"]
    assert {"/v1/rewards", "/classify", "/score", "/rerank", "/pooling", "/v1/embeddings", "/predict"} <= set(paths)
    body = paths["/v1/rewards"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == {"conversations", "prompts", "turns"}
    assert gym_rm.__version__ == app.openapi()["info"]["version"]
    assert chat("a", "b")
