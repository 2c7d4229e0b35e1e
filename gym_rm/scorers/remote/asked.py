"""A server of rewards, asked as its other clients ask it: with token ids, texts or messages, and with their fields."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gym_rm.errors import ConfigError, RemoteError
from gym_rm.http_client.addresses import parse_urls, read_key
from gym_rm.http_client.client import HTTPClient
from gym_rm.http_client.responses import InvalidReply, Refused, parse_body
from gym_rm.scorers.remote.protocols import read_models, to_json
from gym_rm.scores import RewardArray

SECONDS = 300.0  # for a reply
ROUTES = {"gym_rm": "/v1/rewards", "openrlhf": "/get_reward", "vllm": "/classify", "sglang": "/classify"}
FORMS = {  # of the rows of a request, and the field that has them
    "gym_rm": {"conversations": "conversations"},
    "openrlhf": {"texts": "query"},
    "vllm": {"token ids": "input", "texts": "input", "messages": "messages"},
    "sglang": {"token ids": "input_ids", "texts": "text"},
}


class AskedServer:
    """A server that is asked as any client may ask it, and whose rewards are not checked.

    Args:
        url: `gym-rm serve`, vLLM or SGLang, or one of their `ROUTES`, vLLM's `/pooling`, or OpenRLHF's `/get_reward`.
        key: as for `RemoteScorer`.
        fields: further fields of each request, such as `{"truncate_prompt_tokens": 512}`.

    Example:
        >>> AskedServer("http://127.0.0.1:8000").ask("token ids", [[1, 2, 3]])  # doctest: +SKIP
    """

    def __init__(self, url: str, *, key: str | None = None, fields: Mapping[str, Any] | None = None) -> None:
        (given,) = parse_urls([url])
        self._route = next((each for each in (*ROUTES.values(), "/pooling") if given.endswith(each)), None)
        root, self._fields = given.removesuffix(self._route or ""), fields or {}
        limits: Any = {"attempt_timeout": SECONDS, "max_retries": 2, "max_connections": 1}  # a row alone is alone
        self._client, self._protocol, self._model = HTTPClient([root], key=read_key(key), **limits), "openrlhf", root
        if self._route != "/get_reward":
            served = read_models(self._send("/v1/models"))
            own = served.provenance.scorer == "gym_rm" and self._route in (None, "/v1/rewards")
            self._protocol, self._model = "gym_rm" if own else served.protocol, served.provenance.model
        self.forms = FORMS[self._protocol]

    def _send(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        async def send() -> Any:
            deadline, content = asyncio.get_running_loop().time() + SECONDS, to_json(body) if body else None
            return await self._client.send(path, content, read=parse_body, deadline=deadline)

        return self._client.run(send())[0]

    def _body(self, form: str, rows: Sequence[Any]) -> dict[str, Any]:
        body: dict[str, Any] = {self.forms.get(form, form): [text for text, _ in rows] if form == "texts" else rows}
        if self._protocol == "openrlhf":
            body["prompts"] = [prompt for _, prompt in rows]
        if self._protocol == "vllm":
            body |= {"model": self._model, "use_activation": False}
            body |= {"task": "classify"} if self._route == "/pooling" else {}
        if form == "messages":
            body |= {"messages": rows[0], "add_generation_prompt": False, "add_special_tokens": False}
        return {**body, **self._fields}

    def ask(self, form: str, rows: Sequence[Any]) -> tuple[RewardArray, str | None]:
        """Return the rewards `[N]` of one request, of several values of a row the last; if it is refused, NaN and why.

        `rows` are N conversations (one for messages), lists of token ids, or texts with the texts of their prompts.
        Raises InvalidReply if the reply has not one reward for each of them.
        """
        try:
            reply = self._send(self._route or ROUTES[self._protocol], self._body(form, rows))
        except Refused as refused:
            return np.full(len(rows), np.nan), refused.reason
        try:
            found = reply if isinstance(reply, list) else reply.get("rewards", reply.get("data"))
            if isinstance(found[0], Mapping):
                (name,) = {"probs", "embedding", "data"} & {*found[0]}
                found = [each[name][-1] for each in sorted(found, key=lambda each: each.get("index", 0))]
            rewards = np.array(found, dtype=np.float64).reshape(len(rows))
            return rewards, None if np.isfinite(rewards).all() else f"no reward: {reply!r:.300}"
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidReply(f"expected {len(rows)} rewards of {self._model}, got {reply!r:.200}") from error

    def token_ids(self, form: str, row: Any) -> list[int] | None:
        """Return the token ids that the server says it makes of a text or of messages; None if it does not say it."""
        body = self._body("messages" if form == "conversations" else form, [row])
        try:
            asked = {**body, "prompt": row[0], "input": None} if form == "texts" else body
            return [*map(int, self._send("/tokenize", asked)["tokens"])]
        except (ConfigError, RemoteError, Refused, LookupError, TypeError):
            return None
