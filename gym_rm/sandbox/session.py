"""One sandboxed interpreter."""

from __future__ import annotations

import dataclasses
import os
import secrets
import select
import signal
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from gym_rm.errors import GymRMError
from gym_rm.sandbox.child import Child, Launch, read
from gym_rm.sandbox.guest import MEMORY_EXIT, NONCE_BYTES, SETTINGS_LIMIT
from gym_rm.sandbox.limits import SandboxLimits
from gym_rm.sandbox.time_limit import TimeLimit
from gym_rm.sandbox.values import CrossingError, decode, encode

START_SECONDS = 60.0
_CLAIMED = {"ok", "exception", "syntax_error", "memory", "output", "forbidden", "exit"}
_OWN_SIGNALS = {signal.SIGXCPU: "time", signal.SIGSYS: "forbidden", signal.SIGKILL: "killed"}


@dataclasses.dataclass(frozen=True)
class SandboxReply:
    """Answer of a session.

    `status` is "ok", or a failure: "exception", "syntax_error", "time", "memory", "output", "forbidden", "exit" (the
    code ended the program, `value` is its exit code), "killed" (ended from outside, or the machine gave it no time:
    worth another try) and "invalid" (a broken frame). `error_type` and `message` are of an exception, `stdout` and
    `stderr` what was printed since the request.
    """

    status: str
    value: Any = None
    error_type: str = ""
    message: str = ""
    stdout: str = ""
    stderr: str = ""


Host = Callable[[list[Any]], SandboxReply]


class SandboxError(GymRMError, RuntimeError):
    """The sandbox could not start an interpreter, or was closed."""


class SandboxSession:
    """One sandboxed interpreter. Its state persists from request to request; a failure that ended it is repeated.

    Not to be used by two threads at a time. Made by `Sandbox.session`.
    """

    def __init__(self, launch: Launch, *, on_end: Callable[[Child], None] | None = None) -> None:
        self._launch = launch
        self._child = Child(launch)
        self._limits = SandboxLimits()
        self._finished: SandboxReply | None = None
        self._nonce = b""
        self._incoming = bytearray()
        self._printed = {self._child.stdout: bytearray(), self._child.stderr: bytearray()}
        self._end = weakref.finalize(self, _end, self._child, on_end)
        self._keep: object = None

    @property
    def alive(self) -> bool:
        """Whether the interpreter can take another request."""
        return self._finished is None

    def configure(self, limits: SandboxLimits) -> None:
        """Shut the process in under these limits. Raises SandboxError."""
        self._limits = limits
        settings = {**limits.model_dump(), **self._launch.settings}
        message = self._exchange(encode(settings, limit=SETTINGS_LIMIT), TimeLimit(START_SECONDS))
        if isinstance(message, SandboxReply):
            raise SandboxError(f"A sandboxed interpreter did not start ({message.status}): {message.stderr.strip()}")

    def execute(
        self,
        source: str,
        *,
        stdin: str = "",
        main: bool = True,
        result: bool = False,
        host: Host | None = None,
        limit: TimeLimit | None = None,
    ) -> SandboxReply:
        """Run source in the namespace of the session.

        With `main`, `__name__` is "__main__", and threads and atexit functions are finished as at the end of a program;
        else `__name__` is "solution". With `result` the value of a last expression is returned as text. `host(args)`
        answers `__host__(*args)` of trusted code. `limit` may be shared by several requests; by default this one has
        `wall_seconds`.
        """
        arguments = {"source": source, "main": main, "result": result, "host": host is not None, "stdin": stdin}
        return self._request("execute", arguments, host, limit)

    def call(
        self, name: str, args: Sequence[Any] = (), *, host: Host | None = None, limit: TimeLimit | None = None
    ) -> SandboxReply:
        """Call a function of the namespace, whose result must be plain."""
        return self._request("call", {"name": name, "args": list(args)}, host, limit)

    def close(self) -> None:
        """End the interpreter with all of its processes."""
        self._finished = self._finished or SandboxReply("exit", message="the session is closed")
        self._end()

    def __enter__(self) -> SandboxSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(
        self, name: str, arguments: dict[str, Any], host: Host | None, limit: TimeLimit | None
    ) -> SandboxReply:
        if self._finished is not None:
            return dataclasses.replace(self._finished, stdout="", stderr="")
        try:
            data = encode((name, arguments), limit=self._limits.reply_bytes)
        except CrossingError as error:
            return SandboxReply("invalid", error_type="CrossingError", message=str(error))
        limit = limit or TimeLimit(self._limits.wall_seconds)
        while True:
            message = self._exchange(data, limit)
            if isinstance(message, SandboxReply):
                return message
            if message[0] != "host":
                return self._claim(message)
            try:
                if host is None:
                    return self._finish("invalid", "a call of a host that this request does not have")
                answer = host(list(message[1]))
                parts = (answer.status, answer.value, answer.error_type, answer.message)
                data = encode(parts, limit=self._limits.reply_bytes)
            except (CrossingError, ValueError, TypeError) as error:
                return self._finish("invalid", f"a call of the host: {error}")
            except BaseException:
                self._finish("invalid", "the host failed")
                raise

    def _claim(self, message: tuple[Any, ...]) -> SandboxReply:
        """Return what the session says, if it has the form of a reply."""
        if len(message) != 4 or message[0] not in _CLAIMED or not all(type(each) is str for each in message[2:]):
            return self._finish("invalid", "a reply of another form")
        error_type, text = (each.encode("utf-8", "replace").decode() for each in message[2:])
        return SandboxReply(*message[:2], error_type, text, *self._take_printed())

    def _exchange(self, data: bytes, limit: TimeLimit) -> Any:
        """Send one frame and return the tuple of the next one, or the SandboxReply that ended the session."""
        child = self._child
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        frame = memoryview((NONCE_BYTES + len(data)).to_bytes(4, "big") + self._nonce + data)
        poller = select.poll()
        for each in (child.replies, *self._printed):
            poller.register(each, select.POLLIN)
        poller.register(child.requests, select.POLLOUT)
        cpu_time = child.cpu_time()
        while True:
            if limit.is_over:
                return self._finish("time", "the time is over")
            if limit.is_given_up:
                return self._finish("killed", "the machine gave the process too little time")
            started = time.monotonic()
            for number, _ in poller.poll(1000 * limit.until_sample):
                if number == child.requests:
                    try:
                        frame = frame[os.write(number, frame) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError:
                        frame = frame[:0]
                    if not frame:
                        poller.unregister(number)
                    continue
                piece = read(number)
                if piece == b"":
                    poller.unregister(number)
                    if number == child.replies:
                        return self._finish_ended()
                elif piece and number == child.replies:
                    self._incoming += piece
                elif piece:
                    self._printed[number] += piece
                    if self._too_much_printed():
                        return self._finish("output", f"more than {self._limits.output_bytes} bytes were printed")
            received = self._next_message()
            before, cpu_time = cpu_time, child.cpu_time()
            limit.used += max(0.0, cpu_time - before)
            if received is not None:
                return received
            limit.waited(time.monotonic() - started, child)

    def _next_message(self) -> Any:
        """Return the next message if all of it is there."""
        incoming = self._incoming
        if len(incoming) < 4:
            return None
        size = int.from_bytes(incoming[:4], "big")
        if not NONCE_BYTES <= size <= self._limits.reply_bytes + NONCE_BYTES:
            return self._finish("invalid", f"a frame of {size} bytes")
        if len(incoming) < 4 + size:
            return None
        if len(incoming) > 4 + size:
            return self._finish("invalid", "bytes after the reply")
        frame = bytes(incoming[4:])
        incoming.clear()
        if not secrets.compare_digest(frame[:NONCE_BYTES], self._nonce):
            return self._finish("invalid", "a frame that answers no request")
        try:
            message = decode(frame[NONCE_BYTES:])
        except CrossingError as error:
            return self._finish("invalid", str(error))
        if type(message) is not tuple or not message:
            return self._finish("invalid", "a reply of another form")
        for number in self._printed:  # what was printed before the reply is in the pipe by now
            while (piece := read(number)) and not self._too_much_printed():
                self._printed[number] += piece
        if self._too_much_printed():
            return self._finish("output", f"more than {self._limits.output_bytes} bytes were printed")
        return message

    def _too_much_printed(self) -> bool:
        return sum(map(len, self._printed.values())) > self._limits.output_bytes

    def _take_printed(self) -> tuple[str, str]:
        limit = self._limits.output_bytes
        texts = [bytes(each[:limit]).decode("utf-8", "replace") for each in self._printed.values()]
        for each in self._printed.values():
            each.clear()
        return texts[0], texts[1]

    def _finish(self, status: str, message: str, value: Any = None) -> SandboxReply:
        for number in self._printed:
            while (piece := read(number)) and not self._too_much_printed():
                self._printed[number] += piece
        stdout, stderr = self._take_printed()
        self._finished = SandboxReply(status, value, message=message, stdout=stdout, stderr=stderr)
        self._end()
        return self._finished

    def _finish_ended(self) -> SandboxReply:
        """The pipe of replies was closed: find out why."""
        code = self._child.wait(1.0)
        if code is None:
            return self._finish("invalid", "the pipe of replies was closed by the code")
        if self._launch.nested and code > 128:
            code = 128 - code  # bubblewrap reports signals as a shell does
        if code == MEMORY_EXIT:
            return self._finish("memory", "no memory was left")
        if code >= 0:
            return self._finish("exit", f"the process ended with code {code}", code)
        status = _OWN_SIGNALS.get(-code, "exit")  # type: ignore[call-overload]
        if status == "killed" and self._child.cpu_seconds >= self._limits.cpu_seconds:
            status = "time"
        return self._finish(status, f"the process was ended by signal {-code}", code)


def _end(child: Child, on_end: Callable[[Child], None] | None) -> None:
    child.end()
    if on_end is not None:
        on_end(child)
