"""`baton replay`: a recorded run again, and whether the engine decides the same."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from baton.engine.recording.replay import Replay


def replay(
    directory: Annotated[
        Path, typer.Argument(help="What `baton serve --record` was given, or one recording in it.")
    ],
) -> None:
    """Replay a recording of `baton serve --record` through the engine and compare its decisions.

    Exits with 0 if every decision is the recorded one, byte for byte; with 1 if one differs or the recording
    is damaged; with 2 if there is none.
    """
    from baton.engine.recording.replay import replay_all
    from baton.engine.recording.tape import DamagedRecording

    identical = True
    try:
        for place, result in replay_all(directory):
            _print(place, result)
            identical = identical and result.identical
    except DamagedRecording as error:
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        raise typer.Exit(2) from None
    if not identical:
        raise typer.Exit(1)


def _print(place: Path, result: Replay) -> None:
    from baton.version import __version__

    header = result.header
    typer.echo(f"{place}")
    recorded = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(header.started))
    typer.echo(
        f"  recorded   {recorded}, Baton {header.baton}, Python {header.python}, {header.config.executor}"
    )
    if header.baton != __version__:
        typer.echo(f"  note       this is Baton {__version__}: another version may decide differently")
    counts = ", ".join(f"{count:,} {name}" for name, count in result.counts.items())
    typer.echo(f"  replayed   {result.seconds:.1f} s: {counts or 'nothing'}")
    if result.ended is not None:
        typer.echo(f"  ends       {result.ended}")
    else:
        cut = f", in the middle of a frame ({result.cut_off} bytes)" if result.cut_off else ""
        typer.echo(f"  ends       without saying why{cut}: the engine was killed, or the disk was full")
    if result.damage is not None:
        typer.secho(f"  DAMAGED    {result.damage}; up to there:", fg=typer.colors.RED)
    difference = result.difference
    if difference is None:
        typer.echo(f"  decisions  identical, byte for byte; digest {result.digest}")
        return
    typer.secho(
        f"  DIFFERENT  frame {difference.frame}, event {difference.event}, clock {difference.now:.6f}; "
        f"identical before, digest {result.digest}",
        fg=typer.colors.RED,
    )
    for name, text in (("recorded", difference.recorded), ("replayed", difference.replayed)):
        for line in text.splitlines():
            typer.echo(f"    {name}  {line}")
