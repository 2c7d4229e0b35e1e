"""Code of replies is executed: in blocks, whose results are the user's next turns, or in calls of a tool."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

from gym_rm.checks import integer, positive
from gym_rm.data.tools import NOT_EXECUTED, NOT_FINISHED, cut_middle
from gym_rm.engine.text.thinking import Thinking
from gym_rm.engine.text.tool_calls import calls_of
from gym_rm.sandbox.sandbox import Sandbox
from gym_rm.sandbox.session import SandboxReply, SandboxSession
from gym_rm.sandbox.time_limit import TimeLimit
from gym_rm.scorer import NeverCopied
from gym_rm.scorers.code.replies import tagged_blocks
from gym_rm.scorers.code.verdicts import clean
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Message, Prompt

MOST_CHARACTERS = 10_000
"""Length of a result; of a longer one, the middle is left out."""
MOST_SESSIONS = 128
"""Most episodes whose process is kept; the one that was not used for the longest time ends."""
LOST = "The variables of this block are lost."
"""Part of a result that says that the state is the one before the block."""
_REASONS = {
    "time": "TimeoutError: the code ran for too long.",
    "memory": "MemoryError: the code used too much memory.",
    "output": "the code printed too much.",
    "forbidden": "PermissionError: the code did something that is not allowed.",
    "exit": "SystemExit: the code ended the interpreter.",
    "killed": "the interpreter was ended from outside.",
    "invalid": "the interpreter ended.",
}
_KEEPS_STATE = ("ok", "exception", "syntax_error")


class CodeInterpreter(NeverCopied):
    """Executes code of replies and returns what it prints and evaluates to: as `respond`, and as a tool.

    As `respond` it executes the `<code>` blocks of each reply. The result is `<result>4</result>`, or a block of
    several lines. A block that ends with an expression evaluates to it. Errors are results too. A reply without code
    ends the episode. The method `python` is a tool for the `tools` of an environment; its result is the text alone.

    The variables of an episode are kept in a process of its own, which is found by the messages of the conversation,
    so that no name of the episode is needed. If it is gone, the earlier blocks of the conversation are executed
    again. As many conversations of a call run at the same time as the sandbox has workers.

    Args:
        sandbox: sandbox to use, which stays open in `close`; None for a new one from the options.
        timeout: seconds for the code of one reply; also for executing earlier ones again.
        thinking: how the policy marks its thinking, whose blocks are not executed; see `JudgedOptions`.
        max_result_length: most characters of a result. As a tool, not more than the environment's, which would cut it
            again: the code of such a turn is executed once more in the next one.
        options: see `Sandbox`.

    Raises:
        ConfigError: an option is invalid, or the machine can run no code safely.

    Example:
        >>> run = CodeInterpreter(allow_unsafe=True)
        >>> question = {"role": "user", "content": "What is 2 ** 10?"}
        >>> reply = {"role": "assistant", "content": "<code>2 ** 10</code>"}
        >>> run([[question, reply]], [Prompt((question,), "p")], None)
        ['<result>1024</result>']
        >>> run.close()
    """

    def __init__(
        self,
        *,
        sandbox: Sandbox | None = None,
        timeout: float = 10.0,
        thinking: Any = None,
        max_result_length: int = MOST_CHARACTERS,
        **options: Any,
    ) -> None:
        self._thinking = Thinking.parse(thinking)
        self._timeout = positive("timeout", timeout)
        self._max_length = integer("max_result_length", max_result_length, minimum=1)
        self._owned = sandbox is None
        self._sandbox = sandbox or Sandbox(**options)
        # An episode may use more CPU time than one run: the time of each turn is limited instead.
        self._limits = self._sandbox.limits.model_copy(update={"cpu_seconds": 24 * 3600})
        self._lock = threading.Lock()
        self._kept: list[tuple[str, SandboxSession]] = []  # by the messages before the next reply, oldest first

    def __call__(
        self, conversations: Sequence[Conversation], prompts: Sequence[Prompt], scores: Scores | None
    ) -> list[str | None]:
        """Return the result of the code of each last reply, or None if it has no code."""
        return self._sandbox.map(self._turn, conversations, prompts)

    def python(self, code: str, *, conversation: Conversation, prompt: Prompt | None) -> str:
        """Run Python code and return what it prints and the value of its last expression; variables are kept.

        Args:
            code: the code.
        """
        return self._run(conversation, prompt, [code], lambda text: {"role": "tool", "content": text})

    def blocks_of(self, reply: str) -> list[str]:
        """Return the code of a reply that is executed."""
        _, answer = self._thinking.split({"content": reply})
        return [block for _, block in tagged_blocks(answer or "") if block.strip()]

    def close(self) -> None:
        """End the processes of all episodes."""
        self._end_all_but(0)
        if self._owned:
            self._sandbox.close()

    def _turn(self, conversation: Conversation, prompt: Prompt | None) -> str | None:
        """Execute the blocks of the last reply, and return their result."""
        blocks = self.blocks_of(conversation[-1]["content"])
        return self._run(conversation, prompt, blocks, _user_message) if blocks else None

    def _run(
        self,
        conversation: Conversation,
        prompt: Prompt | None,
        blocks: Sequence[str],
        as_message: Callable[[str], Message],
    ) -> str:
        """Execute code at the end of a conversation, and return the content of the message of its result."""
        executed = self._executed(conversation, 0 if prompt is None else len(prompt.messages))
        session = self._take(conversation[: executed[-1][0] + 1]) if executed else None
        session = session or self._rebuilt(conversation, executed)
        texts, reply = self._execute(session, blocks)
        if reply.status == "killed":  # from outside: once again, from the start
            session.close()
            session = self._rebuilt(conversation, executed)
            texts, reply = self._execute(session, blocks)

        result = as_message(cut_middle(clean("\n".join(texts)), self._max_length))
        if reply.status in _KEEPS_STATE:
            with self._lock:
                self._kept.append((_key([*conversation, result]), session))
            self._end_all_but(MOST_SESSIONS)
        else:
            session.close()
        return result["content"]

    def _executed(self, conversation: Conversation, start: int) -> list[tuple[int, list[str]]]:
        """Return the code that was executed after a message: the index of each result, and the blocks that it is of."""
        executed: list[tuple[int, list[str]]] = []
        for k in range(start, len(conversation) - 1):
            message, after = conversation[k], conversation[k + 1]
            if message["role"] != "assistant":
                continue
            if after["role"] == "user" and after["content"].lstrip().startswith("<result>"):
                executed.append((k + 1, self.blocks_of(message["content"])))
            results = itertools.takewhile(lambda result: result["role"] == "tool", conversation[k + 1 :])
            for place, ((name, arguments), result) in enumerate(zip(calls_of(message), results, strict=False), k + 1):
                if name == "python" and not result["content"].startswith((NOT_EXECUTED, NOT_FINISHED)):
                    executed.append((place, [arguments["code"]]))
        return executed

    def _execute(self, session: SandboxSession, blocks: Sequence[str]) -> tuple[list[str], SandboxReply]:
        """Execute blocks until one fails; return the texts of the results, and the last reply."""
        limit = TimeLimit(self._timeout)
        texts: list[str] = []
        for block in blocks:
            reply = session.execute(clean(block), result=True, limit=limit)
            texts += [text.rstrip("\n") for text in (reply.stdout, reply.stderr) if text.strip()]
            if reply.status == "ok":
                texts += [reply.value] if isinstance(reply.value, str) else []
                continue
            if reply.status in _KEEPS_STATE:
                texts.append(": ".join(part for part in (reply.error_type, reply.message) if part))
            else:
                texts.append(f"{_REASONS.get(reply.status, reply.status)} {LOST}")
            break
        return texts, reply

    def _rebuilt(self, conversation: Conversation, executed: Sequence[tuple[int, list[str]]]) -> SandboxSession:
        """Return a new session in which the earlier code of the conversation was executed."""
        session = self._sandbox.session(self._limits)
        limit = TimeLimit(self._timeout)
        for place, blocks in executed:
            if LOST in conversation[place]["content"]:
                continue
            for block in blocks:
                reply = session.execute(clean(block), limit=limit)
                if reply.status not in _KEEPS_STATE:
                    session.close()
                    session = self._sandbox.session(self._limits)
                if reply.status != "ok":
                    break
        return session

    def _take(self, messages: Sequence[Message]) -> SandboxSession | None:
        """Return the session whose state is that after these messages, or None."""
        key = _key(messages)
        with self._lock:
            place = next((place for place, (known, _) in enumerate(self._kept) if known == key), None)
            return None if place is None else self._kept.pop(place)[1]

    def _end_all_but(self, number: int) -> None:
        """End the sessions that were used least recently."""
        with self._lock:
            surplus = max(0, len(self._kept) - number)
            ended, self._kept = self._kept[:surplus], self._kept[surplus:]
        for _, session in ended:
            session.close()


def _user_message(text: str) -> Message:
    result = f"\n\n<result>\n{text}\n</result>" if "\n" in text else f"<result>{text}</result>"
    return {"role": "user", "content": result}


def _key(messages: Sequence[Message]) -> str:
    plain = [[message["role"], message["content"], calls_of(message)] for message in messages]
    return hashlib.sha256(json.dumps(plain, default=str).encode()).hexdigest()
