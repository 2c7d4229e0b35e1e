"""The tools of an environment: they read the calls of replies and answer them."""

from __future__ import annotations

import collections
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import pydantic_core

from gym_rm.async_calls import AsyncCalls
from gym_rm.checks import describe, load_function
from gym_rm.data.tools import NOT_EXECUTED, NOT_FINISHED, UNREADABLE, cut_middle
from gym_rm.engine.text.tool_calls import decode_arguments
from gym_rm.envs.tools.formats import load_format, read_reply
from gym_rm.envs.tools.tool import ArgumentsError, Tool, ToolOptions
from gym_rm.errors import ConfigError, GymRMError, brief, nearest
from gym_rm.types import Conversation, Message, Prompt, copy_conversation, copy_prompt

LEAST_LENGTH = 1000
"""Least `max_text_length`: room for the fields of a tool result."""
MOST_PARALLEL = 64
"""Replies of a step whose calls are executed at the same time."""
MOST_LEFT_BEHIND = 256
"""Threads of calls that did not end in time, after which no further call starts."""


class Reply(NamedTuple):
    """A reply as it stands in the conversation, and what is wrong with the calls in its text."""

    message: Message
    problems: Sequence[str] = ()

    @property
    def num_calls(self) -> int:
        """Number of calls, with those that could not be read."""
        return len(self.message.get("tool_calls", ())) + len(self.problems)

    def numbered(self, before: Conversation) -> Reply:
        """Return the reply with an id for each call that has none: its number in the conversation."""
        calls = self.message.get("tool_calls")
        if not calls:
            return self
        first = 1 + sum(len(message.get("tool_calls", ())) for message in before)
        numbered = [{"type": "function", "id": f"call{first + k:05d}", **call} for k, call in enumerate(calls)]
        return self._replace(message=Message({**self.message, "tool_calls": numbered}))


def as_message(given: Mapping[str, Any]) -> Message:
    """Return a message as it stands in a conversation, from one of OpenAI's API: no None, decoded arguments."""
    filled = {name: value for name, value in given.items() if value is not None}
    if filled.get("tool_calls"):
        filled.setdefault("content", "")
    elif "tool_calls" in filled:
        del filled["tool_calls"]
    return cast(Message, decode_arguments(filled))


class Answer(NamedTuple):
    """The messages that answer the calls of a reply, and how many of them are errors."""

    messages: list[Message]
    num_errors: int


@dataclass(eq=False)
class _Job:
    """The calls of one reply: `answers` grows as they are executed, one after the other."""

    said: Conversation
    prompt: Prompt
    calls: Sequence[Mapping[str, Any]]
    first: int  # number of calls of the episode before these
    answers: list[tuple[str, bool]] = field(default_factory=list)  # texts, and whether they are errors
    deadline: float = 0.0
    thread: threading.Thread | None = None
    over: bool = False

    def messages(self) -> list[Message]:
        return [
            Message(role="tool", tool_call_id=call["id"], name=call["function"]["name"], content=text)
            for call, (text, _) in zip(self.calls, self.answers, strict=False)
        ]


class Toolbox:
    """The tools of an environment.

    The replies of a step are answered at the same time, the calls of one reply one after the other. A call that does
    not end in time is left behind in its thread, and answered with an error. Whatever a policy or a tool does wrong
    is a text for the policy that begins with `Error:`.

    Args:
        tools: functions, `Tool`s, names `"module:function"`, `"calculator"` or `"python"`.
        options: see `ToolOptions`.
        max_text_length: most characters of a message.

    Raises:
        ConfigError: a tool cannot be loaded, or two tools have one name.
    """

    def __init__(self, tools: Any, options: ToolOptions, max_text_length: int) -> None:
        if not isinstance(tools, list | tuple):
            raise ConfigError(
                f"tools must be a list of functions, Tool objects, names 'module:function', or {sorted(SHORT_NAMES)}; "
                f"got {describe(tools)}."
            )
        if max_text_length < LEAST_LENGTH:
            raise ConfigError(f"max_text_length must be at least {LEAST_LENGTH} with tools, got {max_text_length}.")
        self._options = options
        self._format = load_format(options.call_format)
        self._max_length = min(options.max_result_length, max_text_length)
        self._owned: list[Any] = []
        self._left: list[tuple[str, threading.Thread]] = []
        self._async: AsyncCalls[Any] = AsyncCalls(max_concurrency=MOST_PARALLEL, timeout=options.timeout)
        self.tools: dict[str, Tool] = {}
        for given in tools:
            tool = self._load(given)
            if tool.name in self.tools:
                raise ConfigError(f"tools: two tools have the name {tool.name!r}; write Tool(function, name='...').")
            self.tools[tool.name] = tool
        self.schemas = tuple(tool.schema for tool in self.tools.values())

    def read(self, text: str) -> Reply:
        """Return the message of a reply's text."""
        return Reply(*read_reply(text, self._format))

    def answer(self, replies: Sequence[Reply], said: Sequence[Conversation], prompts: Sequence[Prompt]) -> list[Answer]:
        """Execute the calls of M replies, and return the messages that answer them.

        Args:
            replies: `[M]`.
            said: `[M]`, the conversations, which end with these replies.
            prompts: `[M]`.

        Raises:
            GymRMError: too many calls of earlier steps are still running.
        """
        jobs = []
        for reply, conversation, prompt in zip(replies, said, prompts, strict=True):
            first = sum(len(message.get("tool_calls", ())) for message in conversation[len(prompt.messages) : -1])
            jobs.append(_Job(conversation, prompt, reply.message.get("tool_calls", ()), first))
        self._execute([job for job in jobs if job.calls])
        answers = []
        for reply, job in zip(replies, jobs, strict=True):
            messages = job.messages()
            if reply.problems:
                text = UNREADABLE + "; ".join(reply.problems)
                messages.append(Message(role="user", content=cut_middle(text, self._max_length)))
            answers.append(Answer(messages, sum(is_error for _, is_error in job.answers) + len(reply.problems)))
        return answers

    def close(self) -> None:
        """End what the tools of this environment keep open."""
        self._async.close()
        for each in self._owned:
            each.close()

    def _load(self, given: Any) -> Tool:
        if isinstance(given, Tool):
            return given
        if isinstance(given, str) and given in SHORT_NAMES:
            return SHORT_NAMES[given](self)
        if isinstance(given, str) and ":" not in given:
            hint = nearest(given, SHORT_NAMES)
            raise ConfigError(f"tools: {given!r} is none of {sorted(SHORT_NAMES)} and no 'module:function'.{hint}")
        found = load_function("tools", given)
        return found if isinstance(found, Tool) else Tool(found)

    def _execute(self, jobs: Sequence[_Job]) -> None:
        """Fill the answers of all jobs."""
        waiting = collections.deque(jobs)
        running: dict[_Job, None] = {}  # oldest first
        finished: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        try:
            while waiting or running:
                while waiting and len(running) < MOST_PARALLEL:
                    self._refuse_more_left_behind()
                    job = waiting.popleft()
                    job.deadline = time.monotonic() + self._options.timeout
                    job.thread = threading.Thread(
                        target=self._work, args=(job, finished), name="gym_rm tool calls", daemon=True
                    )
                    running[job] = None
                    job.thread.start()
                oldest = next(iter(running))
                try:
                    running.pop(finished.get(timeout=max(0.0, oldest.deadline - time.monotonic())), None)
                except queue.Empty:
                    del running[oldest]
                    self._leave_behind(oldest)
        except BaseException:  # also Ctrl-C: no further call of these replies starts
            for job in running:
                self._leave_behind(job)
            raise

    def _work(self, job: _Job, finished: queue.SimpleQueue[_Job]) -> None:
        """Execute the calls of a job, in a thread of its own."""
        answers = job.answers
        while len(answers) < len(job.calls) and not job.over:
            text, is_error = self._call(job, len(answers))
            answers.append((cut_middle(text, self._max_length), is_error))
        finished.put(job)

    def _call(self, job: _Job, index: int) -> tuple[str, bool]:
        """Return the result of a call, and whether it is an error."""
        function = job.calls[index]["function"]
        tool = self.tools.get(function["name"])
        shown = [schema["function"]["name"] for schema in job.prompt.tools]
        if job.first + index >= self._options.max_calls:
            return f"{NOT_EXECUTED}the {self._options.max_calls} calls of this conversation are used up.", True
        if tool is None or tool.name not in shown:
            known = [name for name in shown if name in self.tools]
            hint = nearest(function["name"], known) or f" Known tools: {', '.join(known)}."
            return f"{NOT_EXECUTED}unknown tool {function['name']!r:.80}.{hint}", True
        try:
            arguments = tool.arguments(function["arguments"])
        except ArgumentsError as error:
            return f"{NOT_EXECUTED}invalid arguments of {tool.name}: {error}", True
        if "conversation" in tool.hidden:
            arguments["conversation"] = copy_conversation([*job.said, *job.messages()])
        if "prompt" in tool.hidden:
            arguments["prompt"] = copy_prompt(job.prompt)
        try:
            if tool.is_async:
                (value,) = self._async.run([lambda: tool.function(**arguments)])
                if isinstance(value, Exception):
                    raise value
            else:
                value = tool.function(**arguments)
            return _as_text(value), False
        except BaseException as error:  # also SystemExit: it ends the call, not the environment
            return f"Error: {brief(error)}", True

    def _leave_behind(self, job: _Job) -> None:
        """Answer the calls of a job whose time is over; its thread ends after the call that it is in."""
        job.over = True
        job.answers = answers = job.answers[: len(job.calls)]  # a new list: the thread keeps the old one
        names = [call["function"]["name"] for call in job.calls[len(answers) :]]
        texts = [f"{NOT_FINISHED}{name} did not end within {self._options.timeout:g} seconds." for name in names[:1]]
        texts += [f"{NOT_EXECUTED}the time for the calls of a reply is over." for _ in names[1:]]
        answers += [(cut_middle(text, self._max_length), True) for text in texts]
        if names:
            self._left.append((names[0], cast(threading.Thread, job.thread)))

    def _refuse_more_left_behind(self) -> None:
        self._left = [(name, thread) for name, thread in self._left if thread.is_alive()]
        if len(self._left) >= MOST_LEFT_BEHIND:
            names = ", ".join(sorted({name for name, _ in self._left}))[:200]
            raise GymRMError(
                f"{len(self._left)} calls of tools still run after their time was over ({names}). Python cannot end a "
                "thread: give what these tools wait for a time limit, or make them async."
            )


def _as_text(value: Any) -> str:
    """Return a result as text: JSON unless it is one."""
    if isinstance(value, str):
        return str.__str__(value)
    plain = pydantic_core.to_jsonable_python(value, serialize_unknown=True, inf_nan_mode="constants")
    return json.dumps(plain, ensure_ascii=False)


def _calculator(toolbox: Toolbox) -> Tool:
    from gym_rm.envs.tools.calculator import calculator

    return Tool(calculator)


def _python(toolbox: Toolbox) -> Tool:
    from gym_rm.scorers.code.interpreter import CodeInterpreter

    # Its own limits come first, so that the policy reads what they say.
    options = toolbox._options
    interpreter = CodeInterpreter(timeout=0.9 * options.timeout, max_result_length=toolbox._max_length)
    toolbox._owned.append(interpreter)
    return Tool(interpreter.python)


SHORT_NAMES: dict[str, Callable[[Toolbox], Tool]] = {"calculator": _calculator, "python": _python}
