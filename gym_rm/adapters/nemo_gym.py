"""NeMo Gym: a resources server made of a scorer or of an environment, for its `simple_agent` and `gymnasium_agent`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from fastapi import FastAPI
from gymnasium.error import ResetNeeded
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gym_rm.checks import integer, one_of, positive
from gym_rm.config import parse_settings
from gym_rm.data.prompts import load_prompts
from gym_rm.data.responses_api import messages_of_items
from gym_rm.envs.settings import EnvSettings, divide_known, planned
from gym_rm.envs.single import RewardEnv
from gym_rm.envs.tools.toolbox import Reply, Toolbox
from gym_rm.errors import ConfigError, GymRMError
from gym_rm.scorer import acquire_scorer, is_relative
from gym_rm.scores import Scores, ScoringError
from gym_rm.server import native
from gym_rm.server.app import Route, guarded_app
from gym_rm.server.options import ServerOptions
from gym_rm.server.responses import RequestError, json_response
from gym_rm.server.service import Service
from gym_rm.types import Message, Prompt

COOKIE = "gym_rm_session"
RESERVED = frozenset({"seed_session", "verify", "aggregate_metrics", "reset", "step", "close", "mcp"})
OURS = ("prompts", "num_envs", "group_size", "autoreset_mode", "render_mode", "plan")
THREADS = 64  # episodes that step at the same time; their scores come from one call


def make_app(
    *,
    options: ServerOptions | None = None,
    failed_rows: Literal["error", "judge_failed"] = "error",
    max_sessions: int = 4096,
    session_timeout: float = 3600.0,
    **settings: Any,
) -> FastAPI:
    """Return a resources server of NeMo Gym, for uvicorn or as the `setup_webserver` of a class of NeMo Gym.

    `/verify` scores a whole rollout, `/<tool>` calls a tool, `/reset` and `/step` run an episode of `RewardModel-v0`.
    Requests of all sessions are scored in common calls.

    Args:
        options: key and limits of the server. Without a key it answers only to loopback addresses.
        failed_rows: what `/verify` answers for a row without a score. `"error"` is HTTP status 422, with which NeMo RL
            repeats the rollout. `"judge_failed"` is NeMo Gym's row of this name, which its `eval` writes to a file of
            failures and repeats; NeMo RL would train on its placeholder reward of 0.0.
        max_sessions: most sessions at the same time; another one gets status 429.
        session_timeout: seconds without a request after which a session ends.
        **settings: the fields of `EnvSettings` but for the prompts, which come with the requests.

    Raises:
        ConfigError: a setting is invalid, or the scorer compares the replies of a group, which come one by one.

    Example:
        >>> app = make_app(reward_model={"kind": "math"})
        >>> sorted(app.state.paths)[:3]
        ['/aggregate_metrics', '/close', '/health']
    """
    one_of("failed_rows", failed_rows, ("error", "judge_failed"))
    divide_known(settings, "a NeMo Gym server")
    if given := [name for name in OURS if name in settings]:
        raise ConfigError(f"{', '.join(given)} must not be set: the rows come with the requests.")
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
    sessions = Sessions(integer("max_sessions", max_sessions, minimum=1), positive("session_timeout", session_timeout))
    names = ("reward_model", "reward_model_kwargs")
    episodes = {name: value for name, value in settings.items() if name not in names}
    routes = _Routes(service, sessions, toolbox, episodes, failed_rows)
    return guarded_app(service, routes.table())


@dataclass(slots=True, eq=False)
class Session:
    """One rollout.

    Attributes:
        prompt: its data row.
        env: its episode; None if it began with `/seed_session`.
        used: time of its last request.
        lock: of the request that changes it.
        said: the messages that are known: those of the prompt, and the calls of tools with their results.
        last_step: id of the last request to `/step`, and the reply to it.
    """

    prompt: Prompt
    env: RewardEnv | None = None
    used: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    said: tuple[Message, ...] = ()
    last_step: tuple[Any, dict[str, Any]] = (None, {})


class Sessions:
    """The sessions by the value of their cookie; unused ones end, and there are never more than `most`."""

    def __init__(self, most: int, timeout: float) -> None:
        self.most, self.timeout = most, timeout
        self._open: dict[str, Session] = {}  # the one that was not used for longest is first

    def start(self, session: Session) -> str:
        """Add a session and return its name. Raises RequestError if there are too many."""
        oldest = time.monotonic() - self.timeout
        for name, other in list(self._open.items()):
            if other.used > oldest:
                break
            self.end(name)
        if len(self._open) >= self.most:
            raise RequestError("queue_full", f"all {self.most} sessions are in use; try again later.", retry_after=5)
        name = secrets.token_hex(16)
        session.used = time.monotonic()
        self._open[name] = session
        return name

    def use(self, name: str | None) -> Session:
        """Return a session. Raises RequestError if it has ended."""
        session = self._open.pop(name or "", None)
        if session is None:
            raise RequestError("invalid_request", "there is no such session; POST the row to /seed_session or /reset.")
        session.used = time.monotonic()
        self._open[cast(str, name)] = session
        return session

    def end(self, name: str | None) -> None:
        """End a session, if there is one."""
        session = self._open.pop(name or "", None)
        if session is not None and session.env is not None:
            session.env.close()


class _Routes:
    """What the server answers."""

    def __init__(
        self,
        service: Service,
        sessions: Sessions,
        toolbox: Toolbox | None,
        settings: dict[str, Any],
        failed_rows: str,
    ) -> None:
        self.service, self.sessions, self.toolbox = service, sessions, toolbox
        self.settings, self.failed_rows = settings, failed_rows
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="gym_rm episodes")

    def table(self) -> list[Route]:
        """Return the routes; that of the tools is the last, because it takes every name."""
        posts = (self.seed_session, self.verify, self.aggregate_metrics, self.reset, self.step, self.close)
        routes: list[Route] = [("POST", f"/{handler.__name__}", handler) for handler in posts]
        routes += [("GET", "/reverify_mode", self.reverify_mode)]
        routes += [("GET", f"/{name}", getattr(native, name)) for name in ("health", "ready", "metrics")]
        routes += [("POST", "/{tool}", self.tool)] if self.toolbox else []
        # Where NeMo Gym records calls of models, it writes the rollout before the path.
        return [*routes, *((method, f"/ng-rollout/{{rollout}}{path}", handler) for method, path, handler in routes)]

    async def seed_session(self, request: Request) -> Response:
        """Start a session for the calls of tools."""
        prompt = self._prompt(await _body(request))
        return self._started(request, Session(prompt, said=prompt.messages), {})

    async def tool(self, request: Request) -> Response:
        """Execute the call of a tool; the reply is the text that the policy reads, an error with status 422."""
        function = {"name": request.path_params["tool"], "arguments": await _body(request)}
        call = Message(role="assistant", content="", tool_calls=[{"type": "function", "function": function}])
        name = request.cookies.get(COOKIE)
        session, toolbox = self.sessions.use(name), cast(Toolbox, self.toolbox)
        async with session.lock:
            reply = Reply(call).numbered(session.said)
            said = [*session.said, reply.message]
            with _refusals():
                (answer,) = await self._in_thread(lambda: toolbox.answer([reply], [said], [session.prompt]))
            session.said = (*said, *answer.messages)
        text = PlainTextResponse(answer.messages[0]["content"], 422 if answer.num_errors else 200)
        return _with_cookie(text, cast(str, name))

    async def verify(self, request: Request) -> Response:
        """Score a whole rollout; the session ends."""
        row = await _body(request)
        prompt = self._prompt(row)
        said = _reply_items(row)
        while said and said[-1]["role"] != "assistant":
            said.pop()  # results that the policy never saw, because the agent's limit of steps was reached
        conversation = [*prompt.messages, *(said or [Message(role="assistant", content="")])]
        scores = await self.service.score([conversation], request, [prompt])
        self.sessions.end(request.cookies.get(COOKIE))
        if scores.failed_rows and self.failed_rows == "error":
            raise RequestError("failed_row", str(scores.errors[0]))
        return json_response(row | verified(scores))

    async def aggregate_metrics(self, request: Request) -> Response:
        """Statistics of rollouts, of all and by task."""
        rows = (await _body(request)).get("verify_responses")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise RequestError("invalid_request", "verify_responses must be a list of objects.", "verify_responses")
        return json_response(aggregated(rows))

    async def reverify_mode(self) -> Response:
        """A verification needs no session."""
        return json_response("stateless")

    async def reset(self, request: Request) -> Response:
        """Start an episode from a row."""
        prompt = self._prompt(await _body(request))

        def start() -> Session:
            env = RewardEnv(prompts=[prompt], reward_model=self.service.batching, **self.settings)
            env.reset()
            return Session(prompt, env)

        with _refusals():
            session = await self._in_thread(start)
        info = {"supports_explicit_close": True, "supports_step_idempotency": True}
        return self._started(request, session, {"observation": None, "info": info})

    async def step(self, request: Request) -> Response:
        """Take one reply of the policy in an episode."""
        row = await _body(request)
        name = request.cookies.get(COOKIE)
        session, request_id = self.sessions.use(name), row.get("_ng_step_request_id")
        async with session.lock:
            if request_id is None or session.last_step[0] != request_id:
                with _refusals():
                    reply = await self._in_thread(lambda: _stepped(session, row))
                session.last_step = request_id, reply
            return _with_cookie(json_response(session.last_step[1]), cast(str, name))

    async def close(self, request: Request) -> Response:
        """End a session; one that has ended is no error."""
        self.sessions.end(request.cookies.get(COOKIE))
        return json_response({})

    def _prompt(self, row: Mapping[str, Any]) -> Prompt:
        """Return a data row as a prompt; a row without tools has those of the server."""
        kept = {name: value for name, value in row.items() if name != "response"}
        with _refusals():
            prompt = load_prompts([{**kept, "responses_create_params": row.get("responses_create_params")}])[0]
        tools = self.toolbox.schemas if self.toolbox else ()
        return prompt if prompt.tools else replace(prompt, tools=tools)

    def _started(self, request: Request, session: Session, content: dict[str, Any]) -> Response:
        self.sessions.end(request.cookies.get(COOKIE))
        return _with_cookie(json_response(content), self.sessions.start(session))

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.threads, function)


def verified(scores: Scores) -> dict[str, Any]:
    """Return what `/verify` adds to the row of the only score.

    NeMo RL refuses components whose sum is not the reward, so others are only among the fields `component_NAME`, of
    which NeMo Gym makes metrics.
    """
    score = scores[0]
    if score.error is not None:
        failure = {"_ng_failure_class": "judge_failed", "_ng_failure_judge_error": score.error}
        return {"reward": 0.0, **failure}
    components = {name: value for name, value in score.components.items() if math.isfinite(value)}
    added = {"reward": score.reward, **{f"component_{name}": value for name, value in components.items()}}
    if components and math.isclose(sum(components.values()), score.reward, rel_tol=1e-6, abs_tol=1e-7):
        return {**added, "reward_components": components}
    return added


def aggregated(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the statistics of the numbers in the rows, without rows that failed, by the names of NeMo Gym."""
    rows = [row for row in rows if row.get("_ng_failure_class") is None]
    tasks: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        tasks.setdefault(row.get("_ng_task_index") or 0, []).append(row)
    groups = [{"_ng_task_index": task, **_statistics(members)} for task, members in tasks.items()]
    of_all = _statistics(rows)
    key_metrics = {name: value for name, value in of_all.items() if name.startswith("mean/")}
    return {"group_level_metrics": groups, "agent_metrics": of_all, "key_metrics": key_metrics}


def _statistics(rows: list[dict[str, Any]]) -> dict[str, float]:
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float) and not name.startswith("_"):
                columns.setdefault(name, []).append(float(value))
    found: dict[str, float] = {}
    for name, values in columns.items():
        found |= {f"mean/{name}": statistics.fmean(values), f"max/{name}": max(values), f"min/{name}": min(values)}
        found[f"median/{name}"] = statistics.median(values)
        found[f"std/{name}"] = statistics.stdev(values) if len(values) > 1 else 0.0
    return found


def _stepped(session: Session, row: Mapping[str, Any]) -> dict[str, Any]:
    """Take a step of an episode and return the reply to `/step`."""
    if session.env is None:
        raise ConfigError("the session has no episode; POST the row to /reset.")
    replies = [message for message in _reply_items(row) if message["role"] == "assistant"]
    reply = replies[-1] if replies else Message(role="assistant", content="")
    said, reward, terminated, truncated, _ = session.env.step(cast(Any, reply))
    new = said[max(k for k, message in enumerate(said) if message["role"] == "assistant") + 1 :]
    outputs = [{"call_id": each["tool_call_id"], "output": each["content"]} for each in new if each["role"] == "tool"]
    texts = [message["content"] for message in new if message["role"] != "tool"]
    return {
        "observation": "\n\n".join(texts) if texts else None,
        "reward": reward,
        "terminated": terminated,
        "truncated": truncated,
        "info": {"tool_outputs": outputs},
    }


def _reply_items(row: Mapping[str, Any]) -> list[Message]:
    """Return the messages of `response.output`."""
    response = row.get("response")
    if not isinstance(response, Mapping):
        raise RequestError("invalid_request", f"response must be an object, got {response!r:.80}.", "response")
    with _refusals():
        return messages_of_items(response.get("output"), "response.output")


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Refuse the request if a row is invalid or has no score."""
    try:
        yield
    except ScoringError as error:
        raise RequestError("failed_row", error.summary) from error
    except (GymRMError, ResetNeeded) as error:
        raise RequestError("invalid_request", str(error)) from error


async def _body(request: Request) -> dict[str, Any]:
    try:
        value = from_json(await request.body(), allow_inf_nan=False)
    except ValueError as error:
        raise RequestError("invalid_json", f"the body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise RequestError("invalid_request", "the body must be a JSON object.")
    return value


def _with_cookie(response: Response, name: str) -> Response:
    """Set the cookie again in every reply, because NeMo Gym's agents keep only those of the last one."""
    response.set_cookie(COOKIE, name, httponly=True, samesite="strict")
    return response
