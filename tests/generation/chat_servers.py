"""An OpenAI-compatible chat server for tests, whose replies can be replaced by faults."""

import asyncio
import json
import re

FORM = re.compile(r"(Score|Verdict) ([A-Z]{6}): ")


def user(text):
    """Return a conversation of one message."""
    return [{"role": "user", "content": text}]


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
        faults: what happens to the next requests, None for nothing. Instead of an answer: (status, body, headers),
            "hang", "drip" (a byte at a time, for ever) or "drop". To the answer: a number of seconds that it takes
            more, "later" (it waits for the answer to another request), "broken" (half of its bytes), "cut" (half of its
            text, as at a limit of tokens) or "empty" (no text).
        always: the same for every request.
    """

    def __init__(self, answer="Hello.", *, key=None, models=("judge-7b",)):
        self.answer = answer if callable(answer) else lambda messages: answer
        self.key, self.models = key, models
        self.requests, self.faults, self.always = [], [], None
        self.running = self.most_running = self.answered = 0

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
        if isinstance(fault, tuple):
            return await self.send(send, *fault)
        if request["model"] not in self.models:
            return await self.send(send, 404, {"error": {"message": "no such model"}})
        status, answer = await self.answer_to(request)
        if status == 200:
            answer = await self.spoil(answer, fault)
        self.answered += 1
        return await self.send(send, status, answer)

    async def answer_to(self, request):
        """Return the status and the body of the answer to a request."""
        reply = self.answer(request["messages"])
        content, reason = reply if isinstance(reply, tuple) else (reply, "stop")
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": reason}
        return 200, {"choices": [choice]}

    async def spoil(self, answer, fault):
        """Return an answer after a fault has happened to it."""
        (choice,) = answer["choices"]
        text = choice["message"]["content"]
        if isinstance(fault, float | int):
            await asyncio.sleep(fault)
        if fault == "later":
            before = self.answered
            while self.answered == before:
                await asyncio.sleep(0.005)
        if fault == "broken":
            whole = json.dumps(answer).encode()
            return whole[: len(whole) // 2]
        if fault == "cut":
            choice["message"]["content"], choice["finish_reason"] = text[: len(text) // 2], "length"
        if fault == "empty":
            choice["message"]["content"] = ""
        return answer

    async def send(self, send, status, content, extra=None):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = [(k.encode(), v.encode()) for k, v in (extra or {}).items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
