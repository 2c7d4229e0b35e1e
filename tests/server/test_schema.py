"""The whole HTTP surface with requests that schemathesis makes from the OpenAPI description."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import gym_rm

schemathesis = pytest.importorskip("schemathesis")

ROUTES = [
    "POST /v1/rewards",
    "POST /v1/weights",
    "GET /info",
    "GET /health",
    "GET /ready",
    "GET /metrics",
    "GET /v1/models",
    "POST /classify",
    "POST /v1/classify",
    "PUT /classify",
    "POST /score",
    "POST /v1/score",
    "POST /rerank",
    "POST /v1/rerank",
    "POST /v2/rerank",
    "POST /pooling",
    "POST /tokenize",
    "POST /v1/embeddings",
    "POST /get_reward",
    "POST /slime",
    "POST /llamafactory",
]
EXAMPLES = 3


@pytest.fixture(scope="module")
def app(embedded):
    from gym_rm.server.app import make_app
    from gym_rm.server.options import ServerOptions

    app = make_app(embedded, ServerOptions(max_wait=0.0))
    yield app
    app.state.service.close()


@pytest.fixture(scope="module")
def operations(app):
    described = schemathesis.openapi.from_asgi("/openapi.json", app)
    found = [result.ok() for result in described.get_all_operations()]
    return {f"{operation.method.upper()} {operation.path}": operation for operation in found}


def test_the_description_has_every_route(operations):
    assert set(operations) == set(ROUTES)


WITH_FIELDS = [route for route in ROUTES if not route.startswith("GET") and route != "POST /get_reward"]


@pytest.mark.parametrize(
    ("route", "mode"), [(route, "valid") for route in ROUTES] + [(route, "invalid") for route in WITH_FIELDS]
)
def test_no_generated_request_makes_the_server_fail(operations, route, mode):
    generation = schemathesis.GenerationMode.POSITIVE if mode == "valid" else schemathesis.GenerationMode.NEGATIVE

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operations[route].as_strategy(generation_mode=generation))
    def check(case):
        response = case.call()
        assert str(response.status_code) in operations[route].definition.raw["responses"]
        assert response.status_code < 500 or response.status_code in (501, 503), response.text
        if response.status_code >= 400 and route != "GET /ready":
            assert {"error", "message"} & response.json().keys()

    check()


def test_the_description_has_the_fields_of_a_body(app):
    paths = app.openapi()["paths"]
    body = paths["/v1/rewards"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/RewardsBody"}
    assert set(app.openapi()["components"]["schemas"]["RewardsBody"]["properties"]) == {
        "conversations",
        "prompts",
        "turns",
    }
    assert app.openapi()["info"]["version"] == gym_rm.__version__
