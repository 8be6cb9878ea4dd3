"""SIGTERM, for a loop that sleeps in `poll()`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stopped_by_sigterm(stop: Callable[[], None], wake: int) -> Iterator[None]:
    """SIGTERM calls `stop`, and any signal writes a byte to the descriptor `wake`.  Only the main thread may
    set handlers: in another one nothing is set."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGTERM, lambda number, frame: stop())
    wakeup = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, handler)
