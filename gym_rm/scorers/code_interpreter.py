"""Multi-turn: the code blocks of replies are executed, and the results are the user's next turns."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from gym_rm.checks import boolean, integer, one_of
from gym_rm.errors import brief
from gym_rm.sandbox.limits import Limits
from gym_rm.sandbox.sandbox import Sandbox
from gym_rm.sandbox.session import Reply, Session
from gym_rm.sandbox.values import Remote
from gym_rm.scorers.code_options import parse_limits, positive, worker_count
from gym_rm.scorers.code_replies import reply_blocks
from gym_rm.scorers.code_verdicts import clean
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Message, Prompt

MOST_CHARACTERS = 10_000
"""Length of a result; the rest is cut off."""
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


class CodeInterpreter:
    """`respond` that executes the code blocks of each reply and returns what they print and evaluate to.

    The result is `<result>4</result>`, or a block of several lines. A block that ends with an expression evaluates to
    it. Errors are results too. A reply without code ends the episode.

    The variables of an episode are kept in a process of its own, which is found by the messages of the conversation,
    so that no name of the episode is needed. If it is gone, the earlier blocks of the conversation are executed
    again. All conversations of a call run at the same time, as far as there are workers.

    Args:
        sandbox: sandbox to use, which stays open in `close`; None for a new one from the following options.
        blocks: which parts of a reply are executed: `"code"`: `<code>` only; `"any"`: `<code>`, or fenced blocks.
        timeout: seconds for the code of one reply; also for executing earlier ones again.
        num_workers: number of conversations at the same time; None for the number of cores.
        terminate_on_evaluation: whether a reply whose code evaluates to a value ends the episode.
        max_sessions: most episodes whose process is kept.
        idle_seconds: after this time without a reply, the process of an episode is ended in the next call.
        layer, allow_unsafe, limits, interpreter, packages: see `CodeScorer`.

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
        blocks: Literal["code", "any"] = "any",
        timeout: float = 10.0,
        num_workers: int | None = None,
        terminate_on_evaluation: bool = False,
        max_sessions: int = 128,
        idle_seconds: float = 600.0,
        layer: str = "auto",
        allow_unsafe: bool = False,
        limits: Mapping[str, Any] | Limits | None = None,
        interpreter: str | None = None,
        packages: Sequence[str] = (),
    ) -> None:
        self._blocks = one_of("blocks", blocks, ("code", "any"))
        self._timeout = positive("timeout", timeout)
        self._num_workers = worker_count(num_workers)
        self._terminate_on_evaluation = boolean("terminate_on_evaluation", terminate_on_evaluation)
        self._max_sessions = integer("max_sessions", max_sessions, minimum=0)
        self._idle_seconds = positive("idle_seconds", idle_seconds)
        self._owned = sandbox is None
        self._sandbox = sandbox or Sandbox(
            layer=layer,
            allow_unsafe=boolean("allow_unsafe", allow_unsafe),
            limits=parse_limits(limits),
            num_workers=self._num_workers,
            interpreter=interpreter,
            packages=packages,
        )
        # An episode may use more CPU time than one run: the time of each turn is limited instead.
        self._limits = dataclasses.replace(self._sandbox.limits, cpu_seconds=24 * 3600)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], tuple[Session, float]] = OrderedDict()
        self._count = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> CodeInterpreter:
        return self

    def __call__(
        self, conversations: Sequence[Conversation], prompts: Sequence[Prompt], scores: Scores | None
    ) -> list[str | None]:
        """Return the result of the code of each last reply, or None if it has no code or the episode ends."""
        self._evict(idle_since=time.monotonic() - self._idle_seconds)
        rows = [
            (conversation, 0 if prompt is None else len(prompt.messages), blocks)
            for conversation, prompt in zip(conversations, prompts, strict=True)
            if (blocks := self.blocks_of(conversation[-1]["content"]))
        ]
        if len(rows) < 2 or self._num_workers == 1:
            results = iter([self._turn(*row) for row in rows])
        else:
            executor = ThreadPoolExecutor(min(self._num_workers, len(rows)), thread_name_prefix="gym_rm interpreter")
            try:
                results = iter(list(executor.map(lambda row: self._turn(*row), rows)))
            finally:
                executor.shutdown(cancel_futures=True)
        return [next(results) if self.blocks_of(each[-1]["content"]) else None for each in conversations]

    def blocks_of(self, reply: str) -> list[str]:
        """Return the code of a reply that is executed."""
        if self._blocks == "code" and "<code>" not in reply.rpartition("</think>")[2]:
            return []
        return [block for block in reply_blocks(reply) if block.strip()]

    def close(self) -> None:
        """End the processes of all episodes."""
        self._evict(keep=0)
        if self._owned:
            self._sandbox.close()

    def _turn(self, conversation: Conversation, start: int, blocks: list[str]) -> str | None:
        """Execute the blocks of the last reply, and keep the session under the conversation with their result."""
        session = self._take(conversation[:-1])
        if session is None:
            session = self._rebuilt(conversation[:-1], start)
        texts, reply = self._execute(session, blocks)
        if reply.status == "killed":  # from outside: once again, from the start
            session.close()
            session = self._rebuilt(conversation[:-1], start)
            texts, reply = self._execute(session, blocks)
        result = as_result(texts)
        lives = reply.status in ("ok", "exception", "syntax_error")
        evaluated = reply.status == "ok" and reply.value is not None
        if lives and not (evaluated and self._terminate_on_evaluation):
            self._keep([*conversation, {"role": "user", "content": result}], session)
        else:
            session.close()
        return None if evaluated and self._terminate_on_evaluation else result

    def _execute(self, session: Session, blocks: Sequence[str]) -> tuple[list[str], Reply]:
        """Execute blocks until one fails; return the texts of the results, and the last reply."""
        deadline = time.monotonic() + self._timeout
        texts: list[str] = []
        for block in blocks:
            reply = session.execute(clean(block), result=True, deadline=deadline)
            texts += [each.rstrip("\n") for each in (reply.stdout, reply.stderr) if each.strip()]
            if reply.status == "ok":
                texts += [] if reply.value is None else [self._shown(session, reply.value)]
                continue
            if reply.status in ("exception", "syntax_error"):
                texts.append(": ".join(part for part in (reply.error_type, reply.message) if part))
            else:
                texts.append(f"{_REASONS.get(reply.status, reply.status)} {LOST}")
            break
        return texts, reply

    def _shown(self, session: Session, value: Any) -> str:
        if isinstance(value, str):
            return value
        if not isinstance(value, Remote):
            try:
                return str(value)
            except (ValueError, RecursionError) as error:  # a number of more digits than Python converts
                return brief(error)
        text = session.call("__str__", on=value)
        return str(text.value) if text.status == "ok" else repr(value)

    def _rebuilt(self, messages: Sequence[Message], start: int) -> Session:
        """Return a new session in which the earlier blocks of the conversation were executed."""
        session = self._sandbox.session(self._limits)
        deadline = time.monotonic() + self._timeout
        for k, message in enumerate(messages[start:], start):
            following = messages[k + 1]["content"] if k + 1 < len(messages) else ""
            if message["role"] != "assistant" or LOST in following:
                continue
            for block in self.blocks_of(message["content"]):
                reply = session.execute(clean(block), deadline=deadline)
                if reply.status not in ("ok", "exception", "syntax_error"):
                    session.close()
                    session = self._sandbox.session(self._limits)
                if reply.status != "ok":
                    break
        return session

    def _take(self, messages: Sequence[Message]) -> Session | None:
        """Return the session whose state is that after these messages, or None."""
        key = _key(messages)
        with self._lock:
            found = next((each for each in self._kept if each[0] == key), None)
            return None if found is None else self._kept.pop(found)[0]

    def _keep(self, messages: Sequence[Message], session: Session) -> None:
        with self._lock:
            self._count += 1
            self._kept[_key(messages), self._count] = (session, time.monotonic())
        self._evict(keep=self._max_sessions)

    def _evict(self, *, keep: int | None = None, idle_since: float = 0.0) -> None:
        """End the sessions that were used least recently, beyond a number or before a time."""
        ended = []
        with self._lock:
            while self._kept:
                oldest = next(iter(self._kept))
                if (keep is None or len(self._kept) <= keep) and self._kept[oldest][1] >= idle_since:
                    break
                ended.append(self._kept.pop(oldest)[0])
        for session in ended:
            session.close()


def as_result(texts: Sequence[str]) -> str:
    """Return the results of code as the user's turn: in one line, or as a block of lines."""
    text = clean("\n".join(texts))
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]}\n... and {len(text) - MOST_CHARACTERS} more characters"
    return f"\n\n<result>\n{text}\n</result>" if "\n" in text else f"<result>{text}</result>"


def _key(messages: Sequence[Message]) -> str:
    plain = [[message["role"], message["content"]] for message in messages]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


@functools.cache
def _shared() -> CodeInterpreter:
    return CodeInterpreter()


def run_code(
    conversations: Sequence[Conversation], prompts: Sequence[Prompt], scores: Scores | None
) -> list[str | None]:
    """`respond` with the defaults of `CodeInterpreter`: `respond="gym_rm.scorers.code_interpreter:run_code"`."""
    return _shared()(conversations, prompts, scores)
