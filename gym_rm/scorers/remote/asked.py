"""A server of rewards, asked as its other clients ask it: with token ids, texts or messages, and with their fields."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from gym_rm.config import parse_settings
from gym_rm.http_client.addresses import parse_urls, read_key
from gym_rm.http_client.client import HTTPClient
from gym_rm.http_client.responses import InvalidReply, NoSuchRoute, Refused, parse_body
from gym_rm.scorers.remote.options import ConnectionOptions
from gym_rm.scorers.remote.protocols import read_models, to_json
from gym_rm.scores import RewardArray

Form: TypeAlias = Literal["conversations", "token ids", "texts", "messages"]
ROUTES = {"gym_rm": "/v1/rewards", "openrlhf": "/get_reward", "vllm": "/classify", "sglang": "/classify"}
FIELDS: Mapping[str, Mapping[Form, str]] = {  # of a request: the one with its rows, by form
    "gym_rm": {"conversations": "conversations"},
    "openrlhf": {"texts": "query"},
    "vllm": {"token ids": "input", "texts": "input", "messages": "messages"},
    "sglang": {"token ids": "input_ids", "texts": "text"},
}


class AskedServer:
    """A server that is asked as any client may ask it, and whose rewards are not checked.

    Args:
        url: `gym-rm serve`, vLLM or SGLang, or one of their `ROUTES`, vLLM's `/pooling`, or OpenRLHF's `/get_reward`.
        fields: further fields of each request, such as `{"truncate_prompt_tokens": 512}`.
        **options: the fields of `ConnectionOptions`.

    Example:
        >>> AskedServer("http://127.0.0.1:8000").ask("token ids", [[1, 2, 3]])  # doctest: +SKIP
    """

    def __init__(self, url: str, fields: Mapping[str, Any] | None = None, **options: Any) -> None:
        chosen: ConnectionOptions = parse_settings(ConnectionOptions, options)
        (given,) = parse_urls([url])
        self._route = next((each for each in (*ROUTES.values(), "/pooling") if given.endswith(each)), None)
        root, self._fields, self._seconds = given.removesuffix(self._route or ""), fields or {}, chosen.timeout
        # One request at a time, so that a row that is sent alone is alone.
        once: Any = {"attempt_timeout": chosen.timeout, "max_retries": 2, "max_connections": 1}
        self._client, self.protocol, self.model = HTTPClient([root], key=read_key(chosen.key), **once), "openrlhf", root
        if self._route != "/get_reward":
            served = read_models(self._send("/v1/models"))
            ours = served.provenance.scorer == "gym_rm" and self._route in (None, "/v1/rewards")
            self.protocol, self.model = "gym_rm" if ours else served.protocol, served.provenance.model
        self.forms = tuple(FIELDS[self.protocol])

    def _send(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        async def send() -> Any:
            deadline = asyncio.get_running_loop().time() + self._seconds
            content = None if body is None else to_json(body)
            return await self._client.send(path, content, read=parse_body, deadline=deadline)

        return self._client.run(send())[0]

    def _body(self, form: Form, rows: Sequence[Any]) -> dict[str, Any]:
        body = {FIELDS[self.protocol].get(form, form): [text for text, _ in rows] if form == "texts" else rows}
        if self.protocol == "openrlhf":
            body["prompts"] = [prompt for _, prompt in rows]
        if self.protocol == "vllm":
            body |= {"model": self.model, "use_activation": False}
            body |= {"task": "classify"} if self._route == "/pooling" else {}
        if form == "messages":
            body |= {"messages": rows[0], "add_generation_prompt": False, "add_special_tokens": False}
        return {**body, **self._fields}

    def ask(self, form: Form, rows: Sequence[Any]) -> tuple[RewardArray, str | None]:
        """Return the rewards `[N]` of one request, of several values the last one; NaN and the reason if it is refused.

        `rows` are N conversations (one for messages), lists of token ids, or texts with the texts of their prompts.
        Raises InvalidReply if the reply has not one reward for each of them.
        """
        try:
            reply = self._send(self._route or ROUTES[self.protocol], self._body(form, rows))
        except Refused as refused:
            return np.full(len(rows), np.nan), refused.reason
        try:
            found = reply if isinstance(reply, list) else reply.get("rewards", reply.get("data"))
            if isinstance(found[0], Mapping):
                (name,) = {"probs", "embedding", "data"} & {*found[0]}
                found = [each[name][-1] for each in sorted(found, key=lambda each: each.get("index", 0))]
            errors = reply.get("errors") or () if isinstance(reply, Mapping) else ()
            return np.array(found, dtype=np.float64).reshape(len(rows)), next(filter(None, errors), None)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidReply(f"expected {len(rows)} rewards of {self.model}, got {reply!r:.200}") from error

    def token_ids(self, form: Form, row: Any) -> list[int] | None:
        """Return the token ids that the server says it makes of a text or of messages; None if it does not say it."""
        body = self._body("messages" if form == "conversations" else form, [row])
        asked = body if form != "texts" else {**body, "prompt": row[0], "input": None}
        try:
            return [*map(int, self._send("/tokenize", asked)["tokens"])]
        except (NoSuchRoute, Refused, LookupError, TypeError):
            return None
