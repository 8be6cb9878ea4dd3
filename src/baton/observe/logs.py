"""One log format for all processes, on stderr: time, level, who, message; or JSON, one object a line.

The JSON has `time` (UTC), `level`, `logger`, `process` (who), `pid` and `message`; `request_id` where the
line is about one request: the id that its client sees as `x-request-id`; `exception`, a traceback.

Much of what is logged was sent by others: clients, other engines, strangers that find a port.  So every line
that a process writes goes through `Bounded`: it is short, it is one line, and of what one place in the code
says again and again only some is written, with how much was left out.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

MAX_CHARS = 2000
"""Of a message; a traceback stands below it."""
BURST = 20
PERIOD_S = 10.0
"""One place in the code says at most `BURST` things in so long; what is critical is always said."""
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t"}
_CONTROLS[ord("\n")] = "\\n"


class Bounded(logging.Filter):
    """Limits rate and length of what is logged, and keeps it from looking like other lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said: dict[tuple[str, int], tuple[float, int]] = {}
        """Place in the code → (since when, how often)."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.CRITICAL:
            place, now = (record.pathname, record.lineno), self._clock()
            since, count = self._said.get(place, (now, 0))
            left_out = 0
            if now >= since + PERIOD_S:
                left_out, since, count = max(count - BURST, 0), now, 0
            self._said[place] = (since, count + 1)
            if count >= BURST:
                return False
        else:
            left_out = 0
        record.msg, record.args = _short(record), None
        if left_out:
            record.msg += f" ({left_out} more of these were not written)"
        return True


def _short(record: logging.LogRecord) -> str:
    """The message, without formatting more than is kept where that can be seen before."""
    args = record.args
    if isinstance(args, tuple):
        args = tuple(_cut(arg, MAX_CHARS // 2) if isinstance(arg, str) else arg for arg in args)
        record.args = args
    return _cut(record.getMessage()).translate(_CONTROLS)


def _cut(text: str, most: int = MAX_CHARS) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


SHOWN = "_BATON_STATUS_LINE"
"""Set in the environment of all processes of a server that has a status line (`launch/status.py`)."""
ERASE = "\r\x1b[K"
"""Goes to the beginning of a terminal's line, and clears it."""


def erasing() -> str:
    """What lines for people begin with in this process: `ERASE` or nothing."""
    return ERASE if SHOWN in os.environ else ""


def unless_shown(level: int) -> int:
    """For what processes say when they start, and leave in peace: where a status line shows the same, it is
    for who debugs."""
    return logging.DEBUG if SHOWN in os.environ else level


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        whole, rest = divmod(int(record.created * 1000), 1000)
        said: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{rest:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._who,
            "pid": os.getpid(),
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            said["request_id"] = str(request_id)
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False)


def configure_logging(level: str, who: str, form: str = "text") -> None:
    """Sets the root logger of this process.  `who` is 'gateway', the name of an instance for its
    engine, with '/' and the rank for a worker, …  `form`: 'text' or 'json'."""
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(JsonLines(who))
    else:
        handler.setFormatter(
            logging.Formatter(
                f"{erasing()}%(asctime)s %(levelname)-7s {who:<11} %(message)s", datefmt="%H:%M:%S"
            )
        )
    handler.addFilter(Bounded())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "urllib3", "filelock", "torch"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


def log_somewhere(level: str) -> None:
    """Warnings of Baton go to stderr if the program has no opinion on logging; else nothing is touched."""
    logger = logging.getLogger("baton")
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s llm      %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
