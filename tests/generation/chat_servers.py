"""An OpenAI-compatible chat server for tests, whose replies can be replaced by faults."""

import asyncio
import json
import re

from reward_servers import App, error, ok

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


class ChatApp(App):
    """Application with `/v1/chat/completions`.

    A fault can also replace the answer: (status, body, headers). Or it happens to the answer: a number of seconds that
    it takes more, "later" (it waits for the answer to another request), "broken" (half of its bytes), "cut" (half of
    its text, as at a limit of tokens) or "empty" (no text).

    Attributes:
        answer: function of the messages that returns the reply, or a `(reply, finish_reason)`.
    """

    def __init__(self, answer="Hello.", *, key=None, models=("judge-7b",)):
        super().__init__(key=key)
        self.answer = answer if callable(answer) else lambda messages: answer
        self.models, self.answered = models, 0

    async def respond(self, method, path, headers, body, send):
        if path == "/v1/models":
            return ok({"data": [{"id": name} for name in self.models]})
        if path != "/v1/chat/completions":
            return error(404, "Not Found")
        request = json.loads(body)
        self.requests.append(request)
        fault = await self.next_fault(send)
        if isinstance(fault, tuple):
            status, content, headers = (*fault, {})[:3]
            return status, headers, content if isinstance(content, bytes) else json.dumps(content).encode()
        if request["model"] not in self.models:
            return error(404, "no such model")
        status, answer = await self.answer_to(request)
        if status == 200:
            answer = await self.spoil(answer, fault)
        self.answered += 1
        return status, {}, answer if isinstance(answer, bytes) else json.dumps(answer).encode()

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
