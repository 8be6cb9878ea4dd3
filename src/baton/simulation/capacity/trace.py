"""Requests of a real day, from a file.

Two kinds of file are read, and the directory of `baton serve --record` (`recorded.py`):

* JSON lines, one request each: `{"timestamp": 27000, "input_length": 3600, "output_length": 60}`, the time in
  milliseconds from any beginning, sizes in tokens.  Other keys are ignored.
* What `baton bench serve --save-result --save-detailed` writes: one object with `start_times` (seconds),
  `input_lens` and `output_lens`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from baton.simulation.capacity.load import Asked

_KEYS = ("timestamp", "input_length", "output_length")
_LISTS = ("start_times", "input_lens", "output_lens")
_MOST_BYTES = 1 << 30
_MOST_TOKENS = 100_000_000


class TraceError(ValueError):
    """Says which line of the file is wrong, and what belongs there."""


def read_trace(path: Path) -> list[Asked]:
    """In the order of their times, the first at 0.  Raises `TraceError`."""
    found = _of_recordings(path) if path.is_dir() else _of_file(path)
    if not found:
        raise TraceError(f"{path}: has no request")
    found.sort()
    first = found[0].at
    return [one._replace(at=one.at - first) for one in found]


def _of_recordings(path: Path) -> list[Asked]:
    from baton.engine.recording.tape import DamagedRecording
    from baton.simulation.capacity.recorded import read_recordings

    try:
        return read_recordings(path)
    except DamagedRecording as error:
        raise TraceError(str(error)) from None


def _of_file(path: Path) -> list[Asked]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise TraceError(f"{path}: larger than 1 GiB; give a part of it")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: is no UTF-8 text") from None
    found = _of_bench(path, text)
    if found is not None:
        return found
    lines = enumerate(text.splitlines(), start=1)
    return [_of_line(f"{path}, line {number}", line) for number, line in lines if line.strip()]


def _of_bench(path: Path, text: str) -> list[Asked] | None:
    """None: it is no result of a benchmark."""
    try:
        whole = json.loads(text)
    except ValueError:
        return None
    if not isinstance(whole, dict) or all(key in whole for key in _KEYS):
        return None
    lists = [whole.get(key) for key in _LISTS]
    if not all(isinstance(one, list) for one in lists) or len({len(one or ()) for one in lists}) != 1:
        needed = ", ".join(_LISTS)
        raise TraceError(
            f"{path}: needs {needed} of one length; `baton bench serve --save-detailed` has them"
        )
    rows = zip(*[one or [] for one in lists], strict=True)
    return [
        _asked(f"{path}, request {number}", row[0], row[1], row[2], 1.0) for number, row in enumerate(rows)
    ]


def _of_line(where: str, line: str) -> Asked:
    try:
        entry = json.loads(line)
    except ValueError:
        raise TraceError(f"{where}: is no JSON") from None
    if not isinstance(entry, dict) or not all(key in entry for key in _KEYS):
        raise TraceError(f"{where}: give an object with {', '.join(_KEYS)} (milliseconds, tokens, tokens)")
    at, prompt, output = (entry[key] for key in _KEYS)
    return _asked(where, at, prompt, output, 1e-3)


def _asked(where: str, at: Any, prompt: Any, output: Any, unit_s: float) -> Asked:
    if isinstance(at, bool) or not isinstance(at, int | float) or not math.isfinite(at):
        raise TraceError(f"{where}: its time {str(at)[:40]!r} is no number")
    for name, count in (("prompt", prompt), ("answer", output)):
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= _MOST_TOKENS:
            raise TraceError(f"{where}: its {name} has {str(count)[:40]!r} tokens; give a whole number")
    return Asked(at * unit_s, max(prompt, 1), max(output, 1))
