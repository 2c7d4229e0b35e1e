"""Program of a worker of `math_workers`: compares formulas with math-verify. It is not imported by the package.

    python -I math_worker.py '{"path": [...], "memory_bytes": ..., "parent": ...}'

The process imports math-verify once and forks a child that reads rows from stdin and writes verdicts to stdout. SIGUSR1
kills the child. A new child starts within milliseconds, whatever ended the old one. Frames are JSON after a length of
four bytes:

- stdin: `[[references, answer], ...]`, at most one frame until `done`.
- stdout: `["ready"]` of each child; for each row `["gold", row]` and `["found", row]` around the parsing of references
  that are new, then `["row", row, verdict, cpu_seconds]`; `["done", retires]` after a batch. The process itself writes
  `["died", status, cpu_seconds]`, and `["failed", message]` if it cannot start.

Frames of stdout are shorter than PIPE_BUF, so that those of both processes never mix.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from typing import Any

PR_SET_PDEATHSIG = 1
MAX_ROWS = 5000  # of one child; sympy keeps caches
MAX_GROWTH = 128 * 2**10  # KiB


def send(*values: Any) -> None:
    """Write a frame."""
    data = json.dumps(values)[:4000].encode()
    os.write(1, struct.pack(">I", len(data)) + data)


def receive(size: int) -> bytes:
    """Read that many bytes. Ends the process if stdin is closed."""
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            os._exit(0)
        data += part
    return data


def child(memory_bytes: int, parent: int) -> None:
    """Compare the rows on stdin until it is closed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]

    def parsed(text: str) -> list[Any]:
        found: list[Any] = parse(f"\\boxed{{{text}}}", config, fallback_mode="no_fallback", parsing_timeout=None)
        return found

    golds: dict[str, list[Any]] = {}

    def verdict(row: int, references: list[str], answer: str) -> str:
        missing = [text for text in references if text not in golds]
        if missing:
            send("gold", row)
            golds.update({text: parsed(text) for text in missing})
            send("found", row)
        known = [each for text in references for each in golds[text]]
        if not known:
            return "no_gold"
        found = parsed(answer)
        if not found:
            return "unparsable"
        return "right" if verify(known, found, timeout_seconds=None) else "wrong"

    send("ready")
    first, num_rows = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    while True:
        (size,) = struct.unpack(">I", receive(4))
        for row, (references, answer) in enumerate(json.loads(receive(size))):
            try:
                given = verdict(row, references, answer)
            except (Exception, RecursionError, MemoryError):
                given = "unparsable"
            send("row", row, given, time.process_time())
            num_rows += 1
        if len(golds) > 4096:
            golds.clear()
        retires = num_rows > MAX_ROWS or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - first > MAX_GROWTH
        send("done", retires)
        if retires:
            os._exit(0)


def main() -> None:
    """Import math-verify, and fork a child whenever there is none."""
    options = json.loads(sys.argv[1])
    sys.path += [each for each in options["path"] if each not in sys.path]
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 2)
    try:
        import math_verify  # noqa: F401
    except Exception as error:
        send("failed", f"{type(error).__name__}: {error}")
        return
    gc.collect()
    gc.freeze()
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(signals, False)
    signal.set_wakeup_fd(wakeup)
    for number in (signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    poll.register(0, 0)  # reports only that the other end was closed
    own = os.getpid()
    while True:
        pid = os.fork()
        if pid == 0:
            try:
                child(options["memory_bytes"], own)
            finally:
                os._exit(1)
        wait(pid, poll, signals, options["parent"])


def wait(pid: int, poll: select.poll, signals: int, parent: int) -> None:
    """Return after the child ended and stdin is empty. Ends the process if its parent is gone."""
    while True:
        events = dict(poll.poll(2000))  # forked children of the parent may keep stdin open, so its end is not enough
        if 0 in events or os.getppid() != parent:
            os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if signals not in events:
            continue
        numbers = os.read(signals, 1024)
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if not ended and signal.SIGUSR1 in numbers:
            os.kill(pid, signal.SIGKILL)
            ended, status, usage = os.wait4(pid, 0)
        if ended:
            break
    os.set_blocking(0, False)
    with contextlib.suppress(BlockingIOError):
        while os.read(0, 65536):
            pass
    os.set_blocking(0, True)
    send("died", os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)


if __name__ == "__main__":
    main()
