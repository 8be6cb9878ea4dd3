"""Flags of what an instance writes down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from baton.launch.options.flag import Options, flag


@dataclass(frozen=True, kw_only=True)
class RecordOptions(Options):
    title: ClassVar[str] = "Logs and recordings"

    log_level: Literal["debug", "info", "warning", "error", "critical"] = flag(
        "info", "How much to log, to stderr.", quiet="warning"
    )
    log_format: Literal["text", "json"] = flag(
        "text", "How a line of the log looks; json: an object with time, level, process, request_id and more."
    )
    record: str | None = flag(
        None,
        "Record all that the engine reads into this directory, for `baton replay`. Contains prompts and "
        "answers as token ids.",
        metavar="DIRECTORY",
        unset="nothing is recorded",
    )
    record_max_bytes: int | str = flag(
        "1GiB",
        "Recording ends when the directory holds so much, such as 1GiB; serving goes on.",
        size=True,
        metavar="SIZE",
    )
