"""NeMo Gym: a resources server made of a scorer.

Tools are those of NeMo Gym's own servers, or of our environments: this server verifies rollouts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fastapi import FastAPI
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from gym_rm.checks import one_of
from gym_rm.data.prompts import load_prompts
from gym_rm.data.responses_api import messages_of_items
from gym_rm.errors import ConfigError, GymRMError
from gym_rm.scorer import ScorerLike, is_relative
from gym_rm.scorers.load import load_scorer
from gym_rm.scores import Score
from gym_rm.server import native
from gym_rm.server.app import Route, guarded_app
from gym_rm.server.options import ServerOptions
from gym_rm.server.responses import RequestError, json_response
from gym_rm.server.service import Service
from gym_rm.types import Message, Prompt

Body: TypeAlias = dict[str, Any]


def make_app(
    reward_model: ScorerLike = None,
    *,
    options: ServerOptions | None = None,
    failed_rows: Literal["error", "judge_failed"] = "error",
    **scorer_options: Any,
) -> FastAPI:
    """Return a resources server of NeMo Gym, for uvicorn or as the `setup_webserver` of a class of NeMo Gym.

    `/verify` scores a whole rollout; concurrent requests are scored in common calls.

    Args:
        reward_model, scorer_options: arguments of `load_scorer`.
        options: key and limits of the server. Without a key it answers only to loopback addresses.
        failed_rows: what `/verify` answers for a row without a score. `"error"` is HTTP status 422, with which NeMo RL
            repeats the rollout. `"judge_failed"` is NeMo Gym's row of this name, which its `eval` writes to a file of
            failures and repeats; NeMo RL would train on its placeholder reward of 0.0.

    Raises:
        ConfigError: an option is invalid, or the scorer compares the replies of a group, which come one by one.

    Example:
        >>> app = make_app(reward_model={"kind": "math"})
        >>> sorted(app.state.paths)[:3]
        ['/aggregate_metrics', '/health', '/metrics']
    """
    one_of("failed_rows", failed_rows, ("error", "judge_failed"))
    scorer = load_scorer(reward_model, **scorer_options)
    if is_relative(scorer):
        raise ConfigError(
            f"{type(scorer).__name__} compares the replies of a group, but NeMo Gym sends them one by one; serve a "
            "scorer whose rewards do not depend on other replies."
        )
    service = Service(scorer, options or ServerOptions())
    service.only_loopback = service.options.key is None
    return guarded_app(service, _Server(service, failed_rows).routes())


@dataclass(frozen=True, slots=True)
class _Server:
    """What the server answers."""

    service: Service
    failed_rows: str

    def routes(self) -> list[Route]:
        """Return the routes of a resources server, also with the rollout that NeMo Gym may write before the path."""
        posts = (self.seed_session, self.verify, self.aggregate_metrics)
        routes: list[Route] = [("POST", f"/{post.__name__}", _handler(post)) for post in posts]
        routes += [("GET", "/reverify_mode", lambda: "stateless")]
        routes += [("GET", f"/{name}", getattr(native, name)) for name in ("health", "ready", "metrics")]
        return [*routes, *((method, f"/ng-rollout/{{rollout}}{path}", handler) for method, path, handler in routes)]

    async def seed_session(self, request: Request, row: Body) -> Response:
        """Check a data row. There is nothing to keep of it: `/verify` gets the row again."""
        _prompt(row)
        return json_response({})

    async def verify(self, request: Request, row: Body) -> Response:
        """Score a whole rollout."""
        prompt, said = _prompt(row), _reply_items(row)
        while said and said[-1]["role"] != "assistant":
            said.pop()  # results that the policy never saw, because the agent's limit of steps was reached
        conversation = [*prompt.messages, *(said or [Message(role="assistant", content="")])]
        (score,) = await self.service.score([conversation], request, [prompt])
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


def _prompt(row: Body) -> Prompt:
    """Return a data row as a prompt."""
    kept = {name: value for name, value in row.items() if name != "response"}
    (prompt,) = load_prompts([{"responses_create_params": None, **kept}])
    return prompt


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
