"""An OpenAI-compatible chat server for tests, whose replies can be replaced by faults."""

import asyncio
import json
import re

FORM = re.compile(r"(Score|Verdict) ([A-Z]{6}): ")


def grade(score):
    """Return a function that answers a judge's question with a score, or a choice, and the mark of the question."""

    def answer(messages):
        name, mark = FORM.findall(messages[-1]["content"])[-1]
        value = score(messages) if callable(score) else score
        return f"I see.\n{name} {mark}: {value}"

    return answer


class ChatApp:
    """ASGI application with `/v1/chat/completions`.

    Attributes:
        answer: function of the messages that returns the reply, or a `(reply, finish_reason)`.
        requests: bodies of all requests.
        faults: what happens to the next requests instead: (status, headers, body), "hang", "drip", "drop" or None.
        always: the same for every request.
    """

    def __init__(self, answer="Hello.", *, key=None, models=("judge-7b",)):
        self.answer = answer if callable(answer) else lambda messages: answer
        self.key, self.models = key, models
        self.requests, self.faults, self.always = [], [], None
        self.running = self.most_running = 0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.respond(scope, body, send)
        finally:
            self.running -= 1

    async def respond(self, scope, body, send):
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            return await self.send(send, 401, {"error": {"message": "no such key"}})
        if scope["path"] == "/v1/models":
            return await self.send(send, 200, {"data": [{"id": name} for name in self.models]})
        if scope["path"] != "/v1/chat/completions":
            return await self.send(send, 404, {"error": {"message": "Not Found"}})
        request = json.loads(body)
        self.requests.append(request)
        fault = self.faults.pop(0) if self.faults else self.always
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "drop":
            raise ConnectionResetError
        if fault == "drip":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b" ", "more_body": True})
                await asyncio.sleep(0.02)
        if fault is not None:
            return await self.send(send, *fault)
        if request["model"] not in self.models:
            return await self.send(send, 404, {"error": {"message": "no such model"}})
        reply = self.answer(request["messages"])
        content, reason = reply if isinstance(reply, tuple) else (reply, "stop")
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": reason}
        return await self.send(send, 200, {"choices": [choice]})

    async def send(self, send, status, content, extra=None):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = [(k.encode(), v.encode()) for k, v in (extra or {}).items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
