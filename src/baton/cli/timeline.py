"""`baton timeline`: where the time of requests went, as a file for ui.perfetto.dev."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from baton.cli.top import Away, Refused, ask


def timeline(
    url: Annotated[
        str, typer.Argument(help="Address of the server, such as http://127.0.0.1:8000.")
    ] = "http://127.0.0.1:8000",
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("trace.json"),
    last_s: Annotated[
        float | None,
        typer.Option(
            help="Requests of the last so many seconds. Default: 10 of a server, all of a recording.",
            min=0.001,
            max=86_400,
        ),
    ] = None,
    recording: Annotated[
        Path | None,
        typer.Option(help="What `baton serve --record` was given, instead of a server: it is replayed."),
    ] = None,
    id: Annotated[str, typer.Option(help="Only the request with this id.")] = "",
    api_key: Annotated[
        str, typer.Option(help="Key of an operator: one of the server's --admin-key.", envvar="BATON_TOP_KEY")
    ] = "",
) -> None:
    """Write where the time of requests went, of a running server or of a recording; open the file in
    ui.perfetto.dev."""
    if recording is not None:
        _of_recording(recording, output, last_s, id)
        return
    last_s = 10.0 if last_s is None else last_s
    if not url.startswith(("http://", "https://")):
        url = f"http://{url}"
    which = {"id": id} if id else {"last_s": f"{last_s:g}"}
    address = f"{url.rstrip('/').removesuffix('/v1')}/debug/timeline?{urlencode(which)}"
    try:
        trace = ask(address, api_key, "traceEvents")
    except (Refused, Away) as error:
        raise _failed(f"{url}: {error}") from None
    _write(output, trace)


def _of_recording(recording: Path, output: Path, last_s: float | None, id: str) -> None:
    from baton.engine.recording.stories import stories_of
    from baton.engine.recording.tape import DamagedRecording
    from baton.observe.events.perfetto import chrome_trace

    try:
        found = stories_of(recording)
    except DamagedRecording as error:
        raise _failed(str(error)) from None
    begin = 0.0 if last_s is None else found.end - last_s
    stories = [story for story in found.stories if (story.ended or found.end) >= begin]
    if id:
        stories = [story for story in stories if story.id == id]
        if not stories:
            raise _failed(f"{recording}: there is no request {id!r} in it")
        begin = min(story.arrived for story in stories)
        found.end = max(story.ended or found.end for story in stories)
    steps = {
        name: [step for step in ran if step.end >= begin and step.begin <= found.end]
        for name, ran in found.steps.items()
    }
    for what in found.damage:
        typer.echo(f"warning: {what}; up to there:", err=True)
    _write(output, chrome_trace(stories, found.end, steps=steps))


def _write(output: Path, trace: dict[str, Any]) -> None:
    try:
        output.write_text(json.dumps(trace))
    except OSError as error:
        raise _failed(f"{output}: {error.strerror}") from None
    typer.echo(f"{output}: {len(trace['traceEvents'])} events; open it in ui.perfetto.dev")


def _failed(what: str) -> typer.Exit:
    typer.echo(f"error: {what}", err=True)
    return typer.Exit(1)
