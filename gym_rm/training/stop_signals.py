"""Stop a run after its current step when it is told to."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

STOPPED = 128 + signal.SIGTERM  # exit status of a run that was told to stop and can be resumed


@contextlib.contextmanager
def heard_signals(*numbers: signal.Signals) -> Iterator[Callable[[], int | None]]:
    """Yield a function that returns which signal came, or None; only the main thread can hear them.

    After the first signal, the next one ends the process at once, as SIGKILL does.

    Args:
        numbers: signals to hear; SIGTERM if there is none.
    """
    heard: list[int] = []
    numbers = numbers or (signal.SIGTERM,)
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {number: signal.getsignal(number) for number in numbers}

    def hear(number: int, frame: Any) -> None:
        heard.append(number)
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    for number in numbers:
        signal.signal(number, hear)
    try:
        yield lambda: heard[0] if heard else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
