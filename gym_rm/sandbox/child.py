"""The process of a session: started with its pipes, killed and reaped."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

CPU_CLOCK = 2  # CPUCLOCK_SCHED of Linux: with the complement of a process id, the clock of that process


@dataclasses.dataclass(frozen=True)
class Launch:
    """Command that starts an interpreter, the program that this reads first, and the settings of the process.

    In the command "@requests", "@replies" and "@info" stand for file descriptors.
    """

    argv: tuple[str, ...]
    program: bytes
    settings: Mapping[str, Any]

    @property
    def nested(self) -> bool:
        """Whether bubblewrap is around the interpreter."""
        return "@info" in self.argv


class Child:
    """Process of a session with its pipes. Ended and reaped by `end`, from any thread and more than once."""

    def __init__(self, launch: Launch) -> None:
        self.owner = os.getpid()
        self.nested = launch.nested
        pipes: list[int] = []
        try:
            requests, self.requests = _pipe(pipes)
            self.replies, replies = _pipe(pipes)
            self.stdout, stdout = _pipe(pipes)
            self.stderr, stderr = _pipe(pipes)
            theirs = {"@requests": requests, "@replies": replies}
            self.info = -1
            if launch.nested:
                self.info, theirs["@info"] = _pipe(pipes)
            argv = [str(theirs[each]) if each in theirs else each for each in launch.argv]
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=tuple(theirs.values()),
                env={},
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            for each in pipes:
                os.close(each)
            raise
        self.mine = [self.requests, self.replies, self.stdout, self.stderr, *([self.info] if self.nested else [])]
        for each in (stdout, stderr, *theirs.values()):
            os.close(each)
        self.cpu_seconds = 0.0
        self.interpreter = 0 if launch.nested else self.process.pid
        self.lock = threading.RLock()  # no signal goes to a number that another thread has just reaped
        with contextlib.suppress(BrokenPipeError), open(self.requests, "wb", closefd=False) as program:
            program.write(launch.program)  # if the pipe is broken, the first request tells why
        for each in self.mine:
            os.set_blocking(each, False)

    def kill(self) -> None:
        """Kill all processes of the session and reap them. The innermost goes first, so that bubblewrap reaps it."""
        with self.lock:
            if self.poll() is None and self.nested and self.find_interpreter() > 1:
                _signal(os.kill, self.interpreter)
                self.wait(1.0)
            if self.poll() is None:
                _signal(os.killpg, self.process.pid)
                self.wait(10.0)

    def find_interpreter(self) -> int:
        """Return the process id of the interpreter, which is the first of its namespace; -1 if it is not known."""
        if self.interpreter == 0:
            self.interpreter = -1
            with contextlib.suppress(OSError, ValueError, IndexError):
                started = select.poll()
                started.register(self.info, select.POLLIN)
                started.poll(1000)  # milliseconds, of which bubblewrap needs few
                told = os.read(self.info, 4096).split(b'"child-pid":', 1)
                self.interpreter = int(told[1].strip().split(b"\n")[0].strip(b" ,}"))
        return self.interpreter

    def cpu_time(self) -> float:
        """Return the seconds of processor time of the interpreter, of all its threads; 0.0 if it has ended."""
        number = self.find_interpreter()
        try:
            return time.clock_gettime(~number << 3 | CPU_CLOCK) if number > 1 else 0.0
        except OSError:
            return 0.0

    def is_asleep(self) -> bool:
        """Return whether no thread runs, waits for a processor or a disk, or is stopped. True where none can tell."""
        states: list[bytes] = []
        threads = Path(f"/proc/{self.find_interpreter()}/task")
        with contextlib.suppress(OSError):  # a process that has ended
            for thread in os.listdir(threads):
                with contextlib.suppress(OSError):  # a thread that has ended
                    states.append((threads / thread / "stat").read_bytes().rpartition(b")")[2].split()[0])
        return not any(state in (b"R", b"D", b"T", b"t") for state in states)

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal), or None while the process runs."""
        with self.lock:
            if self.process.returncode is not None:
                return self.process.returncode
            try:
                pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            except ChildProcessError:  # reaped by a handler of SIGCHLD
                self.process.returncode = 0
                return 0
            if pid:
                self.process.returncode = os.waitstatus_to_exitcode(status)
                self.cpu_seconds = usage.ru_utime + usage.ru_stime
        return self.process.returncode

    def wait(self, seconds: float) -> int | None:
        """Return the exit code once there is one, or None after `seconds`."""
        end, pause = time.monotonic() + seconds, 0.0002
        while (code := self.poll()) is None and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        return code

    def end(self) -> None:
        """Kill and reap the process and close its pipes."""
        mine, self.mine = self.mine, []
        if not mine:
            return
        if os.getpid() == self.owner:
            self.kill()
        else:  # a fork of the parent: the process is not ours
            self.process.returncode = 0
        for each in mine:
            os.close(each)


def _pipe(opened: list[int]) -> tuple[int, int]:
    ends = os.pipe()
    opened.extend(ends)
    return ends


def read(number: int) -> bytes | None:
    """Return bytes that are there, none at the end of the stream, None if there is nothing now."""
    try:
        return os.read(number, 1 << 16)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _signal(send: Callable[[int, int], None], target: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(target, signal.SIGKILL)
