"""`baton timeline`: where the time of requests went, as a file for ui.perfetto.dev."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

import typer

from baton.cli.top import Away, Refused, ask


def timeline(
    url: Annotated[
        str, typer.Argument(help="Address of the server, such as http://127.0.0.1:8000.")
    ] = "http://127.0.0.1:8000",
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("trace.json"),
    last_s: Annotated[
        float, typer.Option(help="Requests of the last so many seconds.", min=0.001, max=86_400)
    ] = 10.0,
    id: Annotated[str, typer.Option(help="Only the request with this id.")] = "",
    api_key: Annotated[
        str, typer.Option(help="Key of an operator: one of the server's --admin-key.", envvar="BATON_TOP_KEY")
    ] = "",
) -> None:
    """Write where the time of a running server's requests went; open the file in ui.perfetto.dev."""
    if not url.startswith(("http://", "https://")):
        url = f"http://{url}"
    which = {"id": id} if id else {"last_s": f"{last_s:g}"}
    address = f"{url.rstrip('/').removesuffix('/v1')}/debug/timeline?{urlencode(which)}"
    try:
        trace = ask(address, api_key, "traceEvents")
        output.write_text(json.dumps(trace))
    except (Refused, Away) as error:
        typer.echo(f"error: {url}: {error}", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(f"error: {output}: {error.strerror}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{output}: {len(trace['traceEvents'])} events; open it in ui.perfetto.dev")
