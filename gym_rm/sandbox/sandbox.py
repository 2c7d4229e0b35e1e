"""Pool of sandboxed interpreters, and the choice of their layer."""

from __future__ import annotations

import collections
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from gym_rm.checks import integer
from gym_rm.config import parse_settings
from gym_rm.errors import ConfigError
from gym_rm.sandbox.child import Child, Launch
from gym_rm.sandbox.layers import choose, launch
from gym_rm.sandbox.limits import SandboxLimits
from gym_rm.sandbox.session import SandboxError, SandboxSession

Result = TypeVar("Result")


class Sandbox:
    """Interpreters that run code of strangers, each for one session.

    `layer` is "auto" (bubblewrap, else landlock), "bubblewrap", "landlock", or "unsafe", which `allow_unsafe=True` must
    permit; what was chosen is `Sandbox.layer`. `limits` are `SandboxLimits`, or some of their fields. `num_workers`
    interpreters wait warm (None: one per core); sessions may be taken by several threads. `interpreter` is the Python
    to run (None: this one if it can be read, else the system's). With `packages`, such as ("numpy",), code can import
    all packages that are installed for it; without, its standard library only. The waiting interpreters have imported
    these packages already. Raises ConfigError if no layer works here.

    >>> with Sandbox() as sandbox, sandbox.session() as session:
    ...     _ = session.execute("def double(x): return 2 * x")
    ...     session.call("double", [21]).value
    42
    """

    def __init__(
        self,
        *,
        layer: str = "auto",
        allow_unsafe: bool = False,
        limits: SandboxLimits | Mapping[str, Any] | None = None,
        num_workers: int | None = None,
        interpreter: str | None = None,
        packages: Sequence[str] = (),
    ) -> None:
        self.limits = limits if isinstance(limits, SandboxLimits) else parse_settings(SandboxLimits, limits or {})
        if isinstance(packages, str) or not all(isinstance(each, str) and each.isidentifier() for each in packages):
            raise ConfigError(f"packages must be a list of names to import, such as ['numpy'], not {packages!r:.80}.")
        self.layer, self._interpreter = choose(layer, allow_unsafe, interpreter, tuple(packages))
        self._packages = tuple(packages)
        count = available_cores() if num_workers is None else num_workers
        self.num_workers = integer("num_workers of the sandbox", count, minimum=1)
        self._closed = False
        self._lock = threading.Lock()
        self._pool: _Pool | None = None
        self._turns = os.getpid(), threading.Semaphore(self.num_workers)

    def session(self, limits: SandboxLimits | None = None) -> SandboxSession:
        """Return a fresh interpreter under these limits (None: those of the sandbox). Close it after use.

        Raises SandboxError if none can be started, or after `close`.
        """
        limits = limits or self.limits
        reason = ""
        for _ in range(self.num_workers + 3):  # waiting ones may have been killed
            session = self._running_pool().take()
            session._keep = self
            try:
                session.configure(limits)
            except SandboxError as error:
                reason = str(error)
                session.close()
                continue
            return session
        raise SandboxError(f"The sandbox ({self.layer}) could not start an interpreter. {reason}")

    def map(self, function: Callable[..., Result], *rows: Iterable[Any]) -> list[Result]:
        """Call a function with each row, in as many threads as workers, as many rows of all calls at the same time.

        After an exception no other row begins.
        """
        if self._turns[0] != os.getpid():  # a fork: its parent's rows never end here
            self._turns = os.getpid(), threading.Semaphore(self.num_workers)
        turn = self._turns[1]

        def in_turn(*row: Any) -> Result:
            with turn:
                return function(*row)

        executor = ThreadPoolExecutor(self.num_workers, thread_name_prefix="gym_rm rows")
        try:
            return list(executor.map(in_turn, *rows))
        finally:
            executor.shutdown(cancel_futures=True)

    def close(self) -> None:
        """End all interpreters, also those in use."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running_pool(self) -> _Pool:
        if self._pool is not None and self._pool.owner != os.getpid():  # a fork: the lock may be held for ever
            self._lock, self._pool = threading.Lock(), None
        with self._lock:
            if self._closed:
                raise SandboxError("The sandbox is closed.")
            if self._pool is None:
                self._pool = _Pool(launch(self.layer, self._interpreter, self._packages), self.num_workers)
                weakref.finalize(self, self._pool.close)
            return self._pool


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Pool:
    """Warm interpreters of one kind, started by one thread: they die with the thread that started them."""

    def __init__(self, kind: Launch, size: int) -> None:
        self.owner = os.getpid()
        self.kind = kind
        self.size = size
        self.idle: collections.deque[SandboxSession] = collections.deque()
        self.children: set[Child] = set()
        self.orders: collections.deque[Future[SandboxSession]] = collections.deque()
        self.changed = threading.Condition()
        self.closed = False
        self.thread = threading.Thread(target=self.run, name="gym_rm sandbox", daemon=True)
        self.thread.start()

    def take(self) -> SandboxSession:
        with self.changed:
            if self.idle:
                self.changed.notify()
                return self.idle.popleft()
            if self.closed:
                raise SandboxError("The sandbox is closed.")
            future: Future[SandboxSession] = Future()
            self.orders.append(future)
            self.changed.notify()
        return future.result()

    def run(self) -> None:
        while True:
            with self.changed:
                while not (self.closed or self.orders or self.wants_more()):
                    self.changed.wait()
                if self.closed:
                    break
                future = self.orders.popleft() if self.orders else None
            try:
                session = SandboxSession(self.kind, on_end=self.forget)
            except BaseException as error:
                if future is not None:
                    future.set_exception(SandboxError(f"No process could be started: {error}"))
                else:
                    with self.changed:
                        self.size = 0  # the next `take` reports it
                continue
            with self.changed:
                self.children.add(session._child)
                if future is None:
                    self.idle.append(session)
            if future is not None:
                future.set_result(session)
            del session, future
        for future in self.orders:
            future.set_exception(SandboxError("The sandbox is closed."))
        # By this thread: when it ends, bubblewrap dies and no longer reaps what it started.
        while self.idle:
            self.idle.popleft().close()
        for child in list(self.children):  # in use: their sessions notice, and close the pipes
            child.kill()

    def wants_more(self) -> bool:
        return len(self.idle) < self.size and len(self.children) < 2 * self.size + 2

    def forget(self, child: Child) -> None:
        if os.getpid() == self.owner:
            with self.changed:
                self.children.discard(child)
                self.changed.notify()

    def close(self) -> None:
        if os.getpid() != self.owner:
            return
        with self.changed:
            self.closed = True
            self.changed.notify()
        if threading.current_thread() is not self.thread:
            self.thread.join(10.0)
