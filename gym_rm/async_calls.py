"""Run coroutines from plain code: an event loop in a thread of its own, and many calls at a time with time limits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from gym_rm.checks import integer, positive
from gym_rm.errors import brief
from gym_rm.scorer import lock_open_after_fork

Value = TypeVar("Value")
Running: TypeAlias = tuple[asyncio.AbstractEventLoop, threading.Thread]
GRACE = 1.0  # seconds for a cancelled call to end


class EventLoop:
    """An event loop in a daemon thread, started on first use; a fork has no threads, and so gets its own.

    Its callers may be in event loops of their own, as in a notebook.

    Raises:
        RuntimeError: it is used after `close`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._closed = False
        self._lock = lock_open_after_fork()
        # By process. That of a parent process stays referenced: its sockets must not be closed in a fork.
        self._running: dict[int, Running] = {}

    def submit(self, coroutine: Coroutine[Any, Any, Value]) -> concurrent.futures.Future[Value]:
        """Start a coroutine in the thread of the loop."""
        return self._submit(coroutine)[0]

    def _submit(self, coroutine: Coroutine[Any, Any, Value]) -> tuple[concurrent.futures.Future[Value], Running]:
        with self._lock:
            if self._closed:
                coroutine.close()
                raise RuntimeError(f"{self._name} were closed; make new ones.")
            if os.getpid() not in self._running:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_serve, args=(loop,), name=self._name, daemon=True)
                self._running[os.getpid()] = loop, thread
                thread.start()
            running = self._running[os.getpid()]
            return asyncio.run_coroutine_threadsafe(coroutine, running[0]), running

    def run(self, coroutine: Coroutine[Any, Any, Value], stall_timeout: float | None = None) -> Value:
        """Return the result of a coroutine, which is cancelled if the caller is interrupted.

        Args:
            coroutine: what runs.
            stall_timeout: seconds in which the loop must come to what is new; None for no limit.

        Raises:
            TimeoutError: a coroutine blocks the loop. The thread is left behind; the next call starts another.
        """
        if threading.current_thread() is self._running.get(os.getpid(), (None, None))[1]:
            coroutine.close()
            raise RuntimeError(f"a coroutine of {self._name} waits for itself; await what it needs instead.")
        future, running = self._submit(coroutine)
        try:
            while True:
                turned = threading.Event()
                with contextlib.suppress(RuntimeError):  # the loop is closed, and so does not turn
                    running[0].call_soon_threadsafe(turned.set)
                if concurrent.futures.wait([future], stall_timeout).done:
                    return future.result()
                if not turned.is_set():
                    self._end(running)
                    raise TimeoutError(f"{self._name} are blocked")
        except BaseException:  # also Ctrl-C
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what runs, and end the thread. May be called several times."""
        with self._lock:
            self._closed = True
            running = self._running.get(os.getpid())
        self._end(running)
        if running is not None and running[1] is not threading.current_thread():
            running[1].join(2 * GRACE)  # a coroutine that never awaits keeps its thread

    def _end(self, running: Running | None) -> None:
        with self._lock:
            if running is not None and self._running.get(os.getpid()) is running:
                del self._running[os.getpid()]
                running[0].call_soon_threadsafe(running[0].stop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then cancel what still runs."""
    loop.run_forever()
    if tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=GRACE))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


class AsyncCalls(Generic[Value]):
    """Awaits many calls, some at the same time, for a caller that does not await.

    All calls share one event loop, so that clients and sessions may be kept between them. A copy, also by pickling,
    has a loop of its own.

    Args:
        max_concurrency: most calls of all `run`s at the same time.
        timeout: seconds for each call, without its wait for others; None for no limit.

    Raises:
        ConfigError: an argument is not positive.

    Example:
        >>> async def double(x):
        ...     return 2 * x
        >>> calls = AsyncCalls(max_concurrency=8, timeout=10.0)
        >>> calls.run([lambda: double(1), lambda: double(None)])
        [2, TypeError("unsupported operand type(s) for *: 'int' and 'NoneType'")]
        >>> calls.close()
    """

    def __init__(self, *, max_concurrency: int = 64, timeout: float | None = 60.0) -> None:
        self.max_concurrency = integer("max_concurrency", max_concurrency, minimum=1)
        self.timeout = None if timeout is None else positive("timeout", timeout)
        self._loop = EventLoop("these AsyncCalls")
        # By loop, so that calls that block one keep no slots in the next.
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self.close = self._loop.close
        weakref.finalize(self, self._loop.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(AsyncCalls, max_concurrency=self.max_concurrency, timeout=self.timeout), ()

    def run(self, calls: Sequence[Callable[[], Awaitable[Value]]]) -> list[Value | Exception]:
        """Return the result of each call, or the exception that it raised; TimeoutError if it took too long.

        A call that is over its time is cancelled. One that does not end then, or that never awaits, is left behind.

        Raises:
            RuntimeError: the calls were closed, or are run by one of themselves, which would wait for itself.
        """
        late = TimeoutError("it did not end, because a call blocks the event loop: it must await what takes time")
        results: list[Value | Exception] = [late] * len(calls)
        stall_timeout = None if self.timeout is None else self.timeout + 2 * GRACE
        try:
            self._loop.run(self._all(calls, results), stall_timeout)
        except concurrent.futures.CancelledError:
            if self._loop._closed:  # else another run left the loop behind
                raise RuntimeError(f"{self._loop._name} were closed while they ran.") from None
        except TimeoutError:
            pass
        return list(results)

    async def _all(self, calls: Sequence[Callable[[], Awaitable[Value]]], results: list[Value | Exception]) -> None:
        """Write the result of each call into the list."""
        free = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_concurrency))

        async def put(index: int) -> None:
            async with free:
                results[index] = await self._result(calls[index])

        async with asyncio.TaskGroup() as group:
            for index in range(len(calls)):
                group.create_task(put(index))

    async def _result(self, call: Callable[[], Awaitable[Value]]) -> Value | Exception:
        task = asyncio.ensure_future(_caught(call))
        try:
            done, _ = await asyncio.wait({task}, timeout=self.timeout)
        finally:
            task.cancel()  # also if this call is cancelled; no effect on one that is done
        if not done:
            await asyncio.wait({task}, timeout=GRACE)
            return TimeoutError(f"no result within {self.timeout:g} seconds")
        return RuntimeError("it was cancelled") if task.cancelled() else task.result()


async def _caught(call: Callable[[], Awaitable[Value]]) -> Value | Exception:
    """Return what a call returns or raises; not CancelledError."""
    try:
        return await call()
    except Exception as error:
        return error
    except (KeyboardInterrupt, SystemExit) as error:  # would end the thread of the loop
        return RuntimeError(f"it raised {brief(error)}")
