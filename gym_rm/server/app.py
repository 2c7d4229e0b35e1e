"""The application: a table of all routes, over one scorer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import gym_rm
from gym_rm.data.policy_texts import PolicyTexts
from gym_rm.scorer import Scorer
from gym_rm.server import native, pooling, trainers
from gym_rm.server.options import ServerOptions
from gym_rm.server.request_bodies import StrictRoute, invalid_fields
from gym_rm.server.request_guard import RequestGuard
from gym_rm.server.responses import STATUS, RequestError, error_response
from gym_rm.server.service import Service

Route: TypeAlias = "tuple[str, str, Callable[..., Any]]"
"""Method, path and handler."""

ROUTES: tuple[Route, ...] = (
    ("GET", "/info", native.info),
    ("GET", "/health", native.health),
    ("GET", "/ready", native.ready),
    ("GET", "/metrics", native.metrics),
    ("POST", "/v1/rewards", native.rewards),
    ("POST", "/v1/weights", native.weights),
    ("GET", "/v1/models", pooling.models),
    ("POST", "/classify", pooling.classify),
    ("POST", "/v1/classify", pooling.classify),
    ("PUT", "/classify", pooling.classify),
    ("POST", "/score", pooling.score),
    ("POST", "/v1/score", pooling.score),
    ("POST", "/rerank", pooling.rerank),
    ("POST", "/v1/rerank", pooling.rerank),
    ("POST", "/v2/rerank", pooling.rerank),
    ("POST", "/pooling", pooling.pooling),
    ("POST", "/tokenize", pooling.tokenize),
    ("POST", "/v1/embeddings", pooling.embeddings),
    ("POST", "/get_reward", trainers.openrlhf),
    ("POST", "/slime", trainers.slime),
    ("POST", "/llamafactory", trainers.llamafactory),
)


def make_app(scorer: Scorer, options: ServerOptions | None = None) -> FastAPI:
    """Return the server's application, for uvicorn, Ray Serve or a test client.

    `app.state.service` is the `Service`; its `close` ends the queue. The scorer stays open.

    Args:
        scorer: any scorer; requests of all protocols are merged into its calls.
        options: options of the server.

    Raises:
        ConfigError: an option is invalid, or the policy's tokenizer cannot be loaded.
    """
    given = options or ServerOptions()
    app = guarded_app(Service(scorer, given), ROUTES)
    app.state.policy_texts = None
    if given.policy_tokenizer is not None:
        app.state.policy_texts = PolicyTexts(given.policy_tokenizer, apply_chat_template=given.apply_chat_template)
    app.add_api_route("/", native.page, include_in_schema=False, response_model=None)
    return app


def guarded_app(service: Service, routes: Sequence[Route]) -> FastAPI:
    """Return an application with these routes behind the guard, which keeps the limits and the key of the service."""
    errors: dict[int | str, dict[str, Any]] = {
        status: {"description": ", ".join(reason for reason in STATUS if STATUS[reason] == status)}
        for status in STATUS.values()
    }
    app = FastAPI(title="gym-rm", version=gym_rm.__version__, docs_url=None, redoc_url=None, responses=errors)
    app.router.route_class = StrictRoute
    app.state.service, app.state.paths = service, frozenset(path for _, path, _ in routes)
    for method, path, handler in routes:
        app.add_api_route(path, handler, methods=[method], response_model=None)
        if method == "GET":  # monitors ask with HEAD; uvicorn leaves out the body
            app.add_api_route(path, handler, methods=["HEAD"], response_model=None, include_in_schema=False)
    app.add_exception_handler(RequestValidationError, _refused)
    app.add_exception_handler(HTTPException, _refused)
    app.add_middleware(cast(Any, RequestGuard), service=service, paths=app.state.paths | {"/", "/openapi.json"})
    return app


async def _refused(request: Request, error: Exception) -> Response:
    """Answer a request that gets no scores, also one with an unknown path, another method or invalid fields."""
    if isinstance(error, RequestValidationError):
        error = invalid_fields(error)
    assert isinstance(error, HTTPException)
    headers = error.headers or {}
    if not isinstance(error, RequestError):
        known = ", ".join(sorted(request.app.state.paths))
        error = {
            404: RequestError("not_found", f"unknown path; the server has {known}."),
            405: RequestError("method_not_allowed", f"{request.url.path} does not accept {request.method}."),
        }.get(error.status_code) or RequestError("bad_request", "invalid request.")
    request.app.state.service.metrics.refusals.labels(error.reason).inc()
    response = error_response(error, request.url.path)
    response.headers.update(headers)
    return response
