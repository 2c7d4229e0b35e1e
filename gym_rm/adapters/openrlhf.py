"""OpenRLHF: `--reward.remote_url` as a Python file or as an HTTP endpoint.

OpenRLHF sends texts, not messages: `prompts` as its dataset made them and `query`, the prompt and the reply decoded
with special tokens. It asks for one sample at a time, from many threads or over many connections, so both forms here
merge what arrives together.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import hmac
import ipaddress
import json
import math
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gym_rm.data.messages import rewards_or_fallback
from gym_rm.scorers.batching import MicroBatchingScorer
from gym_rm.data.policy_texts import PolicyTexts
from gym_rm.errors import ConfigError, GymRMError, RenderError, ScoringError, logger
from gym_rm.scorer import ScorerLike, load_scorer

MEBIBYTE = 2**20


class RewardFunction:
    """The `reward_func` of a file given to OpenRLHF as `--reward.remote_url reward_func.py`.

    Args:
        reward_model: what `load_scorer` takes, `options` with it.
        policy_tokenizer: the policy's tokenizer, or the folder or hub id to load it from: OpenRLHF sends what it
            decoded with this tokenizer, end tokens included.
        apply_chat_template: as OpenRLHF's `--data.apply_chat_template`; here True is the default.
        input_template: as OpenRLHF's `--data.input_template`.
        fallback_reward: reward of a sample that cannot be scored; its `score_ok` log is 0. None raises instead.
        max_batch_size, max_wait: see `MicroBatchingScorer`.

    Example:
        >>> import importlib.resources
        >>> policy = str(importlib.resources.files("gym_rm") / "assets" / "policy")
        >>> brevity = lambda conversations: [-len(c[-1]["content"]) for c in conversations]
        >>> reward_func = RewardFunction(brevity, policy_tokenizer=policy)
        >>> prompt = "<|im_start|>user\\n2 + 2?<|im_end|>\\n<|im_start|>assistant\\n"
        >>> reward_func([prompt + "4<|im_end|>"], [prompt], [""])["rewards"]
        tensor([-1.])
    """

    def __init__(
        self,
        reward_model: ScorerLike = None,
        *,
        policy_tokenizer: Any,
        apply_chat_template: bool = True,
        input_template: str | None = None,
        fallback_reward: float | None = None,
        max_batch_size: int = 1024,
        max_wait: float = 0.005,
        **options: Any,
    ) -> None:
        self.texts = PolicyTexts(
            policy_tokenizer, apply_chat_template=apply_chat_template, input_template=input_template
        )
        self.scorer = MicroBatchingScorer(
            load_scorer(reward_model, **options), max_batch_size=max_batch_size, max_wait=max_wait
        )
        self.fallback_reward = fallback_reward

    def __call__(
        self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Rewards and scores float32 `[N]`, logs `{name: [N]}`.

        Raises:
            RenderError: a query that does not begin with its prompt, or a prompt that cannot be read; names the row.
            ScoringError: samples without a score, where there is no `fallback_reward`.
        """
        import torch

        reply = self.lists(queries, prompts)
        logs = {name: torch.tensor(values) for name, values in reply["extra_logs"].items()}
        return {**{name: torch.tensor(reply[name]) for name in ("rewards", "scores")}, "extra_logs": logs}

    def lists(self, queries: Sequence[str], prompts: Sequence[str], *, timeout: float | None = None) -> dict[str, Any]:
        """The same as plain lists: what the HTTP endpoint answers.

        `scores` are the rewards through a sigmoid: OpenRLHF's dynamic filtering compares them with a range in 0..1.
        """
        if len(prompts) != len(queries):
            raise RenderError(
                f"expected one prompt for each query, got {len(queries)} queries, {len(prompts)} prompts."
            )
        conversations = []
        for row, (prompt, query) in enumerate(zip(prompts, queries, strict=True)):
            try:
                conversations.append(self.texts.conversation(prompt, query))
            except RenderError as error:
                raise RenderError(f"query {row}: {error}") from error
        try:
            scores = self.scorer.submit(conversations).result(timeout)
        except ScoringError as error:
            scores = error.scores
        rewards = rewards_or_fallback(scores, self.fallback_reward)
        logs = {
            "score_ok": [float(error is None) for error in scores.errors],
            "num_tokens": scores.num_tokens.astype(float).tolist(),
            "truncated_tokens": scores.truncated_tokens.astype(float).tolist(),
            **{f"head_{name}": values.tolist() for name, values in scores.heads.items()},
        }
        return {"rewards": rewards, "scores": [_sigmoid(reward) for reward in rewards], "extra_logs": logs}


class RewardServer:
    """`POST /get_reward` for OpenRLHF's `--reward.remote_url http://127.0.0.1:5000/get_reward`.

    Args:
        reward_function: what answers.
        host: where to listen; anything but a loopback address needs a `key`.
        port: 0 for any that is free, see `url`.
        key: asked for as `Authorization: Bearer KEY`, or as the password of a URL `http://any:KEY@host:port/...`, which
            is all that OpenRLHF's client can send.
        max_request_bytes: a larger body is refused (413).
        timeout: seconds after which a request that is still not scored is given up (503); OpenRLHF waits for 180.

    Example:
        >>> with RewardServer(reward_function, port=0) as server:  # doctest: +SKIP
        ...     print(server.url)
        http://127.0.0.1:40123/get_reward
    """

    def __init__(
        self,
        reward_function: RewardFunction,
        *,
        host: str = "127.0.0.1",
        port: int = 5000,
        key: str | None = None,
        max_request_bytes: int = 16 * MEBIBYTE,
        timeout: float = 150.0,
    ) -> None:
        if key is None and not _is_loopback(host):
            raise ConfigError(
                f"host={host!r} can be reached from other machines, and there is no key: anyone could use the reward "
                "model. Pass key=, or listen on 127.0.0.1."
            )
        self.reward_function = reward_function
        self.key = key
        self.max_request_bytes = max_request_bytes
        self.timeout = timeout
        self._http = _HTTPServer((host, port), _Handler)
        self._http.endpoint = self
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """What to give to `--reward.remote_url`."""
        host, port = self._http.server_address[:2]
        return f"http://{host!s}:{port}/get_reward"

    def serve_forever(self) -> None:
        """Answer until `close` is called from another thread, or the process is interrupted."""
        logger.info("answering at %s", self.url)
        self._http.serve_forever()

    def start(self) -> RewardServer:
        """Answer from a thread of its own."""
        self._thread = threading.Thread(target=self.serve_forever, name="gym_rm reward server", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop answering and free the port."""
        if self._thread is not None:
            self._http.shutdown()
            self._thread.join()
            self._thread = None
        self._http.server_close()

    def __enter__(self) -> RewardServer:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def answer(self, body: bytes) -> dict[str, Any]:
        """The reply to a request body.

        Raises:
            BadRequest: it does not follow the protocol, or cannot be scored.
            TimeoutError: it took longer than `timeout`.
        """
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {error}") from error
        if not isinstance(request, dict) or not _is_texts(request.get("query")):
            raise BadRequest("expected an object with 'query', a list of texts")
        if request["query"] and not _is_texts(request.get("prompts")):
            raise BadRequest("expected 'prompts', a list of texts: without them prompt and reply cannot be told apart")
        try:
            return self.reward_function.lists(request["query"], request.get("prompts") or [], timeout=self.timeout)
        except GymRMError as error:
            raise BadRequest(str(error)) from error

    def allows(self, authorization: str) -> bool:
        """Whether this `Authorization` header holds the key."""
        if self.key is None:
            return True
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).decode().partition(":")[2]
            except ValueError:
                return False
        return scheme.lower() in ("basic", "bearer") and hmac.compare_digest(given.encode(), self.key.encode())


class BadRequest(GymRMError, ValueError):
    """A request that cannot be answered; asking again will not help."""


class _HTTPServer(ThreadingHTTPServer):
    request_queue_size = 1024  # a rollout posts hundreds of samples at once; the default backlog is 5
    daemon_threads = True
    endpoint: RewardServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 60  # seconds that an idle or a very slow connection is kept
    server: _HTTPServer

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(HTTPStatus.OK, {"status": "ok"})
        else:
            self._reply(HTTPStatus.NOT_FOUND, {"error": f"there is no {self.path}; post to /get_reward"})

    def do_POST(self) -> None:
        endpoint = self.server.endpoint
        length = self.headers.get("Content-Length", "")
        if self.path.rstrip("/") != "/get_reward":
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no {self.path}; post to /get_reward")
        elif not endpoint.allows(self.headers.get("Authorization", "")):
            self._refuse(HTTPStatus.UNAUTHORIZED, "this server asks for a key")
        elif not length.isdecimal():
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "expected a Content-Length")
        elif int(length) > endpoint.max_request_bytes:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"over {endpoint.max_request_bytes} bytes")
        else:
            self._answer(endpoint, self.rfile.read(int(length)))

    def _answer(self, endpoint: RewardServer, body: bytes) -> None:
        try:
            self._reply(HTTPStatus.OK, endpoint.answer(body))
        except BadRequest as error:
            self._reply(HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)})
        except concurrent.futures.TimeoutError:
            self._reply(HTTPStatus.SERVICE_UNAVAILABLE, {"error": f"not scored within {endpoint.timeout} seconds"})
        except Exception as error:  # the scorer's own, whatever it is: told to the client, and the server goes on
            logger.exception("a request failed")
            self._reply(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"})

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        """Reply without having read the body, after which the connection cannot be used again."""
        self.close_connection = True
        self._reply(status, {"error": reason})

    def _reply(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s %s", self.address_string(), format % args)


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m gym_rm.adapters.openrlhf`: serve until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m gym_rm.adapters.openrlhf", description="Serve /get_reward.")
    parser.add_argument("--reward-model", help="folder or hub id; without it, the embedded reward model")
    parser.add_argument("--policy-tokenizer", required=True, help="folder or hub id of the policy's tokenizer")
    parser.add_argument("--no-chat-template", action="store_true", help="prompts are plain texts")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5000)
    parser.add_argument("--key", help="needed where the host is no loopback address")
    options = parser.parse_args(arguments)
    reward_function = RewardFunction(
        options.reward_model,
        policy_tokenizer=options.policy_tokenizer,
        apply_chat_template=not options.no_chat_template,
    )
    server = RewardServer(reward_function, host=options.host, port=options.port, key=options.key)
    print(f"answering at {server.url}", flush=True)  # noqa: T201
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.close()


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


if __name__ == "__main__":
    main()
