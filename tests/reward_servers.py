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
    """Application with the routes of gym_rm or vLLM.

    `requests` has (path, headers, JSON body) of every POST. A fault can also be (status, headers, body), or a function
    of the right reply that returns another one.
    """

    def __init__(self, protocol="gym_rm", *, key=None, limits=None, provenance=None, reward=reward_of, delay=0.0):
        super().__init__(key=key)
        self.protocol, self.reward, self.delay = protocol, reward, delay
        self.limits = {"max_body_bytes": 1 << 20, "max_conversations": 64, **(limits or {})}
        self.provenance = {**INFO, **(provenance or {})}
        self.calibration = {"conversations": KNOWN, "rewards": [self.reward(one) for one in KNOWN]}
        self.refuse = lambda conversation: None
        self.page = None

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
        if self.protocol == "vllm" and path == "/v1/models":
            return ok({"object": "list", "data": [{"id": "fake", "owned_by": "vllm", "max_model_len": 4096}]})
        return error(404, "Not Found")

    def post(self, path, request, size):
        if (self.protocol, path) == ("gym_rm", "/v1/rewards"):
            return self.rewards(request, size)
        if (self.protocol, path) == ("vllm", "/classify"):
            return self.classify(request)
        return error(404, "Not Found")

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
        reward, tokens = self.reward(request["messages"]), words(request)
        if tokens > 4096:
            return error(400, f"maximum context length is 4096 tokens, the request has {tokens}")
        value = reward if request.get("use_activation") is False else sigmoid(reward)
        data = [{"index": 0, "label": "LABEL_0", "probs": [value], "num_classes": 1}]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
        return ok({"id": "classify-1", "object": "list", "created": 1, "model": "fake", "data": data, "usage": usage})


def words(request):
    return sum(len(message["content"].split()) for message in request["messages"])


def ok(content):
    return 200, {}, json.dumps(content).encode()


def error(status, message, **headers):
    return status, headers, json.dumps({"error": {"message": message, "type": "error", "code": "code"}}).encode()


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
