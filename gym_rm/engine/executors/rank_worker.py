"""What runs in the process of a rank: take requests from the driver, call the executor, and answer.

The process ends when its driver has ended, however that happened: the connection is then closed, and on Linux the
kernel also kills the rank, even one that is stopped. Messages are an 8-byte length and pickled Python objects; they
only pass between a driver and the processes that it started, through a socket that has no name.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import queue
import shutil
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gym_rm.engine.executors.answers import Answer
from gym_rm.engine.executors.executor import BatchResult, Executor
from gym_rm.errors import ConfigError, brief, logger

if TYPE_CHECKING:  # so that the process watches its driver before it imports torch
    from gym_rm.engine.executors.rank import Rank

HEADER = struct.Struct("!Q")
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class RankStart:
    """What a rank needs before it loads its model.

    Attributes:
        rank: its place in the group.
        make: function that returns its executor.
        quiet: whether only errors are logged, because another rank logs the same.
    """

    rank: Rank
    make: Callable[[Rank], Executor]
    quiet: bool = False


class RankWorker:
    """Owns the executor of a rank and answers requests; every exception becomes an answer."""

    def __init__(self, start: RankStart) -> None:
        self._rank = start.rank
        self._make = start.make
        self._executor: Executor | None = None
        if start.quiet:
            logger.setLevel(logging.ERROR)

    def handle(self, method: str, *arguments: Any) -> Answer:
        """Call a method of the executor. `run` takes one batch; only rank 0 answers with its values."""
        try:
            if method == "load":
                self._executor = self._make(self._rank)
                return Answer(self._executor.load(*arguments))
            assert self._executor is not None, "load comes first"
            if method != "run":
                getattr(self._executor, method)(*arguments)
                return Answer()
            (result,) = self._executor.run(arguments)
            return Answer(result if self._rank.index == 0 else replace(result, values=None))
        except ConfigError as error:
            return Answer(error=str(error), refused=True)
        except Exception as error:  # the driver decides
            return Answer(BatchResult(error=brief(error)) if method == "run" else None, brief(error))


def send(connection: socket.socket, message: bytes) -> None:
    """Send a message; the connection's timeout is the limit of the whole message."""
    if len(message) < 1 << 16:
        connection.sendall(HEADER.pack(len(message)) + message)
    else:
        connection.sendall(HEADER.pack(len(message)))
        connection.sendall(message)


def receive(connection: socket.socket) -> bytes:
    """Receive a message.

    Raises:
        EOFError: the other process has closed the connection.
    """
    return _receive(connection, HEADER.unpack(_receive(connection, HEADER.size))[0])


def _receive(connection: socket.socket, size: int) -> bytes:
    message = bytearray(size)
    view = memoryview(message)
    got = 0
    while got < size:
        count = connection.recv_into(view[got:])
        if count == 0:
            raise EOFError
        got += count
    return bytes(message)


def main(descriptor: int, driver: int, folder: str = "") -> None:
    """Serve the driver with this process id through an inherited socket, until either ends.

    If the driver ends first, this process removes the folder of the group, if it is given one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the driver
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)

    def driver_has_ended() -> None:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                requests.put(receive(connection))
        except (EOFError, OSError):
            driver_has_ended()

    try:
        start_message = receive(connection)
    except (EOFError, OSError):
        driver_has_ended()
    threading.Thread(target=read, name="gym_rm driver", daemon=True).start()
    if folder:  # it must still remove the folder
        _wake_with_the_end_of_the_driver()
    else:
        _die_with(driver)
    start: RankStart = pickle.loads(start_message)  # imports torch
    worker = RankWorker(start)
    while True:
        try:
            method, *arguments = pickle.loads(requests.get())
        except Exception as error:  # for example a class that this process cannot import
            answer = Answer(error=f"the request cannot be read: {brief(error)}")
        else:
            answer = worker.handle(method, *arguments)
            del arguments
        try:
            send(connection, pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL))
        except OSError:
            driver_has_ended()


def _die_with(driver: int) -> None:
    """Let the kernel kill this process when the thread that started it ends, if the system has this."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != driver:  # it ended before
        os._exit(0)


def _wake_with_the_end_of_the_driver() -> None:
    """Let the kernel continue this process, if it is stopped, when the thread that started it ends."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
