"""Servers of rewards for tests: real uvicorn servers whose replies can be replaced by faults."""

import asyncio
import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time

INFO = {"scorer": "RewardModelScorer", "model": "fake", "revision": "sha256:1", "settings": {"kind": "decoder"}}
KNOWN = [
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Go away, please."}],
]


def reward_of(conversation):
    """Return a reward that differs for most conversations, and is negative for some."""
    return sum(map(ord, conversation[-1]["content"])) % 997 / 10 - 20.0


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


FAST = {"timeout": 20, "startup_timeout": 2}


def conversations(size, start=0):
    return [
        [
            {"role": "user", "content": "Say a number."},
            {"role": "assistant", "content": f"The number is {number}."},
        ]
        for number in range(start, start + size)
    ]


def rewards(given):
    return [reward_of(conversation) for conversation in given]


@contextlib.contextmanager
def scorer_at(url, **options):
    from gym_rm import load_scorer

    scorer = load_scorer(url, **{**FAST, **options})
    try:
        yield scorer
    finally:
        scorer.close()


class App:
    """ASGI application of a test, whose answers can be replaced by faults.

    Attributes:
        key: what every request needs as its bearer token, except for the page at `/`; None for nothing.
        requests: what was asked.
        faults: what happens to the next requests instead of their answers, None for nothing: "drop", "hang", "drip" (a
            byte at a time, for ever), or what the application makes of it.
        always: the same for every request.
        running, most_running: number of requests at work, and the largest one.
    """

    def __init__(self, *, key=None):
        self.key, self.requests, self.faults, self.always = key, [], [], None
        self.running = self.most_running = 0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body")
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            status, extra, content = error(401, "the key is missing or wrong")
            if self.key is None or scope["path"] == "/" or headers.get("authorization") == f"Bearer {self.key}":
                status, extra, content = await self.respond(scope["method"], scope["path"], headers, body, send)
        finally:
            self.running -= 1
        sent = [(k.encode(), v.encode()) for k, v in {"content-type": "application/json", **extra}.items()]
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": content})

    async def next_fault(self, send):
        """Return the fault of a request, unless it ends here."""
        fault = self.faults.pop(0) if self.faults else self.always
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "drop":
            raise ConnectionResetError  # uvicorn answers 500 without a body
        if fault == "drip":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b" ", "more_body": True})
                await asyncio.sleep(0.02)
        return fault


class RewardApp(App):
    """Application with the routes of gym_rm, or of vLLM 0.32 with a reward model ("vllm") or a chat model ("chat").

    `requests` has (path, headers, JSON body) of every POST. A fault can also be (status, headers, body), or a function
    of the right reply that returns another one. `tokens` is what `/tokenize` answers; None for no such route.
    """

    def __init__(self, protocol="gym_rm", *, key=None, limits=None, provenance=None, reward=reward_of, delay=0.0):
        super().__init__(key=key)
        self.protocol, self.reward, self.delay = protocol, reward, delay
        self.limits = {"max_body_bytes": 1 << 20, "max_conversations": 64, **(limits or {})}
        self.provenance = {**INFO, **(provenance or {})}
        self.calibration = {"conversations": KNOWN, "rewards": [self.reward(one) for one in KNOWN]}
        self.refuse = lambda conversation: None
        self.page = self.tokens = None
        self.model, self.owner, self.root = "fake", "vllm", "fake"

    async def respond(self, method, path, headers, body, send):
        if path == "/" and self.page is not None:
            text, extra = self.page
            return 200, extra, text.encode()
        if method == "GET":
            return self.get(path)
        request = json.loads(body)
        self.requests.append((path, headers, request))
        await asyncio.sleep(self.delay)
        right = self.post(path, request, len(body))
        fault = await self.next_fault(send)
        if callable(fault):
            return 200, {}, fault(json.loads(right[2]))
        return right if fault is None else fault

    def get(self, path):
        if self.protocol == "gym_rm" and path == "/info":
            info = {"model": self.provenance["model"], "provenance": self.provenance, "limits": self.limits}
            return ok({**info, "activations": {"/v1/rewards": "none"}, "calibration": self.calibration})
        if self.protocol in ("vllm", "chat") and path == "/v1/models":
            told = {"id": self.model, "owned_by": self.owner, "root": self.root, "max_model_len": 4096}
            return ok({"object": "list", "data": [told]})
        return NO_ROUTE

    def post(self, path, request, size):
        if (self.protocol, path) == ("gym_rm", "/v1/rewards"):
            return self.rewards(request, size)
        if (self.protocol, path) == ("vllm", "/classify"):
            return self.classify(request)
        if (self.protocol, path) == ("vllm", "/tokenize") and self.tokens is not None:
            return ok({"count": len(self.tokens), "max_model_len": 4096, "tokens": self.tokens, "token_strs": None})
        return NO_ROUTE

    def rewards(self, request, size):
        conversations = request["conversations"]
        if size > self.limits["max_body_bytes"] or len(conversations) > self.limits["max_conversations"]:
            return error(413, "too large")
        for conversation in conversations:
            if (reason := self.refuse(conversation)) is not None:
                return error(422, reason)
        errors = ["too long" if "FAIL" in each[-1]["content"] else None for each in conversations]
        rewards = [None if bad else self.reward(one) for one, bad in zip(conversations, errors, strict=True)]
        turns = [[reward] * sum(m["role"] == "assistant" for m in one) if reward is not None else []
                 for one, reward in zip(conversations, rewards, strict=True)]  # fmt: skip
        counts = [len(one) for one in conversations]
        reply = {"rewards": rewards, "errors": errors, "num_tokens": counts, "truncated_tokens": [0] * len(counts)}
        if request["turns"] == "all":
            reply["turn_rewards"] = turns
        reply["workload"] = {"num_tokens": sum(counts)}
        return ok({"model": "fake", **reply, "provenance": self.provenance})

    def classify(self, request):
        """Return values of token ids, which are their sums, or of messages."""
        if request["model"] != self.model:
            told = {"message": f"The model `{request['model']}` does not exist.", "type": "NotFoundError"}
            return 404, {}, json.dumps({"error": {**told, "param": None, "code": 404}}).encode()
        counts = [len(ids) for ids in request.get("input", ())] or [words(request)]
        if max(counts) > 4096:
            return error(400, f"This model's maximum context length is 4096 tokens, the request has {max(counts)}")
        rewards = [float(sum(ids)) for ids in request.get("input", ())] or [self.reward(request["messages"])]
        rewards = rewards if request.get("use_activation") is False else list(map(sigmoid, rewards))
        told = {"label": "LABEL_0", "num_classes": 1}
        data = [{"index": row, "probs": [reward], **told} for row, reward in enumerate(rewards)]
        usage = {"prompt_tokens": sum(counts), "total_tokens": sum(counts), "completion_tokens": 0}
        return ok({"id": "classify-1", "object": "list", "model": self.model, "data": data, "usage": usage})


class Posing:
    """A server of ours that says it is vLLM or SGLang, with the tokenizer in a folder.

    Attributes:
        bodies: JSON of every POST to `/classify`.
    """

    def __init__(self, app, owner, folder):
        self.app, self.bodies = app, []
        self.told = {"id": "posing", "owned_by": owner, "root": folder, "max_model_len": 4096}

    async def __call__(self, scope, receive, send):
        if scope["path"] not in ("/info", "/v1/models"):
            body = b""

            async def reading():
                nonlocal body
                message = await receive()
                body += message.get("body", b"")
                return message

            await self.app(scope, reading, send)
            if scope["path"] == "/classify":
                self.bodies.append(json.loads(body))
            return
        status, _, content = NO_ROUTE if scope["path"] == "/info" else ok({"object": "list", "data": [self.told]})
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": content})


def words(request):
    return sum(len(message["content"].split()) for message in request["messages"])


def ok(content):
    return 200, {}, json.dumps(content).encode()


def error(status, message, **headers):
    return status, headers, json.dumps({"error": {"message": message, "type": "error", "code": "code"}}).encode()


NO_ROUTE = 404, {}, b'{"detail":"Not Found"}'


@contextlib.contextmanager
def serve(app, listener=None):
    """Run an application with uvicorn in a thread, and yield its URL."""
    import uvicorn

    listener = listener or bound()
    config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert thread.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    try:
        yield url_of(listener)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(timeout=10)
        listener.close()


def bound():
    """Return a socket with a port of its own; connections to it are refused until it is served."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    return listener


def url_of(listener):
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def start_process(listener, *, delay):
    """Start a process that serves a `RewardApp` at a socket of this process, and that a test can kill."""
    command = [sys.executable, __file__, str(listener.fileno()), str(delay)]
    return subprocess.Popen(command, pass_fds=[listener.fileno()])


if __name__ == "__main__":
    import uvicorn

    config = uvicorn.Config(RewardApp(delay=float(sys.argv[2])), log_level="critical", lifespan="off")
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
    os._exit(0)
