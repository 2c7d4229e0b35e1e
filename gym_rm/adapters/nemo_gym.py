"""NeMo Gym: a resources server made of a scorer and tools, for its `simple_agent`."""

from __future__ import annotations

import asyncio
import math
import secrets
import statistics
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, cast

from fastapi import FastAPI
from pydantic_core import from_json
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gym_rm.checks import integer, one_of
from gym_rm.config import parse_settings
from gym_rm.data.prompts import load_prompts
from gym_rm.data.responses_api import messages_of_items
from gym_rm.engine.executors.parallel_options import ParallelOptions
from gym_rm.envs.settings import EnvSettings, planned
from gym_rm.envs.tools.toolbox import Reply, Toolbox
from gym_rm.errors import ConfigError, GymRMError
from gym_rm.scorer import is_relative
from gym_rm.scorers.load import acquire_scorer
from gym_rm.scores import Score
from gym_rm.server import native
from gym_rm.server.app import Route, guarded_app
from gym_rm.server.options import ServerOptions
from gym_rm.server.responses import RequestError, json_response
from gym_rm.server.service import Service
from gym_rm.types import Message, Prompt

Body: TypeAlias = dict[str, Any]
COOKIE = "gym_rm_session"
RESERVED = frozenset({"seed_session", "verify", "aggregate_metrics", "mcp"})
SETTINGS = {
    "reward_model",
    "reward_model_kwargs",
    "tools",
    "tool_options",
    "max_text_length",
    *ParallelOptions.model_fields,
}


def make_app(
    *,
    options: ServerOptions | None = None,
    failed_rows: Literal["error", "judge_failed"] = "error",
    max_sessions: int = 16_384,
    **settings: Any,
) -> FastAPI:
    """Return a resources server of NeMo Gym, for uvicorn or as the `setup_webserver` of a class of NeMo Gym.

    `/verify` scores a whole rollout, `/<tool>` calls a tool. Requests of all sessions are scored in common calls.

    Args:
        options: key and limits of the server. Without a key it answers only to loopback addresses.
        failed_rows: what `/verify` answers for a row without a score. `"error"` is HTTP status 422, with which NeMo RL
            repeats the rollout. `"judge_failed"` is NeMo Gym's row of this name, which its `eval` writes to a file of
            failures and repeats; NeMo RL would train on its placeholder reward of 0.0.
        max_sessions: most rollouts at the same time; a new one ends the one that was not used for longest.
        **settings: `reward_model`, `reward_model_kwargs`, `ParallelOptions`, `tools`, `tool_options` and
            `max_text_length` of `RewardModel-v0`. Prompts come with the requests, and the agent runs the turns.

    Raises:
        ConfigError: a setting is invalid, or the scorer compares the replies of a group, which come one by one.

    Example:
        >>> app = make_app(reward_model={"kind": "math"})
        >>> sorted(app.state.paths)[:3]
        ['/aggregate_metrics', '/health', '/metrics']
    """
    one_of("failed_rows", failed_rows, ("error", "judge_failed"))
    if given := sorted(settings.keys() & EnvSettings.model_fields.keys() - SETTINGS):
        raise ConfigError(f"{', '.join(given)} must not be set: rows come with the requests, the agent runs the turns.")
    parsed = parse_settings(EnvSettings, settings)
    toolbox = Toolbox(parsed.tools, parsed.tool_options, parsed.max_text_length) if parsed.tools else None
    if toolbox is not None and (taken := RESERVED & toolbox.tools.keys()):
        raise ConfigError(f"tools: {sorted(taken)} are paths of the server; write Tool(function, name='...').")
    scorer = acquire_scorer(*planned(parsed, 1))
    if is_relative(scorer):
        raise ConfigError(
            f"{type(scorer).__name__} compares the replies of a group, but NeMo Gym sends them one by one; serve a "
            "scorer whose rewards do not depend on other replies."
        )
    service = Service(scorer, options or ServerOptions())
    service.only_loopback = service.options.key is None
    server = _Server(service, toolbox, failed_rows, integer("max_sessions", max_sessions, minimum=1))
    return guarded_app(service, server.routes())


@dataclass(slots=True, eq=False)
class Session:
    """One rollout.

    Attributes:
        prompt: its data row.
        said: the messages that are known: those of the prompt, and the calls of tools with their results.
        lock: of the request that changes it.
    """

    prompt: Prompt
    said: tuple[Message, ...]
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True, eq=False)
class _Server:
    """What the server answers; `sessions` are by the value of their cookie, the one used last at the end."""

    service: Service
    toolbox: Toolbox | None
    failed_rows: str
    max_sessions: int
    sessions: dict[str, Session] = field(default_factory=dict)

    def routes(self) -> list[Route]:
        """Return the routes; that of the tools is the last, because it takes every name."""
        posts = (self.seed_session, self.verify, self.aggregate_metrics)
        routes: list[Route] = [("POST", f"/{post.__name__}", _handler(post)) for post in posts]
        routes += [("GET", "/reverify_mode", lambda: "stateless")]
        routes += [("GET", f"/{name}", getattr(native, name)) for name in ("health", "ready", "metrics")]
        routes += [("POST", "/{tool}", _handler(self.tool))] if self.toolbox else []
        # Where NeMo Gym records calls of models, it writes the rollout before the path.
        return [*routes, *((method, f"/ng-rollout/{{rollout}}{path}", handler) for method, path, handler in routes)]

    async def seed_session(self, request: Request, row: Body) -> Response:
        """Start a session for the calls of tools."""
        prompt = self._prompt(row)
        self._end(request)
        while len(self.sessions) >= self.max_sessions:
            del self.sessions[next(iter(self.sessions))]
        name = secrets.token_hex(16)
        self.sessions[name] = Session(prompt, prompt.messages)
        return _with_cookie(json_response({}), name)

    async def tool(self, request: Request, arguments: Body) -> Response:
        """Execute the call of a tool; the reply is the text that the policy reads, an error with status 422."""
        function = {"name": request.path_params["tool"], "arguments": arguments}
        call = Message(role="assistant", content="", tool_calls=[{"type": "function", "function": function}])
        session, toolbox = self._session(request), cast(Toolbox, self.toolbox)
        async with session.lock:
            reply = Reply(call).numbered(session.said)
            said = [*session.said, reply.message]
            (answer,) = await run_in_threadpool(toolbox.answer, [reply], [said], [session.prompt])
            session.said = (*said, *answer.messages)
        text = PlainTextResponse(answer.messages[0]["content"], 422 if answer.num_errors else 200)
        return _with_cookie(text, request.cookies[COOKIE])

    async def verify(self, request: Request, row: Body) -> Response:
        """Score a whole rollout; the session ends."""
        prompt, said = self._prompt(row), _reply_items(row)
        while said and said[-1]["role"] != "assistant":
            said.pop()  # results that the policy never saw, because the agent's limit of steps was reached
        conversation = [*prompt.messages, *(said or [Message(role="assistant", content="")])]
        (score,) = await self.service.score([conversation], request, [prompt])
        self._end(request)
        if score.error is not None and self.failed_rows == "error":
            raise RequestError("failed_row", score.error)
        return json_response(row | verified(score))

    async def aggregate_metrics(self, request: Request, body: Body) -> Response:
        """The means of the numbers of rollouts, without those that failed."""
        rows = body.get("verify_responses")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ConfigError("verify_responses must be a list of objects.")
        columns: dict[str, list[float]] = {}
        for row in rows:
            for name, value in row.items() if row.get("_ng_failure_class") is None else ():
                if isinstance(value, int | float) and not name.startswith("_"):
                    columns.setdefault(f"mean/{name}", []).append(value)
        means = {name: statistics.fmean(values) for name, values in columns.items()}
        return json_response({"agent_metrics": means, "key_metrics": means})

    def _prompt(self, row: Body) -> Prompt:
        """Return a data row as a prompt; a row without tools has those of the server."""
        kept = {name: value for name, value in row.items() if name != "response"}
        (prompt,) = load_prompts([{"responses_create_params": None, **kept}])
        return prompt if prompt.tools or not self.toolbox else replace(prompt, tools=self.toolbox.schemas)

    def _session(self, request: Request) -> Session:
        name = request.cookies.get(COOKIE, "")
        session = self.sessions.pop(name, None)
        if session is None:
            raise ConfigError(
                "there is no such session; POST the row to /seed_session. If that was done, the session has "
                f"ended, or there were more than max_sessions={self.max_sessions}."
            )
        self.sessions[name] = session
        return session

    def _end(self, request: Request) -> None:
        self.sessions.pop(request.cookies.get(COOKIE, ""), None)


def verified(score: Score) -> Body:
    """Return what `/verify` adds to the row of a score.

    NeMo RL refuses components whose sum is not the reward, so others are only among the fields `component_NAME`, of
    which NeMo Gym makes metrics.
    """
    if score.error is not None:
        return {"reward": 0.0, "_ng_failure_class": "judge_failed", "_ng_failure_judge_error": score.error}
    components = {name: value for name, value in score.components.items() if math.isfinite(value)}
    added = {"reward": score.reward, **{f"component_{name}": value for name, value in components.items()}}
    is_sum = math.isclose(sum(components.values()), score.reward, rel_tol=1e-6, abs_tol=1e-7)
    return {**added, "reward_components": components} if components and is_sum else added


def _reply_items(row: Body) -> list[Message]:
    response = row.get("response")
    if not isinstance(response, Mapping):
        raise ConfigError(f"response must be an object, got {response!r:.80}.")
    return messages_of_items(response.get("output"), "response.output")


def _handler(answer: Callable[[Request, Body], Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Return a handler that reads a JSON object, and refuses a row that is invalid or has no score."""

    async def handle(request: Request) -> Response:
        try:
            body = from_json(await request.body(), allow_inf_nan=False)
            if not isinstance(body, dict):
                raise ConfigError("the body must be a JSON object.")
            return await answer(request, body)
        except (GymRMError, ValueError, OverflowError) as error:
            raise RequestError("invalid_request", str(error)) from error

    return handle


def _with_cookie(response: Response, name: str) -> Response:
    """Set the cookie again in every reply, because NeMo Gym's agents keep only those of the last one."""
    response.set_cookie(COOKIE, name, httponly=True, samesite="strict")
    return response
