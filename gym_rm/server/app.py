"""The application: all routes over one scorer."""

from __future__ import annotations

from typing import Any, cast

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import gym_rm
from gym_rm.scorer import Scorer
from gym_rm.server.errors import Refused, error_reply, protocol_of
from gym_rm.server.limits import Guard
from gym_rm.server.native import add_native_routes
from gym_rm.server.openrlhf import add_openrlhf_routes
from gym_rm.server.options import ServerOptions
from gym_rm.server.replies import reply
from gym_rm.server.service import Service
from gym_rm.server.sglang import add_sglang_routes
from gym_rm.server.tei import add_tei_routes
from gym_rm.server.vllm import add_vllm_routes


def make_app(scorer: Scorer, options: ServerOptions | None = None) -> FastAPI:
    """Return the server's application, for uvicorn, Ray Serve or a test client.

    `app.state.service` is the `Service`; its `close` ends the queue. The scorer stays open.

    Args:
        scorer: any scorer; requests of all protocols are merged into its calls.
        options: options of the server.

    Raises:
        ConfigError: an option is invalid, or the policy's tokenizer cannot be loaded.
    """
    service = Service(scorer, options or ServerOptions())
    app = FastAPI(title="gym-rm", version=gym_rm.__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    add_native_routes(app, service)
    add_vllm_routes(app, service)
    add_sglang_routes(app, service)
    add_tei_routes(app, service)
    add_openrlhf_routes(app, service)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(cast(Any, Guard), service=service)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    service: Service = request.app.state.service
    service.metrics.refusals.labels(error.reason).inc()
    protocol = protocol_of(request.url.path, getattr(request.state, "body", None))
    status, content, headers = error_reply(error, protocol)
    return reply(content, status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """An unknown path, or a path with another method."""
    assert isinstance(error, HTTPException)
    reason = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "bad_request")
    known = sorted({getattr(route, "path", "") for route in request.app.routes} - {"", "/", "/openapi.json"})
    message = {
        "not_found": f"unknown path; the server has {', '.join(known)}.",
        "method_not_allowed": f"{request.url.path} does not accept {request.method}.",
    }.get(reason, "invalid request.")
    response = await _refused(request, Refused(reason, message))
    response.headers.update(error.headers or {})
    return response
