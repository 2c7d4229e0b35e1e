"""Processes that compare formulas, each with a time limit, and are killed when they exceed it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_rm.errors import ConfigError

SCRIPT = Path(__file__).with_name("math_worker.py")
MAX_BATCH = 32
MAX_BATCH_BYTES = 48_000  # less than the buffer of a pipe, so that a write to an idle worker never waits
START_SECONDS = 120.0
STOP_SECONDS = 5.0
STOPPED_SHARE = 0.1
"""A row that is not finished in time, and had less than this share of it on a processor, is not to blame."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row: the references, of which one must be equal, and the answer, in LaTeX."""

    references: tuple[str, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Verdict of one row (`right`, `wrong`, `unparsable` or `timeout`), or why there is none."""

    verdict: str = ""
    error: str | None = None


@dataclass(slots=True)
class _Worker:
    """A process, its state (`starting`, `idle`, `busy` or `stopping`), and the rows that it was sent."""

    process: subprocess.Popen[bytes]
    state: str = "starting"
    since: float = field(default_factory=time.monotonic)
    rows: deque[int] = field(default_factory=deque)
    in_gold: bool = False
    cpu_seconds: float = 0.0
    retires: bool = False
    unread: bytearray = field(default_factory=bytearray)

    def enter(self, state: str) -> None:
        self.state, self.since = state, time.monotonic()

    def frames(self) -> Iterator[list[Any]]:
        """Yield the frames that have arrived; raises EOFError if the process ended."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 65536)
        if not data:
            raise EOFError
        self.unread += data
        while len(self.unread) >= 4:
            (size,) = struct.unpack(">I", self.unread[:4])
            if len(self.unread) < 4 + size:
                return
            frame = json.loads(self.unread[4 : 4 + size])
            del self.unread[: 4 + size]
            yield frame


class WorkerPool:
    """Processes with math-verify, started when rows first need them. Threads take turns.

    Args:
        num_workers: number of processes.
        timeout: seconds of one row.
        memory_bytes: address space of a process.

    Raises:
        ConfigError: math-verify is not installed.
    """

    def __init__(self, *, num_workers: int, timeout: float, memory_bytes: int) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("comparing formulas needs math-verify; run pip install 'gym-rm[math]'.")
        self._num_workers, self._timeout, self._memory_bytes = num_workers, timeout, memory_bytes
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _end_all, self._workers, self._owner)

    def close(self) -> None:
        """End all processes. The next `run` starts new ones."""
        with self._lock:
            _end_all(self._workers, self._owner)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes."""
        return [each.process.pid for each in self._workers]

    def run(self, rows: Sequence[Comparison], deadline: float = math.inf) -> list[Outcome]:
        """Return one outcome per row. Rows that are not finished at the deadline (monotonic time) have an error."""
        wait = -1 if deadline == math.inf else max(0.0, deadline - time.monotonic())
        if not self._lock.acquire(timeout=wait):
            return [_LATE] * len(rows)
        try:
            if self._owner != os.getpid():  # after a fork; the processes belong to the parent
                self._workers, self._owner = [], os.getpid()
                self._finalizer = weakref.finalize(self, _end_all, self._workers, self._owner)
            return _Call(self._workers, rows, self._num_workers, self._timeout, self._memory_bytes).run(deadline)
        except BaseException:
            _end_all(self._workers, self._owner)
            raise
        finally:
            self._lock.release()


_LATE = Outcome(error="not graded within step_timeout")


class _Call:
    """One `run` of a pool."""

    def __init__(
        self, workers: list[_Worker], rows: Sequence[Comparison], num_workers: int, timeout: float, memory_bytes: int
    ) -> None:
        self.workers, self.rows, self.timeout, self.memory_bytes = workers, rows, timeout, memory_bytes
        self.num_workers = min(num_workers, len(rows))
        self.max_workers = num_workers
        self.pending = deque(range(len(rows)))
        self.losses = [0] * len(rows)
        self.outcomes: list[Outcome | None] = [None] * len(rows)
        self.failed_starts = 0

    def run(self, deadline: float) -> list[Outcome]:
        while any(outcome is None for outcome in self.outcomes):
            now = time.monotonic()
            if now >= deadline:
                break
            while len(self.workers) < self.num_workers:
                self.workers.append(_start(self.memory_bytes))
            for worker in self.workers:
                if worker.state == "idle" and self.pending:
                    self._send(worker)
            for worker in self._ready(min([deadline, *(self._limit(each) for each in self.workers)]) - now):
                self._read(worker)
            self._stop_late()
        for worker in self.workers:
            if worker.state == "busy" and worker.rows:  # without rows, only `done` has not arrived yet
                self._stop(worker)
            worker.rows.clear()
        return [_LATE if outcome is None else outcome for outcome in self.outcomes]

    def _limit(self, worker: _Worker) -> float:
        """Return the time at which the state of a worker must have changed."""
        seconds = {"starting": START_SECONDS, "busy": self.timeout, "stopping": STOP_SECONDS}
        return worker.since + seconds.get(worker.state, math.inf)

    def _ready(self, seconds: float) -> list[_Worker]:
        poll = select.poll()
        by_fd = {worker.process.stdout.fileno(): worker for worker in self.workers if worker.process.stdout}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        milliseconds = None if seconds == math.inf else max(0, math.ceil(seconds * 1000))
        return [by_fd[fd] for fd, _ in poll.poll(milliseconds)]

    def _send(self, worker: _Worker) -> None:
        """Send as many rows as one message may have, but leave some to the other workers."""
        most = min(MAX_BATCH, math.ceil(len(self.pending) / (2 * self.max_workers)))
        batch: list[bytes] = []
        while self.pending and len(batch) < most:
            row = self.rows[self.pending[0]]
            data = json.dumps([row.references, row.answer]).encode()
            if sum(map(len, batch)) + len(data) > MAX_BATCH_BYTES:
                if not batch:
                    self._finish(self.pending.popleft(), Outcome(error="the reference answers are too long"))
                    continue
                break
            batch.append(data)
            worker.rows.append(self.pending.popleft())
        if not batch:
            return
        message = b"[" + b",".join(batch) + b"]"
        worker.enter("busy")
        worker.in_gold = False
        assert worker.process.stdin is not None
        with contextlib.suppress(OSError):  # it ended, and the next read says so
            os.write(worker.process.stdin.fileno(), struct.pack(">I", len(message)) + message)

    def _read(self, worker: _Worker) -> None:
        try:
            for name, *values in worker.frames():
                self._handle(worker, name, values)
        except (EOFError, ValueError):
            self._end(worker)

    def _end(self, worker: _Worker) -> None:
        """End a worker, and put its rows back. A child that holds its pipe may hide that it has ended."""
        _kill(worker)
        status = worker.process.wait()
        self.workers.remove(worker)
        _close(worker)
        self.failed_starts += worker.state == "starting"
        if self.failed_starts > 2:
            raise ConfigError(f"the process that compares formulas ended with the status {status} while starting.")
        self._lost(worker, status)

    def _handle(self, worker: _Worker, name: str, values: list[Any]) -> None:
        if name == "failed":
            raise ConfigError(f"math-verify cannot be imported: {values[0]}; run pip install 'gym-rm[math]'.")
        if name == "ready":
            worker.enter("idle")
            worker.cpu_seconds = 0.0
        elif name == "died":
            self._died(worker, *values)
        elif worker.state == "busy":
            if name in ("gold", "found"):
                worker.in_gold = name == "gold"
            elif name == "row":
                _, verdict, worker.cpu_seconds = values
                failed = verdict == "no_gold"
                error = "the reference answer cannot be parsed" if failed else None
                self._finish(worker.rows.popleft(), Outcome("" if failed else verdict, error))
                worker.enter("busy")
                worker.in_gold = False
            elif name == "done":
                worker.enter("stopping" if values[0] else "idle")

    def _died(self, worker: _Worker, status: int, cpu_seconds: float) -> None:
        """Decide on the row that a killed or crashed child compared, and put the others back."""
        late, used = worker.state == "stopping", cpu_seconds - worker.cpu_seconds
        if late and worker.rows and used >= STOPPED_SHARE * self.timeout:
            row = worker.rows.popleft()
            error = f"the reference answer was not parsed within {self.timeout} s" if worker.in_gold else None
            self._finish(row, Outcome("" if error else "timeout", error))
        self._lost(worker, status)
        worker.enter("stopping")  # until the next child is ready

    def _lost(self, worker: _Worker, status: int) -> None:
        """Put the rows of a worker back. The first one is not tried a third time."""
        if worker.rows:
            row = worker.rows[0]
            self.losses[row] += 1
            if self.losses[row] > 1:
                worker.rows.popleft()
                stopped = worker.state == "stopping"
                reason = f"stopped, twice for {self.timeout} s" if stopped else f"killed twice (status {status})"
                outside = stopped or status in (-signal.SIGKILL, -signal.SIGTERM)
                self._finish(
                    row,
                    Outcome(error=f"the process that compares formulas was {reason}")
                    if outside
                    else Outcome("unparsable"),
                )
        self.pending.extendleft(reversed(worker.rows))
        worker.rows.clear()

    def _stop_late(self) -> None:
        now = time.monotonic()
        for worker in [each for each in self.workers if self._limit(each) <= now]:
            if worker.state == "busy":
                self._stop(worker)
            else:  # it does not answer
                self._end(worker)

    def _stop(self, worker: _Worker) -> None:
        worker.enter("stopping")
        worker.process.send_signal(signal.SIGUSR1)

    def _finish(self, row: int, outcome: Outcome) -> None:
        self.outcomes[row] = outcome


def _start(memory_bytes: int) -> _Worker:
    options = {"path": [each for each in sys.path if each], "memory_bytes": memory_bytes, "parent": os.getpid()}
    return _Worker(
        subprocess.Popen(
            [sys.executable, "-I", str(SCRIPT), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,  # an interrupt from the keyboard is for the parent only
        )
    )


def _end_all(workers: list[_Worker], owner: int) -> None:
    if owner == os.getpid():
        for worker in workers:
            _kill(worker)
        for worker in workers:
            worker.process.wait()
            _close(worker)
    workers.clear()


def _kill(worker: _Worker) -> None:
    """Kill the process and its child, which may be too young to end with it."""
    if worker.process.returncode is None:  # else the number may be that of another process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)


def _close(worker: _Worker) -> None:
    for pipe in (worker.process.stdin, worker.process.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
