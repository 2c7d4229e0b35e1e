"""Calls of a function with the requests that wait, in threads of its own."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from gym_rm.scorer import lock_open_after_fork


class Waiting(Protocol):
    """What waits for its call."""

    def begin(self) -> bool:
        """Return whether it is to be answered: it was not cancelled, and had not begun. Then it has."""
        ...

    def cancel(self) -> None:
        """Do not answer it if it has not begun."""
        ...


Request = TypeVar("Request", bound=Waiting)


class MergedCalls(Generic[Request]):
    """Calls a function with the requests that wait, in threads of its own: those that come within `max_wait` together.

    Requests also collect while all threads are in a call. One that was cancelled, or that has begun because it was put
    twice, is left out.

    Args:
        call: answers the requests, and must not raise.
        size_of: the size of a request.
        max_size: size at which a call is complete; a request is never split.
        max_wait: seconds that the first request of a call waits for others.
        max_calls: calls at the same time; a thread starts when all others are in a call.
        name: of the object that these calls are for, in the names of the threads and in messages.
    """

    def __init__(
        self,
        call: Callable[[list[Request]], None],
        size_of: Callable[[Request], int],
        *,
        max_size: int,
        max_wait: float,
        max_calls: int = 1,
        name: str,
    ) -> None:
        self._call = call
        self._size_of = size_of
        self._max_size = max_size
        self._max_wait = max_wait
        self._max_calls = max_calls
        self._name = name
        self._waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()  # None: closed
        self._threads: dict[threading.Thread, bool] = {}  # and whether each is in a call
        self._lock = lock_open_after_fork()
        self._collecting = lock_open_after_fork()  # of one thread at a time, or requests would not be merged
        self._closed = False

    def put(self, request: Request) -> None:
        """Let a request wait for its call.

        Raises:
            RuntimeError: the calls were closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError(f"this {self._name} is closed; make a new one.")
            self._start()
            self._waiting.put(request)

    def is_own_thread(self) -> bool:
        """Return whether this runs in one of the calls, which would wait for itself."""
        return threading.current_thread() in self._threads

    def close(self, *, wait: bool = True) -> None:
        """Call what waits, then end the threads. May be called several times.

        Args:
            wait: False cancels what waits instead, and returns at once; the threads end after their call.
        """
        with self._lock:
            self._closed = True
            with contextlib.suppress(queue.Empty):
                while not wait:
                    if (request := self._waiting.get_nowait()) is not None:
                        request.cancel()
            self._waiting.put(None)
        while wait and not self.is_own_thread() and (alive := [each for each in self._threads if each.is_alive()]):
            alive[0].join()

    def _start(self) -> None:
        """Start a thread if all are in a call; the lock is held."""
        self._threads = {each: busy for each, busy in self._threads.items() if each.is_alive()}  # a fork copies none
        if not all(self._threads.values()) or len(self._threads) >= self._max_calls:
            return
        thread = threading.Thread(target=self._serve, name=f"gym_rm {self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process can have no more: those that there are take the request
            if not self._threads:
                raise
        else:
            self._threads = {**self._threads, thread: False}

    def _serve(self) -> None:
        thread = threading.current_thread()
        while (requests := self._collect()) is not None:
            with self._lock:
                self._threads[thread] = True
                if not self._waiting.empty():  # it came when this thread seemed to be free
                    self._start()
            if requests:
                self._call(requests)
            with self._lock:
                self._threads[thread] = False

    def _collect(self) -> list[Request] | None:
        """Return the next requests to answer together, or None once this is closed."""
        with self._collecting:
            request = self._waiting.get()
            requests: list[Request] = []
            size = 0
            closes_at = time.monotonic() + self._max_wait
            while request is not None:
                if request.begin():
                    requests.append(request)
                    size += self._size_of(request)
                if size >= self._max_size:
                    return requests
                try:
                    request = self._waiting.get(timeout=max(0.0, closes_at - time.monotonic()))
                except queue.Empty:
                    return requests
            self._waiting.put(None)  # for the other threads, and for this one after its call
            return requests or None
