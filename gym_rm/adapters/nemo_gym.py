"""NeMo Gym: a resources server made of a scorer.

Tools are those of NeMo Gym's own servers, or of our environments: this server verifies rollouts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import statistics
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fastapi import FastAPI
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from gym_rm.checks import finite, integer, one_of
from gym_rm.data.prompts import load_prompts
from gym_rm.data.responses_api import messages_of_items
from gym_rm.errors import ConfigError, GymRMError, RowError
from gym_rm.scorer import ScorerLike, is_relative
from gym_rm.scorers.load import load_scorer
from gym_rm.scores import Score, Scores
from gym_rm.server import native
from gym_rm.server.app import Route, guarded_app
from gym_rm.server.options import ServerOptions
from gym_rm.server.responses import RequestError, json_response
from gym_rm.server.service import Service
from gym_rm.types import Conversation, Message, Prompt

Body: TypeAlias = dict[str, Any]
INCOMPLETE = "cohort_incomplete"  # NeMo Gym's name of the failure


def make_app(
    reward_model: ScorerLike = None,
    *,
    options: ServerOptions | None = None,
    failed_rows: Literal["error", "mask"] = "error",
    group_size: int | None = None,
    group_timeout: float = 1800.0,
    **scorer_options: Any,
) -> FastAPI:
    """Return a resources server of NeMo Gym, for uvicorn or as the `setup_webserver` of a class of NeMo Gym.

    `/verify` scores a whole rollout; concurrent requests are scored in common calls.

    Args:
        reward_model, scorer_options: arguments of `load_scorer`.
        options: key and limits of the server. Without a key, the header `Host` must be the address that it listens on.
        failed_rows: what `/verify` answers for a row without a score: `"error"`, HTTP status 422, or `"mask"`, a row
            with `mask_sample` and `failure_kind`. NeMo Gym leaves it out of all numbers and repeats it. NeMo RL leaves
            it out of the loss, but its reward of 0.0 counts in the baseline.
        group_size: number of replies of a group, for a scorer that compares them; a reply waits for its group, which
            `_ng_group_id` or `_ng_task_index` names, to have each `_ng_rollout_index` from 0.
        group_timeout: seconds after which an incomplete group has failed, and a scored one is forgotten.

    Raises:
        ConfigError: an option is invalid, or the scorer compares the replies of a group and group_size is missing.

    Example:
        >>> app = make_app(reward_model={"kind": "math"})
        >>> sorted(app.state.paths)[:3]
        ['/aggregate_metrics', '/close_session', '/health']
    """
    one_of("failed_rows", failed_rows, ("error", "mask"))
    scorer = load_scorer(reward_model, **scorer_options)
    if is_relative(scorer) != (group_size is not None):
        does = "compares" if is_relative(scorer) else "does not compare"
        raise ConfigError(
            f"{type(scorer).__name__} {does} the replies of a group, and group_size is {group_size!r}; pass the number "
            "of rollouts of a task (num_repeats, num_generations_per_prompt) if it does, else none."
        )
    service = Service(scorer, options or ServerOptions())
    service.only_loopback = service.options.key is None
    groups, timeout = None, finite("group_timeout", group_timeout)
    if group_size is not None:
        groups = _Groups(service, integer("group_size", group_size, minimum=2), timeout)
    return guarded_app(service, _Server(service, failed_rows, groups).routes())


@dataclass(frozen=True, slots=True)
class _Server:
    """What the server answers."""

    service: Service
    failed_rows: str
    groups: _Groups | None

    def routes(self) -> list[Route]:
        """Return the routes of a resources server, also with the rollout that NeMo Gym may write before the path."""
        posts = (self.seed_session, self.close_session, self.verify, self.aggregate_metrics)
        routes: list[Route] = [("POST", f"/{post.__name__}", _handler(post)) for post in posts]
        routes += [("GET", "/reverify_mode", lambda: "unsupported" if self.groups else "stateless")]
        routes += [("GET", f"/{name}", getattr(native, name)) for name in ("health", "ready", "metrics")]
        return [*routes, *((method, f"/ng-rollout/{{rollout}}{path}", handler) for method, path, handler in routes)]

    async def seed_session(self, request: Request, body: Body) -> Response:
        """Name the session of an environment server, or check the row of an agent; `/verify` gets it again."""
        if "resources_session_id" not in body:
            _prompt(body)
            return json_response({})
        response = await self.close_session(request, body)
        response.set_cookie("session", "none")  # single_agent_turn refuses a session without a cookie
        return response

    async def close_session(self, request: Request, body: Body) -> Response:
        """Name the session; there is nothing to close."""
        if not isinstance(name := body.get("resources_session_id"), str) or not name:
            raise ConfigError(f"resources_session_id must be a text, got {name!r:.80}.")
        return json_response({"resources_session_id": name})

    async def verify(self, request: Request, row: Body) -> Response:
        """Score a whole rollout."""
        prompt, said = _prompt(row), _reply_items(row)
        while said and said[-1]["role"] != "assistant":
            said.pop()  # results that the policy never saw, because the agent's limit of steps was reached
        conversation = [*prompt.messages, *(said or [Message(role="assistant", content="")])]
        if self.groups is not None:
            request.scope["release_memory"]()
            score = await self.groups.score(row, conversation, prompt)
        else:
            (score,) = await self.service.score([conversation], request, [prompt])
        if score.error is not None and self.failed_rows == "error":
            raise RequestError("failed_row", score.error)
        return json_response(row | (_verified(score) if score.error is None else _masked(score, row)))

    async def aggregate_metrics(self, request: Request, body: Body) -> Response:
        """The means of the numbers of rollouts, without those that failed."""
        rows = body.get("verify_responses")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ConfigError("verify_responses must be a list of objects.")
        columns: dict[str, list[float]] = {}
        for row in rows:
            masked = row.get("mask_sample") or row.get("_ng_failure_class") is not None
            for name, value in row.items() if not masked else ():
                if isinstance(value, int | float) and not name.startswith("_") and name != "mask_sample":
                    columns.setdefault(f"mean/{name}", []).append(value)
        means = {name: statistics.fmean(values) for name, values in columns.items()}
        return json_response({"agent_metrics": means, "key_metrics": means})


@dataclass(slots=True, eq=False)
class _Group:
    """Replies and prompts by their index until they are scored, and digests of the replies."""

    replies: dict[int, tuple[Conversation, Prompt]]
    digests: dict[int, bytes]
    complete: asyncio.Event
    scores: asyncio.Task[Scores] | None = None


class _Groups:
    """Collects the replies of groups, which come in requests of their own, and scores a group in one call.

    A request that is sent again gets the same score, also later if the group has an id: a task can come in another run.
    """

    def __init__(self, service: Service, size: int, timeout: float) -> None:
        self.service, self.size, self.timeout = service, size, timeout
        self._groups: dict[str, _Group] = {}

    async def score(self, row: Body, conversation: Conversation, prompt: Prompt) -> Score:
        """Return the score of a reply when its group is complete and scored, or has failed."""
        group_id, index = row.get("_ng_group_id"), row.get("_ng_rollout_index")
        name = row.get("_ng_task_index") if group_id is None else [group_id, row.get("_ng_group_attempt", 0)]
        if name is None or type(index) is not int or not 0 <= index < self.size:
            raise ConfigError(
                f"a row needs _ng_rollout_index, from 0 to group_size - 1 = {self.size - 1}, and _ng_group_id or "
                f"_ng_task_index, got {index!r:.80} and {name!r:.80}."
            )
        key = json.dumps(name)
        if (group := self._groups.get(key)) is None:
            group = self._groups[key] = _Group({}, {}, asyncio.Event())
        group.scores = group.scores or asyncio.create_task(self._collect(key, group, keep=group_id is not None))
        digest = hashlib.sha256(json.dumps(conversation).encode()).digest()
        others = (reply[1].messages for reply in group.replies.values())
        if group.digests.setdefault(index, digest) != digest or any(messages != prompt.messages for messages in others):
            raise RequestError("conflict", f"group {key:.80} has another reply {index}, or replies to another prompt.")
        group.replies.setdefault(index, (conversation, prompt))
        if len(group.replies) == self.size:
            group.complete.set()
        return (await asyncio.shield(group.scores))[index]

    async def _collect(self, key: str, group: _Group, *, keep: bool) -> Scores:
        try:
            async with asyncio.timeout(self.timeout):
                await group.complete.wait()
            conversations, prompts = zip(*(group.replies[index] for index in range(self.size)), strict=True)
            stays = Request({"type": "http"}, asyncio.Event().wait)  # type: ignore[arg-type]  # a client that never goes
            return await self.service.score(conversations, stays, prompts)
        except TimeoutError:
            came = f"only {len(group.replies)} of the {self.size} replies of group {key:.80} came"
            error = RowError(f"{came} within group_timeout={self.timeout:g} seconds.", INCOMPLETE)
            return Scores.from_rewards([math.nan] * self.size, errors=[error] * self.size)
        except RequestError:
            keep = False  # a busy server: the same rows are scored when they come again
            raise
        finally:
            group.replies = {}
            asyncio.get_running_loop().call_later(self.timeout if keep else 0, self._groups.pop, key, None)


def _verified(score: Score) -> Body:
    """Return what `/verify` adds to the row of a score.

    NeMo RL refuses components whose sum is not the reward, so others are only among the fields `component_NAME`, of
    which NeMo Gym makes metrics.
    """
    components = {name: value for name, value in score.components.items() if math.isfinite(value)}
    added = {"reward": score.reward, **{f"component_{name}": value for name, value in components.items()}}
    is_sum = math.isclose(sum(components.values()), score.reward, rel_tol=1e-6, abs_tol=1e-7)
    return {**added, "reward_components": components} if components and is_sum else added


def _masked(score: Score, row: Body) -> Body:
    """Return what `/verify` adds to a row without a score: NeMo Gym reads `mask_sample`, NeMo RL `instance_config`."""
    assert score.error is not None
    asked, config = score.infos.get("judge_answers"), row.get("instance_config")
    kind = "verifier_error" if asked is None else "judge_unparseable" if asked else "judge_failed"
    kind, reason = INCOMPLETE if score.error.kind == INCOMPLETE else kind, score.error[:2000]
    masked = {"reward": 0.0, "mask_sample": True, "failure_kind": kind, "failure_reason": reason}
    masked["instance_config"] = {**(config if isinstance(config, dict) else {}), "mask_sample": True}
    # A class makes the collection repeat the row. It refuses such fields in an episode, whose row has none.
    return masked | ({"_ng_failure_class": kind, "_ng_failure_message": reason} if "_ng_task_index" in row else {})


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
