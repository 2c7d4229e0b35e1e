"""What runs in the process of a rank: take requests from the driver, call the executor, and answer.

The process ends when its driver has ended, however that happened: the connection is then closed, and on Linux the
kernel also kills the rank, even one that is stopped. Messages are pickled Python objects; they only pass between a
driver and the processes that it started, through a socket that has no name.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from gym_rm.engine.executors.executor import BatchResult, Executor
from gym_rm.errors import ConfigError, brief, logger

if TYPE_CHECKING:  # so that the process watches its driver before it imports torch
    from gym_rm.engine.executors.ranks import Rank

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a rank to one request: a value, or an error as text, because exceptions need not be picklable.

    Attributes:
        value: what the method returned.
        error: what it raised instead, or None.
        refused: whether the error is a ConfigError.
    """

    value: Any = None
    error: str | None = None
    refused: bool = False

    @property
    def failed(self) -> bool:
        """Whether the rank raised, or its batch failed."""
        return self.error is not None or (isinstance(self.value, BatchResult) and self.value.error is not None)


class RankWorker:
    """Owns the executor of a rank, which `make` returns, and answers requests; every exception becomes an answer."""

    def __init__(self, rank: Rank, make: Callable[[Rank], Executor]) -> None:
        self._rank = rank
        self._make = make
        self._executor: Executor | None = None
        if rank.quiet:
            logger.setLevel(logging.ERROR)

    def answer(self, request: bytes) -> bytes:
        """Return the answer to a request, both as pickled bytes."""
        try:
            answer = self._answer(*pickle.loads(request))
        except ConfigError as error:
            answer = Answer(error=str(error), refused=True)
        except Exception as error:  # the driver decides
            answer = Answer(error=brief(error))
        return pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)

    def _answer(self, method: str, *arguments: Any) -> Answer:
        """Call a method of the executor. `run` takes one batch; only rank 0 answers with its values."""
        if method == "load":
            self._executor = self._make(self._rank)
            return Answer(self._executor.load(*arguments))
        assert self._executor is not None, "load comes first"
        if method == "run":
            (result,) = self._executor.run(arguments)
            return Answer(result if self._rank.index == 0 else replace(result, values=None))
        getattr(self._executor, method)(*arguments)
        return Answer()


def main(descriptor: int, driver: int) -> None:
    """Serve the driver with this process id through an inherited socket, until either ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the driver
    if sys.platform.startswith("linux"):  # the kernel kills this process when the thread that started it ends
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != driver:  # it ended before
            os._exit(0)
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        """Take requests also while a batch runs, to learn of the end of the driver."""
        try:
            while True:
                requests.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=read, name="gym_rm driver", daemon=True).start()
    worker = RankWorker(*pickle.loads(requests.get()))  # imports torch
    while True:
        answer = worker.answer(requests.get())
        try:
            connection.send_bytes(answer)
        except OSError:
            os._exit(0)
