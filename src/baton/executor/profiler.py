"""A profile of a rank's steps: started and stopped from outside, bounded, written as one trace file.

Events are kept in memory until `stop`, some hundreds of bytes for each operator call; so recording ends by
itself after `MAX_STEPS`, and what was recorded until then is what `stop` writes.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from baton.executor.base import ControlRefused

log = logging.getLogger(__name__)

MAX_STEPS = 1000


class StepProfiler:
    """Of rank `rank`; idle until `start`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._directory = Path()
        self._profile: torch.profiler.profile | None = None
        self._steps: int | None = None
        """Recorded so far; None: nothing is being recorded."""

    @property
    def recording(self) -> bool:
        return self._steps is not None

    def why_not_start(self, directory: str) -> str:
        """Makes the directory; returns why a profile cannot start, or ""."""
        if self._profile is not None:
            return f"a profile is being recorded into {str(self._directory)!r} already; stop it first"
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError(None, "it is not writable")
        except OSError as error:
            return f"{directory!r} cannot be used: {error.strerror or error}"
        return ""

    def start(self, directory: str) -> None:
        """After `why_not_start` found nothing."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._directory = Path(directory)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()
        self._steps = 0

    def step_done(self) -> None:
        """To be called after each step while `recording`."""
        if self._steps is not None:
            self._steps += 1
            if self._steps >= MAX_STEPS:
                self._stop_recording()
                log.info("the profile has its %d steps; recording ends", MAX_STEPS)

    def stop(self) -> Path:
        """Writes the trace and returns its path.  Raises `ControlRefused`; nothing is recorded afterwards."""
        profile = self._profile
        if profile is None:
            raise ControlRefused("no profile is being recorded; start one first")
        self._stop_recording()
        self._profile = None
        name = f"baton-rank{self._rank}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.trace.json"
        path = self._directory / name
        try:
            profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise ControlRefused(f"{str(path)!r} cannot be written: {error}") from None
        if not path.is_file():  # some failures the exporter only logs
            raise ControlRefused(f"{str(path)!r} was not written; is there space?")
        log.info("wrote the profile %s", path)
        return path

    def _stop_recording(self) -> None:
        if self._steps is not None and self._profile is not None:
            self._steps = None
            self._profile.stop()
