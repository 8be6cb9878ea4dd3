"""A progress bar for the Python API.  On stderr: what a program prints is its own."""

from __future__ import annotations

from typing import Any


class Progress:
    """A progress bar over finished requests; `with Progress(n, shown) as advance`."""

    def __init__(self, total: int, shown: bool, name: str = "Generating") -> None:
        self._total, self._shown, self._name = total, shown, name

    def __enter__(self) -> Any:
        if not self._shown:
            return lambda: None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._bar.start()
        task = self._bar.add_task(self._name, total=self._total)
        return lambda: self._bar.advance(task)

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._bar.stop()
