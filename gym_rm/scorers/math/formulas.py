"""Formulas compared by math-verify in the sandbox, each with a limit of time and memory."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from gym_rm.errors import ConfigError
from gym_rm.sandbox.limits import SandboxLimits
from gym_rm.sandbox.sandbox import Sandbox
from gym_rm.sandbox.session import SandboxReply, SandboxSession
from gym_rm.sandbox.time_limit import TimeLimit

PROGRAM = Path(__file__).with_name("guest_formulas.py")
MOST_ROWS = 2000  # of one session; sympy keeps caches
WALL_SECONDS = 4.0  # for each second of processor time, which math-verify measures itself
MEMORY_BYTES = 2**30  # of address space; an answer that needs more is unparsable


@dataclass(frozen=True, slots=True)
class FormulaPair:
    """One row: the references, of which one must be equal, the answer, in LaTeX, and whether it must be a value."""

    references: tuple[str, ...]
    answer: str
    evaluated: bool = False


_Idle = deque[tuple[SandboxSession, int]]  # sessions, and how many rows each may still compare; safe among threads
Verdict: TypeAlias = tuple[str | None, str | None]
"""`right`, `wrong`, `unparsable` or `timeout`, or why there is no verdict."""


class FormulaComparer:
    """Sessions of a sandbox with math-verify, which serve one row after another until one runs out of time.

    What runs is math-verify, and only its texts are a stranger's: a machine without layers compares formulas too.
    `timeout` has the seconds of processor time for one row. Raises ConfigError if math-verify is not installed.
    """

    def __init__(self, *, num_workers: int, timeout: float) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("comparing formulas needs math-verify; run pip install 'gym-rm[math]'.")
        self._timeout = timeout
        self._sandbox = Sandbox(
            allow_unsafe=True,
            limits=SandboxLimits(wall_seconds=60.0, cpu_seconds=24 * 3600, memory_bytes=MEMORY_BYTES),
            num_workers=num_workers,
            packages=("math_verify",),
        )
        self._owner = os.getpid()
        self._idle = _Idle()

    def close(self) -> None:
        """End all processes."""
        self._sandbox.close()
        while self._idle:
            self._idle.pop()[0].close()

    def compare(self, pairs: Sequence[FormulaPair]) -> list[Verdict]:
        """Return one verdict per row."""
        if self._owner != os.getpid():  # after a fork; the sessions belong to the parent
            self._idle, self._owner = _Idle(), os.getpid()
        return self._sandbox.map(self._compare, pairs)

    def _compare(self, pair: FormulaPair) -> Verdict:
        """Return the verdict of one row. A row that others hindered is tried once more."""
        for _ in range(2):
            session, rows = self._take()
            verdict = self._compare_in(session, pair)
            if session.alive and rows > 1:
                self._idle.append((session, rows - 1))
            else:
                session.close()
            if verdict is not None:
                return verdict
        return None, "the process that compares formulas was killed twice, or got no processor time"

    def _compare_in(self, session: SandboxSession, pair: FormulaPair) -> Verdict | None:
        """Return the verdict of one row, or None if the process was killed, or waited too long for a processor."""
        references = list(pair.references)
        reply = self._call(session, "read_references", [references])
        if reply.status in ("killed", "time"):
            return None
        if _out_of_time(reply):
            return None, f"the reference answer was not parsed within {self._timeout} s"
        if reply.status != "ok" or reply.value is not True:
            return None, "the reference answer cannot be parsed"
        reply = self._call(session, "compare", [references, pair.answer, pair.evaluated])
        if reply.status in ("killed", "time"):
            return None
        if _out_of_time(reply):
            return "timeout", None
        known = reply.status == "ok" and reply.value in ("right", "wrong")
        return reply.value if known else "unparsable", None

    def _call(self, session: SandboxSession, name: str, arguments: list[Any]) -> SandboxReply:
        return session.call(name, [*arguments, self._timeout], limit=TimeLimit(WALL_SECONDS * self._timeout))

    def _take(self) -> tuple[SandboxSession, int]:
        """Return a session, and how many rows it may compare."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        session = self._sandbox.session()
        reply = session.execute(PROGRAM.read_text(), main=False)
        if reply.status not in ("ok", "killed"):
            session.close()
            raise ConfigError(f"math-verify cannot be imported: {reply.message}; run pip install 'gym-rm[math]'.")
        return session, MOST_ROWS


def _out_of_time(reply: SandboxReply) -> bool:
    """Return whether the process used up its processor time."""
    return reply.status == "exit" and reply.value == -signal.SIGPROF
