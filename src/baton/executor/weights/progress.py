"""How far loading is: a bar on a terminal, a line every few seconds elsewhere; nothing if it is quick.

The bar is tqdm's, which many programs of this kind show, and which leaves a terminal as it was when its
process is killed.  Where `baton serve` keeps a status line there is neither: it shows what `tell` said.
With several ranks the first speaks for all: they read the same files at the same rate.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from baton.observe.logs import SHOWN

log = logging.getLogger(__name__)

_QUIET_S = 1.0
"""What takes less is not shown."""
_LINE_S = 10.0
"""Between two lines."""


class LoadProgress:
    """Called after each layer."""

    def __init__(
        self,
        total_bytes: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """`total_bytes`: of the checkpoint's files.  `stream`: stderr.  `tell`: called once a second at most
        with how far it is, for who waits for this process."""
        self._total = total_bytes
        self._stream = sys.stderr if stream is None else stream
        self._shown = SHOWN in os.environ and tell is not None
        self._on_terminal = _is_terminal(self._stream) and SHOWN not in os.environ
        self._tell = tell
        self._told: float | None = None
        self._clock = clock
        self._began = self._spoke = clock()
        self._bar: Any = None

    def __call__(self, what: str, fraction: float) -> None:
        """`what` has been packed: so much of the whole is done."""
        now = self._clock()
        done = int(self._total * fraction)
        if self._tell is not None and (self._told is None or now - self._told >= _QUIET_S):
            self._told = now
            self._tell(f"{100 * fraction:.0f} % ({what})")
        if self._on_terminal:
            if now - self._began >= _QUIET_S:
                self._draw(what, done)
        elif not self._shown and now - self._spoke >= _LINE_S:
            self._spoke = now
            rate = done / (now - self._began)
            log.info(
                "loading: %.0f %%, %.1f of %.1f GB, %.0f MB/s: %s",
                100 * fraction,
                done / 1e9,
                self._total / 1e9,
                rate / 1e6,
                what,
            )

    def close(self) -> None:
        """The bar goes; what was loaded stands in the banner."""
        if self._bar is not None:
            self._bar.close()

    def _draw(self, what: str, done: int) -> None:
        if self._bar is None:
            self._bar = _bar(self._total, self._stream, time.time() - (self._clock() - self._began))
        self._bar.set_postfix_str(what, refresh=False)
        self._bar.n = done
        self._bar.refresh()


def _is_terminal(stream: TextIO) -> bool:
    """One of no size shows no bar."""
    if not stream.isatty():
        return False
    with suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).lines > 0
    return True


def _bar(total: int, stream: TextIO, began: float) -> Any:
    from tqdm import tqdm  # (not while nothing is shown)

    tqdm.monitor_interval = 0  # no thread that looks after bars
    tqdm.set_lock(threading.RLock())  # else a semaphore for several processes
    bar = tqdm(
        total=total, desc="loading", unit="B", unit_scale=True, file=stream, leave=False, dynamic_ncols=True
    )
    bar.start_t = began
    return bar
