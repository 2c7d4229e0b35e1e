"""Stop a run after its current step when it is told to."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

NOTICE = b"\nThe run saves and stops after this step; a second Ctrl-C stops it at once.\n"


@contextlib.contextmanager
def heard_signals() -> Iterator[Callable[[], signal.Signals | None]]:
    """Yield a function that returns which signal came, SIGTERM or SIGINT (Ctrl-C), or None.

    After the first signal, the next one ends the process at once, as SIGKILL does. Only the main thread hears signals.
    """
    heard: list[signal.Signals] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {number: signal.getsignal(number) for number in numbers}

    def hear(number: int, frame: Any) -> None:
        heard.append(signal.Signals(number))
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            os.write(2, NOTICE)  # a handler must not use buffered streams
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    for number in numbers:
        signal.signal(number, hear)
    try:
        yield lambda: heard[0] if heard else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
