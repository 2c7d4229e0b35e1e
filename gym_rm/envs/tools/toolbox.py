"""The tools of an environment: they read the calls of replies and answer them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import pydantic_core

from gym_rm.async_calls import AsyncCalls
from gym_rm.checks import describe, load_function
from gym_rm.data.tools import NOT_EXECUTED, NOT_FINISHED, UNREADABLE, cut_middle
from gym_rm.engine.text.tool_calls import decode_arguments
from gym_rm.envs.tools.calculator import calculator
from gym_rm.envs.tools.formats import load_format, read_reply
from gym_rm.envs.tools.tool import ArgumentsError, Tool, ToolOptions
from gym_rm.errors import ConfigError, brief, nearest
from gym_rm.types import Conversation, Message, Prompt, copy_conversation, copy_prompt

MOST_PARALLEL = 64
"""Replies of a step whose calls are executed at the same time."""
SHORT_NAMES = ("calculator", "python")


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
        if "tool_calls" not in self.message:
            return self
        first = 1 + _num_calls(before)
        calls = [
            {"type": "function", "id": f"call{number:05d}", **call}
            for number, call in enumerate(self.message["tool_calls"], first)
        ]
        return self._replace(message=Message({**self.message, "tool_calls": calls}))


def as_message(given: Mapping[str, Any]) -> Message:
    """Return a message as it stands in a conversation, from one of OpenAI's API: no empty fields, decoded arguments."""
    filled = {name: value for name, value in given.items() if value is not None and value != []}
    if "content" in given or "tool_calls" in filled:
        filled.setdefault("content", "")
    return cast(Message, decode_arguments(filled))


class Answer(NamedTuple):
    """The messages that answer the calls of a reply, and how many of them are errors."""

    messages: list[Message]
    num_errors: int


@dataclass
class _Job:
    """The calls of one reply. Their thread appends to `results` (texts, and whether they are errors)."""

    said: Conversation
    prompt: Prompt
    calls: Sequence[Mapping[str, Any]]
    num_earlier: int  # calls of the episode before these
    results: list[tuple[str, bool]] = field(default_factory=list)
    is_over: bool = False


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
                "tools must be a list of functions, Tool objects, names 'module:function', 'calculator' or 'python'; "
                f"got {describe(tools)}."
            )
        self._options = options
        self._format = load_format(options.call_format)
        self._max_length = min(options.max_result_length, max_text_length)
        self._async: AsyncCalls[Any] = AsyncCalls(max_concurrency=MOST_PARALLEL, timeout=options.timeout)
        self._interpreter: Any = None
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
        """Execute the calls of M replies, with which the conversations `said` end; return what answers them, `[M]`."""
        jobs = [
            _Job(conversation, prompt, reply.message.get("tool_calls", ()), _num_calls(conversation[:-1], prompt))
            for reply, conversation, prompt in zip(replies, said, prompts, strict=True)
        ]
        self._execute([job for job in jobs if job.calls])
        answers = []
        for reply, job in zip(replies, jobs, strict=True):
            results = list(job.results)  # a thread that was left behind may still append to its own
            if missing := job.calls[len(results) :]:
                name = missing[0]["function"]["name"]
                seconds = f"{self._options.timeout:g} seconds"
                results.append((f"{NOT_FINISHED}{name} did not end within {seconds}.", True))
                results += [(f"{NOT_EXECUTED}the time for the calls of a reply is over.", True)] * (len(missing) - 1)
            messages = self._messages(job.calls, results)
            if reply.problems:
                text = UNREADABLE + "; ".join(reply.problems)
                messages.append(Message(role="user", content=cut_middle(text, self._max_length)))
            answers.append(Answer(messages, sum(is_error for _, is_error in results) + len(reply.problems)))
        return answers

    def close(self) -> None:
        """End what the tools of this environment keep open."""
        self._async.close()
        if self._interpreter is not None:
            self._interpreter.close()

    def _load(self, given: Any) -> Tool:
        if given == "calculator":
            return Tool(calculator)
        if given == "python":
            from gym_rm.scorers.code.interpreter import CodeInterpreter

            # Its own limits come first, so that the policy reads what they say.
            seconds = 0.9 * self._options.timeout
            self._interpreter = CodeInterpreter(timeout=seconds, max_result_length=self._max_length)
            return Tool(self._interpreter.python)
        if isinstance(given, str) and ":" not in given:
            hint = nearest(given, SHORT_NAMES)
            raise ConfigError(f"tools: {given!r} is none of {list(SHORT_NAMES)} and no 'module:function'.{hint}")
        found = given if isinstance(given, Tool) else load_function("tools", given)
        return found if isinstance(found, Tool) else Tool(found)

    def _execute(self, jobs: Sequence[_Job]) -> None:
        """Fill the results of all jobs."""
        for start in range(0, len(jobs), MOST_PARALLEL):
            wave = jobs[start : start + MOST_PARALLEL]
            threads = [threading.Thread(target=self._work, args=(job,), daemon=True) for job in wave]
            deadline = time.monotonic() + self._options.timeout
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(max(0.0, deadline - time.monotonic()))
            finally:  # also at Ctrl-C: no further call of these replies starts
                for job in wave:
                    job.is_over = True

    def _work(self, job: _Job) -> None:
        """Execute the calls of a job, in a thread of its own."""
        for call in job.calls:
            if job.is_over:
                return
            job.results.append(self._call(job, call["function"]))

    def _call(self, job: _Job, function: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the result of a call, and whether it is an error."""
        if job.num_earlier + len(job.results) >= self._options.max_calls:
            return f"{NOT_EXECUTED}the {self._options.max_calls} calls of this conversation are used up.", True
        tool = self.tools.get(function["name"])
        shown = [schema["function"]["name"] for schema in job.prompt.tools]
        if tool is None or tool.name not in shown:
            known = [name for name in shown if name in self.tools]
            hint = nearest(function["name"], known) or f" Known tools: {', '.join(known)}."
            return f"{NOT_EXECUTED}unknown tool {function['name']!r:.80}.{hint}", True
        try:
            arguments = tool.arguments(function["arguments"])
        except ArgumentsError as error:
            return f"{NOT_EXECUTED}invalid arguments of {tool.name}: {error}", True
        if "conversation" in tool.hidden:
            arguments["conversation"] = copy_conversation([*job.said, *self._messages(job.calls, job.results)])
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

    def _messages(self, calls: Sequence[Mapping[str, Any]], results: Sequence[tuple[str, bool]]) -> list[Message]:
        messages = []
        for call, (text, _) in zip(calls, results, strict=False):
            name, content = call["function"]["name"], cut_middle(text, self._max_length)
            messages.append(Message(role="tool", tool_call_id=call["id"], name=name, content=content))
        return messages


def _num_calls(conversation: Conversation, prompt: Prompt | None = None) -> int:
    """Return the number of calls of a conversation, without those of its prompt."""
    messages = conversation[0 if prompt is None else len(prompt.messages) :]
    return sum(len(message.get("tool_calls", ())) for message in messages)


def _as_text(value: Any) -> str:
    """Return a result as text: JSON unless it is one."""
    if isinstance(value, str):
        return str.__str__(value)
    plain = pydantic_core.to_jsonable_python(value, serialize_unknown=True, inf_nan_mode="constants")
    return json.dumps(plain, ensure_ascii=False)
